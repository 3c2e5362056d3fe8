"""Inputs for tiny models of any kind, guessed by the names of `forward`'s arguments; the first that runs is taken."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attn.integration.discovery import find_attention
from tests.architectures.models import CannotBuildError

BATCH, LENGTH, TARGET_LENGTH = 2, 14, 9
#: Ordinary tokens lie from 5 to here; the special ones of the small vocabulary lie outside.
LAST_TOKEN = 60
#: Numbers of image or sound tokens to try: what a tower of 16 patches leaves, with and without a class token.
PLACEHOLDERS = (16, 17, 4, 1, 64, 32, 8)
#: After so many seconds the best guess so far is taken.
MAX_SECONDS = 12.0

Inputs = dict[str, Any]


def tokens(length: int = LENGTH, batch: int = BATCH, seed: int = 0) -> Tensor:
    """Random ordinary tokens `[B, L]`."""
    return torch.randint(5, LAST_TOKEN, (batch, length), generator=torch.Generator().manual_seed(seed))


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def find_inputs(model: PreTrainedModel) -> Inputs:
    """Inputs that the model runs on, and that reach as many of its attention modules as any guess does.

    Raises:
        CannotBuildError: None of the guesses runs; the message gives the first error.
    """
    modules = [layer.module for layer in find_attention(model) if not layer.cross]
    first_error: Exception | None = None
    best: Inputs | None = None
    most = -1
    end = time.perf_counter() + MAX_SECONDS
    for guess in guesses(model):
        try:
            count = _count_reached(model, modules, guess)
        except Exception as error:  # noqa: BLE001  (a wrong guess may raise anything)
            first_error = first_error or error
            count = -1
        if count > most:
            most, best = count, guess
        if count == len(modules) or time.perf_counter() > end:
            break
    if best is not None:
        return best
    reason = f"{type(first_error).__name__}: {first_error}" if first_error else "forward takes no input that is known"
    raise CannotBuildError(f"inputs: {' '.join(reason.split())}")


def _count_reached(model: PreTrainedModel, modules: list[Any], inputs: Inputs) -> int:
    """How many of the modules run on these inputs."""
    reached: set[int] = set()
    hooks = [module.register_forward_hook(lambda run, *_: reached.add(id(run))) for module in modules]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return len(reached)


def guesses(model: PreTrainedModel) -> Iterator[Inputs]:
    """Candidates, the likeliest first: text alone where the model takes text, else each form of pixels or sound."""
    names = set(inspect.signature(model.forward).parameters)
    text: Inputs = {"input_ids": tokens()} if "input_ids" in names else {}
    if "decoder_input_ids" in names:
        text["decoder_input_ids"] = tokens(TARGET_LENGTH, seed=2)
    if text:
        yield text
    for name in FORMS:
        for value in FORMS[name](model) if name in names else ():
            yield {name: value, **text}
            yield from _with_masks(name, value, names)
            yield from _with_placeholders(model, name, value, text)
            if text:
                yield {name: value, **{key: ids for key, ids in text.items() if key.startswith("decoder")}}
    if names & {"hidden_states", "grid_thw", "image_grid_thw", "grid_hw"}:
        yield from _hidden_states(model, names)
    if "past_values" in names:
        yield from _time_series(model)


def _with_masks(name: str, value: Any, names: set[str]) -> Iterator[Inputs]:
    """Sound or flat patches with the mask that some towers require."""
    for mask in ("input_features_mask", "feature_attention_mask", "mask", "padding_mask"):
        if mask in names and name == "input_features" and value.dim() == 3:
            for length in {value.shape[1], value.shape[2]}:
                yield {name: value, mask: torch.ones(BATCH, length, dtype=torch.long)}
    if {"pixel_attention_mask", "spatial_shapes"} <= names and value.dim() == 3:
        rows = int(value.shape[1] ** 0.5)
        mask_of_patches = torch.ones(value.shape[:2], dtype=torch.long)
        shapes = torch.tensor([[rows, rows]] * BATCH)
        yield {name: value, "pixel_attention_mask": mask_of_patches, "spatial_shapes": shapes}


def _with_placeholders(model: PreTrainedModel, name: str, value: Any, text: Inputs) -> Iterator[Inputs]:
    """Text with as many image (or sound) tokens as a small tower may give."""
    names = ("audio_token_id", "audio_token_index") if "input_" in name else ("image_token_id", "image_token_index")
    for token in _config_values(model, *names)[:1] if "input_ids" in text else ():
        for count in PLACEHOLDERS:
            ids = torch.cat([text["input_ids"], torch.full((BATCH, count), token), tokens(3, seed=4)], dim=1)
            yield {name: value, **text, "input_ids": ids}


def _config_values(model: PreTrainedModel, *names: str) -> list[int]:
    """The integers that the model's configs have under any of these names, without repetitions."""
    values: dict[int, None] = {}
    configs = [model.config]
    while configs:
        config = configs.pop(0)
        for name in names:
            value = getattr(config, name, None)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                values[value] = None
        configs.extend(part for part in vars(config).values() if hasattr(part, "to_dict"))
    return list(values)


def _pixels(model: PreTrainedModel) -> Iterator[Tensor]:
    channels = (_config_values(model, "num_channels", "in_channels", "in_chans") or [3])[0]
    sizes = _config_values(model, "image_size", "img_size", "input_image_size", "pretrain_image_size")
    if hasattr(model.config, "backbone_config"):  # it leaves a 32nd of the width
        sizes = [96, *sizes]
    frames = (_config_values(model, "num_frames", "frames_per_clip") or [2])[0]
    patch = (_config_values(model, "patch_size") or [16])[0]
    for size in dict.fromkeys([*sizes, 32, 64, 128, 224]):
        if 8 <= size <= 256:
            yield random(BATCH, channels, size, size)
            yield random(BATCH, frames, channels, size, size)
            yield random(BATCH, (size // patch) ** 2, channels * patch * patch)


def _spectrograms(model: PreTrainedModel) -> Iterator[Tensor]:
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "n_mels", "input_size")
    bins = _config_values(model, *names) + _config_values(
        model, "feature_projection_input_dim", "d_model", "hidden_size"
    )
    frames = [2 * limit for limit in _config_values(model, "max_source_positions")] + [64, 128]
    frames = _config_values(model, "max_length", "spec_size") + frames
    for bin_count in dict.fromkeys(bins):
        for frame_count in dict.fromkeys(frames):
            if frame_count <= 1024:
                yield random(BATCH, bin_count, frame_count)
                yield random(BATCH, frame_count, bin_count)
                yield random(BATCH, 1, frame_count, bin_count)


def _waves(model: PreTrainedModel) -> Iterator[Tensor]:
    yield random(BATCH, 1600)
    yield random(BATCH, 1, 3200)
    yield from _spectrograms(model)


FORMS: dict[str, Callable[[PreTrainedModel], Iterator[Tensor]]] = {
    "pixel_values": _pixels,
    "pixel_values_videos": _pixels,
    "input_features": _spectrograms,
    "input_values": _waves,
    "inputs": _waves,
}


def _hidden_states(model: PreTrainedModel, names: set[str]) -> Iterator[Inputs]:
    """Vision towers that take flat patches `[patches, C·T·P·P]` and the grid that they come from."""
    patch = (_config_values(model, "patch_size") or [8])[0]
    channels = (_config_values(model, "in_channels", "num_channels", "in_chans") or [3])[0]
    times = (_config_values(model, "temporal_patch_size") or [1])[0]
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    shapes = ((32, channels * times * patch * patch), (32, channels, patch, patch), (1, 32, channels, patch, patch))
    for name in ("grid_thw", "image_grid_thw", "grid_hw"):
        if name in names:
            flat = "hidden_states" if "hidden_states" in names else "pixel_values"
            merged = {"merge_sizes": torch.tensor([2, 2])} if "merge_sizes" in names else {}
            for shape in shapes:
                yield {flat: random(*shape), name: grid[:, 1:] if name == "grid_hw" else grid, **merged}
    for width in _config_values(model, "hidden_size", "d_model", "embed_dim") if "hidden_states" in names else ():
        yield {"hidden_states": random(BATCH, LENGTH, width)}


def _time_series(model: PreTrainedModel) -> Iterator[Inputs]:
    config = model.config
    context = (_config_values(model, "context_length") or [8])[0]
    length = context + max([0, *(getattr(config, "lags_sequence", None) or [])])
    horizon = (_config_values(model, "prediction_length") or [4])[0]
    channels = (_config_values(model, "num_input_channels") or [1])[0]
    features = getattr(config, "num_time_features", 0) or 1
    yield {"past_values": random(BATCH, context, channels)}
    yield {"past_values": random(BATCH, context)}
    if config.__class__.__name__.startswith(("Autoformer", "Informer", "TimeSeries")):
        yield {
            "past_values": random(BATCH, length),
            "past_time_features": random(BATCH, length, features),
            "past_observed_mask": torch.ones(BATCH, length),
            "future_values": random(BATCH, horizon),
            "future_time_features": random(BATCH, horizon, features),
        }
