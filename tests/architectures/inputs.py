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
from tests.architectures.models import CannotBuildError, accepts

BATCH, LENGTH, TARGET_LENGTH = 2, 14, 9
#: Ordinary tokens lie from 5 to here; the special ones of the small vocabulary lie outside.
LAST_TOKEN = 60
#: Patches along each side of an image.
SQUARE = 4
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
    for guess in completed(model):
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


def completed(model: PreTrainedModel) -> Iterator[Inputs]:
    """The guesses with the other arguments that `forward` requires, and once more with all that are known here."""
    parameters = inspect.signature(model.forward).parameters
    required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    for guess in guesses(model):
        companions = {name: COMPANIONS[name](model, guess) for name in COMPANIONS if name in parameters}
        companions = {name: value for name, value in companions.items() if value is not None and name not in guess}
        yield {**guess, **{name: value for name, value in companions.items() if name in required}}
        if not required >= companions.keys():
            yield {**guess, **companions}


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
    if names & {"hidden_states", "inputs_embeds", "query_embeds", "context", "grid_thw", "image_grid_thw", "grid_hw"}:
        yield from _hidden_states(model, names)
    if "past_values" in names:
        yield from _time_series(model)


def _with_masks(name: str, value: Any, names: set[str]) -> Iterator[Inputs]:
    """Sound with the mask that some towers require, over its frames."""
    for mask in ("input_features_mask", "feature_attention_mask", "mask", "padding_mask"):
        if mask in names and name == "input_features" and value.dim() == 3:
            for length in sorted(value.shape[1:], reverse=True):  # more frames than bins, in most of these
                yield {name: value, mask: torch.ones(BATCH, length, dtype=torch.long)}


def _with_placeholders(model: PreTrainedModel, name: str, value: Any, text: Inputs) -> Iterator[Inputs]:
    """Text with as many image (or sound) tokens as a small tower may give."""
    names = ("audio_token_id", "audio_token_index") if "input_" in name else ("image_token_id", "image_token_index")
    for token in _config_values(model, *names)[:1] if "input_ids" in text else ():
        for count in (*_config_values(model, "num_query_tokens"), *PLACEHOLDERS):
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
    tiles = _config_values(model, "max_num_tiles")
    for size in dict.fromkeys([*sizes, 32, 64, 128, 224]):
        if 8 <= size <= 256:
            yield random(BATCH, channels, size, size)
            yield random(BATCH, frames, channels, size, size)
            if tiles:
                yield random(BATCH, 1, tiles[0], channels, size, size)
            yield random(BATCH, (size // patch) ** 2, channels * patch * patch)
    if accepts(model, "target_sizes"):  # all patches side by side
        yield random(1, channels, patch, BATCH * SQUARE * SQUARE * patch)


def _spectrograms(model: PreTrainedModel) -> Iterator[Tensor]:
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "n_mels", "input_size")
    bins = _config_values(model, *names) + _config_values(
        model, "feature_projection_input_dim", "d_model", "hidden_size"
    )
    frames = [2 * limit for limit in _config_values(model, "max_source_positions")] + [64, 128]
    frames = _config_values(model, "max_length", "spec_size") + frames
    frames += [4 * window for window in _config_values(model, "n_window")]  # two chunks
    for bin_count in dict.fromkeys(bins):
        for frame_count in dict.fromkeys(frames):
            if frame_count <= 1024:
                yield random(BATCH, bin_count, frame_count)
                yield random(BATCH, frame_count, bin_count)
                yield random(BATCH, 1, frame_count, bin_count)
                if accepts(model, "feature_lens"):
                    yield random(bin_count, frame_count)


def _flat_patches(model: PreTrainedModel) -> Iterator[Tensor]:
    """Patches with row and column (from 1) before their values."""
    for width in _config_values(model, "patch_embed_hidden_size"):
        places = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).expand(BATCH, -1, -1)
        yield torch.cat([places.float(), random(BATCH, 16, width)], dim=-1)


def _waves(model: PreTrainedModel) -> Iterator[Tensor]:
    yield random(BATCH, 1600)
    yield random(BATCH, 1, 3200)
    yield from _spectrograms(model)


FORMS: dict[str, Callable[[PreTrainedModel], Iterator[Tensor]]] = {
    "pixel_values": _pixels,
    "pixel_values_videos": _pixels,
    "input_features": _spectrograms,
    "input_values": _waves,
    "flattened_patches": _flat_patches,
    "inputs": _waves,
}


def _hidden_states(model: PreTrainedModel, names: set[str]) -> Iterator[Inputs]:
    """Flat patches `[patches, C·T·P·P]` of vision towers with the grid that they come from; states of any width."""
    patch = (_config_values(model, "patch_size") or [8])[0]
    channels = (_config_values(model, "in_channels", "num_channels", "in_chans") or [3])[0]
    times = (_config_values(model, "temporal_patch_size", "patch_temporal") or [1])[0]
    patch_width = (_config_values(model, "spatial_merge_size") or [1])[0] * patch
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    shapes = [(32, channels * times * patch * patch), (32, channels, patch, patch), (1, 32, channels, patch, patch)]
    shapes += [(32, patch_width, patch_width, channels)]
    for name in ("grid_thw", "image_grid_thw", "grid_hw"):
        if name in names:
            flat = "hidden_states" if "hidden_states" in names else "pixel_values"
            merged = {"merge_sizes": torch.tensor([2, 2])} if "merge_sizes" in names else {}
            for shape in shapes:
                yield {flat: random(*shape), name: grid[:, 1:] if name == "grid_hw" else grid, **merged}
    widths = _config_values(model, "hidden_size", "d_model", "embed_dim", "input_size")
    for name in ("hidden_states", "inputs_embeds", "query_embeds", "context"):
        for width in widths if name in names else ():
            yield {name: random(BATCH, LENGTH, width)}
    if "hidden_states" in names:
        for pixels in _pixels(model):
            yield {"hidden_states": pixels}


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


# --------------------------------------------------------------------------------------------------------------------
# Arguments that come with the main input


def _ones_of_media(model: PreTrainedModel, inputs: Inputs) -> Tensor | None:
    """`[B, media]` for images of which each has several tiles `[B, media, tiles, C, H, W]`."""
    pixels = inputs.get("pixel_values")
    return torch.ones(pixels.shape[:2], dtype=torch.long) if pixels is not None and pixels.dim() == 6 else None


def _ones_of_tiles(model: PreTrainedModel, inputs: Inputs) -> Tensor | None:
    pixels = inputs.get("pixel_values")
    return torch.ones(pixels.shape[:3], dtype=torch.long) if pixels is not None and pixels.dim() == 6 else None


def _ones_of_steps(model: PreTrainedModel, inputs: Inputs) -> Tensor | None:
    """A mask without padding for states `[B, steps, width]`."""
    names = {"hidden_states", "context"} & inputs.keys()
    states = next((inputs[name] for name in names if inputs[name].dim() == 3), None)
    return None if states is None else torch.ones(states.shape[:2], dtype=torch.bool)


def _positions_of_patches(model: PreTrainedModel, inputs: Inputs) -> Tensor | None:
    """Column and row `[B, patches, 2]` of the patches of square images."""
    pixels = inputs.get("pixel_values")
    if pixels is None or pixels.dim() != 3:
        return None
    count = int(pixels.shape[1] ** 0.5)
    columns, rows = torch.meshgrid(torch.arange(count), torch.arange(count), indexing="xy")
    return torch.stack([columns.flatten(), rows.flatten()], dim=-1).expand(len(pixels), -1, -1)


def _patches_of_images(model: PreTrainedModel, inputs: Inputs) -> Tensor | None:
    """Rows and columns of patches `[B, 2]` of square images."""
    pixels = inputs.get("pixel_values")
    if pixels is None or pixels.dim() not in (3, 4):
        return None
    count = pixels.shape[1] if pixels.dim() == 3 else SQUARE * SQUARE  # patches side by side otherwise
    return torch.tensor([[int(count**0.5)] * 2] * BATCH)


def _mask_of_patches(model: PreTrainedModel, inputs: Inputs) -> Tensor | None:
    pixels = inputs.get("pixel_values")
    return torch.ones(pixels.shape[:2], dtype=torch.long) if pixels is not None and pixels.dim() == 3 else None


def _lengths_of_sounds(model: PreTrainedModel, inputs: Inputs) -> Tensor | None:
    """Frames of each of two sounds that lie one after the other in a spectrogram `[bins, frames]`."""
    features = inputs.get("input_features")
    return None if features is None or features.dim() != 2 else torch.tensor([features.shape[1] // 2] * 2)


def _states_of_encoder(model: PreTrainedModel, inputs: Inputs) -> Tensor | None:
    widths = _config_values(model, "encoder_hidden_size", "cross_hidden_size", "hidden_size")
    return random(BATCH, LENGTH, widths[0], seed=5) if widths else None


#: Name of an argument -> its value for these inputs, or None where it does not go with them.
COMPANIONS: dict[str, Callable[[PreTrainedModel, Inputs], Tensor | None]] = {
    "aspect_ratio_ids": _ones_of_media,
    "aspect_ratio_mask": _ones_of_tiles,
    "mask": _ones_of_steps,
    "pixel_position_ids": _positions_of_patches,
    "target_sizes": _patches_of_images,
    "spatial_shapes": _patches_of_images,
    "pixel_attention_mask": _mask_of_patches,
    "attention_mask": _ones_of_steps,
    "feature_lens": _lengths_of_sounds,
    "encoder_hidden_states": _states_of_encoder,
    "qformer_input_ids": lambda model, inputs: tokens(seed=6),
}
