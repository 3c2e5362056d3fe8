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
    from .evaluation.fidelity import Fidelity, measure_fidelity
    from .integration.attention import AttentionCall, exact_attention, observe_attention
    from .integration.positions import extend_positions
    from .patching import PatchReport, is_patched, patch_model, patch_report, unpatch_model
    from .registry import list_attentions, register_attention, register_feature_map
    from .training.transfer import TransferResult, transfer_attention

__all__ = [
    "AttentionCall",
    "Fidelity",
    "LayerConfig",
    "LinearAttentionConfig",
    "PatchReport",
    "TransferResult",
    "__version__",
    "exact_attention",
    "extend_positions",
    "is_patched",
    "list_attentions",
    "load_pretrained",
    "measure_fidelity",
    "observe_attention",
    "patch_model",
    "patch_report",
    "register_attention",
    "register_feature_map",
    "transfer_attention",
    "unpatch_model",
]

_HOMES = {
    "AttentionCall": "integration.attention",
    "Fidelity": "evaluation.fidelity",
    "LayerConfig": "config",
    "LinearAttentionConfig": "config",
    "PatchReport": "patching",
    "TransferResult": "training.transfer",
    "exact_attention": "integration.attention",
    "extend_positions": "integration.positions",
    "is_patched": "patching",
    "list_attentions": "registry",
    "load_pretrained": "checkpoints",
    "measure_fidelity": "evaluation.fidelity",
    "observe_attention": "integration.attention",
    "patch_model": "patching",
    "patch_report": "patching",
    "register_attention": "registry",
    "register_feature_map": "registry",
    "transfer_attention": "training.transfer",
    "unpatch_model": "patching",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import hf_linear_attn` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
