"""Tiny random instances of every architecture that Transformers knows, from config classes alone: no network.

A config is made small by the names of its fields (`hidden_size`, `num_attention_heads`, …) and keeps what makes the
architecture itself: layer types, kinds of positions, kinds of experts. Where the small sizes do not fit together, wider
ones are tried (see `LEVELS`). What no rule can know stands in `EXCEPTIONS`.
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
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from .tiny_exceptions import CLASSES, EXCEPTIONS

VOCABULARY = 99
WIDTH, HEADS, HEAD_DIM = 64, 4, 16
#: No instance may have more parameters than this: it would be slow, and says that a field was missed.
MOST_PARAMETERS = 80_000_000
#: Layers of different kinds that are kept of a model that mixes them.
MOST_LAYERS = 6

#: Which class stands for a model type, first match first.
PREFERRED = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)

Rule = tuple[re.Pattern[str], int]


def _rules(*pairs: tuple[str, int]) -> tuple[Rule, ...]:
    return tuple((re.compile(pattern), value) for pattern, value in pairs)


#: Field name -> largest value. The first pattern that matches the whole name counts.
COUNTS = _rules(
    (r"type_vocab_size", 2),
    (r".*vocab_size\w*|.*vocabulary_size|num_embeddings", VOCABULARY),
    (r"\w*codebook_size", 64),
    (r"num_feat_extract_layers|num_hidden_groups", 1 << 30),
    (r"max_source_positions|audio_max_position_embeddings", 32),
    (r"max_position_embeddings|n_positions|max_sequence_length|max_target_positions|max_seq_len|context_length", 128),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_groups|num_groups_for_topk", 1),
    (r".*(num|n)_.*experts|num_experts|moe_num_experts|n_routed_experts", 4),
    (r"first_k_dense_replace|num_dense_layers|num_nextn_predict_layers|moe_layer_start_index", 1),
    (r"num_kv_shared_layers", 0),
    (r"(num_|n_)?(\w+_)?(layers?|blocks)|depth|\w+_depth|num_\w+_layers", 2),
    (r"\w*(attn|attention|global)\w*(every|interval|period|pattern)\w*|sliding_window_pattern|\w+_layer_period", 2),
    (r"attn_layer_offset|expert_layer_offset", 1),
    (r"image_size|img_size|pretrain_image_size|input_image_size|teacher_image_size", 32),
    (r"num_frames|max_num_frames", 2),
    (r"num_queries|num_query_tokens|num_latents|num_slots|num_denoising", 10),
    (r"num_mel_bins|feature_size", 16),
    (r"sliding_window|local_attention|attention_window|attention_chunk_size|window_size", 4),
    (r"chunk_size|block_size|mamba_chunk_size|index_topk", 8),
    (r"num_conv_pos_embeddings|num_conv_pos_embedding_groups", 4),
)
WIDTHS = _rules(
    (r"head_dim|attention_head_size|d_kv|head_size|attention_head_dim|global_head_dim|index_head_dim", HEAD_DIM),
    (r"linear_\w+_head_dim|kda_head_dim|mamba_head_dim|mamba_d_head", HEAD_DIM),
    (r"kv_lora_rank|q_lora_rank|qk_head_dim", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|rotary_dim", 8),
    (r".*attention_heads|(encoder_|decoder_)?num_heads|n_heads?|linear_num_\w+_heads|index_n_heads", HEADS),
    (r"\w*(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|ffn_size)|d_ff|n_inner|\w*inner_dim", WIDTH),
    (r"\w*(hidden_size|hidden_dim|embed_dim|embedding_size|proj_dim|projection_dim|feat_dim)", WIDTH),
    (r"d_model|n_embd|dim|width|emb_dim|output_dim|lru_width|projection_size|query_dim_size", WIDTH),
    (r"patch_size", 8),
    (r"coordinate_size|shape_size", 8),
    (r"mamba_n_heads|mamba_num_heads|mamba_d_state|state_size|ssm_state_size", 8),
)
#: Lists of which every entry is made this small.
LISTS = {"conv_dim": 32, "tdnn_dim": 32, "depths": 1, "image_size": 32, "encoder_depths": 1, "decoder_depths": 1}

#: What is made small, in the order of trying: widths may be tied to each other in ways that no rule knows.
LEVELS = ("small", "wide", "few layers")


class CannotBuildError(Exception):
    """No tiny instance of this model type can be made; the text says why."""


@dataclass(frozen=True)
class Case:
    """One architecture of the sweep: a model type, or the same as a decoder."""

    model_type: str
    decoder: bool = False

    def __str__(self) -> str:
        return f"{self.model_type} (decoder)" if self.decoder else self.model_type


def every_case() -> Iterator[Case]:
    """All model types, and those that have a switch `is_decoder` once more as decoders."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for model_type in CONFIG_MAPPING_NAMES:
        yield Case(model_type)
        if model_type in causal and getattr(CONFIG_MAPPING[model_type], "is_decoder", None) is False:
            yield Case(model_type, decoder=True)


# --------------------------------------------------------------------------------------------------------------------
# Configs


def tiny_config(case: Case, level: str = "small") -> PretrainedConfig:
    """The config of a case at one of the `LEVELS`.

    Raises:
        CannotBuildError: the config class cannot be made, or refuses its small values.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            default = CONFIG_MAPPING[case.model_type]()
            config = _shrunk(default, level)
    except Exception as error:
        raise CannotBuildError(f"config: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if case.decoder:
        config.is_decoder = True
    return config


def _shrunk(config: PretrainedConfig, level: str) -> PretrainedConfig:
    changes = _changes(config, level)
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            changes[name] = _shrunk(_without_timm(value), level)
    changes.update(copy.deepcopy(EXCEPTIONS.get(config.model_type, {})))
    return type(config)(**changes)


def _without_timm(config: PretrainedConfig) -> PretrainedConfig:
    """Backbones of the package timm, which is not needed here, become those of Transformers."""
    if config.model_type != "timm_backbone":
        return config
    resnet: Any = CONFIG_MAPPING["resnet"]
    return resnet(out_features=["stage2", "stage3", "stage4"])


def _changes(config: PretrainedConfig, level: str) -> dict[str, Any]:
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    lists_of_heads = any(isinstance(fields.get(name), (list, tuple)) for name in ("num_heads", "num_attention_heads"))
    rules = COUNTS + (WIDTHS if level == "small" and not lists_of_heads else ())
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if name.endswith(("token_id", "token_index", "_id")) and level != "few layers":
            changes[name] = _token(name, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            limit = next((limit for pattern, limit in rules if pattern.fullmatch(name)), None)
            if limit is not None and value > limit:
                changes[name] = limit
        elif isinstance(value, (list, tuple)) and name in LISTS and all(isinstance(entry, int) for entry in value):
            changes[name] = type(value)(min(entry, LISTS[name]) for entry in value)
    _keep_groups(fields, changes)
    _keep_kinds_of_layers(fields, changes)
    if "qk_rope_head_dim" in changes:  # in latent attention, head_dim is the rotated part of a head
        changes.pop("head_dim", None)
        if isinstance(fields.get("head_dim"), int):
            changes["head_dim"] = changes["qk_rope_head_dim"]
    sections = "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ())
    _fit_rotary(fields, changes, sections)
    return changes


def _token(name: str, value: Any) -> Any:
    """Special tokens inside the small vocabulary: the usual three, others from its end, the same for the same name."""
    usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if name in usual and (value is not None or name == "eos_token_id"):
        return usual[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < VOCABULARY // 2:
        return value
    return VOCABULARY - 1 - sum(name.replace("_index", "_id").encode()) % 31


def _keep_groups(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    """Grouped-query attention stays grouped: 2 of 4 heads, 1 of 4 where there was one."""
    for heads, groups in (
        ("num_attention_heads", "num_key_value_heads"),
        ("decoder_attention_heads", "decoder_num_key_value_heads"),
        ("encoder_attention_heads", "encoder_num_key_value_heads"),
        ("num_attention_heads", "num_global_key_value_heads"),
    ):
        count, before = fields.get(groups), fields.get(heads)
        if isinstance(count, int) and isinstance(before, int) and heads in changes:
            changes[groups] = changes[heads] if count == before else min(count, changes[heads] // 2)


def _keep_kinds_of_layers(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    """Of a model whose layers differ (per-layer lists), the first layer of each kind, and at least two."""
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
    kept = sorted(kinds.values())[:MOST_LAYERS]
    full = [i for i, kind in enumerate(fields.get("layer_types") or []) if kind == "full_attention"]
    if full and not set(full) & set(kept):
        kept.append(full[0])
    kept = sorted({*kept, *range(2)} if len(kept) < 2 else kept)
    changes[name] = len(kept)
    for key, value in lists.items():
        changes[key] = [value[index] for index in kept]


def _fit_rotary(fields: dict[str, Any], changes: dict[str, Any], by_default: bool) -> None:
    """Sections of multi-axis rotary positions must add up to half of the rotated part of a head.

    by_default: the model has sections even where its config states none.
    """
    rope = changes.get("rope_parameters", fields.get("rope_parameters"))
    if "head_dim" not in changes and not {"num_attention_heads", "hidden_size"} <= set(changes):
        return
    if not isinstance(rope, dict):
        return
    rope = copy.deepcopy(rope)
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


def model_class(case: Case, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that stands for a case: what generates if anything does, else the plain model.

    Raises:
        CannotBuildError: there is none, or it cannot be imported here.
    """
    import transformers

    causal_only_if_asked = getattr(type(config), "is_decoder", None) is False and not case.decoder
    name: Any = CLASSES.get(case.model_type)
    composite = hasattr(config, "text_config") or (getattr(config, "is_encoder_decoder", False) and not case.decoder)
    order = sorted(PREFERRED, key=lambda mapping: composite and mapping == PREFERRED[0])
    for mapping in order if name is None else ():
        if causal_only_if_asked and mapping == PREFERRED[0]:
            continue
        name = getattr(modeling_auto, mapping, {}).get(case.model_type)
        if name is not None:
            break
    name = name[0] if isinstance(name, (tuple, list)) else name
    found = getattr(transformers, name, None) if name else None
    found = found or _class_of_modeling_file(config, name)
    if found is None or not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise CannotBuildError(f"no model class belongs to {type(config).__name__}")
    return found


def _class_of_modeling_file(config: PretrainedConfig, name: str | None) -> Any:
    module = type(config).__module__
    try:
        modeling = importlib.import_module(module.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None
    if name is not None:
        return getattr(modeling, name, None)
    own = [
        cls
        for cls in vars(modeling).values()
        if isinstance(cls, type)
        and issubclass(cls, PreTrainedModel)
        and cls.config_class is type(config)
        and "_init_weights" not in vars(cls)
        and not cls.__name__.endswith("PreTrainedModel")
    ]
    return next(iter(own), None)


def tiny_model(case: Case, level: str = "small", seed: int = 0) -> PreTrainedModel:
    """A tiny model in float32, in evaluation mode, with weights large enough for attention to matter.

    Raises:
        CannotBuildError: with the reason.
    """
    config = tiny_config(case, level)
    config._name_or_path = ""
    cls = model_class(case, config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            count = _parameters(cls, config)
            if count is not None and count > MOST_PARAMETERS:
                raise CannotBuildError(f"{count:,} parameters at level {level!r}")
            torch.manual_seed(seed)
            model = cls(copy.deepcopy(config)).float().eval()
    except CannotBuildError:
        raise
    except Exception as error:
        raise CannotBuildError(f"model: {type(error).__name__}: {' '.join(str(error).split())}") from error
    sharpen(model, seed)
    return model


def _parameters(cls: type[PreTrainedModel], config: PretrainedConfig) -> int | None:
    """How many parameters the model would have, or None if that cannot be told without making it."""
    try:
        with torch.device("meta"):
            return sum(tensor.numel() for tensor in cls(copy.deepcopy(config)).parameters())
    except Exception:  # noqa: BLE001  (not every model can be made without memory; making it tells more)
        return None


@torch.no_grad()
def sharpen(model: nn.Module, seed: int = 0) -> None:
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
