"""How much of everything a plan uses on a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...integration.discovery import longest_input
from ..speed import can_go_beyond
from .budget import Budget

if TYPE_CHECKING:
    from ...plan import PlanOptions


@dataclass(frozen=True)
class Amounts:
    """How much is used. Lengths in tokens; tokens, passages and rows: of the choice, and as many of the verification;
    seconds: of each timed pair of models; evaluations: looks at the validation sequences during the transfer."""

    sequence_length: int
    batch_size: int
    steps: int
    evaluations: int
    train_sequences: int
    validation_sequences: int
    tokens: int
    passages: int
    rows: int | None
    lengths: tuple[int, ...]
    seconds: float
    seed: int


def amounts_for(options: PlanOptions, config: Any, length: int, budget: Budget) -> Amounts:
    """How much to measure on this model.

    Raises:
        ValueError: a sequence length beyond the model's positions.
    """
    limit = getattr(config.get_text_config(decoder=False), "max_position_embeddings", None)
    chosen = options.sequence_length or min(length, limit or length)
    if isinstance(limit, int) and chosen > limit:
        raise ValueError(f"sequence_length {chosen} is beyond the model's {limit} positions. Use {limit} or less.")
    quick = options.quick
    batch = max(1, min(32, 1024 // chosen))
    lengths = {*(options.lengths if options.lengths is not None else (1024,) if quick else (1024, 4096))}
    steps = options.steps if options.steps is not None else 25 if quick else 200
    return Amounts(
        sequence_length=chosen,
        batch_size=batch,
        steps=steps,
        evaluations=2 if quick else 5,
        train_sequences=batch * (26 if quick else 120),
        validation_sequences=batch * 2,
        tokens=4096 if quick else 32768,
        passages=32 if quick else 256,
        rows=128 if quick else None,
        lengths=tuple(sorted(lengths | ({budget.length} if budget.length else set()))),
        seconds=0.5 if quick else 2.0,
        seed=options.seed,
    )


def timeable(amounts: Amounts, model: Any, budget: Budget) -> Amounts:
    """Without the lengths that the model cannot take.

    Raises:
        ValueError: the budget is of such a length.
    """
    limit = longest_input(model)
    if limit is None or can_go_beyond(model):
        return amounts
    if budget.length is not None and budget.length > limit:
        raise ValueError(
            f"The budget {budget.text!r} is beyond the model's {limit} positions. Give a length up to {limit}."
        )
    return replace(amounts, lengths=tuple(length for length in amounts.lengths if length <= limit) or (limit,))
