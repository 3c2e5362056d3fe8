"""What families with ALiBi share: a slope for each head, of which their models make a bias of keys."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import OutsideAdapter


class AlibiAdapter(OutsideAdapter):
    """The adapter of causal modules that compute their softmax by themselves, with `-m (i - j)` in the logits."""

    causal = True
    terms = ("slope",)

    @staticmethod
    def slopes(module: Any) -> Tensor:
        """Return m `[H]` as the model's own function makes it, on the CPU."""
        modeling: Any = sys.modules[type(module).__module__]
        tokens = torch.ones(1, 2, dtype=torch.long, device="cpu")
        return modeling.build_alibi_tensor(tokens, module.num_heads, torch.float32)[:, 0, 1]

    def install(self, module: Any, parents: Sequence[Any]) -> None:
        super().install(module, parents)
        # Numbers and no tensor: they follow the module to any device, and are no part of its weights.
        module.alibi_slopes = tuple(self.slopes(module).tolist()) if self.terms_of(module) else None

    def remove(self, module: Any, parents: Sequence[Any]) -> None:
        super().remove(module, parents)
        del module.alibi_slopes


def slopes_of(module: Any, device: torch.device) -> Tensor | None:
    """Return the slopes m `[H]` of a module that is patched; None without ALiBi."""
    return None if module.alibi_slopes is None else torch.tensor(module.alibi_slopes, device=device)
