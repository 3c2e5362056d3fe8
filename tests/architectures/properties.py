"""What a patched model promises, checked on one architecture.

Every property is asked of the exact model first: what softmax attention does not keep either (a model that shifts its
positions with the padding, say) is not demanded of the patched one, and is recorded so.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache, takes_cache
from hf_linear_attn.integration.discovery import find_attention, patched_layers
from hf_linear_attn.integration.exact import AttentionCall, observe_attention
from hf_linear_attn.integration.model_class import base_class
from hf_linear_attn.integration.trial import SKIP_VARIABLE, architecture_name
from tests.architectures.inputs import LENGTH, Inputs, find_inputs, guesses, tokens
from tests.architectures.models import LEVELS, CannotBuildError, Case, accepts, architecture_model

PACKAGE = Path(hla.__file__).parent
#: How the package says that it cannot serve a model. Anything else that is raised is a fault.
REFUSALS = (NotImplementedError, ValueError, TypeError)
#: Largest relative difference of two ways to the same float32 outputs.
TOLERANCE = 1e-4
#: Smallest relative change of the outputs that shows that linear attention runs.
MIN_EFFECT = 1e-6
#: How many tokens a padded row lacks.
PADDING = 5

#: The mechanism of models that add terms to their logits, which few mechanisms apply.
FOR_TERMS = "window"

WORKS, REFUSED, UNBUILT, WRONG = "works", "refused", "cannot be built tiny", "wrong"


@dataclass
class Result:
    """One case with one mechanism. checks: name -> "passed", "n/a: why", "refused: message" or "failed: what"."""

    case: str
    attention: str
    outcome: str = ""
    detail: str = ""
    class_name: str = ""
    level: str = ""
    parameters: int = 0
    #: The layers that were left out by name, because the plain call refused them and said so.
    left_out: list[str] = field(default_factory=list)
    #: Kind of layer -> how many: "linear, causal", "cross-attention", "sliding window of 4", …
    layers: dict[str, int] = field(default_factory=dict)
    #: The architectures that a window over the whole input leaves exact, as the table of the package names them.
    architectures: list[str] = field(default_factory=list)
    checks: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class NotApplicableError(Exception):
    """This model has no such property; the message says why."""


def describe(error: BaseException, length: int | None = None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:length]}"


# --------------------------------------------------------------------------------------------------------------------
# Outputs and their differences


def forward(model: PreTrainedModel, inputs: Inputs) -> Any:
    """Outputs with the same random numbers every time."""
    torch.manual_seed(0)
    return model(**inputs)


CACHES = ("past", "cache")


def outputs(model: PreTrainedModel, inputs: Inputs, without: Sequence[str] = CACHES) -> list[Tensor]:
    """All floating outputs, but for those with parts of their names."""
    with torch.no_grad():
        return list(floating_tensors(forward(model, inputs), without))


def floating_tensors(value: Any, without: Sequence[str] = CACHES) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, dict):
        for name, part in value.items():
            if not any(text in str(name) for text in without):
                yield from floating_tensors(part, without)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from floating_tensors(part, without)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """`max|a - b| / max|b|`, infinite for other shapes and where only one is finite."""
    if actual.shape != expected.shape:
        return float("inf")
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(actual)):
        return float("inf")
    difference = (actual[finite].double() - expected[finite].double()).abs()
    return float(difference.max() / expected[finite].double().abs().max().clamp(min=1e-12)) if len(difference) else 0.0


def bit_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in zip(left, right, strict=True)
    )


def main_ids(inputs: Inputs) -> str:
    """Which input has the tokens that the outputs belong to."""
    return "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"


def per_token(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """The output `[B, L, …]` that has a row for every token: logits or hidden states."""
    length = inputs[main_ids(inputs)].shape[1]
    with torch.no_grad():
        out = forward(model, inputs)
    for value in out.values() if isinstance(out, dict) else out:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3 and value.shape[1] == length:
            return value
    raise NotApplicableError("no output has a row for every token")


def _text_only(model: PreTrainedModel, inputs: Inputs) -> Inputs:
    """The inputs, or text alone where they have images or sounds, too, and the model runs without."""
    if "input_ids" not in inputs:
        raise NotApplicableError("no text input")
    if set(inputs) <= {"input_ids", "decoder_input_ids", "use_cache"}:
        return inputs
    text = next(guesses(model))
    if not hla.is_patched(model):  # What the exact model cannot do is not asked of the patched one.
        try:
            outputs(model, text)
        except Exception:  # noqa: BLE001  (a model that requires an image may raise anything)
            raise NotApplicableError("text comes with other inputs") from None
    return text


# --------------------------------------------------------------------------------------------------------------------
# Properties of exact and patched models alike: how far two ways to the same outputs differ


def backward(model: PreTrainedModel, inputs: Inputs) -> float:
    """0 if every gradient is finite and learned parameters of linear attention have one, else infinity."""
    model.zero_grad()
    with torch.enable_grad():
        tensors = [tensor for tensor in floating_tensors(forward(model, inputs)) if tensor.requires_grad]
        if not tensors:
            raise NotApplicableError("outputs have no gradient")
        torch.stack([tensor.square().mean() for tensor in tensors]).sum().backward()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    learned = [name for name, tensor in model.named_parameters() if ".linear_attention." in name]
    model.zero_grad(set_to_none=True)
    if not gradients:
        raise NotApplicableError("parameters have no gradient")
    finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
    return 0.0 if finite and (not learned or any(name in gradients for name in learned)) else float("inf")


def _padding(model: PreTrainedModel, inputs: Inputs, padding: str) -> float:
    """How far a padded row of a batch differs from the same row by itself."""
    inputs = _text_only(model, inputs)
    ids = inputs["input_ids"]
    if not accepts(model, "attention_mask"):
        raise NotApplicableError("forward takes no attention_mask")
    rotary = any("rotary" in type(module).__name__.lower() for module in model.modules())
    if padding == "left" and rotary and not accepts(model, "position_ids"):
        # Softmax sees differences of positions only, a feature map of rotated queries and keys the positions.
        raise NotApplicableError("rotary positions shift with the padding, and forward takes no position_ids")
    real = slice(0, LENGTH - PADDING) if padding == "right" else slice(PADDING, LENGTH)
    mask = torch.ones_like(ids)
    mask[1] = 0
    mask[1, real] = 1
    padded = {**inputs, "input_ids": torch.where(mask == 0, 0, ids), "attention_mask": mask}
    if padding == "left" and accepts(model, "position_ids"):
        padded["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    single = {**inputs, "input_ids": ids[:, real], "attention_mask": torch.ones_like(ids[:, real])}
    single = {name: value[1:] if isinstance(value, Tensor) else value for name, value in single.items()}
    expected, actual = per_token(model, single), per_token(model, padded)[1:]
    return relative_difference(actual if "decoder_input_ids" in inputs else actual[:, real], expected)


def padding_right(model: PreTrainedModel, inputs: Inputs) -> float:
    return _padding(model, inputs, "right")


def padding_left(model: PreTrainedModel, inputs: Inputs) -> float:
    """Padding before the row, with the positions that `generate` would give."""
    return _padding(model, inputs, "left")


def causality(model: PreTrainedModel, inputs: Inputs) -> float:
    """Another last token changes nothing before it."""
    inputs = _text_only(model, inputs)
    changed = inputs[main_ids(inputs)].clone()
    changed[:, -1] = (changed[:, -1] - 5 + 7) % 50 + 5
    before, after = per_token(model, inputs), per_token(model, {**inputs, main_ids(inputs): changed})
    if relative_difference(after[:, -1], before[:, -1]) == 0:
        raise NotApplicableError("the last output does not depend on the last token")
    return relative_difference(after[:, :-1], before[:, :-1])


def _decode(model: PreTrainedModel, inputs: Inputs, prefix: Sequence[int]) -> float:
    """How far decoding with a cache, a prefix in parts and then token by token, differs from one pass."""
    inputs = _text_only(model, inputs)
    if not takes_cache(model):
        raise NotApplicableError("forward takes no cache")
    full = per_token(model, {**inputs, "use_cache": False})
    ids, parts, past, start = inputs[main_ids(inputs)], [], None, 0
    for size in [*prefix, *[1] * (ids.shape[1] - sum(prefix))]:
        step = {**inputs, main_ids(inputs): ids[:, start : start + size], "use_cache": True}
        with torch.no_grad():
            out = forward(model, {**step, **cache_argument(model, past)})
        past, start = output_cache(out), start + size
        if past is None:
            raise NotApplicableError("the model makes no cache")
        parts.append(next(value for value in floating_tensors(out) if value.dim() >= 3))
    return relative_difference(torch.cat(parts, dim=1), full)


def decode_by_token(model: PreTrainedModel, inputs: Inputs) -> float:
    return _decode(model, inputs, ())


def decode_after_prefill(model: PreTrainedModel, inputs: Inputs) -> float:
    return _decode(model, inputs, (4, 3))


def generation(model: PreTrainedModel, inputs: Inputs) -> float:
    """Share of tokens of `generate` that differ between cache and no cache, with padding on the left."""
    inputs = _text_only(model, inputs)
    ids = inputs["input_ids"]
    if not model.can_generate():
        raise NotApplicableError("the model does not generate")
    mask = torch.ones_like(ids)
    prompt = {name: value for name, value in inputs.items() if name not in ("decoder_input_ids", "use_cache")}
    if "decoder_input_ids" in inputs or not accepts(model, "attention_mask"):
        prompt["input_ids"] = tokens(LENGTH)
    else:
        mask[1, :PADDING] = 0
        prompt["input_ids"] = torch.where(mask == 0, 0, ids)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    generated = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        generated.append(model.generate(**prompt, attention_mask=mask, use_cache=use_cache, **settings))
    if not all(isinstance(ids, Tensor) for ids in generated) or generated[0].shape != generated[1].shape:
        return float("inf")
    return float((generated[0] != generated[1]).float().mean())


def save_and_load(model: PreTrainedModel, inputs: Inputs) -> float:
    """0 if a saved and loaded model gives the same bits, else infinity."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if hla.is_patched(model):
            loaded = hla.load_pretrained(folder, auto_class=base_class(type(model)))
        else:
            loaded = type(model).from_pretrained(folder)
        # Weights read from a file lie elsewhere in memory, where kernels may add in another order: copy them.
        loaded = copy.deepcopy(loaded.eval())
    return 0.0 if bit_equal(outputs(loaded, inputs), outputs(model, inputs)) else float("inf")


PROPERTIES: dict[str, Callable[[PreTrainedModel, Inputs], float]] = {
    "backward": backward,
    "padding right": padding_right,
    "padding left": padding_left,
    "causality": causality,
    "decode by token": decode_by_token,
    "decode after prefill": decode_after_prefill,
    "generate": generation,
    "save and load": save_and_load,
}


# --------------------------------------------------------------------------------------------------------------------
# One case


def examine(case: Case, mechanisms: Sequence[str] = ("elu",)) -> list[Result]:
    """Check every property of a case with each mechanism; after one that does not work, the others are left out.

    Nothing is raised: what goes wrong is the result.
    """
    results = []
    model: PreTrainedModel | None = None
    for attention in mechanisms:
        result, start = Result(str(case), attention), time.perf_counter()
        results.append(result)
        try:
            if model is None:
                model, level, inputs = build(case)
            if any(layer.terms for layer in find_attention(model) if layer.span == "full"):
                result.attention = FOR_TERMS
            result.class_name, result.level = type(model).__name__, level
            result.parameters = sum(tensor.numel() for tensor in model.parameters())
            with mock.patch.dict(os.environ):
                _examine(model, inputs, result)
        except CannotBuildError as error:
            result.outcome, result.detail = UNBUILT, str(error)
        except Exception as error:  # noqa: BLE001  (the point is to find whatever is raised)
            result.outcome, result.detail = WRONG, f"{type(error).__name__}: {error}"
        result.seconds = round(time.perf_counter() - start, 2)
        if result.outcome != WORKS or result.attention == FOR_TERMS:
            break
    return results


def build(case: Case) -> tuple[PreTrainedModel, str, Inputs | None]:
    """The smallest model that can be made, and inputs that it runs on (None: it is refused before it would run)."""
    problem: CannotBuildError | None = None
    for level in LEVELS:
        try:
            model = architecture_model(case, level)
            only_cross = all(layer.cross for layer in find_attention(model))
            return model, level, None if only_cross else find_inputs(model)
        except CannotBuildError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _examine(model: PreTrainedModel, inputs: Inputs | None, result: Result) -> None:
    try:
        hla.unpatch_model(patch(model, result))
    except REFUSALS as error:
        result.outcome, result.detail = REFUSED, str(error)
        return
    check(model, inputs or find_inputs(model), result)
    failed = [f"{name} {text}" for name, text in result.checks.items() if text.startswith("failed")]
    result.outcome, result.detail = (WRONG, "; ".join(failed)) if failed else (WORKS, "")
    if not failed and result.checks["effect"].startswith("refused"):
        result.outcome, result.detail = REFUSED, result.checks["effect"]


def _plan(default: Any, result: Result) -> dict[str, Any]:
    return {"default": default, **dict.fromkeys(result.left_out, "softmax")}


def patch(model: PreTrainedModel, result: Result) -> PreTrainedModel:
    """Patch all that can be: where a layer is refused by name, follow the advice and leave that layer out."""
    refusal: Exception | None = None
    while True:
        try:
            model = hla.patch_model(model, _plan(result.attention, result))
            os.environ[SKIP_VARIABLE] = "1"  # One trial of each case is enough.
            return model
        except NotImplementedError as error:
            if "cannot be tried here" in str(error):  # The checks below try more kinds of inputs.
                os.environ[SKIP_VARIABLE] = "1"
                continue
            refusal = refusal or error
            if not _leave_out(model, error, result):
                raise refusal from None
        except ValueError as error:
            raise (refusal or error) from None


def _leave_out(model: PreTrainedModel, error: Exception, result: Result) -> bool:
    """Note the layer that a refusal names; False if it names none, or one that is left out already."""
    names = [layer.name for layer in find_attention(model) if not layer.cross]
    named = [name for name in names if any(part in str(error) for part in (f"({name},", f"({name})", f"{name!r}"))]
    if not named or named[0] in result.left_out:
        return False
    result.left_out.append(named[0])
    return True


def check(model: PreTrainedModel, inputs: Inputs, result: Result) -> None:
    """Fill in `result.checks` and `result.layers`. The model is left unpatched."""
    before, keys = outputs(model, inputs), list(model.state_dict())
    exact = {name: _difference(function, model, inputs) for name, function in PROPERTIES.items()}
    repeatable = bit_equal(before, outputs(model, inputs))
    patch(model, result)
    try:
        inputs, after = _patched_outputs(model, inputs, result)
    except REFUSALS as error:
        if not _raised_by_the_package(error):
            raise
        result.checks["effect"] = f"refused: {error}"
        result.layers = kinds_of_layers(model) if hla.is_patched(model) else {}
    else:
        result.layers = kinds_of_layers(model)
        result.checks["finite"] = _finite(before, after)
        result.checks["effect"], result.checks["direction"] = _effect_and_direction(model, inputs, before, after)
        for name, function in PROPERTIES.items():
            result.checks[name] = _compare(exact[name], function, model, inputs)
    if hla.is_patched(model):
        hla.unpatch_model(model)
    again = outputs(model, {name: value for name, value in inputs.items() if name != "use_cache"})
    same = list(model.state_dict()) == keys and (not repeatable or bit_equal(before, again))
    result.checks["unpatch"] = "passed" if same else "failed: outputs differ from those before patch_model"
    if not result.checks["effect"].startswith("refused"):
        result.checks["whole window"] = _whole_window(model, inputs, result) if repeatable else "n/a: random"


def _whole_window(model: PreTrainedModel, inputs: Inputs, result: Result) -> str:
    """Whether a window that holds the whole input gives the outputs of exact attention: the same mask and direction."""
    if any(name.endswith("mask") and not bool(value.all()) for name, value in inputs.items()):
        return "n/a: outputs of padding may be anything"
    without = (*CACHES, "attentions")
    exact = outputs(model, {name: value for name, value in inputs.items() if name != "use_cache"}, without)
    try:
        hla.patch_model(model, _plan({"attention": "window", "window_size": 4096}, result))
        actual = outputs(model, inputs, without)
        reached = _architectures_reached(model, inputs)
    except REFUSALS as error:
        return f"refused: {error}" if _raised_by_the_package(error) else f"failed: {error}"
    finally:
        if hla.is_patched(model):
            hla.unpatch_model(model)
    worst = max(relative_difference(*pair) for pair in zip(actual, exact, strict=True))
    if worst > TOLERANCE:
        return f"failed: outputs differ by {worst:.1e}"
    result.architectures = sorted(reached)
    return "passed"


def _architectures_reached(model: PreTrainedModel, inputs: Inputs) -> set[str]:
    """The names of the architectures of all linear layers whose attention these inputs reach."""
    modules: set[Any] = set()
    with observe_attention(model, lambda call: modules.add(call.module)):
        outputs(model, inputs)
    return {architecture_name(layer) for layer in patched_layers(model).values() if layer.module in modules}


def _patched_outputs(model: PreTrainedModel, inputs: Inputs, result: Result) -> tuple[Inputs, list[Tensor]]:
    """Outputs of the patched model, following the advice of what it refuses; also the inputs that it took."""
    refusal: Exception | None = None
    while True:
        try:
            return inputs, outputs(model, inputs)
        except REFUSALS as error:
            refusal = refusal or error
            if "use_cache=False" in str(error) and "use_cache" not in inputs and accepts(model, "use_cache"):
                inputs = {**inputs, "use_cache": False}
                result.checks["cache"] = f"refused: {error}"
                continue
            if not _raised_by_the_package(error) or not _leave_out(model, error, result):
                raise
        hla.unpatch_model(model)
        try:
            patch(model, result)
        except REFUSALS:
            raise refusal from None


def _raised_by_the_package(error: BaseException) -> bool:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(PACKAGE) in frame.tb_frame.f_code.co_filename


def _finite(before: list[Tensor], after: list[Tensor]) -> str:
    if all(bool(torch.isfinite(tensor).all()) for tensor in after):
        return "passed"
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in before)
    return "failed: outputs are not finite" if finite else "n/a: neither are those of the exact model"


def _effect_and_direction(
    model: PreTrainedModel, inputs: Inputs, before: list[Tensor], after: list[Tensor]
) -> tuple[str, str]:
    """Whether linear attention changes the outputs, and every layer runs in the direction that it was built for."""
    change = max((relative_difference(a, b) for a, b in zip(after, before, strict=False)), default=0.0)
    differences, wrong = [], []

    def observe(call: AttentionCall) -> None:
        if change <= MIN_EFFECT:
            differences.append(relative_difference(call.linear_output(), call.output))
        full_mask = call.padding is not None and call.padding.dim() == 4  # such a mask gives the direction itself
        if not full_mask and call.causal != call.mechanism.shape.causal:
            wrong.append(f"failed: {type(call.module).__name__} is called with causal={call.causal}")

    with observe_attention(model, observe):
        outputs(model, inputs)
    if change > MIN_EFFECT:
        effect = "passed"
    elif not differences:
        raise CannotBuildError("inputs: none is known here that reaches the layers that were patched")
    elif max(differences) <= MIN_EFFECT:
        effect = "n/a: each token of these inputs sees itself only, or equal tokens"
    else:
        effect = f"failed: outputs change by {change:.1e} only"
    return effect, wrong[0] if wrong else "passed"


def kinds_of_layers(model: PreTrainedModel) -> dict[str, int]:
    """How many attention modules of a patched model are linear, and why the others are exact."""
    linear = {layer.name for layer in hla.patch_report(model).layers if layer.attention != "softmax"}
    kinds: Counter[str] = Counter()
    for layer in find_attention(model):
        if layer.name in linear:
            kinds["linear, causal" if layer.causal else "linear, bidirectional"] += 1
        elif layer.cross:
            kinds["cross-attention"] += 1
        else:
            kinds[layer.span if layer.span != "full" else f"left out: {layer.obstacle or 'no heads'}"] += 1
    return dict(kinds)


def _difference(function: Callable[..., float], model: PreTrainedModel, inputs: Inputs) -> float | str:
    """What the exact model gives: a difference, or why there is none."""
    try:
        return function(model, inputs)
    except NotApplicableError as error:
        return f"n/a: {error}"
    except Exception as error:  # noqa: BLE001  (the exact model may raise anything)
        return f"n/a: the exact model raises {describe(error, 150)}"


def _compare(exact: float | str, function: Callable[..., float], model: PreTrainedModel, inputs: Inputs) -> str:
    if isinstance(exact, str):
        return exact
    if not exact <= TOLERANCE:
        return f"n/a: the exact model differs by {exact:.1e}"
    try:
        value = function(model, inputs)
    except NotApplicableError as error:
        return f"n/a: {error}"
    except NotImplementedError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001  (the point is to find whatever is raised)
        return f"failed: {describe(error)}"
    return "passed" if value <= TOLERANCE else f"failed: differs by {value:.1e} (exact: {exact:.1e})"
