"""What no general rule knows about tiny instances: values of single model types."""

from __future__ import annotations

from typing import Any

HEAD_DIM = {"head_dim": 16}
TIME_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "d_model": 64}

#: Model type -> fields of its config that are set after the general rules.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "autoformer": TIME_SERIES,
    "informer": TIME_SERIES,
    "time_series_transformer": TIME_SERIES,
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "esm": {"vocab_size": 99, "pad_token_id": 0, "mask_token_id": 3},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "hunyuan_v1_dense": HEAD_DIM,
    "hunyuan_v1_moe": HEAD_DIM,
    "hunyuan_vl_text": HEAD_DIM,
    "ministral": HEAD_DIM,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral4": HEAD_DIM,
    "mamba2": {"hidden_size": 64, "expand": 2, "num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "glm5_next_text": {"index_topk": 16},
    # Its windows cut the image into 4 by 4 parts of at least one patch.
    "lw_detr_vit": {"image_size": 64, "patch_size": 8},
}

#: Model type -> class that stands for it, where the general order picks another.
CLASSES: dict[str, str] = {}
