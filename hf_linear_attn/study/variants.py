"""The variants of a model that an evaluation compares: exact, without attention, with a mechanism, converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from transformers import PreTrainedModel

from ..checkpoints import load_checkpoint
from ..integration.ablation import without_attention
from ..integration.context import is_learned, saved_tensors
from ..integration.discovery import longest_input
from ..measure.metric import Metric, Numbers
from ..measure.speed import timing_options
from ..mechanisms.softmax import EXACT
from ..patching import patch_model
from ..registry import ATTENTIONS, seed_options
from ..training.calibration import calibrate_untrained
from ..training.resumable import local_seed
from ..training.transfer import transfer_attention
from ..utils.models import Batch, shared_copy
from .checkpoint_groups import CheckpointGroup
from .evaluated_model import EvaluatedModel
from .study import Conditions, Learned, Record, Study

#: Labels of the two references, and the mechanism's name of a model without attention.
EXACT_LABEL, WITHOUT_ATTENTION, NO_ATTENTION = "exact", "without attention", "none"

#: What was done to a model with linear attention, and to any variant, in the order of tables.
LINEAR_STATES = ("untrained", "transferred", "converted")
STATES = ("exact", "tuned", *LINEAR_STATES, "without attention")

#: How often an attention transfer is evaluated, to keep its best step.
EVALUATIONS = 4


@dataclass(frozen=True)
class Variant:
    """One variant of a model, with what its measurements depend on besides the exact model."""

    label: str  # the row of tables that it belongs to
    attention: str  # the mechanism
    load: Callable[[], PreTrainedModel]
    state: str = ""  # one of `STATES`
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_linear(self) -> bool:
        """Whether it has linear attention."""
        return self.state in LINEAR_STATES

    def of(self, conditions: Conditions) -> Conditions:
        """Return the conditions of a measurement of this variant."""
        settings = {**conditions.settings, **self.settings}
        return replace(
            conditions,
            attention=self.attention,
            state=self.state,
            seed=self.seed,
            options=self.options,
            settings=settings,
        )

    def measure(self, study: Study, evaluated: EvaluatedModel, metrics: Mapping[str, Metric]) -> dict[str, Record]:
        """Measure what the study does not know yet; return the records by measurement."""
        load, records = cache(self.load), {}  # once for all metrics; a checkpoint is in memory no longer than this
        for name, metric in metrics.items():
            study.progress.status(f"{self.label}: {name.replace('_', ' ')}")
            conditions = self.of(evaluated.conditions(name, settings=evaluated.metric_settings(name)))
            records[name] = study.measure(conditions, partial(_measured, metric, load), label=self.label)
        return records


def _measured(metric: Metric, load: Callable[[], PreTrainedModel]) -> Numbers:
    return metric(load())


def references(model: PreTrainedModel) -> list[Variant]:
    """Return the exact model and the model without attention."""
    floor = cache(lambda: without_attention(model))
    return [
        Variant(EXACT_LABEL, EXACT, lambda: model, "exact"),
        Variant(WITHOUT_ATTENTION, NO_ATTENTION, floor, "without attention"),
    ]


def variants_of(
    evaluated: EvaluatedModel, study: Study, attentions: Sequence[str], seeds: Sequence[int], steps: int, groups: Any
) -> Iterator[list[Variant]]:
    """Yield the variants of a model by rows of the summary."""
    for reference in references(evaluated.model):
        yield [reference]
    for name in attentions:
        for seed in seeds:
            stages = MechanismStages(evaluated, study, name, seed, steps)
            if row := stages.variants(is_first=seed == seeds[0]):
                yield row
    for group in groups:
        for folder, fingerprint in group.folders.items():
            load = partial(load_converted, evaluated, folder)
            yield [Variant(group.label, group.attention, load, group.state, settings={"checkpoint": fingerprint})]


def load_converted(evaluated: EvaluatedModel, folder: str) -> PreTrainedModel:
    """Load a checkpoint that was made from the model."""
    model, _ = load_checkpoint(folder, evaluated.kind.model_class)
    return model.eval().to(evaluated.model.device)


@dataclass(frozen=True)
class MechanismStages:
    """One mechanism with one seed: untrained (what it learns is calibrated), and after attention transfer."""

    evaluated: EvaluatedModel
    study: Study
    name: str
    seed: int
    steps: int  # of attention transfer

    def variants(self, *, is_first: bool) -> list[Variant]:
        """Return its stages, each of which loads a model of its own; nothing if the seed changes nothing.

        Of a mechanism that learns nothing there is one stage.
        """
        entry, seed = ATTENTIONS.get(self.name), self.seed
        options = seed_options(entry, seed)
        trains = entry.learned and self.steps > 0
        if not trains and not options and not is_first:
            return []
        settings = {"order": seed} if entry.learned else {}
        own_seed = seed if trains or options else None
        untrained = Variant(self.name, self.name, cache(self.calibrated), "untrained", own_seed, options, settings)
        if not trains:
            return [untrained]
        after = replace(untrained, state="transferred", settings={**settings, "steps": self.steps})
        return [untrained, replace(after, load=cache(partial(self.transferred, untrained, after)))]

    @cached_property
    def batches(self) -> tuple[list[Batch], list[Batch]]:
        """Batches to calibrate and to train on, and a few that choose the best step of the training."""
        return self.evaluated.training_batches(self.seed)

    def calibrated(self) -> PreTrainedModel:
        """Return the model with the mechanism, of which nothing has been trained."""
        model = patched_copy(self.evaluated.model, self.name, self.seed)
        if ATTENTIONS.get(self.name).learned:
            calibrate_untrained(model, self.batches[0])
        return model

    def transferred(self, untrained: Variant, after: Variant) -> PreTrainedModel:
        """Return the model with the parameters of an attention transfer: those that are stored, or it is done now."""
        model = patched_copy(self.evaluated.model, self.name, self.seed)
        model.load_state_dict(saved_tensors(untrained.load(), is_learned), strict=False)
        settings = self.evaluated.row_settings
        conditions = after.of(self.evaluated.conditions("attention_transfer", settings=settings))
        learned = self.study.learned(conditions, partial(self.train, model), label=self.name)
        model.load_state_dict(learned, strict=False)
        return model

    def train(self, model: PreTrainedModel) -> tuple[dict[str, Any], Learned]:
        """Train a patched model; return what a record says of that, and the parameters."""
        batches, validation = self.batches
        with local_seed(self.seed):
            result = transfer_attention(
                model,
                batches,
                max_steps=self.steps,
                validation=validation,
                eval_steps=max(self.steps // EVALUATIONS, 1),
                progress=self.show_step,
            )
        values = {"steps": result.steps, "tokens": result.tokens, "best_step": result.best_step}
        return {**values, "seconds": result.seconds}, saved_tensors(model, is_learned)

    def show_step(self, step: int, steps: int, loss: float) -> None:
        """Show how far the transfer is."""
        self.study.progress.status(f"{self.name}: attention transfer, loss {loss:.3f}", step, steps)


def patched_copy(model: PreTrainedModel, name: str, seed: int) -> PreTrainedModel:
    """Return a copy that shares the weights of a model, with a mechanism whose features are drawn by a seed."""
    return patch_model(shared_copy(model), name, **seed_options(ATTENTIONS.get(name), seed))


def check_fits(model: PreTrainedModel, name: str, seed: int) -> None:
    """Raise a ValueError if a mechanism does not fit a model."""
    try:
        patched_copy(model, name, seed)
    except NotImplementedError as error:
        raise ValueError(f"{name!r} cannot be measured on this model: {error}") from error


def timed_variants(
    evaluated: EvaluatedModel, attentions: Sequence[str], seed: int, groups: Sequence[CheckpointGroup], longest: int
) -> list[Variant]:
    """Return what is timed side by side. Time depends on what is patched and not on weights: none are loaded.

    A mechanism that is built for a largest length is built for the longest one that is timed.
    """
    model, limit = evaluated.model, longest_input(evaluated.model)
    first, last = references(model)
    variants = [first]
    for name in attentions:
        entry = ATTENTIONS.get(name)
        options = timing_options(entry, seed_options(entry, seed), limit, longest)
        identity = {key: item for key, item in options.items() if key != "seed"}
        patched = cache(partial(patch_model, shared_copy(model), name, **options))
        variants.append(Variant(name, name, patched, options=identity))
    for group in groups:
        if group.layers:
            sized = group.sized(limit, longest)
            patched = cache(partial(patch_model, shared_copy(model), {"default": EXACT, **sized.layers}))
            variants.append(Variant(group.label, group.attention, patched, options={"layers": sized.identity}))
    return [*variants, last]
