"""Which heads stay exact under a budget, and the windows of the others: the one search of `convert` and `plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from transformers import PreTrainedModel

from ..config import DEFAULT_ATTENTION, CacheDtype, LinearAttentionConfig
from ..feature_maps.base import AttentionShape
from ..integration.context import mechanism_of
from ..integration.discovery import attention_shape, self_attention
from ..mechanisms.head_mixture import HeadMixture
from ..mechanisms.softmax import SoftmaxAttention, head_token_bytes
from ..mechanisms.window import WindowAttention, WindowOptions
from ..patching import patch_model
from ..registry import ATTENTIONS, build_options
from ..training.head_search import SEARCH_TOKENS, ExactHeads, find_exact_heads
from ..utils.models import shared_copy
from ..utils.timing import is_measurable
from . import models
from .budgets import Budget
from .conversion_result import HeadChoice
from .stages import TrainingRun

#: Widths of windows that are considered, narrower ones for rows of less than 256 tokens, and shares of exact heads for
#: a budget of quality or speed.
WINDOWS, NARROW_WINDOWS = (64, 128, 256, 384, 512, 768, 1024), (8, 16, 32)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)

#: Share of the allowed cache that windows and sums may take: with a fifth of SmolLM2's heads exact and windows of 384
#: tokens, a quarter of its cache at 8,192 tokens, they take 0.2 of it.
WINDOW_SHARE = 0.2

#: Share of heads that a search for a budget chooses; the ranking that it leaves serves any share.
SEARCH_SHARE = 0.2


def choose_heads(run: TrainingRun, teacher: PreTrainedModel) -> HeadChoice | None:
    """Return the key-value heads that stay exact, chosen once, on training rows; None if none are asked for.

    For a budget heads are ranked where the others have the windows that they are going to have.
    """
    config, budget = run.config, run.budget
    if not config.exact_share and budget is None:
        return None

    def choose() -> dict[str, Any]:
        options, reason = dict(config.options), ""
        if budget is None:
            heads = _ranked_heads(run, teacher, options)
        else:
            heads, choice = _heads_for_budget(run, teacher, budget, options)
            options |= choice.options
            reason = choice.reason
            run.progress.log(f"For the budget {config.budget}: {reason}.")
        listed = ", ".join(f"{layer}: {list(numbers)}" for layer, numbers in sorted(heads.heads.items()))
        run.progress.log(f"Exact heads by layer: {listed or 'none'}")
        plan = heads.plan({"attention": config.attention, **options})  # a seed among the options stays
        return asdict(HeadChoice(plan, heads.table.to_dict("records"), reason))

    return HeadChoice(**run.once("exact_heads", choose))


def _heads_for_budget(
    run: TrainingRun, teacher: PreTrainedModel, budget: Budget, options: dict[str, Any]
) -> tuple[ExactHeads, Choice]:
    """Return the choice of a budget, and the exact heads beside a mechanism of these options and its own."""
    longest = run.data.longest
    if budget.cost == "cache":
        choice = choose_by_cache(budget, teacher, longest, options)
        heads = _ranked_heads(run, teacher, {**options, **choice.options})
    else:
        window = quarter_window(longest)
        options = {**options, "window_size": window}
        heads = _ranked_heads(run, teacher, options)
        choice = choose_by_measuring(budget, window, _measure_choices(run, teacher, heads, options))
    return heads.with_share(choice.share), choice


def plan_of(choice: HeadChoice | None) -> LinearAttentionConfig | None:
    """Return the plan of a choice; None without one."""
    return None if choice is None else LinearAttentionConfig.parse(dict(choice.plan))


def _ranked_heads(run: TrainingRun, teacher: PreTrainedModel, options: dict[str, Any]) -> ExactHeads:
    """Return the choice of exact heads where all others have a mechanism with these options."""
    config, data = run.config, run.data
    batches = data.leading_batches(data.train, SEARCH_TOKENS)
    share = config.exact_share or SEARCH_SHARE
    with run.progress.working("choosing the heads that stay exact"):
        return find_exact_heads(
            teacher, data.tokenizer, batches, config.attention, share=share, **{"seed": config.seed, **options}
        )


def _measure_choices(
    run: TrainingRun, teacher: PreTrainedModel, heads: ExactHeads, options: dict[str, Any]
) -> Callable[[float], float | None]:
    """Return a function of a share of exact heads: the speedup with a mechanism for the others, or what is lost.

    Nothing is trained, but calibrated, once for all shares: a calibration fits each head by itself.
    """
    config, budget = run.config, run.budget
    assert budget is not None

    @cache
    def fitted() -> PreTrainedModel:
        student = shared_copy(teacher)
        models.patch_as_configured(student, config, LinearAttentionConfig.parse(config.attention, None, options))
        run.calibrate(student)
        return student

    def measure(share: float) -> float | None:
        plan = heads.with_share(share).plan({"attention": config.attention, **options})
        if budget.unit is None:
            timed = run.time(teacher, patch_model(shared_copy(teacher), plan), budget.length)["student"]
            # What varies more from round to round than it differs from 1 is no speedup.
            is_known = is_measurable(timed["speedup_p20"], timed["speedup_p80"])
            return float(timed["speedup"]) if is_known else min(float(timed["speedup"]), 1.0)
        student = with_learned_parts(teacher, plan, fitted())
        name = f"{share:.0%} exact heads"
        is_recall = budget.unit.name == "recall"
        measured = partial(run.measure_recall, length=budget.length) if is_recall else run.measure
        return budget.unit.damage(measured("teacher", teacher), measured(name, student), run.metric.score.metric)

    return measure


def with_learned_parts(exact: PreTrainedModel, plan: Mapping[str, Any], patched: PreTrainedModel) -> PreTrainedModel:
    """Return the exact model patched by a plan, with the learned parts of the same mechanisms in all heads."""
    model = patch_model(shared_copy(exact), plan)
    for layer, other in zip(self_attention(model), self_attention(patched), strict=True):
        mechanism = mechanism_of(layer.module)
        learned = mechanism_of(other.module)
        if isinstance(mechanism, HeadMixture):
            mechanism.load_heads(learned)
        elif mechanism is not None and not isinstance(mechanism, SoftmaxAttention):  # which has learned nothing
            mechanism.load_state_dict(learned.state_dict())
    return model.eval()


@dataclass(frozen=True)
class Choice:
    """The share of the key-value heads that stay exact, the windows of all others in tokens, why, and the cache."""

    share: float
    window: int
    reason: str
    cache_dtype: CacheDtype = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """What the mechanism of the other heads is given."""
        stored = {} if self.cache_dtype == "auto" else {"cache_dtype": self.cache_dtype}
        return {"window_size": self.window, **stored}


def quarter_window(longest: int) -> int:
    """Return the width of windows for a budget of quality or speed: a quarter of the longest training row at most, but
    not below the narrowest."""
    widths = [width for width in (*NARROW_WINDOWS, *WINDOWS) if 4 * width <= longest]
    return max(widths, default=NARROW_WINDOWS[0])


def choose_by_measuring(budget: Budget, window: int, measure: Callable[[float], float | None]) -> Choice:
    """Choose exact heads for a budget of quality or speed, where all others have windows of this width.

    The shares of `SHARES` are measured in turn, before any training: for a budget of quality from none on until the
    damage is within it (or else the least that was found), for one of speed from the largest share down until the
    model is fast enough. `measure` returns the damage of a share in the budget's unit, or its speed relative to the
    exact model; None where it is undefined. A ValueError if the budget cannot be measured, or nothing is fast enough.
    """
    unit, tried, values = budget.unit, [], {}
    for share in SHARES if unit is not None else reversed(SHARES):
        value = measure(share)
        if value is None:
            reason = "the exact model recalls nothing there, or a score is undefined"
            raise ValueError(f"The budget {budget.text!r} cannot be measured: {reason}.")
        values[share] = value
        tried.append(f"{f'{value:.2f}x' if unit is None else unit.format(value)} with {share:.0%} exact heads")
        if budget.is_met(value):
            return Choice(share, window, f"untrained, the first choice within {budget.text}: {', '.join(tried)}")
    if unit is None:
        remedy = "Ask for less speed, or use plan."
        raise ValueError(f"No choice is within the budget {budget.text!r}: {', '.join(tried)}. {remedy}")
    reason = f"untrained none is within {budget.text}, and training has to do the rest: {', '.join(tried)}"
    return Choice(min(values, key=values.__getitem__), window, reason)


def choose_by_cache(
    budget: Budget, model: PreTrainedModel, longest: int, options: Mapping[str, Any] | None = None
) -> Choice:
    """Choose exact heads and windows by the bytes of caches and states, relative to exact attention in float32.

    That is arithmetic: the widest windows that take `WINDOW_SHARE` of the budget, and as many exact heads as the rest
    holds. Where it holds none, keys and values are stored in int8, and where it then holds none either, windows get the
    whole budget. They fill at most half of the longest training row, of `longest` tokens: the other half trains what is
    outside of them. Layers that see a sliding window only keep their caches, and do not count. A ValueError if nothing
    is small enough.
    """
    limit, length = budget.limit / 100, budget.length
    windows: WindowOptions = build_options(ATTENTIONS.get(DEFAULT_ATTENTION), dict(options or {}))
    every = self_attention(model)
    layers = [(index, layer) for index, layer in enumerate(every) if layer.span == "full"]
    counted = "the cache" if len(layers) == len(every) else "the cache of the layers that see the whole text"
    # The index of a layer changes no size.
    shapes = [replace(attention_shape(layer, index, None), layer_index=0) for index, layer in layers]
    whole = length * sum(shape.token_bytes for shape in shapes)
    heads = sum(shape.num_key_value_heads for shape in shapes)

    @cache
    def state_bytes(shape: AttentionShape, width: int, cache_dtype: CacheDtype) -> int:
        return WindowAttention(shape, replace(windows, window_size=width, cache_dtype=cache_dtype)).state_bytes()

    def fit(cache_dtype: CacheDtype) -> Choice | None:
        states = {width: sum(state_bytes(shape, width, cache_dtype) for shape in shapes) / whole for width in WINDOWS}
        within = [width for width, share in states.items() if share <= limit]
        if not within:
            return None
        within = [width for width in within if 2 * width <= longest] or within[:1]
        window = max([width for width in within if states[width] <= WINDOW_SHARE * limit], default=within[0])
        # As many heads as fit are exact: of share s they and the others take s exact + (1 - s) state <= limit.
        tokens = sum(shape.num_key_value_heads * head_token_bytes(shape, cache_dtype) for shape in shapes)
        exact = length * tokens / whole
        share = min(int(heads * (limit - states[window]) / max(exact - states[window], 1e-9)), heads - 1) / heads
        if not share:
            window = within[-1]
        stored = ", stored in int8," if cache_dtype == "int8" else ""
        reason = f"{share * exact + (1 - share) * states[window]:.1%} of {counted} at {length:,} tokens"
        text = f"in float32 {DEFAULT_ATTENTION} of {window} tokens and {share:.1%} exact heads{stored} take {reason}"
        return Choice(share, window, text, cache_dtype)

    unrounded = fit(windows.cache_dtype)
    if unrounded is not None and unrounded.share:
        return unrounded
    rounded = fit("int8")
    choice = unrounded if rounded is None or (unrounded is not None and not rounded.share) else rounded
    if choice is None:
        least = sum(state_bytes(shape, WINDOWS[0], "int8") for shape in shapes) / whole
        taken = f"windows of {WINDOWS[0]} tokens, stored in int8, take {least:.1%} of {counted} at {length:,} tokens"
        raise ValueError(f"The budget of {limit:.0%} cannot be met: {taken}. Allow more, or count longer inputs.")
    return choice
