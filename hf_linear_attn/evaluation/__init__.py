"""Evaluation: quality, speed and memory of a model with linear attention, beside its exact attention.

Importing this package is light; `evaluate` and the classes are imported when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import evaluate, run_evaluate
    from .config import EvaluateConfig, EvaluationData, SpeedConfig
    from .fidelity import Fidelity, measure_fidelity
    from .harness import harness_model, run_harness
    from .metrics import Perplexity, measure_perplexity, sentence_embeddings
    from .records import Conditions, Records
    from .results import Evaluation

_EXPORTS = {
    "config": ("EvaluateConfig", "EvaluationData", "SpeedConfig"),
    "api": ("evaluate", "run_evaluate"),
    "fidelity": ("Fidelity", "measure_fidelity"),
    "harness": ("harness_model", "run_harness"),
    "metrics": ("Perplexity", "measure_perplexity", "sentence_embeddings"),
    "records": ("Conditions", "Records"),
    "results": ("Evaluation",),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "Conditions",
    "EvaluateConfig",
    "Evaluation",
    "EvaluationData",
    "Fidelity",
    "Perplexity",
    "Records",
    "SpeedConfig",
    "evaluate",
    "harness_model",
    "measure_fidelity",
    "measure_perplexity",
    "run_evaluate",
    "run_harness",
    "sentence_embeddings",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
