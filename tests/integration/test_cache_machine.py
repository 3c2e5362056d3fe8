"""The cache of a patched model under any order of operations, against a list of tokens for each row.

`HYPOTHESIS_PROFILE=search pytest tests/integration/test_cache_machine.py` looks longer, and elsewhere each time.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import DynamicCache

import hf_linear_attn as hla
from tests.comparing import assert_close, logits
from tests.small import patched, randomize_learned
from tests.tiny_models import GPT2, LLAMA, MAX_LENGTH, VOCABULARY

#: Rows that a batch may grow to.
ROWS = 6


@functools.cache
def model_of(name: str) -> Any:
    """A patched model; `mixture` has an exact layer beside a linear one, with its own kind of cache."""
    if name == "mixture":
        return randomize_learned(hla.patch_model(LLAMA.build(), "hedgehog", layers=[1]))
    return patched(name, GPT2 if name == "gla" else LLAMA)


@functools.cache
def exact_layers_forget() -> bool:
    """Whether Transformers' own layers are empty after `reset()`: until 5.17 they keep their length, full of zeros."""
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1), 0)
    cache.reset()
    return cache.get_seq_length() == 0


class CacheMachine(RuleBasedStateMachine):
    """`cache` is what is tested, `tokens` what it must stand for: the same tokens give the same next logits."""

    name = "hedgehog"

    @initialize(rows=st.integers(1, 3))
    def begin(self, rows: int) -> None:
        self.model = model_of(self.name)
        self.cache = DynamicCache(config=self.model.config)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.recording, self.removable = False, 0
        self.generator = torch.Generator().manual_seed(0)

    @property
    def length(self) -> int:
        return len(self.tokens[0])

    def rearranged(self, order: list[int]) -> None:
        self.tokens = [list(self.tokens[row]) for row in order]

    def new_tokens(self, count: int) -> torch.Tensor:
        """Drawn beside hypothesis, which likes equal ones: rows that are all alike would hide a wrong order."""
        return torch.randint(2, VOCABULARY, (len(self.tokens), count), generator=self.generator)

    @rule(count=st.integers(1, 5))
    def append(self, count: int) -> None:
        if self.length + count < MAX_LENGTH:
            new = self.new_tokens(count)
            logits(self.model, new, past_key_values=self.cache)
            self.tokens = [old + more for old, more in zip(self.tokens, new.tolist(), strict=True)]
            self.removable = self.removable + count if self.recording else 0

    @rule(count=st.integers(3, 6))
    def append_one_by_one(self, count: int) -> None:
        """Steps that follow a step may write over its state (`InPlaceState`)."""
        for _ in range(count):
            self.append(1)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(self.tokens))))
        self.cache.reorder_cache(torch.tensor(order))
        self.rearranged(order)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        order = data.draw(st.lists(st.integers(0, len(self.tokens) - 1), min_size=1, max_size=ROWS))
        self.cache.batch_select_indices(torch.tensor(order))
        self.rearranged(order)

    @precondition(lambda self: self.length and 2 * len(self.tokens) <= ROWS)
    @rule()
    def repeat(self) -> None:
        self.cache.batch_repeat_interleave(2)
        self.rearranged([row for row in range(len(self.tokens)) for _ in range(2)])

    @precondition(lambda self: self.length)
    @rule()
    def record(self) -> None:
        self.cache.activate_past_recording()
        self.recording = True

    @precondition(lambda self: self.removable)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.removable))
        self.cache.crop(-count)
        self.tokens = [row[: len(row) - count] for row in self.tokens]
        self.removable = 0

    @precondition(lambda self: self.length)
    @rule()
    def crop_too_much(self) -> None:
        """What was not recorded cannot be taken back: refused, and nothing changes."""
        if self.name != "mixture":
            with pytest.raises(ValueError, match="Cannot remove the last"):
                self.cache.crop(-(self.removable + 1))

    @precondition(lambda self: self.length)
    @rule()
    def offload(self) -> None:
        for layer in self.cache.layers:
            layer.offload()
            layer.prefetch()

    @precondition(lambda self: self.name != "mixture" or exact_layers_forget())
    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.tokens, self.removable = [[] for _ in self.tokens], 0

    @invariant()
    def the_next_tokens_come_out_as_without_a_cache(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.get_seq_length() == self.length
        new = self.new_tokens(1)
        out = logits(self.model, new, past_key_values=copy.deepcopy(self.cache))
        whole = logits(self.model, torch.cat([torch.tensor(self.tokens).long(), new], dim=1), use_cache=False)
        assert_close(out, whole[:, -1:])


@pytest.mark.parametrize(
    "name", ["elu", "favor+", "hedgehog", "window", "gla", "gated-delta", "linformer-causal", "mixture"]
)
def test_any_order_of_operations(name: str) -> None:
    machine = type("Machine", (CacheMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(settings.default, stateful_step_count=15))
