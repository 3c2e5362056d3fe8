"""Measures one model with several mechanisms: quality before and after attention transfer, speed, memory.

Every measurement goes through `Records`: what they hold is not measured again.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from transformers import PreTrainedModel

from ..integration.attention import SUBMODULE
from ..integration.discovery import longest_input
from ..integration.inputs import accepts_longer_inputs, has_position_table
from ..mechanisms.softmax import EXACT
from ..patching import patch_model, patch_report
from ..registry import ATTENTIONS
from ..training.transfer import transfer_attention
from ..utils.files import atomic_write
from ..utils.formatting import format_bytes
from ..utils.models import shared_copy
from .config import Settings
from .inputs import EvaluationInputs
from .metrics import QualityMetric, Score, fidelity_metric, value
from .models import Checkpoint, CheckpointGroup, ExactModel, patched_like, seed_options
from .progress import NoProgress, Progress
from .records import LEARNED_FOLDER, Conditions, Record, Records
from .resources import free_memory
from .speed import (
    DECODING,
    FORWARD,
    LAYER,
    MEMORY_SHARE,
    PREFILL,
    TRAINING,
    WITHOUT_ATTENTION,
    Forecast,
    Values,
    forecast,
    measure_decoding,
    measure_layer,
    measure_passes,
    timing_options,
    without_attention,
)

#: The label of the exact model, and the mechanism's name of a model without attention.
EXACT_LABEL, NO_ATTENTION = "exact", "none"

#: Lengths at which throughput is timed, where they are measured; the shortest and the longest are added.
USUAL_LENGTHS = (512, 2048, 8192)

Loader = Callable[[], PreTrainedModel]


@dataclass
class Evaluator:
    """Runs the measurements of one model.

    Attributes:
        exact: The model.
        inputs: Its data.
        settings: How much to measure.
        metrics: Quality of the model as a whole.
        records: Where measurements go.
        groups: Converted checkpoints.
        baselines: Checkpoints with exact attention, tuned as the converted ones were.
        folder: Where learned parameters are saved (None: nowhere).
        task: A further task that this model is for; only its scores are measured then.
        progress: Told what is being done.
        used: Ids of the records that belong to this evaluation.
        notes: What was left out, and why.
    """

    exact: ExactModel
    inputs: EvaluationInputs
    settings: Settings
    metrics: Sequence[QualityMetric]
    records: Records
    groups: Sequence[CheckpointGroup] = ()
    baselines: Sequence[CheckpointGroup] = ()
    folder: Path | None = None
    task: str = ""
    progress: Progress = field(default_factory=NoProgress)
    used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def scores(self) -> list[Score]:
        """The scores of this model, the most important first."""
        return [metric.score for metric in self.metrics if metric.score is not None]

    def _status(self, message: str) -> None:
        self.progress.status(f"{self.task}: {message}" if self.task else message)

    # ---------------------------------------------------------------------------------------------- quality

    def measure_quality(self) -> None:
        """Measure the exact model, the model without attention, every mechanism and every checkpoint."""
        model = self.exact.model
        self._status("exact model, and the same model without attention")
        self._quality(EXACT_LABEL, EXACT, lambda: model, self.metrics, state="exact")
        floor = cache(lambda: without_attention(model))
        self._quality(WITHOUT_ATTENTION, NO_ATTENTION, floor, self.metrics, state="without attention")
        for name in self.settings.attentions:
            self._measure_mechanism(name)
        for group in (*self.baselines, *self.groups):
            self._measure_checkpoints(group)

    def _quality(
        self, label: str, attention: str, model: Loader, metrics: Sequence[QualityMetric], **parts: Any
    ) -> dict[str, Record]:
        """Measure what is not known yet; return the records by the name of the measurement."""
        results = {}
        settings = parts.pop("settings", {})
        for metric in metrics:
            task = metric.score.task if metric.score else ""
            combined = {**metric.settings, **settings}
            conditions = self.exact.conditions(attention, metric.measurement, task=task, settings=combined, **parts)
            record = self.records.measure(conditions, lambda metric=metric: metric(model()), label=label)  # type: ignore[misc]
            self.used.add(record.id)
            results[metric.measurement] = record
        return results

    def _mechanism_metrics(self) -> list[QualityMetric]:
        facts = self.inputs.facts.get("fidelity", {})
        fidelity = fidelity_metric(self.inputs.fidelity, {"data": self.inputs.hash, **facts})
        return [*self.metrics, *([] if self.task else [fidelity])]

    def _measure_mechanism(self, name: str) -> None:
        """Patch a copy, measure, transfer, measure again; for each seed."""
        entry = ATTENTIONS.get(name)
        trains = entry.learned and self.settings.steps > 0
        for seed in self.settings.seeds:
            options = seed_options(entry, seed)
            if not trains and not options and seed != self.settings.seeds[0]:
                continue  # nothing is random here
            patched = cache(lambda options=options: patch_model(shared_copy(self.exact.model), name, **options))
            metrics = self._mechanism_metrics()
            identity: dict[str, Any] = {"options": options, "seed": seed if trains or options else None}
            self._status(f"{name}: untrained")
            before = self._quality(name, name, patched, metrics, state="untrained", **identity)
            self._parameters(name, patched, identity)
            after = before
            if trains:
                identity.update(state="transferred", settings={"transfer": self._transfer_settings(seed)})
                transferred = cache(
                    lambda seed=seed, patched=patched, identity=identity: self._transferred(
                        name, seed, patched, identity
                    )
                )
                conditions = self.exact.conditions(name, "attention_transfer", **identity)
                if self.records.known(conditions) is None:
                    transferred()
                self.used.add(conditions.id)
                self._status(f"{name}: after attention transfer")
                after = self._quality(name, name, transferred, metrics, **identity)
            self._log(name, before, after)

    def _parameters(self, name: str, patched: Loader, identity: Mapping[str, Any]) -> None:
        """Record the number of learned parameters."""
        conditions = self.exact.conditions(name, "parameters", options=identity["options"])
        values = lambda: [value("learned_parameters", patch_report(patched()).parameters)]  # noqa: E731
        self.used.add(self.records.measure(conditions, values, label=name).id)

    def _transfer_settings(self, seed: int) -> dict[str, Any]:
        settings = self.settings
        names = ("steps", "batch_size", "evaluations", "sequence_length", "train_sequences", "validation_sequences")
        return {**{name: getattr(settings, name) for name in names}, "data": self.inputs.hash, "order": settings.seed}

    def _transferred(self, name: str, seed: int, patched: Loader, identity: Mapping[str, Any]) -> PreTrainedModel:
        """The patched model with its learned parameters trained: those on disk, or else by a transfer."""
        model = patched()
        conditions = self.exact.conditions(name, "attention_transfer", **identity)
        path = None if self.folder is None else self.folder / LEARNED_FOLDER / f"{conditions.id}.safetensors"
        if path is not None and path.is_file() and self.records.known(conditions) is not None:
            model.load_state_dict(load_file(path), strict=False)
            return model
        batches = list(self.inputs.train)
        if seed != self.settings.seed:  # seeds must differ in something where nothing else is random
            random.Random(seed).shuffle(batches)
        values = train_attention(
            model,
            batches,
            self.inputs.validation,
            self.settings,
            seed,
            lambda step, total, loss: self._status(f"{name}: attention transfer, step {step}/{total}, loss {loss:.3f}"),
        )
        if path is not None:
            atomic_write(path, save(learned_tensors(model)))
        seconds = next(one["value"] for one in values if one["metric"] == "transfer_seconds")
        record = self.records.add(conditions, values, label=name, seconds=seconds)
        self.used.add(record.id)
        return model

    def _measure_checkpoints(self, group: CheckpointGroup) -> None:
        """Measure checkpoints as they are."""
        metrics = self._mechanism_metrics() if group.layers else self.metrics
        results: dict[str, Record] = {}
        for checkpoint in group.checkpoints:
            self._status(f"{group.label}: {checkpoint.folder}")
            settings = {"checkpoint": checkpoint.fingerprint}
            load = cache(checkpoint.load)
            parts = {"state": group.state, "settings": settings}
            results = self._quality(group.label, group.attention, load, metrics, **parts)
        if group.layers and not self.task:
            conditions = self.exact.conditions(group.attention, "parameters", options={"layers": group.identity})
            count = lambda: [value("learned_parameters", patch_report(self._patched_like(group)).parameters)]  # noqa: E731
            self.used.add(self.records.measure(conditions, count, label=group.label).id)
        self._log(group.label, results, results)

    def _patched_like(self, group: CheckpointGroup) -> PreTrainedModel:
        return patched_like(group.layers, self.exact.model)

    def _log(self, label: str, before: Mapping[str, Record], after: Mapping[str, Record]) -> None:
        """Report the scores of a mechanism."""
        parts = []
        for score in self.scores:
            first, last = (records[score.measurement].value(score.metric) for records in (before, after))
            if first is None or last is None:
                continue
            text = f"{last:.{score.digits}f}"
            parts.append(f"{score.title} {text if before is after else f'{first:.{score.digits}f} → {text}'}")
        self.progress.log(f"{label}: {', '.join(parts)}")

    # ---------------------------------------------------------------------------------------------- speed

    def measure_speed(self) -> None:
        """Measure speed, memory and operations at every length."""
        if not self.settings.lengths:
            return
        _SpeedMeasurement(self).run()


def train_attention(
    model: PreTrainedModel,
    train: Sequence[Mapping[str, torch.Tensor]],
    validation: Sequence[Mapping[str, torch.Tensor]],
    settings: Settings,
    seed: int,
    progress: Callable[[int, int, float], None],
) -> list[dict[str, Any]]:
    """Train the learned parts of a patched model by attention transfer.

    Args:
        model: The patched model.
        train: Batches to train on.
        validation: Batches that choose the best step.
        settings: `steps`, and how often the validation batches are evaluated.
        seed: Seed of everything random.
        progress: Called with the step, all steps, and the loss.

    Returns:
        The values of a record: `steps`, `tokens`, `best_step`, `transfer_seconds` and the losses by step.
    """
    torch.manual_seed(seed)
    result = transfer_attention(
        model,
        list(train),
        steps=settings.steps,
        validation=list(validation),
        evaluate_every=max(settings.steps // settings.evaluations, 1),
        progress=progress,
    )
    return [
        value("steps", result.steps),
        value("tokens", result.tokens),
        value("best_step", result.best_step),
        value("transfer_seconds", result.seconds, unit="s"),
        *(value("loss", loss, step=step) for step, loss in enumerate(result.losses, start=1)),
        *(value("held_out_loss", loss, step=step) for step, loss in result.evaluations),
    ]


def learned_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that a patched model has beyond the exact one, on the CPU, by name."""
    state = model.state_dict()
    return {name: tensor.contiguous().cpu() for name, tensor in state.items() if f".{SUBMODULE}." in f".{name}"}


class _SpeedMeasurement:
    """Times one model with each mechanism, side by side.

    The exact model and the model without attention are timed again beside whatever is missing, because a speedup is
    always a ratio within one run.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.settings = evaluator.settings
        self.exact = evaluator.exact.cast(self.settings.dtype)
        self.limit = longest_input(self.exact.model)
        self.records, self.progress = evaluator.records, evaluator.progress
        self._models: dict[str, Loader] = {}
        self._identities: dict[str, tuple[str, dict[str, Any]]] = {}
        model = self.exact.model
        self._add(EXACT_LABEL, EXACT, {"implementation": self.exact.implementation}, lambda: model)
        self._add(WITHOUT_ATTENTION, NO_ATTENTION, {}, cache(lambda: without_attention(model)))
        for name in self.settings.attentions:
            self._add_mechanism(name)
        for group in evaluator.groups:
            layers = group.resized(max(self.settings.lengths))
            patched = cache(lambda layers=layers: patched_like(layers, model))
            # Time depends on what is patched and not on weights: we patch a copy of the exact model.
            identity = replace(group, layers=layers).identity
            self._add(group.label, group.attention, {"layers": identity}, patched)

    def _add(self, label: str, attention: str, options: dict[str, Any], model: Loader) -> None:
        self._identities[label], self._models[label] = (attention, options), model

    def _add_mechanism(self, name: str) -> None:
        entry, model = ATTENTIONS.get(name), self.exact.model
        accepted = [item.name for item in fields(entry.options)]
        seeded = seed_options(entry, self.settings.seed)
        options = timing_options(seeded, accepted, self.limit, max(self.settings.lengths))
        identity = {key: item for key, item in options.items() if key != "seed"}
        self._add(name, name, identity, cache(lambda: patch_model(shared_copy(model), name, **options)))

    @property
    def mechanisms(self) -> list[str]:
        return [label for label in self._models if label not in (EXACT_LABEL, WITHOUT_ATTENTION)]

    def run(self) -> None:
        """Run all measurements."""
        settings, decoder = self.settings, self.exact.kind == "decoder"
        everything = [EXACT_LABEL, *self.mechanisms, WITHOUT_ATTENTION]
        lengths = self._possible_lengths()
        done = self._passes(FORWARD, everything, lengths)
        if settings.throughput_batch_size > 1:
            self._throughput(FORWARD, everything, done)
        if settings.backward:
            trained = self._passes(TRAINING, everything, lengths)
            if settings.throughput_batch_size > 1:
                self._throughput(TRAINING, everything, trained)
        if decoder:
            self._passes(PREFILL, everything, lengths)
            self._decoding(lengths)
        if settings.layer:
            labels = [EXACT_LABEL, *(name for name in self.mechanisms if name in settings.attentions)]
            self._sweep(LAYER, labels, settings.lengths, 1, self._layer)

    # ---------------------------------------------------------------------------------------------- one length

    def _conditions(self, label: str, measurement: str, length: int, batch_size: int) -> Conditions:
        attention, options = self._identities[label]
        return self.exact.conditions(attention, measurement, length=length, batch_size=batch_size, options=options)

    def _measure(
        self,
        measurement: str,
        labels: Sequence[str],
        length: int,
        batch_size: int,
        run: Callable[[Any], dict[str, Values]],
    ) -> dict[str, Record]:
        """Return the record of each label; what is missing is timed beside the exact model and without attention."""
        conditions = {label: self._conditions(label, measurement, length, batch_size) for label in labels}
        missing = {label for label in labels if self.records.known(conditions[label]) is None}
        if missing:
            chosen = [label for label in labels if label in missing or label in (EXACT_LABEL, WITHOUT_ATTENTION)]
            group = secrets.token_hex(4)
            for label, values in run({label: self._models[label]() for label in chosen}).items():
                self.records.add(conditions[label], values, label=label, group=group)
        results = {label: self.records.latest(conditions[label]) for label in labels}
        known = {label: record for label, record in results.items() if record is not None}
        self.evaluator.used.update(record.id for record in known.values())
        return known

    def _all_known(self, measurement: str, labels: Sequence[str], length: int, batch_size: int) -> bool:
        conditions = [self._conditions(label, measurement, length, batch_size) for label in labels]
        return all(self.records.known(one) is not None for one in conditions)

    def _sweep(
        self,
        measurement: str,
        labels: Sequence[str],
        lengths: Sequence[int],
        batch_size: int,
        run: Callable[..., dict[str, Values]],
        predict: Callable[[int], Forecast] | None = None,
    ) -> dict[int, dict[str, Record]]:
        """Measure at each length until time or memory would not suffice. The last length predicts the next one."""
        done: dict[int, dict[str, Record]] = {}
        for index, length in enumerate(lengths):
            reason = None
            if (predict or done) and not self._all_known(measurement, labels, length, batch_size):
                expected = predict(length) if predict else self._longer(done, length)
                reason = expected.reason_to_skip(self.settings.seconds, self.exact.model.device)
            if reason is None:
                batch = f", {batch_size} sequences" if batch_size > 1 else ""
                self.progress.status(f"{measurement}{batch}: {length:,} tokens")
                try:
                    results = self._measure(measurement, labels, length, batch_size, partial(run, length=length))
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    reason = "the device has no more memory"
            if reason is not None:
                left = ", ".join(f"{length:,}" for length in lengths[index:])
                batch = f" with {batch_size} sequences" if batch_size > 1 else ""
                self.evaluator.notes.append(f"{measurement}{batch} was not timed at {left} tokens: {reason}.")
                break
            done[length] = results
        return done

    def _longer(self, done: Mapping[int, Mapping[str, Record]], length: int) -> Forecast:
        """The time of exact attention grows with the square, and its memory too where all weights are in memory."""
        last = max(done)
        growth = length / last
        quadratic = {EXACT_LABEL: growth**2}
        memory = quadratic if self.exact.implementation == "eager" else {}
        rows = {label: _cost(record) for label, record in done[last].items()}
        return forecast(rows, lambda label: quadratic.get(label, growth), lambda label: memory.get(label, growth))

    # ---------------------------------------------------------------------------------------------- measurements

    def _passes(
        self, measurement: str, labels: Sequence[str], lengths: Sequence[int], batch_size: int = 1, **options: Any
    ) -> dict[int, dict[str, Record]]:
        """Time one pass of the whole model. Operations are counted for one sequence only: a batch has so many times as
        many, and a prefill as many as a forward pass."""

        def run(models: Any, length: int) -> dict[str, Values]:
            return measure_passes(
                models,
                self.evaluator.inputs.tokens,
                length,
                baseline=EXACT_LABEL,
                seconds=self.settings.seconds,
                measurement=measurement,
                batch_size=batch_size,
                memory=True,
                flops=batch_size == 1 and measurement != PREFILL,
            )

        return self._sweep(measurement, labels, lengths, batch_size, run, **options)

    def _throughput(self, measurement: str, labels: Sequence[str], single: Mapping[int, Mapping[str, Record]]) -> None:
        """Time several sequences at once, at a few of the lengths."""
        size = self.settings.throughput_batch_size

        def predict(length: int) -> Forecast:
            rows = {label: _cost(record) for label, record in single[length].items()}
            return forecast(rows, lambda label: size, lambda label: size)

        lengths = lengths_to_show(list(single), self.settings.length)
        self._passes(measurement, labels, lengths, size, predict=predict)

    def _layer(self, models: Any, length: int) -> dict[str, Values]:
        settings = self.settings
        return measure_layer(models, length, baseline=EXACT_LABEL, seconds=settings.seconds / 2, seed=settings.seed)

    def _decoding(self, contexts: Sequence[int]) -> None:
        """Time one more token after each context, of one sequence and of several."""
        labels = [EXACT_LABEL, *self.mechanisms]
        single = {context: self._decode(labels, context, 1) for context in contexts}
        size = self.settings.throughput_batch_size
        if size == 1:
            return
        free = free_memory(self.exact.model.device)
        for context in lengths_to_show(list(contexts), self.settings.length):
            needed = size * sum(record.value("cache_bytes") or 0 for record in single[context].values())
            if free is None or needed <= MEMORY_SHARE * free:
                self._decode(labels, context, size)
                continue
            self.evaluator.notes.append(
                f"decoding with {size} sequences was not timed after {context:,} tokens: the caches would need "
                f"{format_bytes(needed)}, and {format_bytes(free)} are free."
            )

    def _decode(self, labels: Sequence[str], context: int, batch_size: int) -> dict[str, Record]:
        self.progress.status(f"decoding after {context:,} tokens")

        def run(models: Any) -> dict[str, Values]:
            return measure_decoding(
                models,
                self.evaluator.inputs.tokens,
                context,
                baseline=EXACT_LABEL,
                seconds=self.settings.seconds / 4,
                batch_size=batch_size,
            )

        return self._measure(DECODING, labels, context, batch_size, run)

    def _possible_lengths(self) -> tuple[int, ...]:
        """The lengths that the whole model can take; a note says what those beyond its positions mean."""
        lengths, limit, model = self.settings.lengths, self.limit, self.exact.model
        if limit is None or max(lengths) <= limit:
            return lengths
        if not accepts_longer_inputs(model):
            self.evaluator.notes.append(f"The model takes {limit:,} positions; longer inputs were not timed.")
            return tuple(length for length in lengths if length <= limit) or (limit,)
        if has_position_table(model):
            self.evaluator.notes.append(
                f"The model has {limit:,} positions. Beyond them its position numbers start again from zero, which "
                "does not change the time; no quality was measured there."
            )
            return lengths
        self.evaluator.notes.append(
            f"The model was trained on up to {limit:,} positions. Its rotary positions continue beyond them, where no "
            "quality was measured."
        )
        return lengths


def _cost(record: Record) -> tuple[float, float | None]:
    return record.value("seconds") or 0.0, record.value("peak_memory")


def lengths_to_show(lengths: Sequence[int], own: int | None = None) -> list[int]:
    """Return at most four lengths to show: the user's own, the usual ones if measured, the shortest, the longest."""
    if not lengths:
        return []
    chosen = sorted({lengths[0], lengths[-1], *(length for length in USUAL_LENGTHS if length in lengths)})[-4:]
    if own is not None and own in lengths and own not in chosen:
        nearest = min(chosen, key=lambda length: abs(length - own))
        chosen[chosen.index(nearest)] = own
    return sorted(chosen)


def missing_loader(folder: str) -> Loader:
    """Return a loader for a checkpoint of an earlier run, whose folder must be given again if it is needed."""

    def load() -> PreTrainedModel:
        raise ValueError(f"The checkpoint {folder!r} of an earlier run is needed again: give its folder too.")

    return load


def checkpoint_of(fact: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint of an earlier run from what the records say about it."""
    return Checkpoint(fact["folder"], fact["fingerprint"], missing_loader(fact["folder"]))
