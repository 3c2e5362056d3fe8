"""Speed, memory and operations of one model with each mechanism, side by side; every length is kept once measured."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..integration.discovery import longest_input
from ..patching import patch_model
from ..registry import ATTENTIONS
from .decoding import decode_speed
from .forecast import MEMORY_SHARE, Forecast, forecast
from .formats import format_bytes
from .measurements import Store
from .preparing import Plan
from .resources import free_memory
from .speed import (
    FREE,
    TRAINING,
    can_go_beyond,
    has_position_table,
    layer_speed,
    length_rows,
    shared_copy,
    timing_options,
    without_attention,
)
from .subject import EXACT, Group, Subject, default_options, longer_layers, patched_like
from .summary import shown_places
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
        subject = subject.cast(plan.dtype)
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
        ahead: Callable[[int], Forecast] | None = None,
    ) -> dict[str, Any]:
        """All lengths, until there is no time or no memory for the next one. ahead: what a length will take (default:
        from the length before it)."""
        self.progress.start(title, len(lengths))
        done: list[int] = []
        rows: dict[str, list[dict[str, Any]]] = {}
        notes: list[str] = []
        for index, length in enumerate(lengths):
            key = {**measure, "length": length}
            wanting = None
            if (ahead or done) and not self._known(names, key):
                expected = ahead(length) if ahead else self._longer(rows, length / done[-1])
                wanting = expected.refusal(self.plan.budget, self.subject.model.device)
            found: Rows = {}
            if wanting is None:
                self.progress.update(index, f"{length:,} tokens")
                try:
                    found = self._rows(names, key, lambda models, length=length: run(models, length))  # type: ignore[misc]
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    wanting = "memory", "the device had no more"
            if wanting is not None:
                left = ", ".join(f"{held:,}" for held in lengths[index:])
                notes.append(f"Not timed, for want of {wanting[0]}: {left} tokens ({wanting[1]}).")
                break
            done.append(length)
            for name, row in found.items():
                rows.setdefault(name, []).append(row)
        return speed_parts(done, rows, self.baseline, notes)

    def _longer(self, rows: Mapping[str, list[dict[str, Any]]], growth: float) -> Forecast:
        """The exact form's time grows with the square, and its memory too where all weights are held at once."""
        square = {self.baseline: growth**2}
        eager = square if self.baseline == "eager" else {}
        last = {name: held[-1] for name, held in rows.items()}
        return forecast(last, lambda name: square.get(name, growth), lambda name: eager.get(name, growth))

    # ---------------------------------------------------------------------------------------------- all lengths

    def speed(self) -> dict[str, Any]:
        """The whole model and one attention layer against the baseline, at every length; several sequences at once at
        some."""
        whole, notes = self._whole_lengths()
        table = self._passes("speed of the whole model", "forward", whole)
        table["notes"][:0] = notes
        found: dict[str, Any] = {"baseline": self.baseline, "model": table}
        if self.plan.backward:
            found["training"] = self._passes("forward and backward", TRAINING, whole)
        if self.subject.kind == "decoder" and self.plan.prefill:
            found["prefill"] = self._passes("prefill", "prefill", whole)
        found["layer"] = self._layer() if self.plan.layer else speed_parts([], {}, self.baseline, [])
        if self.plan.batch > 1:
            found["throughput"] = self._throughput("forward", table)
            if self.plan.backward:
                found["training_throughput"] = self._throughput(TRAINING, found["training"])
        return found

    def _passes(self, title: str, what: str, lengths: Sequence[int], batch: int = 1, **table: Any) -> dict[str, Any]:
        """One pass of the whole model. Of several sequences at once the operations are not counted: they are those of
        one, so many times; so are those of a prefill."""
        plan = self.plan
        counted = batch == 1 and what != "prefill"
        resources = ("memory", "flops")[: 1 + counted] if plan.resources else ()

        def run(models: Any, length: int) -> Rows:
            return length_rows(
                models,
                self.tokens,
                length,
                baseline=self.baseline,
                budget=plan.budget,
                what=what,
                batch=batch,
                resources=resources,
            )

        measure = {"what": what, "batch": batch, "resources": plan.resources}
        return self._table(title, [self.baseline, *self.names, FREE], lengths, measure, run, **table)

    def _throughput(self, what: str, single: Mapping[str, Any]) -> dict[str, Any]:
        """Several sequences at once, at a few of the lengths that were timed with one."""
        batch, lengths = self.plan.batch, single["lengths"]

        def ahead(length: int) -> Forecast:
            rows = {name: held[lengths.index(length)] for name, held in single["rows"].items()}
            return forecast(rows, lambda name: batch, lambda name: batch)

        chosen = [lengths[place] for place in shown_places(lengths, self.plan.own)]
        title = f"{what}, {batch} sequences at once"
        return {"batch": batch, **self._passes(title, what, chosen, batch, ahead=ahead)}

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
        """Time and cache of one more token after contexts of every length, and of several streams at once."""
        found = self._decode(self.plan.lengths, 1)
        if self.plan.batch > 1:
            found["throughput"] = self._decode_several(found)
        return found

    def _decode_several(self, single: Mapping[str, Any]) -> dict[str, Any]:
        """Several streams, after those contexts whose caches find room."""
        batch, contexts, free = self.plan.batch, single["contexts"], free_memory(self.subject.model.device)
        kept, notes = [], []
        for place in shown_places(contexts, self.plan.own):
            needed = batch * sum(rows[place]["cache_bytes"] for rows in single["rows"].values())
            if free is None or needed <= MEMORY_SHARE * free:
                kept.append(contexts[place])
                continue
            told = f"the caches would hold {format_bytes(needed)}, {format_bytes(free)} are free"
            notes.append(f"Not timed, for want of memory: a context of {contexts[place]:,} tokens ({told}).")
        return {"batch": batch, **self._decode(kept, batch), "notes": notes}

    def _decode(self, contexts: Sequence[int], batch: int) -> dict[str, Any]:
        names = [self.baseline, *self.names]
        streams = "" if batch == 1 else f", {batch} streams"
        self.progress.start(f"decoding{streams}", len(contexts))
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

        def run(models: Any, context: int) -> Rows:
            found = decode_speed(
                models,
                self.tokens,
                [context],
                baseline=self.baseline,
                budget=self.plan.budget / 4,
                announce=lambda step, note: None,
                batch=batch,
            )
            return {
                name: {**asdict(held[0].timing), "cache_bytes": held[0].cache_bytes} for name, held in found.items()
            }

        for index, context in enumerate(contexts):
            self.progress.update(index, f"decoding after {context:,} tokens")
            measure = {"what": "decode", "batch": batch, "context": context}
            found = self._rows(names, measure, lambda models, context=context: run(models, context))  # type: ignore[misc]
            for name in names:
                rows[name].append({**found[name], "tokens_per_second": batch / found[name]["median"]})
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
