"""Inputs for tiny models of any kind: guesses by the names of `forward`'s arguments, the first that runs is taken."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..integration.discovery import find_attention
from .tiny import CannotBuildError

BATCH, LENGTH, TARGET_LENGTH = 2, 14, 9
#: Ordinary tokens lie from 5 to here; the special ones of the small vocabulary lie outside.
LAST_TOKEN = 60

#: Numbers of image or sound tokens to try: what a tower of 16 patches leaves, with and without a class token.
PLACEHOLDERS = (16, 17, 4, 1, 64, 32, 8)
#: Guessing ends after this time with what was found.
MOST_SECONDS = 12.0

Inputs = dict[str, Any]


def tokens(length: int = LENGTH, batch: int = BATCH, seed: int = 0) -> Tensor:
    """Random ordinary tokens `[B, L]`."""
    return torch.randint(5, LAST_TOKEN, (batch, length), generator=torch.Generator().manual_seed(seed))


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def find_inputs(model: PreTrainedModel) -> Inputs:
    """Inputs that the model runs on, and that reach as many of its attention modules as any guess does.

    Raises:
        CannotBuildError: none of the guesses runs; the text gives the first error.
    """
    modules = [layer.module for layer in find_attention(model) if not layer.cross]
    first: Exception | None = None
    best: tuple[int, Inputs | None] = (-1, None)
    until = time.perf_counter() + MOST_SECONDS
    for guess in guesses(model):
        try:
            reached = _reached(model, modules, guess)
        except Exception as error:  # noqa: BLE001  (a wrong guess may raise anything)
            first = first or error
            reached = -1
        if reached > best[0]:
            best = reached, guess
        if reached == len(modules) or time.perf_counter() > until:
            break
    if best[1] is not None:
        return best[1]
    reason = "forward takes no input that is known here" if first is None else f"{type(first).__name__}: {first}"
    raise CannotBuildError(f"inputs: {' '.join(reason.split())}")


def _reached(model: PreTrainedModel, modules: list[Any], inputs: Inputs) -> int:
    """How many of the modules run on these inputs."""
    seen: set[int] = set()
    hooks = [module.register_forward_hook(lambda run, *_: seen.add(id(run))) for module in modules]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return len(seen)


def guesses(model: PreTrainedModel) -> Iterator[Inputs]:
    """Candidates, the likeliest first: text alone where the model takes text, else each form of pixels or sound."""
    names = set(inspect.signature(model.forward).parameters)
    text = _text(names)
    for kind in ("input_ids", *FORMS):
        if kind == "input_ids":
            if text:
                yield text
            continue
        if kind not in names:
            continue
        for value in FORMS[kind](model):
            yield {kind: value, **text}
            yield from _with_masks(kind, value, names)
            yield from _with_placeholders(model, kind, value, text)
            if text:
                yield {kind: value, **{name: given for name, given in text.items() if name.startswith("decoder")}}
    if names & {"hidden_states", "grid_thw", "image_grid_thw", "grid_hw"}:
        yield from _hidden_states(model, names)
    if "past_values" in names:
        yield from _time_series(model)


def _with_masks(kind: str, value: Any, names: set[str]) -> Iterator[Inputs]:
    """Sound or flat patches with the mask that some towers require."""
    for mask in ("input_features_mask", "feature_attention_mask", "mask", "padding_mask"):
        if mask in names and kind in ("input_features", "audio_input_features") and value.dim() == 3:
            for length in {value.shape[1], value.shape[2]}:
                yield {kind: value, mask: torch.ones(BATCH, length, dtype=torch.long)}
    if {"pixel_attention_mask", "spatial_shapes"} <= names and value.dim() == 3:
        side = int(value.shape[1] ** 0.5)
        yield {
            kind: value,
            "pixel_attention_mask": torch.ones(value.shape[:2], dtype=torch.long),
            "spatial_shapes": torch.tensor([[side, side]] * BATCH),
        }


def _with_placeholders(model: PreTrainedModel, kind: str, value: Any, text: Inputs) -> Iterator[Inputs]:
    """Text that holds as many image (or sound) tokens as a small tower may give."""
    names = ("audio_token_id", "audio_token_index") if "input_" in kind else ("image_token_id", "image_token_index")
    for token in _values(model, *names)[:1] if "input_ids" in text else ():
        for count in PLACEHOLDERS:
            ids = torch.cat([text["input_ids"], torch.full((BATCH, count), token), tokens(3, seed=4)], dim=1)
            yield {kind: value, **text, "input_ids": ids}


def _text(names: set[str]) -> Inputs:
    found: Inputs = {}
    if "input_ids" in names:
        found["input_ids"] = tokens()
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = tokens(TARGET_LENGTH, seed=2)
    return found


def _values(model: PreTrainedModel, *names: str) -> list[int]:
    """The numbers that the model's configs hold under any of these names, without repetitions."""
    found: dict[int, None] = {}
    configs = [model.config]
    while configs:
        config = configs.pop(0)
        for name in names:
            value = getattr(config, name, None)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                found[value] = None
        configs.extend(part for part in vars(config).values() if hasattr(part, "to_dict"))
    return list(found)


def _pixels(model: PreTrainedModel) -> Iterator[Tensor]:
    channels = (_values(model, "num_channels", "in_channels", "in_chans") or [3])[0]
    sizes = _values(model, "image_size", "img_size", "input_image_size", "pretrain_image_size")
    if hasattr(model.config, "backbone_config"):  # it leaves a 32nd of the width
        sizes = [96, *sizes]
    for size in dict.fromkeys([*sizes, 32, 64, 128, 224]):
        if 8 <= size <= 256:
            yield random(BATCH, channels, size, size)
            frames = (_values(model, "num_frames", "frames_per_clip") or [2])[0]
            yield random(BATCH, frames, channels, size, size)
            patch = (_values(model, "patch_size") or [16])[0]
            yield random(BATCH, (size // patch) ** 2, channels * patch * patch)


def _spectrograms(model: PreTrainedModel) -> Iterator[Tensor]:
    bins = _values(model, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "n_mels", "input_size")
    bins = bins + _values(model, "feature_projection_input_dim", "d_model", "hidden_size")
    frames = [2 * limit for limit in _values(model, "max_source_positions")] + [64, 128]
    frames = _values(model, "max_length", "spec_size") + frames
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
    patch = (_values(model, "patch_size") or [8])[0]
    channels = (_values(model, "in_channels", "num_channels", "in_chans") or [3])[0]
    times = (_values(model, "temporal_patch_size") or [1])[0]
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    for name in ("grid_thw", "image_grid_thw", "grid_hw"):
        if name in names:
            shape = grid[:, 1:] if name == "grid_hw" else grid
            flat = "hidden_states" if "hidden_states" in names else "pixel_values"
            merged = {"merge_sizes": torch.tensor([2, 2])} if "merge_sizes" in names else {}
            yield {flat: random(32, channels * times * patch * patch), name: shape, **merged}
            yield {flat: random(32, channels, patch, patch), name: shape, **merged}
            yield {flat: random(1, 32, channels, patch, patch), name: shape, **merged}
    for width in _values(model, "hidden_size", "d_model", "embed_dim") if "hidden_states" in names else ():
        yield {"hidden_states": random(BATCH, LENGTH, width)}


def _time_series(model: PreTrainedModel) -> Iterator[Inputs]:
    config = model.config
    context = (_values(model, "context_length") or [8])[0]
    length = context + max([0, *(getattr(config, "lags_sequence", None) or [])])
    ahead = (_values(model, "prediction_length") or [4])[0]
    channels = (_values(model, "num_input_channels") or [1])[0]
    features = getattr(config, "num_time_features", 0) or 1
    yield {"past_values": random(BATCH, context, channels)}
    yield {"past_values": random(BATCH, context)}
    if config.__class__.__name__.startswith(("Autoformer", "Informer", "TimeSeries")):
        yield {
            "past_values": random(BATCH, length),
            "past_time_features": random(BATCH, length, features),
            "past_observed_mask": torch.ones(BATCH, length),
            "future_values": random(BATCH, ahead),
            "future_time_features": random(BATCH, ahead, features),
        }
