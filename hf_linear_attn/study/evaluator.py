"""Measures one model with several mechanisms: quality before and after attention transfer, speed, memory.

Every measurement goes through `Records`: what they hold is not measured again.
"""

import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from transformers import PreTrainedModel

from ..integration.ablation import without_attention
from ..integration.context import SUBMODULE
from ..integration.discovery import longest_input
from ..measure.inputs import possible_lengths, timing_options
from ..measure.quality import QualityMetric, Score, fidelity_metric
from ..measure.speed import (
    DECODING,
    FORWARD,
    PREFILL,
    TRAINING,
    WITHOUT_ATTENTION,
    measure_decoding,
    measure_passes,
    reason_to_skip,
)
from ..measure.values import Values, value
from ..mechanisms.softmax import EXACT
from ..patching import patch_model, patch_report
from ..registry import ATTENTIONS
from ..training.transfer import transfer_attention
from ..utils.files import atomic_write
from ..utils.formatting import fixed
from ..utils.models import shared_copy
from ..utils.progress import Progress
from .inputs import EvaluationInputs
from .loading import CheckpointGroup, ExactModel, seed_options
from .records import LEARNED_FOLDER, Record, Records
from .settings import Settings

#: The label of the exact model, and the mechanism's name of a model without attention.
EXACT_LABEL, NO_ATTENTION = "exact", "none"

#: Of the settings, what an attention transfer depends on.
TRANSFER_SETTINGS = ("steps", "batch_size", "evaluations", "sequence_length", "train_sequences", "validation_sequences")

#: The number of learned parameters of a patched model.
PARAMETERS = QualityMetric("parameters", lambda model, _: [value("learned_parameters", patch_report(model).parameters)])

Loader = Callable[[], PreTrainedModel]


@dataclass
class Evaluator:
    """Runs the measurements of one model."""

    exact: ExactModel
    inputs: EvaluationInputs
    settings: Settings
    metrics: Sequence[QualityMetric]  # of the model as a whole
    records: Records = field(default_factory=Records)
    groups: list[CheckpointGroup] = field(default_factory=list)  # checkpoints
    task: str = ""  # a further task that this model is for; only its scores are measured then
    progress: Progress = field(default_factory=Progress)
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    converted: dict[str, Loader] = field(default_factory=dict)  # by label, after the transfer

    @property
    def scores(self) -> list[Score]:
        """The scores of this model, the most important first."""
        return [metric.score for metric in self.metrics if metric.score is not None]

    def measure_quality(self) -> None:
        """Measure the exact model, the model without attention, every mechanism and every checkpoint."""
        model = self.exact.model
        self._quality(EXACT_LABEL, EXACT, lambda: model, state="exact")
        floor = cache(lambda: without_attention(model))
        self._quality(WITHOUT_ATTENTION, NO_ATTENTION, floor, state="without attention")
        for name in self.settings.attentions:
            for seed in self.settings.seeds:
                self._measure_mechanism(name, seed)
        for group in self.groups:
            for folder, fingerprint in group.folders.items():
                load = cache(partial(group.load, folder, self.exact.kind, model.device))
                settings = {"checkpoint": fingerprint}
                results = self._quality(group.label, group.attention, load, state=group.state, settings=settings)
                self._log(f"{group.label}, {Path(folder).name}", results)

    def _status(self, label: str, stage: str, done: int = 0, total: int | None = None) -> None:
        labels = [EXACT_LABEL, WITHOUT_ATTENTION, *self.settings.attentions, *(group.label for group in self.groups)]
        task = f"{self.task}: " if self.task else ""
        self.progress.status(f"{task}{label} ({labels.index(label) + 1} of {len(labels)}): {stage}", done, total)

    def _quality(self, label: str, attention: str, model: Loader, **parts: Any) -> dict[str, Record]:
        """Measure what is not known yet; return the records by the name of the measurement."""
        results = {}
        settings = parts.pop("settings", {})
        metrics = [*self.metrics]
        if attention not in (EXACT, NO_ATTENTION) and not self.task:
            facts = self.inputs.facts["fidelity"]
            metrics += [fidelity_metric(self.inputs.fidelity, {"data": self.inputs.hash, **facts}), PARAMETERS]
        for metric in metrics:
            parts["task"] = metric.score.task if metric.score else ""
            combined = {**metric.settings, **settings}
            conditions = self.exact.conditions(attention, metric.measurement, settings=combined, **parts)
            watch = partial(self._status, label, metric.measurement.replace("_", " "))
            measure = lambda metric=metric, watch=watch: metric(model(), watch)  # noqa: E731
            results[metric.measurement] = self.records.measure(conditions, measure, label=label)
        return results

    def _measure_mechanism(self, name: str, seed: int) -> None:
        entry = ATTENTIONS.get(name)
        trains = entry.learned and self.settings.steps > 0
        options = seed_options(entry, seed)
        if not trains and not options and seed != self.settings.seeds[0]:
            return  # nothing is random here
        patched = cache(lambda: patch_model(shared_copy(self.exact.model), name, **options))
        identity: dict[str, Any] = {"options": options, "seed": seed if trains or options else None}
        stages = [self._quality(name, name, patched, state="untrained", **identity)]
        self.converted[name] = patched
        if trains:
            transfer = {name: getattr(self.settings, name) for name in TRANSFER_SETTINGS}
            transfer |= {"data": self.inputs.hash, "order": self.settings.seed}
            identity.update(state="transferred", settings={"transfer": transfer})
            transferred = cache(lambda: self.transferred(name, seed, patched(), identity))
            if self.records.known(self.exact.conditions(name, "attention_transfer", **identity), name) is None:
                transferred()
            stages.append(self._quality(name, name, transferred, **identity))
            self.converted[name] = transferred
        self._log(name, *stages)

    def transferred(self, name: str, seed: int, model: PreTrainedModel, identity: Mapping[str, Any]) -> PreTrainedModel:
        """The patched model with its learned parameters trained: those on disk, or else by a transfer."""
        conditions = self.exact.conditions(name, "attention_transfer", **identity)
        path = self.records.path and self.records.path.parent / LEARNED_FOLDER / f"{conditions.id}.safetensors"
        if path is not None and path.is_file() and self.records.known(conditions, name) is not None:
            model.load_state_dict(load_file(path), strict=False)
            return model
        batches = list(self.inputs.train)
        if seed != self.settings.seed:  # seeds must differ in something where nothing else is random
            random.Random(seed).shuffle(batches)
        watch: Callable[[int, int, float], None] = lambda step, total, loss: self._status(  # noqa: E731
            name, f"attention transfer, loss {loss:.3f}", step, total
        )
        settings = self.settings
        torch.manual_seed(seed)
        result = transfer_attention(
            model,
            batches,
            steps=settings.steps,
            validation=self.inputs.validation,
            evaluate_every=max(settings.steps // settings.evaluations, 1),
            progress=watch,
        )
        values = [
            value("steps", result.steps),
            value("tokens", result.tokens),
            value("best_step", result.best_step),
            value("transfer_seconds", result.seconds, unit="s"),
            *(value("loss", loss, step=step) for step, loss in enumerate(result.losses, start=1)),
            *(value("held_out_loss", loss, step=step) for step, loss in result.evaluations),
        ]
        if path is not None:
            learned = {name: item for name, item in model.state_dict().items() if f".{SUBMODULE}." in f".{name}"}
            atomic_write(path, save({name: item.contiguous().cpu() for name, item in learned.items()}))
        self.records.add(conditions, values, label=name)
        return model

    def _log(self, label: str, *stages: Mapping[str, Record]) -> None:
        parts = []
        for score in self.scores:
            numbers = [records[score.measurement].value(score.metric) for records in stages]
            texts = (fixed(number, score.digits) for number in numbers if number is not None)
            parts.append(f"{score.title} {' → '.join(texts)}")
        self.progress.log(f"{label}: {', '.join(parts)}")


def measure_speed(evaluator: Evaluator) -> None:
    """Measure speed, memory and operations of one model with each mechanism at every length, side by side."""
    settings, exact = evaluator.settings, evaluator.exact.cast(evaluator.settings.dtype)
    lengths, note = possible_lengths(exact.model, settings.lengths)
    evaluator.notes += [note] if note else []
    sweep = _SpeedSweep(evaluator, exact)
    generation = [PREFILL, DECODING] if exact.kind == "decoder" else []
    for measurement in (FORWARD, *([TRAINING] if settings.backward else []), *generation):
        sweep.time(measurement, lengths)


class _SpeedSweep:
    """Times a model with each mechanism, and stops where time or memory would not suffice.

    The exact model and the model without attention are timed again beside whatever is missing, because a speedup is
    always a ratio within one run.
    """

    def __init__(self, evaluator: Evaluator, exact: ExactModel) -> None:
        self.evaluator, self.exact, self.settings = evaluator, exact, evaluator.settings
        model, tokens = exact.model, evaluator.inputs.tokens
        self.common: dict[str, Any] = {"tokens": tokens, "baseline": EXACT_LABEL}
        self.models: dict[str, tuple[str, dict[str, Any], Loader]] = {}  # label -> mechanism, its options, the model
        self.models[EXACT_LABEL] = (EXACT, {"implementation": exact.implementation}, lambda: model)
        sized = partial(timing_options, limit=longest_input(model), length=max(self.settings.lengths))
        for name in self.settings.attentions:
            entry = ATTENTIONS.get(name)
            options = sized(entry, seed_options(entry, self.settings.seed))
            identity = {key: item for key, item in options.items() if key != "seed"}
            patched = cache(partial(patch_model, shared_copy(model), name, **options))
            self.models[name] = (name, identity, patched)
        for group in filter(lambda group: group.layers, evaluator.groups):
            # Time depends on what is patched and not on weights: we patch a copy of the exact model.
            layers = {
                index: {**layer, "options": sized(ATTENTIONS.get(layer["attention"]), layer["options"])}
                for index, layer in group.layers.items()
            }
            identity = {"layers": replace(group, layers=layers).identity}
            patched = cache(partial(patch_model, shared_copy(model), {"default": EXACT, **layers}))
            self.models[group.label] = (group.attention, identity, patched)
        self.models[WITHOUT_ATTENTION] = (NO_ATTENTION, {}, cache(lambda: without_attention(model)))

    def time(self, measurement: str, lengths: Sequence[int]) -> None:
        """Time one pass of the whole model, or one more token after each context: of one sequence, and of several.

        Operations are counted for one sequence: a batch has so many times as many, and a prefill as many as a forward
        pass. Several sequences are timed at a few of the lengths, and not in a prefill.
        """
        seconds, size = self.settings.seconds, self.settings.throughput_batch_size
        flops: dict[str, Any] = {}
        if measurement == DECODING:
            measure = partial(measure_decoding, **self.common, seconds=seconds / 4)
        else:
            measure = partial(measure_passes, **self.common, seconds=seconds, measurement=measurement, memory=True)
            flops["flops"] = self.settings.flops and measurement != PREFILL
        single = self._run(measurement, lengths, partial(measure, **flops))
        if size > 1 and measurement != PREFILL:
            shown = lengths_to_show(list(single), self.settings.length)
            self._run(measurement, shown, partial(measure, batch_size=size), batch_size=size, single=single)

    def _run(
        self,
        measurement: str,
        lengths: Sequence[int],
        measure: Callable[..., dict[str, Values]],
        *,
        batch_size: int = 1,
        single: Mapping[int, Mapping[str, Record]] | None = None,
    ) -> dict[int, dict[str, Record]]:
        """Measure at each length, unless the last one, or what `single` has of one sequence, predicts too much."""
        done: dict[int, dict[str, Record]] = {}
        records, device = self.evaluator.records, self.exact.model.device
        name = measurement + (f" with {batch_size} sequences" if batch_size > 1 else "")
        models = {**self.models}
        if measurement == DECODING:
            del models[WITHOUT_ATTENTION]
        # The time of exact attention grows with the square, and its memory too where all weights are in memory.
        quadratic = [(EXACT_LABEL, "seconds")]
        quadratic += [(EXACT_LABEL, "peak_memory")] if self.exact.implementation == "eager" else []
        for index, length in enumerate(lengths):
            parts = {"length": length, "batch_size": batch_size}
            conditions = {
                label: self.exact.conditions(attention, measurement, **parts, options=options)
                for label, (attention, options, _) in models.items()
            }
            missing = [label for label, one in conditions.items() if records.known(one, label) is None]
            if missing:
                last = max(done, default=length)
                rows, growth = (single[length], batch_size) if single else (done.get(last, {}), length / last)
                reason = reason_to_skip(rows, growth, self.settings.seconds, device, () if single else quadratic)
                if not reason:
                    self.evaluator.progress.status(f"{name}: {length:,} tokens", index, len(lengths))
                    beside = [label for label in models if label in (*missing, EXACT_LABEL, WITHOUT_ATTENTION)]
                    try:
                        results = measure({label: models[label][2]() for label in beside}, length=length)
                    except torch.cuda.OutOfMemoryError:
                        torch.cuda.empty_cache()
                        reason = "the device has no more memory"
                if reason:
                    left = ", ".join(f"{length:,}" for length in lengths[index:])
                    self.evaluator.notes.append(f"{name} was not timed at {left} tokens: {reason}.")
                    break
                group = secrets.token_hex(4)
                for label, values in results.items():
                    records.add(conditions[label], values, label=label, group=group)
            done[length] = {label: record for label, one in conditions.items() if (record := records.latest(one))}
        return done


def lengths_to_show(lengths: Sequence[int], own: int | None) -> list[int]:
    """Return at most five lengths to show: the user's own if measured, and four that are evenly spread."""
    spread = [lengths[index * (len(lengths) - 1) // 3] for index in range(4)] if lengths else []
    return sorted({*spread, *(length for length in lengths if length == own)})
