"""Linear-time attention for pretrained Transformers models.

import hf_linear_attn as hla
model = hla.patch_model(model, "hedgehog")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .checkpoints import load_pretrained as load_pretrained
    from .config import LayerConfig as LayerConfig
    from .config import LinearAttentionConfig as LinearAttentionConfig
    from .exporting import export as export
    from .integration.context import is_patched as is_patched
    from .integration.context_parallel import context_parallel as context_parallel
    from .integration.exact import AttentionCall as AttentionCall
    from .integration.exact import exact_attention as exact_attention
    from .integration.exact import observe_attention as observe_attention
    from .integration.positions import extend_positions as extend_positions
    from .integration.state_files import load_state as load_state
    from .integration.state_files import save_state as save_state
    from .measure.agreement import Agreement as Agreement
    from .measure.agreement import measure_agreement as measure_agreement
    from .measure.fidelity import Fidelity as Fidelity
    from .measure.fidelity import measure_fidelity as measure_fidelity
    from .measure.recall import Recall as Recall
    from .measure.recall import measure_recall as measure_recall
    from .ops.backends import get_backend as get_backend
    from .ops.backends import list_backends as list_backends
    from .ops.backends import register_backend as register_backend
    from .ops.backends import set_backend as set_backend
    from .ops.backends import use_backend as use_backend
    from .patching import PatchReport as PatchReport
    from .patching import patch_model as patch_model
    from .patching import patch_report as patch_report
    from .patching import unpatch_model as unpatch_model
    from .registry import list_attentions as list_attentions
    from .registry import register_attention as register_attention
    from .registry import register_feature_map as register_feature_map
    from .streaming import read_stream as read_stream
    from .study.convert import convert as convert
    from .study.convert import finetune as finetune
    from .study.evaluate import evaluate as evaluate
    from .study.evaluation import Evaluation as Evaluation
    from .study.plan import plan as plan
    from .training.calibration import Calibration as Calibration
    from .training.calibration import calibrate as calibrate
    from .training.distillation import DistillationConfig as DistillationConfig
    from .training.distillation import DistillationTrainer as DistillationTrainer
    from .training.distillation import FinetuningConfig as FinetuningConfig
    from .training.distillation import FinetuningTrainer as FinetuningTrainer
    from .training.head_search import ExactHeads as ExactHeads
    from .training.head_search import find_exact_heads as find_exact_heads
    from .training.head_search import find_retrieval_heads as find_retrieval_heads
    from .training.selection import LinearParts as LinearParts
    from .training.selection import close_harmful_parts as close_harmful_parts
    from .training.transfer import TransferResult as TransferResult
    from .training.transfer import transfer_attention as transfer_attention

#: Public names by the module that defines them.
_NAMES = {
    "checkpoints": ("load_pretrained",),
    "config": ("LayerConfig", "LinearAttentionConfig"),
    "exporting": ("export",),
    "streaming": ("read_stream",),
    "study.evaluate": ("evaluate",),
    "study.convert": ("convert", "finetune"),
    "measure.agreement": ("Agreement", "measure_agreement"),
    "measure.fidelity": ("Fidelity", "measure_fidelity"),
    "training.head_search": ("ExactHeads", "find_exact_heads", "find_retrieval_heads"),
    "measure.recall": ("Recall", "measure_recall"),
    "study.plan": ("plan",),
    "study.evaluation": ("Evaluation",),
    "integration.context": ("is_patched",),
    "integration.exact": ("AttentionCall", "exact_attention", "observe_attention"),
    "integration.context_parallel": ("context_parallel",),
    "integration.positions": ("extend_positions",),
    "integration.state_files": ("load_state", "save_state"),
    "ops.backends": ("get_backend", "list_backends", "register_backend", "set_backend", "use_backend"),
    "patching": ("PatchReport", "patch_model", "patch_report", "unpatch_model"),
    "registry": ("list_attentions", "register_attention", "register_feature_map"),
    "training.calibration": ("Calibration", "calibrate"),
    "training.distillation": ("DistillationConfig", "DistillationTrainer", "FinetuningConfig", "FinetuningTrainer"),
    "training.selection": ("LinearParts", "close_harmful_parts"),
    "training.transfer": ("TransferResult", "transfer_attention"),
}
_HOMES: dict[str, str] = {}
for _module, _names in _NAMES.items():
    _HOMES.update(dict.fromkeys(_names, _module))

__all__ = sorted(("__version__", *_HOMES))


def __getattr__(name: str) -> Any:
    """Import on first use: `import hf_linear_attn` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
