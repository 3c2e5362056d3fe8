"""The public API: pinned."""

import importlib

import pytest

import hf_linear_attn as hla

PUBLIC = [
    "Agreement",
    "AttentionCall",
    "Calibration",
    "DistillationConfig",
    "DistillationTrainer",
    "Evaluation",
    "ExactHeads",
    "Fidelity",
    "FinetuningConfig",
    "FinetuningTrainer",
    "LayerConfig",
    "LinearAttentionConfig",
    "LinearParts",
    "PatchReport",
    "Recall",
    "TransferResult",
    "__version__",
    "calibrate",
    "close_harmful_parts",
    "context_parallel",
    "convert",
    "evaluate",
    "exact_attention",
    "export",
    "extend_positions",
    "find_exact_heads",
    "find_retrieval_heads",
    "finetune",
    "get_backend",
    "is_patched",
    "list_attentions",
    "list_backends",
    "load_pretrained",
    "load_state",
    "measure_agreement",
    "measure_fidelity",
    "measure_recall",
    "observe_attention",
    "patch_model",
    "patch_report",
    "plan",
    "read_stream",
    "register_attention",
    "register_backend",
    "register_feature_map",
    "save_state",
    "set_backend",
    "transfer_attention",
    "unpatch_model",
    "use_backend",
]


def test_the_public_names():
    assert hla.__all__ == PUBLIC
    assert sorted(hla.__all__) == hla.__all__
    assert dir(hla) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_and_is_documented(name):
    value = getattr(hla, name)
    assert isinstance(value, str) or value.__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hf_linear_attn' has no attribute 'patch'"):
        _ = hla.patch


def test_every_name_has_one_home():
    for name, home in hla._HOMES.items():
        module = importlib.import_module(f"hf_linear_attn.{home}")
        assert getattr(hla, name) is getattr(module, name)
        assert getattr(hla, name).__module__ == module.__name__
