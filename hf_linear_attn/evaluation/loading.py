"""Models to measure: loaded whole, checked, quiet."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from ..integration.discovery import self_attention
from ..patching import CONFIG_FIELD
from ..training.models import load_model
from ..training.options import TrainingRunConfig
from ..utils.models import quiet_transformers


def config_and_tokenizer(source: str) -> tuple[Any, Any]:
    try:
        config = AutoConfig.from_pretrained(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise OSError(
            f"The model {source!r} or its tokenizer cannot be loaded ({_first_line(error)}). Give a local folder or a "
            "repository on the Hub."
        ) from error
    if getattr(config, CONFIG_FIELD, None) is not None:
        raise ValueError(f"{source!r} is patched already. Give the model as it was before.")
    if config.is_encoder_decoder:
        raise ValueError(
            f"Model type {config.model_type!r} is an encoder-decoder, which is not measured here (patch_model serves "
            "it). Give an encoder (BERT, RoBERTa, …) or a decoder (GPT-2, Llama, …)."
        )
    return config, tokenizer


def load_backbone(source: str, auto_class: str, device: torch.device) -> Any:
    try:
        with quiet_transformers():
            loaded, info = getattr(transformers, auto_class).from_pretrained(source, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise OSError(f"The model {source!r} cannot be loaded ({_first_line(error)}).") from error
    missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
    if missing:
        raise ValueError(f"{source!r} lacks weights ({missing[0]}, …). Give a complete checkpoint.")
    try:
        layers = self_attention(loaded)
    except NotImplementedError as error:
        raise ValueError(str(error)) from error
    if any(layer.causal is not (auto_class == "AutoModelForCausalLM") for layer in layers):
        raise ValueError(
            f"{source!r} was loaded by {auto_class}, which its attention does not fit. Give another model."
        )
    return loaded.eval().to(device)


def load_classifier(source: str, task: str, problem: Any, device: torch.device) -> Any:
    loaded = load_model(TrainingRunConfig(model=source, attention=None), problem)
    if loaded.new_parameters:
        raise ValueError(
            f"{source!r} has no head for the task {task!r} ({loaded.new_parameters[0]} is missing): fine-tune it "
            f"first, for example with `hf-linear-attn finetune {source} --data.task {task}`."
        )
    return loaded.model.eval().to(device)


def fingerprint(model: Any) -> str:
    """SHA-256 over the names and shapes of all weights and the beginning of each: tells checkpoints apart."""
    digest = hashlib.sha256()
    for name, held in model.state_dict().items():
        digest.update(f"{name} {tuple(held.shape)} {held.dtype}".encode())
        start = held.detach().reshape(-1)[:4096].cpu().contiguous()
        digest.update(start.view(torch.uint8).numpy().tobytes() if start.numel() else b"")
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
