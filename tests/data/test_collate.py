"""Padding, masking, labels."""

from __future__ import annotations

import pytest
import torch

from hf_linear_attn.data.collate import causal_labels, collate_padded, mask_tokens
from tests.data.made_up import tokenizer

ROWS = [
    {"input_ids": [2, 6, 7, 3], "token_type_ids": [0, 0, 1, 1], "labels": 1},
    {"input_ids": [2, 3], "token_type_ids": [0, 1], "labels": 0},
]


def test_padding():
    batch = collate_padded(ROWS, 9)
    assert batch["input_ids"].tolist() == [[2, 6, 7, 3], [2, 3, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert batch["labels"].tolist() == [1, 0]
    assert {value.dtype for value in batch.values()} == {torch.int64}


@pytest.mark.parametrize(("multiple", "length"), [(1, 4), (3, 6), (4, 4), (8, 8)])
def test_multiples(multiple, length):
    assert collate_padded(ROWS, 0, multiple=multiple)["input_ids"].shape == (2, length)


def test_kinds_of_labels():
    ids = [{"input_ids": [1, 2]}, {"input_ids": [1]}]
    assert set(collate_padded(ids, 0)) == {"input_ids", "attention_mask"}
    scores = collate_padded([{**row, "labels": value} for row, value in zip(ids, (0.5, 2.0), strict=True)], 0)["labels"]
    assert scores.tolist() == [0.5, 2.0]
    assert scores.dtype == torch.float32
    tokens = collate_padded([{**row, "labels": row["input_ids"]} for row in ids], 0)["labels"]
    assert tokens.tolist() == [[1, 2], [1, -100]]
    single = collate_padded([{**row, "labels": torch.tensor(1)} for row in ids], 0)["labels"]
    assert single.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("rows", "multiple", "message"),
    [
        ([], 1, "at least one row"),
        ([{"input_ids": []}], 1, "Row 0 of the batch holds no tokens"),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": 1}], 1, "differ in their columns"),
        ([{"text": "a"}], 1, "has the columns text; it needs input_ids"),
        ([{"input_ids": [1], "idx": 3}], 1, "has the columns input_ids, idx"),
        ([{"input_ids": [1], "labels": [1, 2]}], 1, r"has 1 tokens, but labels of the shape \(2,\)"),
        ([{"input_ids": [1]}], 0, "at least 1, got 0"),
    ],
)
def test_bad_rows_are_told(rows, multiple, message):
    with pytest.raises(ValueError, match=message):
        collate_padded(rows, 0, multiple=multiple)


def long_batch(rows=64, length=200):
    tok = tokenizer()
    ids = torch.randint(6, len(tok), (rows, length))
    ids[:, 0], ids[:, -3] = tok.cls_token_id, tok.sep_token_id
    ids[:, -2:] = tok.pad_token_id
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    return tok, {"input_ids": ids, "attention_mask": mask}


def test_masking():
    tok, batch = long_batch()
    before = batch["input_ids"].clone()
    made = mask_tokens(batch, tok, torch.Generator().manual_seed(3))
    assert torch.equal(batch["input_ids"], before)
    chosen = made["labels"] != -100
    assert torch.equal(made["labels"][chosen], before[chosen])
    assert torch.equal(made["input_ids"][~chosen], before[~chosen])
    special = torch.isin(before, torch.tensor(tok.all_special_ids))
    assert not bool((chosen & special).any())
    count = int(chosen.sum())
    # Five standard deviations of a binomial share on 12,608 tokens and on 1,900 of them.
    assert abs(count / int((~special).sum()) - 0.15) < 5 * (0.15 * 0.85 / 12_608) ** 0.5
    masked = made["input_ids"][chosen] == tok.mask_token_id
    assert abs(float(masked.float().mean()) - 0.8) < 5 * (0.8 * 0.2 / count) ** 0.5
    other = (made["input_ids"] != before)[chosen] & ~masked
    words = len(tok) - len(tok.all_special_ids)
    assert abs(float(other.float().mean()) - 0.1 * (1 - 1 / words)) < 5 * (0.1 * 0.9 / count) ** 0.5
    assert not bool(torch.isin(made["input_ids"][chosen][other], torch.tensor(tok.all_special_ids)).any())


def test_masks_come_from_the_generator_alone():
    tok, batch = long_batch(4, 20)
    state = torch.get_rng_state()
    first, again, other = (mask_tokens(batch, tok, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["labels"], other["labels"])


def test_at_least_one_token_is_masked():
    tok, batch = long_batch(1, 6)
    for seed in range(20):
        labels = mask_tokens(batch, tok, torch.Generator().manual_seed(seed), 1e-6)["labels"]
        assert int((labels != -100).sum()) == 1
    everything = mask_tokens(batch, tok, torch.Generator().manual_seed(0), 1.0)["labels"]
    assert (everything[0] != -100).tolist() == [False, True, True, False, False, False]


def test_what_cannot_be_masked_is_told():
    tok, batch = long_batch(1, 6)
    generator = torch.Generator()
    for probability in (0.0, 1.5):
        with pytest.raises(ValueError, match="probability to mask a token"):
            mask_tokens(batch, tok, generator, probability)
    with pytest.raises(ValueError, match="nothing to mask"):
        mask_tokens({**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}, tok, generator)
    tok.mask_token = None
    with pytest.raises(ValueError, match="no mask token"):
        mask_tokens(batch, tok, generator)


def test_causal_labels():
    batch = collate_padded([{"input_ids": [5, 0, 7]}, {"input_ids": [8]}], 0)
    made = causal_labels(batch)
    assert made["labels"].tolist() == [[5, 0, 7], [8, -100, -100]]
    assert "labels" not in batch
