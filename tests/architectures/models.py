"""Tiny random instances of every architecture that Transformers knows, from config classes alone: no network.

A config is made small by the names of its fields (`hidden_size`, `num_attention_heads`, …) and keeps what makes the
architecture itself: layer types, kinds of positions, kinds of experts. Where the small sizes do not fit together, wider
ones are tried (see `LEVELS`). `EXCEPTIONS` has the values of single model types that no general rule can know.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 99
WIDTH, HEADS, HEAD_DIM = 64, 4, 16
#: An instance with more parameters would be slow, and shows that a field was missed.
MAX_PARAMETERS = 80_000_000
#: How many layers of different kinds are kept of a model that mixes them.
MAX_LAYERS = 6
#: What is made small, in the order of trying: widths may be tied to each other in ways that no rule knows.
LEVELS = ("small", "wide", "few layers")

#: Which class stands for a model type, first match first.
MODEL_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)

#: Pattern of a field's whole name -> largest value; the first pattern that matches counts.
COUNTS = {
    r"type_vocab_size": 2,
    r".*vocab_size\w*|.*vocabulary_size|num_embeddings": VOCABULARY,
    r"\w*codebook_size": 64,
    r"num_feat_extract_layers|num_hidden_groups": 1 << 30,
    r"max_source_positions|audio_max_position_embeddings": 32,
    r"max_position_embeddings|n_positions|max_sequence_length|max_target_positions|max_seq_len|context_length": 128,
    r"num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts|num_selected_experts": 2,
    r"n_group|topk_group|num_expert_groups?|num_groups_for_topk": 1,
    r".*(num|n)_.*experts|num_experts|moe_num_experts|n_routed_experts": 4,
    r"first_k_dense_replace|num_dense_layers|num_nextn_predict_layers|moe_layer_start_index": 1,
    r"num_kv_shared_layers": 0,
    r"(num_|n_)?(\w+_)?(layers?|blocks)|depth|\w+_depth|num_\w+_layers": 2,
    r"\w*(attn|attention|global)\w*(every|interval|period|pattern)\w*|sliding_window_pattern|\w+_layer_period": 2,
    r"attn_layer_offset|expert_layer_offset": 1,
    r"image_size|img_size|pretrain_image_size|input_image_size|teacher_image_size": 32,
    r"num_frames|max_num_frames": 2,
    r"num_queries|num_query_tokens|num_latents|num_slots|num_denoising": 10,
    r"num_mel_bins|feature_size": 16,
    r"sliding_window|local_attention|attention_window|attention_chunk_size|window_size": 4,
    r"chunk_size|block_size|mamba_chunk_size|index_topk": 8,
    r"insert_layer_id": 0,
    r"num_conv_pos_embeddings|num_conv_pos_embedding_groups": 4,
}
WIDTHS = {
    r"head_dim|attention_head_size|d_kv|head_size|attention_head_dim|global_head_dim|index_head_dim": HEAD_DIM,
    r"linear_\w+_head_dim|kda_head_dim|mamba_head_dim|mamba_d_head": HEAD_DIM,
    r"kv_lora_rank|q_lora_rank|qk_head_dim": 16,
    r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|rotary_dim": 8,
    r".*attention_heads|(encoder_|decoder_)?num_heads|n_heads?|linear_num_\w+_heads|index_n_heads": HEADS,
    r"\w*(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|ffn_size)|d_ff|n_inner|\w*inner_dim": WIDTH,
    r"vision_output_dim|projector_(in|out)put_dim|adapter_in_dim|adapter_input_size": WIDTH,
    r"nemo_conv_channels|ext_pw_out_channel|depthwise_separable_out_channel": WIDTH,
    r"\w*(hidden_size|hidden_dim|embed_dim|embedding_size|proj_dim|projection_dim|feat_dim)": WIDTH,
    r"d_model|n_embd|dim|width|emb_dim|output_dim|lru_width|projection_size|query_dim_size": WIDTH,
    r"patch_size": 8,
    r"coordinate_size|shape_size": 8,
    r"mamba_n_heads|mamba_num_heads|mamba_d_state|state_size|ssm_state_size": 8,
}
#: Lists of which every entry is made this small.
LISTS = {"conv_dim": 32, "tdnn_dim": 32, "depths": 1, "image_size": 32, "encoder_depths": 1, "decoder_depths": 1}

TIME_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "d_model": 64}
IMAGE_TOKEN = {"vocabulary_map": {"<image>": 4}}
QUERIES = {"image_token_index": 90, "video_token_index": 91}
SMALL_HEADS = {"head_dim": HEAD_DIM}
#: Two layers with one block of weights.
SHARED_BLOCK = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
#: Its attention reads the hidden states and the embeddings, one beside the other.
SHARED_BLOCK |= {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * WIDTH // HEADS}
ONE_GROUP_OF_EXPERTS = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True}
#: Model type -> fields that are set after the general rules.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), TIME_SERIES),
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), QUERIES),
    "chameleon": IMAGE_TOKEN,
    "emu3": IMAGE_TOKEN,
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral", "mistral4"), SMALL_HEADS),
    "deepseek_v2": ONE_GROUP_OF_EXPERTS,
    # As all released checkpoints have it.
    "deberta": DISENTANGLED,
    "deberta-v2": {**DISENTANGLED, "position_buckets": 16, "max_relative_positions": 40, "norm_rel_ebd": "layer_norm"},
    "dots1": {**ONE_GROUP_OF_EXPERTS, "n_shared_experts": 1},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "glm5_next_text": {"index_topk": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lw_detr_vit": {"image_size": 64, "patch_size": 8},  # its windows are 4 by 4, of at least one patch each
    "llama4_vision_model": {"intermediate_size": 256},  # four patches are joined
    "mamba2": {"hidden_size": 64, "expand": 2, "num_heads": 8, "head_dim": 16},
    "mllama_vision_model": {"vision_output_dim": 2 * WIDTH},  # the states of one layer beside the last ones
    "nemotron": {"num_key_value_heads": 2},
    "zamba": SHARED_BLOCK,
    "zamba2": {**SHARED_BLOCK, "mamba_headdim": HEAD_DIM},
    "qwen2_5_omni_audio_encoder": {"n_window": 8},
    "xmod": {"default_language": "en_XX"},
}


class CannotBuildError(Exception):
    """No tiny instance of this model type can be made or run; the message says why."""


def _message(stage: str, error: Exception) -> str:
    return f"{stage}: {type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(frozen=True)
class Case:
    """A model type, or the same as a decoder."""

    model_type: str
    decoder: bool = False

    def __str__(self) -> str:
        return f"{self.model_type} (decoder)" if self.decoder else self.model_type


def cases_of(model_type: str) -> Iterator[Case]:
    """The model type, and once more as a decoder where its config has a switch `is_decoder`."""
    yield Case(model_type)
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type in causal and getattr(CONFIG_MAPPING[model_type], "is_decoder", None) is False:
        yield Case(model_type, decoder=True)


# --------------------------------------------------------------------------------------------------------------------
# Configs


def architecture_config(case: Case, level: str = "small") -> PretrainedConfig:
    """The config of a case at one of the `LEVELS`.

    Raises:
        CannotBuildError: The config class cannot be made, or refuses its small values.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = _shrink(CONFIG_MAPPING[case.model_type](), level)
    except Exception as error:
        raise CannotBuildError(_message("config", error)) from error
    if case.decoder:
        config.is_decoder = True
    return config


def _shrink(config: PretrainedConfig, level: str) -> PretrainedConfig:
    if config.model_type == "timm_backbone":  # the package timm is not required here
        config = CONFIG_MAPPING["resnet"](out_features=["stage2", "stage3", "stage4"])
    changes = _small_fields(config, level)
    parts = {name: value for name, value in vars(config).items() if isinstance(value, PretrainedConfig)}
    changes.update({name: _shrink(part, level) for name, part in parts.items()})
    changes.update(copy.deepcopy(EXCEPTIONS.get(config.model_type, {})))
    return type(config)(**changes)


def _small_fields(config: PretrainedConfig, level: str) -> dict[str, Any]:
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    heads_by_stage = any(isinstance(fields.get(name), (list, tuple)) for name in ("num_heads", "num_attention_heads"))
    rules = {**COUNTS, **(WIDTHS if level == "small" and not heads_by_stage else {})}
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if name.endswith(("token_id", "token_index", "_id")) and level != "few layers":
            changes[name] = _special_token(name, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            limit = next((limit for pattern, limit in rules.items() if re.fullmatch(pattern, name)), None)
            if limit is not None and value > limit:
                changes[name] = limit
        elif re.fullmatch(r"fullatt_block_indexes|intermediate_layers_indices", name):
            changes[name] = [1]
        elif isinstance(value, (list, tuple)) and name in LISTS and all(isinstance(entry, int) for entry in value):
            changes[name] = type(value)(min(entry, LISTS[name]) for entry in value)
    if "spatial_merge_size" in fields and "window_size" in changes:  # in pixels, of two merged patches at least
        changes["window_size"] = 2 * fields["spatial_merge_size"] * changes.get("patch_size", fields["patch_size"])
    _keep_grouped_heads(fields, changes)
    _keep_kinds_of_layers(fields, changes)
    if "qk_rope_head_dim" in changes:  # in latent attention, head_dim is the rotated part of a head
        changes.pop("head_dim", None)
        if isinstance(fields.get("head_dim"), int):
            changes["head_dim"] = changes["qk_rope_head_dim"]
    _fit_rotary_sections(config, fields, changes)
    return changes


def _special_token(name: str, value: Any) -> Any:
    """Special tokens inside the small vocabulary: the usual three, others from its end, the same for the same name."""
    usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if name in usual and (value is not None or name == "eos_token_id"):
        return usual[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < VOCABULARY // 2:
        return value
    return VOCABULARY - 1 - sum(name.replace("_index", "_id").encode()) % 31


def _keep_grouped_heads(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    """Grouped-query attention stays grouped: 2 of 4 heads, 1 of 4 where there was one."""
    for heads, groups in (
        ("num_attention_heads", "num_key_value_heads"),
        ("decoder_attention_heads", "decoder_num_key_value_heads"),
        ("encoder_attention_heads", "encoder_num_key_value_heads"),
        ("num_attention_heads", "num_global_key_value_heads"),
        ("num_heads", "num_key_value_heads"),
    ):
        count, before = fields.get(groups), fields.get(heads)
        if isinstance(count, int) and isinstance(before, int) and heads in changes:
            changes[groups] = changes[heads] if count == before else min(count, changes[heads] // 2)


def _keep_kinds_of_layers(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    """Of a model whose layers differ (per-layer lists), keep the first layer of each kind, and at least two."""
    name = next((n for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(fields.get(n), int)), None)
    if name is None or name not in changes:
        return
    count = fields[name]
    lists = {key: value for key, value in fields.items() if isinstance(value, (list, tuple)) and len(value) == count}
    if not lists:
        return
    kinds: dict[str, int] = {}
    for index in range(count):
        kinds.setdefault(repr([value[index] for value in lists.values()]), index)
    indices = sorted(kinds.values())[:MAX_LAYERS]
    full = [index for index, kind in enumerate(fields.get("layer_types") or []) if kind == "full_attention"]
    if full and not set(full) & set(indices):
        indices.append(full[0])
    indices = sorted({*indices, *range(2)} if len(indices) < 2 else indices)
    changes[name] = len(indices)
    changes.update({key: [value[index] for index in indices] for key, value in lists.items()})


def _fit_rotary_sections(config: PretrainedConfig, fields: dict[str, Any], changes: dict[str, Any]) -> None:
    """Sections of multi-axis rotary positions must add up to half of the rotated part of a head."""
    rope = copy.deepcopy(changes.get("rope_parameters", fields.get("rope_parameters")))
    sized = "head_dim" in changes or {"num_attention_heads", "hidden_size"} <= set(changes)
    if not sized or not isinstance(rope, dict):
        return
    # Some models have sections even where their config states none.
    by_default = "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ())
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        sections = part.get("mrope_section") or ([1, 1, 1] if by_default and "rope_theta" in part else None)
        if sections:
            half = int(HEAD_DIM * part.get("partial_rotary_factor", fields.get("partial_rotary_factor") or 1.0)) // 2
            first = half - 2 * (half // 3)
            part["mrope_section"] = [first, *[half // 3] * (len(sections) - 1)][: len(sections)]
    if rope != fields.get("rope_parameters"):
        changes["rope_parameters"] = rope


# --------------------------------------------------------------------------------------------------------------------
# Models


def architecture_class(case: Case, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that stands for a case: one that generates if there is any, else the bare model.

    Raises:
        CannotBuildError: There is none, or it cannot be imported here.
    """
    encoder_by_default = getattr(type(config), "is_decoder", None) is False and not case.decoder
    composite = hasattr(config, "text_config") or (getattr(config, "is_encoder_decoder", False) and not case.decoder)
    mappings = sorted(MODEL_MAPPINGS, key=lambda mapping: composite and mapping == MODEL_MAPPINGS[0])
    if encoder_by_default:
        mappings.remove(MODEL_MAPPINGS[0])
    names = [getattr(modeling_auto, mapping, {}).get(case.model_type) for mapping in mappings]
    name: Any = next((name for name in names if name is not None), None)
    name = name[0] if isinstance(name, (tuple, list)) else name
    cls = (getattr(transformers, name, None) if name else None) or _class_of_modeling_file(config, name)
    if cls is None or not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise CannotBuildError(f"no model class belongs to {type(config).__name__}")
    return cls


def _class_of_modeling_file(config: PretrainedConfig, name: str | None) -> Any:
    try:
        modeling = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None
    if name is not None:
        return getattr(modeling, name, None)
    classes = [cls for cls in vars(modeling).values() if isinstance(cls, type) and issubclass(cls, PreTrainedModel)]
    models = [cls for cls in classes if cls.config_class is type(config) and "_init_weights" not in vars(cls)]
    return next((cls for cls in models if not cls.__name__.endswith("PreTrainedModel")), None)


def architecture_model(case: Case | str, level: str = "small", seed: int = 0) -> PreTrainedModel:
    """A tiny model in float32, in evaluation mode, with weights large enough for attention to matter.

    Raises:
        CannotBuildError: The model cannot be made; the message gives the reason.
    """
    case = Case(case) if isinstance(case, str) else case
    config = architecture_config(case, level)
    config._name_or_path = ""
    cls = architecture_class(case, config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            count = _count_parameters(cls, config)
            if count is not None and count > MAX_PARAMETERS:
                raise CannotBuildError(f"{count:,} parameters at level {level!r}")
            torch.manual_seed(seed)
            model = cls(copy.deepcopy(config)).float().eval()
    except CannotBuildError:
        raise
    except Exception as error:
        raise CannotBuildError(_message("model", error)) from error
    enlarge_weights(model, seed)
    return model


def _count_parameters(cls: type[PreTrainedModel], config: PretrainedConfig) -> int | None:
    """How many parameters the model would have, or None if it cannot be made on the meta device."""
    try:
        with torch.device("meta"):
            return sum(tensor.numel() for tensor in cls(copy.deepcopy(config)).parameters())
    except Exception:  # noqa: BLE001  (making it in memory gives the better error)
        return None


@torch.no_grad()
def enlarge_weights(model: nn.Module, seed: int = 0) -> None:
    """Enlarge the weights: at the usual 0.02 every attention is uniform, and checks on it would prove nothing."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.parameters():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        spread = float(tensor.std()) if tensor.numel() > 1 else 0.0
        if not bool(torch.isfinite(tensor).all()) or float(tensor.abs().max()) > 1e3:  # memory that nobody filled
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
        elif tensor.dim() < 2:
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
        elif spread < 1e-6:
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
        elif spread < 0.1:
            tensor.mul_(min(4.0, 0.15 / spread))


def accepts(model: nn.Module, name: str) -> bool:
    """Whether `forward` names this argument."""
    return name in inspect.signature(model.forward).parameters
