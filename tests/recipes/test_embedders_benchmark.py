"""Vectors of texts by an encoder and by a decoder, and the search among them, beside what is computed by hand."""

from __future__ import annotations

from typing import Any

import torch

from recipes.benchmarks.embedders import encode_pieces, read_pieces, search
from tests.tiny_models import BERT, LLAMA
from tests.tiny_text import tiny_tokenizer

TEXT = "alpha beta gamma cat dog bird river"


@torch.no_grad()
def hidden_states(model: Any, ids: list[int]) -> torch.Tensor:
    return model.base_model(torch.tensor([ids]))[0][0]


def test_a_decoder_reads_the_pieces_of_a_text_in_one_stream() -> None:
    model: Any = LLAMA.build()
    tokenizer = tiny_tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    means, counts = read_pieces(model.base_model, tokenizer, TEXT, size=4)
    states = hidden_states(model, ids)
    assert counts.tolist() == [4, len(ids) - 4]
    torch.testing.assert_close(means, torch.stack([states[:4].mean(0), states[4:].mean(0)]), rtol=1e-4, atol=1e-5)


def test_an_encoder_reads_each_piece_by_itself() -> None:
    model: Any = BERT.build()
    tokenizer = tiny_tokenizer()
    before, *ids, after = tokenizer(TEXT)["input_ids"]
    means, counts = encode_pieces(model, tokenizer, TEXT, size=6)
    pieces = [[before, *ids[:4], after], [before, *ids[4:], after]]
    assert counts.tolist() == [len(piece) for piece in pieces]
    expected = torch.stack([hidden_states(model, piece).mean(0) for piece in pieces])
    torch.testing.assert_close(means, expected, rtol=1e-4, atol=1e-5)


def test_the_search_finds_what_is_most_similar() -> None:
    """Two documents of two pieces each. Their vectors as a whole are (10, 2) and (10, -2): the mean is (10, 0)."""
    counts = torch.tensor([1, 1])
    documents = [
        (torch.tensor([[10.0, 8.0], [10.0, -4.0]]), counts),
        (torch.tensor([[10.0, -5.0], [10.0, 1.0]]), counts),
    ]
    # The first passage is nearer to the first document as a whole, and to the second piece of the second one.
    passages = [(torch.tensor([[10.0, 1.0]]), counts[:1]), (torch.tensor([[10.0, -8.0]]), counts[:1])]
    recall = {(row["vectors"], row["centred"]): row["recall"]["0.5"] for row in search(documents, {0.5: passages})}
    assert (recall["one", False], recall["one", True], recall["pieces", False]) == (1.0, 1.0, 0.5)
