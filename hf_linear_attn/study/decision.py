"""Which heads of a decoder stay exact, and how wide the windows of the others are, for a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from transformers import PreTrainedModel

from ..config import DEFAULT_ATTENTION
from ..feature_maps.base import AttentionShape
from ..integration.discovery import attention_shape, self_attention
from ..mechanisms.window import WindowAttention, WindowOptions
from .budget import Budget

#: Widths of windows that are considered, and shares of exact heads for a budget of quality.
WINDOWS, SHARES = (64, 128, 256, 384, 512, 768, 1024), (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)

#: Share of the allowed cache that windows and sums may take: with a fifth of SmolLM2's heads exact and windows of 384
#: tokens, a quarter of its cache at 8,192 tokens, they take 0.2 of it.
WINDOW_SHARE = 0.2


@dataclass(frozen=True)
class Choice:
    """The share of the key-value heads that stay exact, the windows of all others in tokens, and why."""

    share: float
    window: int
    reason: str


def choose(budget: Budget, model: PreTrainedModel, longest: int, damage: Callable[[float, int], float]) -> Choice:
    """Choose exact heads and windows for a budget.

    A budget of cache is met by arithmetic: the widest windows that take `WINDOW_SHARE` of it, and as many exact heads
    as the rest holds. For a budget of quality the shares of `SHARES` are tried in turn, with windows of a quarter of
    the rows, until the damage is within the budget before any training.

    Args:
        budget: Of cache, or of lost perplexity or nats.
        model: The exact decoder.
        longest: Tokens of the longest training row.
        damage: Measures a choice of share and window, in the budget's unit.

    Raises:
        ValueError: The budget is of another kind, or no choice meets it.
    """
    if budget.cost == "cache" and budget.length is not None:
        return _by_cache(model, budget.limit / 100, budget.length)
    if budget.unit is None or budget.unit.measurement != "perplexity":
        remedy = (
            "Give a budget such as '25% cache at 8192', '2% perplexity' or '0.05 nats', or use hf-linear-attn plan."
        )
        raise ValueError(f"convert cannot choose for the budget {budget.text!r}. {remedy}")
    window = max([width for width in WINDOWS if 4 * width <= longest], default=WINDOWS[0])
    tried = []
    for share in SHARES:
        tried.append(f"{budget.unit.format(value := damage(share, window))} with {share:.0%} exact heads")
        if value <= budget.limit:
            return Choice(share, window, f"untrained, the first choice within {budget.text}: {', '.join(tried)}")
    raise ValueError(f"No choice is within the budget {budget.text!r}: {', '.join(tried)}. Allow more, or use plan.")


def _by_cache(model: PreTrainedModel, limit: float, length: int) -> Choice:
    """Choose by the bytes of caches and states after `length` tokens in float32, relative to exact attention.

    Layers that see a sliding window only keep their caches, and do not count.
    """
    layers = [(index, layer) for index, layer in enumerate(self_attention(model)) if layer.span == "full"]
    # The index of a layer changes no size.
    shapes = [replace(attention_shape(layer, index, None), layer_index=0) for index, layer in layers]
    whole = length * sum(shape.token_bytes for shape in shapes)

    @cache
    def state_bytes(shape: AttentionShape, width: int) -> int:
        return WindowAttention(shape, WindowOptions(window_size=width)).state_bytes()

    states = {width: sum(state_bytes(shape, width) for shape in shapes) / whole for width in WINDOWS}
    fitting = [width for width, share in states.items() if share <= limit]
    if not fitting:
        least = f"windows of {WINDOWS[0]} tokens take {states[WINDOWS[0]]:.1%} of the cache at {length:,} tokens"
        raise ValueError(f"The budget of {limit:.0%} cannot be met: {least}. Allow more, or count longer inputs.")
    window = max([width for width in fitting if states[width] <= WINDOW_SHARE * limit], default=fitting[0])
    # What share s of heads is exact: s + (1 - s) state = limit.
    share = (limit - states[window]) / (1 - states[window])
    reason = f"{limit:.1%} of the cache at {length:,} tokens"
    return Choice(share, window, f"{DEFAULT_ATTENTION} of {window} tokens and {share:.1%} exact heads take {reason}")
