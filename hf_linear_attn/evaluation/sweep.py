"""The architecture sweep: patch a tiny random instance of every model type, and check what a patched model promises.

Every property is asked of the exact model first: what softmax attention does not keep either (a model that shifts its
positions with the padding, say) is not demanded of the patched one, and is recorded so.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..integration.attention import AttentionCall, observe_attention
from ..integration.discovery import find_attention
from ..patching import is_patched, patch_model, patch_report, unpatch_model
from .sweep_checks import CHECKS, NotApplicableError, outputs, relative_difference
from .tiny import LEVELS, CannotBuildError, Case, accepts, tiny_model
from .tiny_inputs import Inputs, find_inputs

PACKAGE = Path(__file__).resolve().parents[1]
#: What a user is told that cannot be served. Anything else that is raised is a fault.
REFUSALS = (NotImplementedError, ValueError, TypeError)
#: Largest relative difference of two ways to the same float32 outputs.
TOLERANCE = 1e-4
#: Smallest relative change of the outputs that shows that linear attention runs.
LEAST_EFFECT = 1e-5

WORKS, REFUSED, UNBUILT, WRONG = "works", "refused", "cannot be built tiny", "wrong"


@dataclass
class Result:
    """One case of the sweep. checks: name -> "passed", "n/a: why", "refused: text" or "failed: what"."""

    case: str
    attention: str
    outcome: str = ""
    detail: str = ""
    class_name: str = ""
    level: str = ""
    parameters: int = 0
    #: The layers that were left out by name, because the plain call refused them and said so.
    left_out: list[str] = field(default_factory=list)
    #: Kind of layer -> how many: "linear", "cross-attention", "sliding window of 4", …
    layers: dict[str, int] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sweep_case(case: Case, attention: str = "elu") -> Result:
    """Run every check on one case. Never raises: what goes wrong is the result."""
    result = Result(str(case), attention)
    start = time.perf_counter()
    try:
        _sweep(case, attention, result)
    except CannotBuildError as error:
        result.outcome, result.detail = UNBUILT, str(error)
    except Exception as error:  # noqa: BLE001  (the sweep is to find whatever is raised)
        result.outcome, result.detail = WRONG, f"{type(error).__name__}: {error}"
    result.seconds = round(time.perf_counter() - start, 2)
    return result


def _sweep(case: Case, attention: str, result: Result) -> None:
    model, inputs = build(case, result)
    result.class_name = type(model).__name__
    result.parameters = sum(tensor.numel() for tensor in model.parameters())
    try:
        patch(model, attention, result)
    except REFUSALS as error:
        result.outcome, result.detail = REFUSED, str(error)
        return
    unpatch_model(model)
    inputs = inputs or find_inputs(model)
    check(model, lambda m: patch(m, attention, result), inputs, result)
    failed = [name for name, text in result.checks.items() if text.startswith("failed")]
    result.outcome = WRONG if failed else WORKS
    if failed:
        result.detail = "; ".join(f"{name} {result.checks[name]}" for name in failed)
    elif result.checks["effect"].startswith("refused"):
        result.outcome, result.detail = REFUSED, result.checks["effect"]


def build(case: Case, result: Result) -> tuple[PreTrainedModel, Inputs | None]:
    """The smallest model that can be made, and that runs on some inputs (None: it is refused before it would run)."""
    problem: CannotBuildError | None = None
    for level in LEVELS:
        try:
            model = tiny_model(case, level)
            result.level = level
            if all(layer.cross for layer in find_attention(model)):
                return model, None
            return model, find_inputs(model)
        except CannotBuildError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def patch(model: PreTrainedModel, attention: str, result: Result) -> PreTrainedModel:
    """Patch all that can be: where a layer is refused by name, follow the advice and leave that layer out."""
    names = [layer.name for layer in find_attention(model) if not layer.cross]
    refusal: Exception | None = None
    while True:
        try:
            return patch_model(model, {"default": attention, **dict.fromkeys(result.left_out, "softmax")})
        except NotImplementedError as error:
            refusal = refusal or error
            if not _leave_out(names, error, result):
                raise refusal from None
        except ValueError as error:
            raise (refusal or error) from None


def _leave_out(names: list[str], error: Exception, result: Result) -> bool:
    """Note the layer that a refusal names; False if it names none, or one that is left out already."""
    text = str(error)
    named = [name for name in names if any(part in text for part in (f"({name},", f"({name})", f"{name!r}"))]
    if not named or named[0] in result.left_out:
        return False
    result.left_out.append(named[0])
    return True


def check(model: PreTrainedModel, patch: Callable[[Any], Any], inputs: Inputs, result: Result) -> None:
    """Fill in `result.checks` and `result.layers`. The model is left unpatched."""
    before = outputs(model, inputs)
    keys = list(model.state_dict())
    exact = {name: _attempt(partial(function, model, inputs)) for name, function in CHECKS.items()}
    repeatable = _equal(before, outputs(model, inputs))
    patch(model)
    try:
        inputs, after = _run_patched(model, patch, inputs, result)
    except REFUSALS as error:
        if not _is_ours(error):
            raise
        result.checks["effect"] = f"refused: {error}"
        result.layers = kinds_of_layers(model) if is_patched(model) else {}
    else:
        result.layers = kinds_of_layers(model)
        change = max((relative_difference(a, b) for a, b in zip(after, before, strict=False)), default=0.0)
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in after)
        result.checks["finite"] = "passed" if finite else _unless_exact_is_not(before)
        result.checks["effect"] = "passed" if change > LEAST_EFFECT else _no_effect(model, inputs, change)
        for name, function in CHECKS.items():
            result.checks[name] = _compared(exact[name], partial(function, model, inputs))
        result.checks["direction"] = _direction(model, inputs)
        result.checks["save and load"] = _saved(model, inputs, after)
    if is_patched(model):
        unpatch_model(model)
    again = outputs(model, {name: value for name, value in inputs.items() if name != "use_cache"})
    same = list(model.state_dict()) == keys and (not repeatable or _equal(before, again))
    result.checks["unpatch"] = "passed" if same else "failed: outputs differ from those before patch_model"


def _run_patched(
    model: PreTrainedModel, patch: Callable[[Any], Any], inputs: Inputs, result: Result
) -> tuple[Inputs, list[Tensor]]:
    """Outputs of the patched model, following the advice of what it refuses; also the inputs that it took."""
    names = [layer.name for layer in find_attention(model) if not layer.cross]
    first: Exception | None = None
    while True:
        try:
            return inputs, outputs(model, inputs)
        except REFUSALS as error:
            first = first or error
            if "use_cache=False" in str(error) and "use_cache" not in inputs and accepts(model, "use_cache"):
                inputs = {**inputs, "use_cache": False}
                result.checks["cache"] = f"refused: {error}"
                continue
            if not _is_ours(error) or not _leave_out(names, error, result):
                raise
        unpatch_model(model)
        try:
            patch(model)
        except REFUSALS:
            raise first from None


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised it: everything else is an accident."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and str(PACKAGE) in last.tb_frame.f_code.co_filename


def _no_effect(model: PreTrainedModel, inputs: Inputs, change: float) -> str:
    """Why the outputs are those of the exact model: a fault, unless linear layers do not run or have nothing to mix."""
    differences = []

    def observe(call: AttentionCall) -> None:
        differences.append(relative_difference(call.linear_output(), call.output))

    with observe_attention(model, observe):
        outputs(model, inputs)
    if not differences:
        raise CannotBuildError("inputs: none is known here that reaches the layers that were patched")
    if max(differences) <= LEAST_EFFECT:
        return "n/a: each token of these inputs sees itself only, or equal tokens"
    return f"failed: outputs change by {change:.1e} only"


def _direction(model: PreTrainedModel, inputs: Inputs) -> str:
    """Whether every layer runs in the direction, causal or not, that it was built for."""
    wrong = []

    def observe(call: AttentionCall) -> None:
        full = call.padding is not None and call.padding.dim() == 4  # such a mask says it all
        if not full and call.causal != call.mechanism.shape.causal:
            wrong.append(f"{type(call.module).__name__} is called with causal={call.causal}")

    with observe_attention(model, observe):
        outputs(model, inputs)
    return f"failed: {wrong[0]}" if wrong else "passed"


def kinds_of_layers(model: PreTrainedModel) -> dict[str, int]:
    """How many attention modules of a patched model are linear, and why the others are exact."""
    linear = {layer.name for layer in patch_report(model).layers if layer.attention != "softmax"}
    kinds: Counter[str] = Counter()
    for layer in find_attention(model):
        if layer.name in linear:
            kinds["linear, causal" if layer.causal else "linear, bidirectional"] += 1
        elif layer.cross:
            kinds["cross-attention"] += 1
        elif layer.span != "full":
            kinds[layer.span] += 1
        else:
            kinds[f"left out: {layer.obstacle or 'no heads'}"] += 1
    return dict(kinds)


def _attempt(run: Callable[[], float]) -> float | str:
    """A difference, or why there is none."""
    try:
        return run()
    except NotApplicableError as error:
        return f"n/a: {error}"
    except Exception as error:  # noqa: BLE001  (the exact model may raise anything)
        return f"n/a: the exact model raises {type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _compared(exact: float | str, run: Callable[[], float]) -> str:
    if isinstance(exact, str):
        return exact
    if not exact <= TOLERANCE:
        return f"n/a: the exact model differs by {exact:.1e}"
    try:
        value = run()
    except NotApplicableError as error:
        return f"n/a: {error}"
    except NotImplementedError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001  (the sweep is to find whatever is raised)
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
    return "passed" if value <= TOLERANCE else f"failed: differs by {value:.1e} (exact: {exact:.1e})"


def _unless_exact_is_not(before: list[Tensor]) -> str:
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in before)
    return "failed: outputs are not finite" if finite else "n/a: neither are those of the exact model"


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in zip(left, right, strict=True)
    )


def _saved(model: PreTrainedModel, inputs: Inputs, after: list[Tensor]) -> str:
    from ..checkpoints import load_pretrained
    from ..integration.model_class import base_class

    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            # Weights read from a file lie elsewhere in memory, where kernels may add in another order: copy them.
            loaded = copy.deepcopy(load_pretrained(folder, auto_class=base_class(type(model))).eval())
            change = max((relative_difference(a, b) for a, b in zip(outputs(loaded, inputs), after, strict=True)))
        except Exception as error:  # noqa: BLE001  (compared with what the exact model does)
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            if change == 0:
                return "passed"
            problem = f"differs by {change:.1e}"
    reference = _saved_exact(model, inputs)
    return f"failed: {problem}" if reference == "passed" else f"n/a: {reference}"


def _saved_exact(model: PreTrainedModel, inputs: Inputs) -> str:
    """Whether the same model, unpatched, comes back as it was."""
    plain = unpatch_model(copy.deepcopy(model))
    with tempfile.TemporaryDirectory() as folder:
        try:
            plain.save_pretrained(folder)
            loaded = type(plain).from_pretrained(folder).eval()
            if _equal(outputs(loaded, inputs), outputs(plain, inputs)):
                return "passed"
            return "the exact model is not the same after save_pretrained and from_pretrained"
        except Exception as error:  # noqa: BLE001  (the exact model may raise anything)
            return f"the exact model raises {type(error).__name__}: {' '.join(str(error).split())[:150]}"
