"""Rows of a cache that are kept, taken out, joined: each must go on as if it had always been alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import EncoderDecoderCache

from hf_linear_attn.integration.cache_argument import cache_argument
from hf_linear_attn.integration.cache_rows import extend_rows, extract_row, filter_rows, merge_rows
from hf_linear_attn.streaming import cache_bytes
from tests.cases import every_mechanism
from tests.comparing import assert_close, logits
from tests.inputs import token_ids
from tests.small import on_the_grid, patched
from tests.tiny_models import GPT2, LLAMA, Family

LENGTHS = (17, 5, 11)


class Batch:
    """Rows in one cache, each beside the tokens that it stands for."""

    def __init__(self, model: Any, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> None:
        self.model = model
        self.rows = [token_ids(1, length, seed + index)[0].tolist() for index, length in enumerate(lengths)]
        self.cache = merge_rows([self.read(row) for row in self.rows])
        self.steps = 0

    def read(self, row: list[int]) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        logits(self.model, torch.tensor([row]), **cache_argument(self.model, cache))
        return cache

    @property
    def padding(self) -> list[int]:
        return [self.cache.get_seq_length() - len(row) for row in self.rows]

    def step(self) -> None:
        """Give each row a token, and compare its logits with those of the row alone, without a cache."""
        new = token_ids(len(self.rows), 1, 100 + self.steps)
        lengths = torch.tensor([len(row) for row in self.rows])
        mask = torch.arange(self.cache.get_seq_length() + 1) >= torch.tensor(self.padding)[:, None]
        out = logits(
            self.model,
            new,
            **cache_argument(self.model, self.cache),
            attention_mask=mask.long(),
            position_ids=lengths[:, None],
        )
        self.rows = [[*row, *token] for row, token in zip(self.rows, new.tolist(), strict=True)]
        self.steps += 1
        for actual, row in zip(out[:, -1], self.rows, strict=True):
            assert_close(actual, logits(self.model, torch.tensor([row]), use_cache=False)[0, -1])


def go_through_all_verbs(model: Any) -> None:
    batch = Batch(model)
    batch.step()
    batch.step()
    padding = batch.padding
    single = extract_row(batch.cache, 1, padding[1])
    assert single.get_seq_length() == len(batch.rows[1])
    filter_rows(batch.cache, [2, 1], padding=min(padding[1], padding[2]))
    batch.rows = [batch.rows[2], batch.rows[1]]
    assert batch.cache.get_seq_length() == len(batch.rows[0])
    batch.step()
    other = Batch(model, (23, 2), seed=50)
    extend_rows(batch.cache, other.cache)
    batch.rows += other.rows
    assert batch.cache.get_seq_length() == 23
    batch.step()
    batch.step()
    last = Batch(model, (1,))
    last.rows, last.cache = [batch.rows[1][:-3]], single  # as it was when it was taken out
    last.step()


@every_mechanism(causal=True)
def test_rows_join_and_leave_a_batch_unchanged(name: str) -> None:
    family = GPT2 if name in ("gla", "luna") else LLAMA
    go_through_all_verbs(patched(name, family))


@pytest.mark.parametrize(
    "options",
    [{"exact_heads": [1]}, {"layers": [1]}, {"exact_heads": [0], "cache_dtype": "int8"}],
    ids=["exact heads", "exact layer", "int8"],
)
def test_rows_of_mixtures_join_and_leave(options: dict[str, Any]) -> None:
    model = patched("window", LLAMA, **options)
    go_through_all_verbs(on_the_grid(model) if "cache_dtype" in options else model)


@pytest.mark.parametrize("family", [LLAMA, Family("mistral", True, ("q_proj",))], ids=str)
def test_rows_of_exact_models_join_and_leave(family: Family) -> None:
    """Mistral's layers have sliding windows of 4, of which a cache keeps the last 3 tokens."""
    config = {"sliding_window": 4} if family.name == "mistral" else {}
    go_through_all_verbs(family.build(**config))


def test_no_memory_remains_of_rows_that_have_left() -> None:
    model = patched("hedgehog", LLAMA, exact_heads=[1])
    batch = Batch(model, (40, 3))
    filter_rows(batch.cache, [1], padding=37)
    assert cache_bytes(batch.cache) <= cache_bytes(batch.read(batch.rows[1])) + 2 * 3  # a mask in each layer


def test_slots_of_rows_that_have_left_are_dropped() -> None:
    model = patched("linformer-causal", LLAMA)
    batch = Batch(model, (40, 3))
    filter_rows(batch.cache, [1], padding=37)
    assert cache_bytes(batch.cache) == cache_bytes(batch.read(batch.rows[1]))


def test_merged_caches_stay_as_they_are() -> None:
    model = patched("window", LLAMA, exact_heads=[1])
    batch = Batch(model, (9, 4))
    single = batch.read(batch.rows[1])
    merged = merge_rows([batch.cache, single])
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[1:, :5] = 0
    logits(model, token_ids(3, 1), **cache_argument(model, merged), attention_mask=mask)
    assert (single.get_seq_length(), batch.cache.get_seq_length()) == (4, 9)
    batch.step()


def test_what_cannot_be_done_is_refused_and_changes_nothing() -> None:
    model = patched("hedgehog", LLAMA)
    batch = Batch(model)
    with pytest.raises(ValueError, match="at least one row"):
        filter_rows(batch.cache, [])
    with pytest.raises(ValueError, match="padding=13"):
        filter_rows(batch.cache, [1], padding=13)  # 12 are
    with pytest.raises(ValueError, match="is empty"):
        merge_rows([batch.cache, DynamicCache(config=model.config)])
    with pytest.raises(ValueError, match="at least one cache"):
        merge_rows([])
    with pytest.raises(ValueError, match="different classes"):
        merge_rows([batch.cache, Batch(LLAMA.build()).cache])
    with pytest.raises(ValueError, match="different mechanisms"):
        merge_rows([batch.cache, Batch(patched("window", LLAMA)).cache])
    batch.step()
    batch.cache.activate_past_recording()
    batch.step()
    with pytest.raises(ValueError, match=r"crop\(0\)"):
        filter_rows(batch.cache, [0])


def test_caches_of_other_kinds_are_refused() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1), 0)
    with pytest.raises(NotImplementedError, match="EncoderDecoderCache"):
        merge_rows([EncoderDecoderCache(cache, DynamicCache())])
