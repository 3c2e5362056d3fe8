"""The variants of a model that a study compares: exact, without attention, with a mechanism, converted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from transformers import PreTrainedModel

from ..integration.ablation import without_attention
from ..integration.context import SUBMODULE, is_learned, saved_tensors
from ..integration.discovery import self_attention
from ..measure.speed import timing_options
from ..measure.values import Measure, Values, value
from ..mechanisms.head_mixture import HeadMixture
from ..mechanisms.softmax import EXACT, SoftmaxAttention
from ..patching import patch_model
from ..registry import ATTENTIONS, seed_options
from ..training.calibration import calibrate_untrained
from ..training.resumable import local_seed
from ..training.transfer import transfer_attention
from ..utils.models import shared_copy
from ..utils.progress import OnBatch, report_nothing
from .checkpoint_groups import CheckpointGroup, load_checkpoint_of
from .options import ResolvedOptions
from .prepare import EvaluatedModel, ExactModel, Measurement, PreparedModel
from .study import Conditions, Learned, Record, Study

#: Labels of the two references, and the mechanism's name of a model without attention.
EXACT_LABEL, WITHOUT_ATTENTION, NO_ATTENTION = "exact", "without attention", "none"

#: What was done to a model with linear attention, and to any variant, in the order of tables.
LINEAR_STATES = ("untrained", "transferred", "converted")
STATES = ("exact", "tuned", *LINEAR_STATES, "without attention")

Loader = Callable[[], PreTrainedModel]

#: Of the options, what an attention transfer depends on.
TRANSFER_OPTIONS = ("steps", "batch_size", "evaluations", "sequence_length", "train_sequences", "validation_sequences")


@dataclass(frozen=True)
class Variant:
    """One variant of a model, with what its measurements depend on besides the exact model."""

    label: str  # the row of tables that it belongs to
    attention: str  # the mechanism
    load: Loader
    state: str = ""  # one of `STATES`
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_linear(self) -> bool:
        return self.state in LINEAR_STATES

    def of(self, conditions: Conditions) -> Conditions:
        """Return the conditions of a measurement of this variant."""
        own: dict[str, Any] = {name: getattr(self, name) for name in ("attention", "state", "seed", "options")}
        return replace(conditions, **own, settings={**conditions.settings, **self.settings})

    def measure(self, study: Study, measurements: Iterable[Measurement], status: str = "") -> dict[str, Record]:
        """Measure what the study does not know yet; return the records by the name of the measurement.

        With a status, the rows that are done are reported as its progress.
        """
        records, loaded = {}, replace(self, load=cache(self.load))  # in memory while it is measured, and no longer
        for conditions, measure in measurements:
            stage = f"{status}: {conditions.measurement.replace('_', ' ')}"
            watch = partial(study.progress.status, stage) if status else report_nothing
            function = partial(loaded._measured, measure, watch)
            records[conditions.measurement] = study.measure(self.of(conditions), function, label=self.label)
        return records

    def _measured(self, measure: Measure, on_batch: OnBatch) -> Values:
        return measure(self.load(), on_batch)


def references(model: PreTrainedModel) -> list[Variant]:
    """Return the exact model and the model without attention."""
    floor = cache(lambda: without_attention(model))
    return [
        Variant(EXACT_LABEL, EXACT, lambda: model, "exact"),
        Variant(WITHOUT_ATTENTION, NO_ATTENTION, floor, "without attention"),
    ]


def variants_of(one: EvaluatedModel, study: Study) -> Iterator[list[Variant]]:
    """Yield the variants of a model by rows of the summary."""
    for reference in references(one.exact.model):
        yield [reference]
    for name in one.resolved.attentions:
        for seed in one.resolved.seeds:
            yield mechanism_stages(one, study, name, seed)
    for group in one.groups:
        for folder, fingerprint in group.folders.items():
            load = partial(load_checkpoint_of, one.exact.kind, folder, one.exact.model.device)
            yield [Variant(group.label, group.attention, load, group.state, settings={"checkpoint": fingerprint})]


def mechanism_stages(one: EvaluatedModel, study: Study, name: str, seed: int) -> list[Variant]:
    """Return a mechanism untrained (what it learns is calibrated) and, if it learns, after attention transfer.

    Each loads a model of its own. There is nothing if a seed changes nothing.
    """
    entry, resolved, inputs, exact = ATTENTIONS.get(name), one.resolved, one.inputs, one.exact
    learns, options = entry.learned, seed_options(entry, seed)
    trains = learns and resolved.steps > 0
    if not trains and not options and seed != resolved.seeds[0]:
        return []
    transfer = {key: getattr(resolved, key) for key in TRANSFER_OPTIONS}
    transfer |= {"data": inputs.hash, "order": resolved.seed}
    calibration = {key: item for key, item in transfer.items() if key not in ("steps", "evaluations")}

    def calibrated() -> PreTrainedModel:
        model = patch_model(shared_copy(exact.model), name, **options)
        if learns:
            calibrate_untrained(model, inputs.train)
        return model

    untrained = Variant(name, name, cache(calibrated), "untrained", seed if trains or options else None, options)
    if learns:
        untrained = replace(untrained, settings={"calibration": calibration})
    if not trains:
        return [untrained]
    after = replace(untrained, state="transferred", settings={"transfer": transfer})
    conditions = after.of(exact.conditions("attention_transfer"))
    study.records.use(conditions, name)  # the report shows an earlier transfer also where nothing has to be measured

    def trained() -> PreTrainedModel:
        model = patch_model(shared_copy(exact.model), name, **options)
        model.load_state_dict(saved_tensors(untrained.load(), is_learned), strict=False)
        return transferred(one, study, model, conditions)

    return [untrained, replace(after, load=cache(trained))]


def transferred(one: PreparedModel, study: Study, model: PreTrainedModel, conditions: Conditions) -> PreTrainedModel:
    """Give a patched model its trained parameters, the stored ones or those of a transfer now, and return it."""
    resolved, name = one.resolved, conditions.attention

    def train() -> tuple[Values, Learned]:
        batches, seed = list(one.inputs.train), conditions.seed or 0
        if seed != resolved.seed:  # seeds must differ in something where nothing else is random
            random.Random(seed).shuffle(batches)
        with local_seed(seed):
            result = transfer_attention(
                model,
                batches,
                max_steps=resolved.steps,
                validation=one.inputs.validation,
                eval_steps=max(resolved.steps // resolved.evaluations, 1),
                progress=lambda step, total, loss: study.progress.status(
                    f"{name}: attention transfer, loss {loss:.3f}", step, total
                ),
            )
        values = [
            value("steps", result.steps),
            value("tokens", result.tokens),
            value("best_step", result.best_step),
            value("transfer_seconds", result.seconds, unit="s"),
            *(value("loss", loss, step=step) for step, loss in enumerate(result.losses, start=1)),
            *(value("held_out_loss", loss, step=step) for step, loss in result.evaluations),
        ]
        return values, saved_tensors(model, is_learned)

    model.load_state_dict(study.learned(conditions, train, label=name), strict=False)
    return model


def with_learned_parts(exact: PreTrainedModel, plan: Mapping[str, Any], patched: PreTrainedModel) -> PreTrainedModel:
    """Return the exact model patched by a plan, with the learned parts of the same mechanisms in all heads."""
    model = patch_model(shared_copy(exact), plan)
    for own, other in zip(self_attention(model), self_attention(patched), strict=True):
        mechanism: Any = getattr(own.module, SUBMODULE, None)
        learned: Any = getattr(other.module, SUBMODULE, None)
        if isinstance(mechanism, HeadMixture):
            mechanism.load_heads(learned)
        elif mechanism is not None and not isinstance(mechanism, SoftmaxAttention):  # which has learned nothing
            mechanism.load_state_dict(learned.state_dict())
    return model.eval()


def timed_variants(exact: ExactModel, resolved: ResolvedOptions, groups: Sequence[CheckpointGroup]) -> list[Variant]:
    """Return what is timed side by side. Time depends on what is patched and not on weights: none are loaded.

    A mechanism that is built for a largest length is built for the longest one that is timed.
    """
    model, limit, length = exact.model, exact.positions, max(resolved.lengths)
    first, last = references(model)
    variants = [replace(first, options={"implementation": exact.implementation})]
    for name in resolved.attentions:
        entry = ATTENTIONS.get(name)
        options = timing_options(entry, seed_options(entry, resolved.seed), limit, length)
        identity = {key: item for key, item in options.items() if key != "seed"}
        patched = cache(partial(patch_model, shared_copy(model), name, **options))
        variants.append(Variant(name, name, patched, options=identity))
    for group in filter(lambda group: group.layers, groups):
        sized = group.sized(limit, length)
        patched = cache(partial(patch_model, shared_copy(model), {"default": EXACT, **sized.layers}))
        variants.append(Variant(group.label, group.attention, patched, options={"layers": sized.identity}))
    return [*variants, last]
