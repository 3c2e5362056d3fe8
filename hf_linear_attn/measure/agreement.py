"""Agreement by generation: how far greedy continuations of a converted model are those of the exact one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from statistics import fmean
from typing import Any, cast

import pandas as pd
import torch

from ..utils.options import check_argument
from .recall import generate_greedily, wilson_interval


@dataclass(frozen=True, repr=False)
class Agreement:
    """Greedy continuations of two models.

    Attributes:
        table: One row per prompt: `tokens` of the prompt, `common` (tokens before the continuations differ), `equal`
            (the share of positions with the same token), `same` (whether all are).
    """

    table: pd.DataFrame

    def summary(self) -> dict[str, float]:
        """Return the means of `common`, `equal` and `same`, and `low` and `high`, the 95 % interval of `same`."""
        low, high = wilson_interval(float(self.table["same"].mean()), len(self.table))
        return {**self.table[["common", "equal", "same"]].astype(float).mean().to_dict(), "low": low, "high": high}

    def __repr__(self) -> str:
        row = self.summary()
        return (
            f"{len(self.table)} continuations: the same for {row['common']:.1f} tokens on average, {row['equal']:.0%} "
            f"of all tokens equal, {row['same']:.0%} [{row['low']:.0%}, {row['high']:.0%}] the same throughout"
        )


def measure_agreement(model: Any, exact: Any, prompts: Sequence[Sequence[int]], *, new_tokens: int = 64) -> Agreement:
    """Compare greedy continuations of a converted model with those of the exact model.

    The likelihood of given text hides what is lost in generation, where each token follows the model's own.

    Args:
        model: A decoder with linear attention, or any other one with the same vocabulary.
        exact: The model that it was made from.
        prompts: Token ids of each prompt, such as the beginnings of held-out documents.
        new_tokens: Tokens to generate.

    Raises:
        ValueError: There is no prompt, or one is empty; or new_tokens is not positive.
    """
    if not prompts or not all(len(ids) for ids in prompts):
        raise ValueError("prompts: give one prompt or more, of one token or more each.")
    check_argument("new_tokens", new_tokens, int, least=1)
    rows = []
    for prompt in prompts:
        generated, expected = (_greedy_continuation(decoder, prompt, new_tokens) for decoder in (model, exact))
        pairs = list(zip_longest(generated, expected))[len(prompt) :]  # one of them may have ended earlier
        equal = [token == other for token, other in pairs]
        common = len(list(takewhile(bool, equal)))
        rows.append({"tokens": len(prompt), "common": common, "equal": fmean(equal), "same": all(equal)})
    return Agreement(pd.DataFrame(rows))


def _greedy_continuation(decoder: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Return the prompt and what the decoder goes on with."""
    ids = torch.tensor([list(prompt)], device=decoder.device)
    return cast(list[int], generate_greedily(decoder, ids, new_tokens, pad=0)[0].tolist())
