"""Attention mechanisms: modules (q, k, v, mask, state) -> output. Importing this package registers every file in it."""

import importlib
import pkgutil

from .base import AttentionInputs, LinearAttention

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f".{_module.name}", __name__)

__all__ = ["AttentionInputs", "LinearAttention"]
