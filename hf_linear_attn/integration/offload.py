"""Weights that accelerate keeps elsewhere (`device_map` with "cpu" or "disk", `cpu_offload`) and brings for a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..ops.common import ACCELERATE_HOOK

_NOTHING: AbstractContextManager[None] = nullcontext()


def in_memory(mechanism: nn.Module) -> AbstractContextManager[None]:
    """While this is entered, the mechanism and its feature map have their weights.

    accelerate's hooks surround `forward`. A feature map has none: its mechanism calls `query` and `key`, and other
    methods than `forward` of the mechanism read its weights as well. Without hooks this costs nothing.
    """
    if torch.compiler.is_compiling():
        return _NOTHING
    parts = [
        part
        for part in (mechanism, *mechanism._modules.values())
        if part is not None and ACCELERATE_HOOK in part.__dict__
    ]
    return _brought(parts) if parts else _NOTHING


@contextmanager
def _brought(parts: list[Any]) -> Iterator[None]:
    done = []
    try:
        for part in parts:
            getattr(part, ACCELERATE_HOOK).pre_forward(part)
            done.append(part)
        yield
    finally:
        for part in reversed(done):
            getattr(part, ACCELERATE_HOOK).post_forward(part, None)
