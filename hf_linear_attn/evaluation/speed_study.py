"""Speed, memory and operations of one model with each mechanism, side by side; every length is kept once measured."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ..integration.discovery import longest_input
from ..patching import patch_model
from ..registry import ATTENTIONS
from .decoding import decode_speed
from .measurements import Store
from .preparing import Plan
from .speed import (
    FREE,
    LONGEST_WAIT,
    can_go_beyond,
    expected_seconds,
    has_position_table,
    layer_speed,
    length_rows,
    shared_copy,
    timing_options,
    without_attention,
)
from .subject import EXACT, Group, Subject, default_options, longer_layers, patched_like
from .timing import SpeedTable, amdahl_ceiling, amdahl_share, crossover

if TYPE_CHECKING:
    from .study import Progress

Rows = dict[str, dict[str, Any]]


class SpeedStudy:
    """What a model costs with each mechanism. The baseline is timed again beside whatever is missing, in turns: a ratio
    is always of one run."""

    def __init__(
        self,
        subject: Subject,
        plan: Plan,
        tokens: Sequence[int],
        store: Store,
        progress: Progress,
        groups: Sequence[Group] = (),
    ) -> None:
        self.subject, self.plan, self.tokens, self.store, self.progress = subject, plan, tokens, store, progress
        self.baseline, self.limit = subject.baseline, longest_input(subject.model)
        self._models: dict[str, Callable[[], PreTrainedModel]] = {}
        self._identities: dict[str, dict[str, Any]] = {}
        self._states: dict[str, str] = {}
        self._add(self.baseline, {"name": EXACT, "implementation": self.baseline}, lambda: subject.model)
        self._add(FREE, {"name": FREE}, cache(lambda: without_attention(subject.model)))
        self.names: list[str] = []
        for name in plan.attentions:
            self._add_patched(name)
        for group in groups:
            self._add_group(group)

    # ---------------------------------------------------------------------------------------------- what is timed

    def _add(self, name: str, identity: dict[str, Any], model: Callable[[], PreTrainedModel]) -> None:
        self._identities[name], self._models[name] = identity, model

    def _longest(self) -> int:
        return max(self.plan.lengths, default=0)

    def _add_patched(self, name: str) -> None:
        """A patched copy; a mechanism that is built for a largest length is built for the longest one that is timed."""
        entry, exact = ATTENTIONS.get(name), self.subject.model
        accepted = [field.name for field in fields(entry.options)]
        options = timing_options(default_options(entry, self.plan.seed), accepted, self.limit, self._longest())
        identity = {"name": name, "options": {key: held for key, held in options.items() if key != "seed"}}
        self._add(name, identity, cache(lambda: patch_model(shared_copy(exact), name, **options)))
        self._states[name] = entry.state
        self.names.append(name)

    def _add_group(self, group: Group) -> None:
        """Time depends on what is patched and not on weights: a copy of the exact model with the same layers."""
        longer, exact = replace(group, layers=longer_layers(group.layers, self._longest())), self.subject.model
        identity = {"name": group.attention, "layers": longer.layers}
        self._add(group.name, identity, cache(lambda: patched_like(longer, exact)))
        self._states[group.name] = ATTENTIONS.get(group.attention).state
        self.names.append(group.name)

    # ---------------------------------------------------------------------------------------------- one length

    def _rows(self, names: Sequence[str], measure: Mapping[str, Any], run: Callable[[Any], Rows]) -> Rows:
        """What is known of each name; what is missing is timed beside the baseline and the model without attention."""
        keys = {name: self.subject.key(self._identities[name], measure) for name in names}
        missing = {name for name in names if self.store.known(keys[name]) is None}
        if missing:
            chosen = [name for name in names if name in missing or name in (self.baseline, FREE)]
            group = secrets.token_hex(4)
            for name, row in run({name: self._models[name]() for name in chosen}).items():
                self.store.add(keys[name], row, group=group)
        found: Rows = {}
        for name in names:
            held = self.store.newest(keys[name])
            if held is not None:
                repeats = len(self.store.history(keys[name]))
                found[name] = {**held.value, "measurement": held.id, "repeats": repeats}
        return found

    def _known(self, names: Sequence[str], measure: Mapping[str, Any]) -> bool:
        return all(self.store.known(self.subject.key(self._identities[name], measure)) is not None for name in names)

    def _table(
        self,
        title: str,
        names: Sequence[str],
        lengths: Sequence[int],
        measure: Mapping[str, Any],
        run: Callable[[Any, int], Rows],
    ) -> dict[str, Any]:
        """All lengths, until the next one would take far more than the budget."""
        self.progress.start(title, len(lengths))
        done: list[int] = []
        rows: dict[str, list[dict[str, Any]]] = {}
        notes: list[str] = []
        for index, length in enumerate(lengths):
            key = {**measure, "length": length}
            expected = 0.0
            if done and not self._known(names, key):
                medians = {name: held[-1]["median"] for name, held in rows.items()}
                expected = expected_seconds(medians, self.baseline, length / done[-1])
            if expected > max(15 * self.plan.budget, LONGEST_WAIT):
                left = ", ".join(f"{held:,}" for held in lengths[index:])
                notes.append(f"Not timed, for want of time: {left} tokens (one length would take ~{expected:.0f} s).")
                break
            self.progress.update(index, f"{length:,} tokens")
            found = self._rows(names, key, lambda models, length=length: run(models, length))  # type: ignore[misc]
            done.append(length)
            for name, row in found.items():
                rows.setdefault(name, []).append(row)
        return speed_parts(done, rows, self.baseline, notes)

    # ---------------------------------------------------------------------------------------------- all lengths

    def speed(self) -> dict[str, Any]:
        """The whole model and one attention layer against the baseline, at every length."""
        whole, notes = self._whole_lengths()
        plan = self.plan

        def forward(models: Any, length: int, backward: bool = False) -> Rows:
            return length_rows(
                models,
                self.tokens,
                length,
                baseline=self.baseline,
                budget=plan.budget,
                backward=backward,
                resources=plan.resources,
            )

        measure = {"batch": 1, "resources": plan.resources}
        names = [self.baseline, *self.names, FREE]
        table = self._table("speed of the whole model", names, whole, {"what": "forward", **measure}, forward)
        table["notes"][:0] = notes
        found: dict[str, Any] = {"baseline": self.baseline, "model": table}
        if plan.backward:
            found["training"] = self._table(
                "forward and backward",
                names,
                whole,
                {"what": "forward+backward", **measure},
                lambda models, length: forward(models, length, True),
            )
        found["layer"] = self._layer() if plan.layer else speed_parts([], {}, self.baseline, [])
        return found

    def _whole_lengths(self) -> tuple[tuple[int, ...], list[str]]:
        """The lengths that the whole model can take, and what to say about those beyond its positions."""
        lengths, limit, model = self.plan.lengths, self.limit, self.subject.model
        if limit is None or not lengths or max(lengths) <= limit:
            return lengths, []
        if not can_go_beyond(model):
            kept = tuple(length for length in lengths if length <= limit) or (limit,)
            return kept, [f"The whole model takes {limit:,} positions; beyond that only one layer was timed."]
        if has_position_table(model):
            return lengths, [
                f"The model has {limit:,} positions. Beyond them its position numbers begin again from zero: that "
                "changes nothing about the time, but the outputs there mean nothing and no quality was measured."
            ]
        return lengths, [
            f"The model was trained on up to {limit:,} positions. Its rotary positions go on beyond them, so "
            "the times are those of real runs, but no quality was measured there."
        ]

    def _layer(self) -> dict[str, Any]:
        names = [self.baseline, *(name for name in self.names if name in self.plan.attentions)]

        def run(models: Any, length: int) -> Rows:
            table = layer_speed(
                models,
                [length],
                baseline=self.baseline,
                budget=self.plan.budget / 2,
                seed=self.plan.seed,
                announce=lambda step, note: None,
            )
            return {name: asdict(timings[0]) for name, timings in table.rows.items()}

        measure = {"what": "layer", "batch": 1, "seed": self.plan.seed}
        return self._table("speed of one attention layer", names, self.plan.lengths, measure, run)

    def decode(self) -> dict[str, Any]:
        """Time and cache of one more token after contexts of every length."""
        contexts, names = self.plan.lengths, [self.baseline, *self.names]
        self.progress.start("decoding", len(contexts))
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

        def run(models: Any, context: int) -> Rows:
            found = decode_speed(
                models,
                self.tokens,
                [context],
                baseline=self.baseline,
                budget=self.plan.budget / 4,
                announce=lambda step, note: None,
            )
            return {
                name: {**asdict(held[0].timing), "cache_bytes": held[0].cache_bytes} for name, held in found.items()
            }

        for index, context in enumerate(contexts):
            self.progress.update(index, f"decoding after {context:,} tokens")
            measure = {"what": "decode", "batch": 1, "context": context}
            found = self._rows(names, measure, lambda models, context=context: run(models, context))  # type: ignore[misc]
            for name in names:
                rows[name].append(found[name])
        return {"baseline": self.baseline, "contexts": list(contexts), "states": dict(self._states), "rows": rows}


# --------------------------------------------------------------------------------------------------------------------
# As plain data


def speed_parts(
    lengths: Sequence[int], rows: Mapping[str, list[dict[str, Any]]], baseline: str, notes: Sequence[str]
) -> dict[str, Any]:
    """Rows by name, with crossovers; with the ceiling where the time without attention is known."""
    mechanisms = [name for name in rows if name not in (baseline, FREE)]
    found: dict[str, Any] = {
        "lengths": list(lengths),
        "rows": dict(rows),
        "crossover": {name: asdict(crossover(lengths, [row["speedup"] for row in rows[name]])) for name in mechanisms},
        "notes": list(notes),
    }
    if FREE in rows or not rows:
        pairs = zip(rows.get(baseline, []), rows.get(FREE, []), strict=True)
        ceilings = [amdahl_ceiling(base["median"], free["median"]) for base, free in pairs]
        found["ceiling"] = ceilings
        found["attention_share"] = [amdahl_share(ceiling) for ceiling in ceilings]
    return found


def speed_dict(table: SpeedTable) -> dict[str, Any]:
    """A `SpeedTable` as plain data."""
    rows = {name: [asdict(timing) for timing in timings] for name, timings in table.rows.items()}
    return speed_parts(table.lengths, rows, table.baseline, table.notes)
