"""The cache of a patched model under any order of operations, against a list of tokens for each row.

Any column may be padding in some rows: before, after and between the tokens. It must count for nothing.

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
from torch.nn import functional
from transformers import DynamicCache

from hf_linear_attn.integration.cache_argument import cache_argument
from hf_linear_attn.integration.cache_rows import extend_rows, extract_row, filter_rows, merge_rows
from tests.comparing import assert_close, logits
from tests.slow_cases import long
from tests.small import on_the_grid, patched
from tests.tiny_models import GPT2, LLAMA, MAX_LENGTH, VOCABULARY, Family

#: Rows that a batch may grow to.
ROWS = 6


MODELS: dict[str, tuple[Family, str, dict[str, Any]]] = {
    **{name: (LLAMA, name, {}) for name in ("elu", "favor+", "hedgehog", "window", "scatterbrain")},
    **{name: (LLAMA, name, {}) for name in ("gated-delta", "linformer-causal")},
    "gla": (GPT2, "gla", {}),
    "exact heads": (LLAMA, "hedgehog", {"exact_heads": [1]}),
    "window and exact heads": (LLAMA, "window", {"exact_heads": [0]}),
    "mixture": (LLAMA, "hedgehog", {"layers": [1]}),  # the other layer is exact, with its own kind of cache
    "exact": (LLAMA, "", {}),
    "int8": (LLAMA, "window", {"cache_dtype": "int8", "exact_heads": [0]}),
}


@functools.cache
def model_of(name: str) -> Any:
    family, attention, options = MODELS[name]
    if not attention:
        return family.build()
    model = patched(attention, family, **options)
    # In float32 a key between two numbers of the grid is rounded either way.
    return on_the_grid(model.double()) if "cache_dtype" in options else model


@functools.cache
def exact_layers_forget() -> bool:
    """Whether Transformers' own layers are empty after `reset()`: until 5.17 they keep their length, full of zeros."""
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1), 0)
    cache.reset()
    return cache.get_seq_length() == 0


@st.composite
def columns(draw: st.DrawFn, rows: int, count: int) -> torch.Tensor:
    """`[rows, count]`, False where there is padding: often nowhere, else anywhere."""
    if draw(st.booleans()):
        return torch.ones(rows, count, dtype=torch.bool)
    row = st.lists(st.booleans(), min_size=count, max_size=count)
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))


class CacheMachine(RuleBasedStateMachine):
    """`cache` is what is tested, `tokens` what it must stand for: each row alone has the same logits without a cache.

    `tokens` is without padding; `mask` says which columns of the cache hold it.
    """

    name = "hedgehog"

    @initialize(rows=st.integers(1, 3))
    def begin(self, rows: int) -> None:
        self.model = model_of(self.name)
        self.cache = DynamicCache(config=self.model.config)
        self.forget(rows)
        self.recording = False
        self.generator = torch.Generator().manual_seed(0)

    def forget(self, rows: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        #: Of each row, the logits of the tokens that came since the last comparison.
        self.outputs = [torch.empty(0, VOCABULARY) for _ in range(rows)]
        self.mask, self.removable = torch.empty(rows, 0, dtype=torch.bool), 0

    @property
    def length(self) -> int:
        return self.mask.shape[1]

    @property
    def remembers_all(self) -> bool:
        """Whether a layer is exact, from whose cache any token can be removed."""
        return self.name in ("mixture", "exact")

    def rearranged(self, order: list[int]) -> None:
        self.tokens, self.mask = [list(self.tokens[row]) for row in order], self.mask[order]
        self.outputs = [self.outputs[row] for row in order]

    def new_tokens(self, count: int) -> torch.Tensor:
        """Drawn beside hypothesis, which likes equal ones: rows that are all alike would hide a wrong order."""
        return torch.randint(2, VOCABULARY, (len(self.tokens), count), generator=self.generator)

    def run(self, cache: DynamicCache, new: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The logits of new tokens, with the mask and the positions that `generate` passes."""
        mask = torch.cat([self.mask, real], dim=1)
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, self.length :]
        attention_mask = None if bool(mask.all()) else mask.long()
        return logits(
            self.model, new, **cache_argument(self.model, cache), attention_mask=attention_mask, position_ids=positions
        )

    def without_cache(self, rows: list[list[int]]) -> list[torch.Tensor]:
        """The logits of each row; those of one length are computed together."""
        out: dict[int, torch.Tensor] = {}
        for length in {len(row) for row in rows}:
            same = [index for index, row in enumerate(rows) if len(row) == length]
            ids = torch.tensor([rows[index] for index in same])
            out.update(zip(same, logits(self.model, ids, use_cache=False), strict=True))
        return [out[index] for index in range(len(rows))]

    @rule(count=st.integers(1, 6), data=st.data())
    def append(self, count: int, data: st.DataObject) -> None:
        if self.length + count < MAX_LENGTH:
            new, real = self.new_tokens(count), data.draw(columns(len(self.tokens), count))
            out = self.run(self.cache, new, real)
            for row, where in enumerate(real):
                self.tokens[row] += new[row, where].tolist()
                self.outputs[row] = torch.cat([self.outputs[row], out[row, where]])
            self.mask = torch.cat([self.mask, real], dim=1)
            self.removable = self.removable + count if self.recording else 0

    @rule(count=st.integers(3, 6), data=st.data())
    def append_one_by_one(self, count: int, data: st.DataObject) -> None:
        """Steps that follow a step may write over its state (`InPlaceState`)."""
        for _ in range(count):
            self.append(1, data)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        self.put_in_order(data.draw(st.permutations(range(len(self.tokens)))))

    def put_in_order(self, order: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(order))
        self.rearranged(order)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        order = data.draw(st.lists(st.integers(0, len(self.tokens) - 1), min_size=1, max_size=ROWS))
        self.cache.batch_select_indices(torch.tensor(order))
        self.rearranged(order)

    def leading_padding(self, rows: list[int]) -> int:
        """How many first columns are padding in all of some rows, but for the last column."""
        return int((~self.mask[rows, :-1]).all(dim=0).long().cumprod(dim=0).sum())

    def only(self, rows: list[int], padding: int) -> None:
        self.rearranged(rows)
        self.mask = self.mask[:, padding:]
        self.removable = 0

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, len(self.tokens) - 1), min_size=1, max_size=ROWS, unique=True))
        padding = data.draw(st.integers(0, self.leading_padding(rows)))
        self.cache.crop(0)
        filter_rows(self.cache, rows, padding)
        self.only(rows, padding)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def extract(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.tokens) - 1))
        self.cache.crop(0)
        before = self.cache
        self.cache = extract_row(before, row, self.leading_padding([row]))
        before.reorder_cache(torch.tensor([0] * len(self.tokens)))  # which the other one must not notice
        self.only([row], self.leading_padding([row]))

    @precondition(lambda self: self.length and len(self.tokens) < ROWS)
    @rule(rows=st.integers(1, 2), count=st.integers(1, 12), merged=st.booleans(), data=st.data())
    def join(self, rows: int, count: int, merged: bool, data: st.DataObject) -> None:
        """Other rows, which a cache of their own has read in one or two pieces, come to those that there are."""
        if max(self.length, count) + 1 >= MAX_LENGTH:
            return
        self.cache.crop(0)
        saved = self.cache, self.tokens, self.outputs, self.mask
        self.cache = DynamicCache(config=self.model.config)
        self.forget(rows)
        for size in (count // 2, count - count // 2):
            if size:
                self.append(size, data)
        other, tokens, outputs, mask = self.cache, self.tokens, self.outputs, self.mask
        self.cache, self.tokens, self.outputs, self.mask = saved
        if merged:
            self.cache = merge_rows([self.cache, other])
        else:
            extend_rows(self.cache, other)
        self.tokens, self.outputs = self.tokens + tokens, self.outputs + outputs
        length = max(self.length, mask.shape[1])
        self.mask = torch.cat([functional.pad(part, (length - part.shape[1], 0)) for part in (self.mask, mask)])
        self.removable = 0

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
        gone = self.mask[:, -count:].sum(dim=1).tolist()
        self.tokens = [row[: len(row) - number] for row, number in zip(self.tokens, gone, strict=True)]
        self.mask, self.removable = self.mask[:, :-count], 0
        self.outputs = [out[: max(0, len(out) - number)] for out, number in zip(self.outputs, gone, strict=True)]

    @precondition(lambda self: self.length)
    @rule(counts=st.lists(st.integers(1, 4), min_size=1, max_size=3), reordered=st.booleans(), data=st.data())
    def append_and_crop(self, counts: list[int], reordered: bool, data: st.DataObject) -> None:
        """As assisted decoding does: few cases would have these steps one after another by chance."""
        self.record()
        for count in counts:
            self.append(count, data)
        if reordered:
            self.put_in_order([*range(1, len(self.tokens)), 0])
        if self.removable:
            self.crop(data)

    @precondition(lambda self: self.length)
    @rule()
    def crop_too_much(self) -> None:
        """What was not recorded cannot be taken back: refused, and nothing changes."""
        if not self.remembers_all:
            with pytest.raises(ValueError, match="Cannot remove the last"):
                self.cache.crop(-(self.removable + 1))

    @precondition(lambda self: self.length)
    @rule()
    def offload(self) -> None:
        for layer in self.cache.layers:
            layer.offload()
            layer.prefetch()

    #: From a few tokens on: most steps are of use where there are tokens.
    @precondition(lambda self: self.length > 8 and (not self.remembers_all or exact_layers_forget()))
    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.forget(len(self.tokens))

    @invariant()
    def new_tokens_and_the_next_come_out_as_without_a_cache(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.get_seq_length() == self.length
        new = self.new_tokens(1)
        following = self.run(copy.deepcopy(self.cache), new, torch.ones_like(new, dtype=torch.bool))
        actual = [torch.cat(pair) for pair in zip(self.outputs, following, strict=True)]
        full = self.without_cache([[*old, *more] for old, more in zip(self.tokens, new.tolist(), strict=True)])
        expected = [row[-len(out) :] for row, out in zip(full, actual, strict=True)]
        assert_close(torch.cat(actual), torch.cat(expected))
        self.outputs = [torch.empty(0, VOCABULARY) for _ in full]


#: Their states have the forms of `hedgehog` and of `window and exact heads`.
ALIKE = ("elu", "favor+", "exact heads")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in MODELS if name not in ALIKE), *long(*ALIKE)])
def test_any_order_of_operations(name: str) -> None:
    machine = type("Machine", (CacheMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(settings.default, stateful_step_count=15))
