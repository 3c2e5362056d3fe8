"""Linear-time attention for pretrained Transformers models.

import hf_linear_attn as hla
model = hla.patch_model(model, "hedgehog")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .checkpoints import load_pretrained
    from .config import LayerConfig, LinearAttentionConfig
    from .evaluation.api import evaluate
    from .evaluation.fidelity import Fidelity, measure_fidelity
    from .evaluation.recall import Recall, RetrievalHeads, find_retrieval_heads, measure_recall
    from .evaluation.results import Evaluation
    from .integration.context import is_patched
    from .integration.exact import AttentionCall, exact_attention, observe_attention
    from .integration.positions import extend_positions
    from .ops.backends import get_backend, list_backends, register_backend, set_backend, use_backend
    from .patching import PatchReport, patch_model, patch_report, unpatch_model
    from .registry import list_attentions, register_attention, register_feature_map
    from .training.arguments import AttentionTransferConfig, DistillationConfig, FinetuningConfig
    from .training.trainers import AttentionTransferTrainer, DistillationTrainer, FinetuningTrainer
    from .training.transfer import TransferResult, transfer_attention

__all__ = [
    "AttentionCall",
    "AttentionTransferConfig",
    "AttentionTransferTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "Evaluation",
    "Fidelity",
    "FinetuningConfig",
    "FinetuningTrainer",
    "LayerConfig",
    "LinearAttentionConfig",
    "PatchReport",
    "Recall",
    "RetrievalHeads",
    "TransferResult",
    "__version__",
    "evaluate",
    "exact_attention",
    "extend_positions",
    "find_retrieval_heads",
    "get_backend",
    "is_patched",
    "list_attentions",
    "list_backends",
    "load_pretrained",
    "measure_fidelity",
    "measure_recall",
    "observe_attention",
    "patch_model",
    "patch_report",
    "register_attention",
    "register_backend",
    "register_feature_map",
    "set_backend",
    "transfer_attention",
    "unpatch_model",
    "use_backend",
]

_HOMES = {
    "AttentionCall": "integration.exact",
    "AttentionTransferConfig": "training.arguments",
    "AttentionTransferTrainer": "training.trainers",
    "DistillationConfig": "training.arguments",
    "DistillationTrainer": "training.trainers",
    "Evaluation": "evaluation.results",
    "Fidelity": "evaluation.fidelity",
    "FinetuningConfig": "training.arguments",
    "FinetuningTrainer": "training.trainers",
    "LayerConfig": "config",
    "LinearAttentionConfig": "config",
    "PatchReport": "patching",
    "Recall": "evaluation.recall",
    "RetrievalHeads": "evaluation.recall",
    "TransferResult": "training.transfer",
    "evaluate": "evaluation.api",
    "exact_attention": "integration.exact",
    "extend_positions": "integration.positions",
    "find_retrieval_heads": "evaluation.recall",
    "get_backend": "ops.backends",
    "is_patched": "integration.context",
    "list_attentions": "registry",
    "list_backends": "ops.backends",
    "load_pretrained": "checkpoints",
    "measure_fidelity": "evaluation.fidelity",
    "measure_recall": "evaluation.recall",
    "observe_attention": "integration.exact",
    "patch_model": "patching",
    "patch_report": "patching",
    "register_attention": "registry",
    "register_backend": "ops.backends",
    "register_feature_map": "registry",
    "set_backend": "ops.backends",
    "transfer_attention": "training.transfer",
    "unpatch_model": "patching",
    "use_backend": "ops.backends",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import hf_linear_attn` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
