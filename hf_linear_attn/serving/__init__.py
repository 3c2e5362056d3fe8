"""Many requests to one decoder: a batch that changes while it runs, kept prefixes, an OpenAI-compatible server.

with Engine(model, tokenizer) as engine:
    for text in engine.stream("Once upon a time", max_new_tokens=64):
        ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine as Engine
    from .engine import QueueFullError as QueueFullError
    from .requests import CancelledRequestError as CancelledRequestError
    from .requests import Request as Request

_HOMES = {"Engine": "engine", "QueueFullError": "engine", "CancelledRequestError": "requests", "Request": "requests"}

__all__ = ["CancelledRequestError", "Engine", "QueueFullError", "Request"]


def __getattr__(name: str) -> Any:
    """Import on first use: reading the options of the server loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
