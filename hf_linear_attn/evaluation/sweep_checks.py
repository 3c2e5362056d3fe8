"""What the architecture sweep asks of a model: each check is a function of model and inputs that returns how far two
ways to the same outputs differ, and runs on exact and on patched models alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .tiny import accepts
from .tiny_inputs import LENGTH, Inputs, tokens

#: Tokens that a padded row lacks.
PADDING = 5


class NotApplicableError(Exception):
    """This model has no such property; the text says why."""


def run(model: PreTrainedModel, inputs: Inputs) -> Any:
    """Outputs with the same random numbers every time."""
    torch.manual_seed(0)
    return model(**inputs)


def outputs(model: PreTrainedModel, inputs: Inputs) -> list[Tensor]:
    """All floating outputs, without caches."""
    with torch.no_grad():
        return list(floats(run(model, inputs)))


def floats(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Cache):
        return
    elif isinstance(value, dict):
        for name, part in value.items():
            if "past" not in str(name) and "cache" not in str(name):
                yield from floats(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from floats(part)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """`max|a - b| / max|b|`, infinite for other shapes and where only one is finite."""
    if actual.shape != expected.shape:
        return float("inf")
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(actual)):
        return float("inf")
    difference = (actual[finite].double() - expected[finite].double()).abs()
    return float(difference.max() / expected[finite].double().abs().max().clamp(min=1e-12)) if len(difference) else 0.0


def per_token(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """The output `[B, L, …]` that has a row for every token: logits or hidden states."""
    with torch.no_grad():
        out = run(model, inputs)
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    length = inputs[name].shape[1]
    values = out.values() if isinstance(out, dict) else out
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3 and value.shape[1] == length:
            return value
    raise NotApplicableError("no output has a row for every token")


def _text_only(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    if "input_ids" not in inputs:
        raise NotApplicableError("no text input")
    if not set(inputs) <= {"input_ids", "decoder_input_ids", "use_cache"}:
        raise NotApplicableError("text comes with other inputs")
    return inputs["input_ids"]


# --------------------------------------------------------------------------------------------------------------------
# The checks


def backward(model: PreTrainedModel, inputs: Inputs) -> float:
    """0 if every gradient is finite, else infinity. The linear attention must get gradients where it learns."""
    model.zero_grad()
    with torch.enable_grad():
        found = [tensor for tensor in floats(run(model, inputs)) if tensor.requires_grad]
        if not found:
            raise NotApplicableError("outputs have no gradient")
        torch.stack([tensor.square().mean() for tensor in found]).sum().backward()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    learned = [name for name, tensor in model.named_parameters() if ".linear_attention." in name]
    model.zero_grad(set_to_none=True)
    if not gradients:
        raise NotApplicableError("parameters have no gradient")
    finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
    reached = not learned or any(name in gradients for name in learned)
    return 0.0 if finite and reached else float("inf")


def _padding(model: PreTrainedModel, inputs: Inputs, side: str) -> float:
    ids = _text_only(model, inputs)
    if not accepts(model, "attention_mask"):
        raise NotApplicableError("forward takes no attention_mask")
    real = slice(0, LENGTH - PADDING) if side == "right" else slice(PADDING, LENGTH)
    mask = torch.ones_like(ids)
    mask[1] = 0
    mask[1, real] = 1
    padded = ids.clone()
    padded[1, mask[1] == 0] = 0
    given = {**inputs, "input_ids": padded, "attention_mask": mask}
    alone = {**inputs, "input_ids": ids[:, real]}
    alone = {name: value[1:] if isinstance(value, Tensor) else value for name, value in alone.items()}
    alone["attention_mask"] = torch.ones_like(alone["input_ids"])
    if side == "left" and not accepts(model, "position_ids") and _rotary(model):
        # Softmax sees differences of rotary positions only; a feature map of rotated queries and keys sees the places.
        raise NotApplicableError("rotary positions shift with the padding, and forward takes no position_ids")
    if side == "left" and accepts(model, "position_ids"):
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    expected = per_token(model, alone)
    found = per_token(model, given)[1:]
    return relative_difference(found if "decoder_input_ids" in inputs else found[:, real], expected)


def _rotary(model: PreTrainedModel) -> bool:
    return any("rotary" in type(module).__name__.lower() for module in model.modules())


def padding_right(model: PreTrainedModel, inputs: Inputs) -> float:
    """Padding behind the shorter row changes nothing at its tokens."""
    return _padding(model, inputs, "right")


def padding_left(model: PreTrainedModel, inputs: Inputs) -> float:
    """The same with padding before, and the positions that `generate` would give."""
    return _padding(model, inputs, "left")


def causality(model: PreTrainedModel, inputs: Inputs) -> float:
    """Another last token changes nothing before it."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    _text_only(model, inputs)
    changed = inputs[name].clone()
    changed[:, -1] = (changed[:, -1] - 5 + 7) % 50 + 5
    before, after = per_token(model, inputs), per_token(model, {**inputs, name: changed})
    if relative_difference(after[:, -1], before[:, -1]) == 0:
        raise NotApplicableError("the last output does not depend on the last token")
    return relative_difference(after[:, :-1], before[:, :-1])


def _decoded(model: PreTrainedModel, inputs: Inputs, sizes: list[int]) -> float:
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    _text_only(model, inputs)
    if not accepts(model, "past_key_values"):
        raise NotApplicableError("forward takes no past_key_values")
    full = per_token(model, {**inputs, "use_cache": False})
    parts, past, start = [], None, 0
    for size in sizes:
        given = {**inputs, name: inputs[name][:, start : start + size], "past_key_values": past, "use_cache": True}
        with torch.no_grad():
            out = run(model, given)
        past, start = getattr(out, "past_key_values", None), start + size
        if past is None:
            raise NotApplicableError("the model makes no cache")
        parts.append(next(value for value in floats(out) if value.dim() >= 3))
    return relative_difference(torch.cat(parts, dim=1), full)


def _length(inputs: Inputs) -> int:
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    if name not in inputs:
        raise NotApplicableError("no text input")
    return inputs[name].shape[1]


def decode_by_token(model: PreTrainedModel, inputs: Inputs) -> float:
    """Token by token with a cache = all at once."""
    return _decoded(model, inputs, [1] * _length(inputs))


def decode_after_prefill(model: PreTrainedModel, inputs: Inputs) -> float:
    """A prefix, several tokens, then one at a time = all at once."""
    length = _length(inputs)
    return _decoded(model, inputs, [4, 3, *[1] * (length - 7)])


def generation(model: PreTrainedModel, inputs: Inputs) -> float:
    """Share of tokens of `generate` that differ between cache and no cache, with padding on the left."""
    ids = _text_only(model, inputs)
    if not model.can_generate():
        raise NotApplicableError("the model does not generate")
    mask = torch.ones_like(ids)
    given = {name: value for name, value in inputs.items() if name not in ("decoder_input_ids", "use_cache")}
    if "decoder_input_ids" in inputs or not accepts(model, "attention_mask"):
        given["input_ids"] = tokens(LENGTH)
    else:
        mask[1, :PADDING] = 0
        given["input_ids"] = torch.where(mask == 0, 0, ids)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        found.append(model.generate(**given, attention_mask=mask, use_cache=use_cache, **settings))  # type: ignore
    if not all(isinstance(tensor, Tensor) for tensor in found) or found[0].shape != found[1].shape:
        return float("inf")
    return float((found[0] != found[1]).float().mean())


CHECKS: dict[str, Callable[[PreTrainedModel, Inputs], float]] = {
    "backward": backward,
    "padding right": padding_right,
    "padding left": padding_left,
    "causality": causality,
    "decode by token": decode_by_token,
    "decode after prefill": decode_after_prefill,
    "generate": generation,
}
