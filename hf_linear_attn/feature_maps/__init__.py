"""Feature maps: one paper, one file, one class, one registration. Importing this package registers every file in it."""

import importlib
import pkgutil

from .base import AttentionShape, FeatureMap

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f".{_module.name}", __name__)

__all__ = ["AttentionShape", "FeatureMap"]
