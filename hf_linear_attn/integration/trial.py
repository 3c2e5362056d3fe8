"""Whether linear attention works in an architecture: by the table that is shipped, else by a trial.

A new version of Transformers, or a class of the user's own, may handle caches or masks in a way that nobody has seen
here, and be wrong without a word. What the table does not list is therefore tried: on a dozen random tokens, or on two
images or sounds, a model with a window over the whole input must equal the exact one in one pass, with padding on the
left, and in pieces with a cache. The verdict is kept in the cache folder. The model itself is never touched: a copy
runs, of the first layers, which shares its weights.
"""

import contextlib
import copy
import functools
import hashlib
import inspect
import itertools
import json
import os
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..config import LinearAttentionConfig
from ..mechanisms.softmax import EXACT
from ..ops.native.build import BuildError, cache_folder
from ..utils.files import atomic_write
from ..utils.models import accepted
from ..version import __version__
from .cache_argument import cache_argument, output_cache, takes_cache
from .context import is_patched
from .discovery import AttentionLayer
from .exact import observe_attention
from .install import install_layers, plan_layers, remove_layers
from .models import base_class

#: Architecture -> the versions of Transformers with which every check of the sweep over all architectures passed.
TABLE = Path(__file__).with_name("architectures.json")
#: Set to 1, it lets models be patched that are not in the table, without a trial.
SKIP_VARIABLE = "HF_LINEAR_ATTN_SKIP_TRIAL"

#: Tokens of the trial, and those among them that pad the second row.
LENGTH, PADDING = 12, 4
#: Where the tokens are cut into pieces: a single one on an empty cache and several; single ones after a prompt.
CUTS = (0, 1, 8, LENGTH)
CUTS_BY_TOKEN = (0, 9, 10, 11, LENGTH)
#: The first layers of a stack that run, at least.
LEAST_LAYERS = 2
#: Windows over the whole of some tokens, and of the patches of an image.
TOKEN_WINDOW, IMAGE_WINDOW = 64, 8192
#: Fields of configs: the sizes of images, patches and spectrograms.
SIZES = (
    ("image_size",),
    ("num_channels", "in_channels"),
    ("patch_size",),
    ("temporal_patch_size",),
    ("num_mel_bins",),
    ("max_source_positions",),
    ("feature_projection_input_dim",),
)
#: Samples of a sound, and frames, rows and columns of the patches of two images.
SAMPLES, GRID = 4000, ((1, 4, 4), (1, 4, 4))
#: Largest `‖a - b‖ / ‖b‖` of outputs by the coarsest dtype of the weights; other dtypes are those of quantized weights.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 3e-2}
COARSE = 1e-1
#: Parameters up to this size get noise in the copy: what a fresh model has set to zero could not be seen to matter.
SMALL = 1 << 16
NOISE = 0.1

Inputs = dict[str, Any]


class UntriableError(Exception):
    """The model cannot be tried here; the message says why."""


def check_architecture(root: PreTrainedModel, layers: Sequence[AttentionLayer]) -> None:
    """Raise a NotImplementedError unless linear attention is known to work in these layers of a model.

    Args:
        root: A model that is no part of another one, patched or exact.
        layers: Layers of it that are, or are to be, linear.
    """
    groups: dict[tuple[str, ...], list[AttentionLayer]] = {}
    for layer in layers:
        if not is_listed(layer):
            groups.setdefault(_candidates(layer), []).append(layer)
    if not groups or os.environ.get(SKIP_VARIABLE) == "1":
        return
    for candidates, unknown in groups.items():
        try:
            problem = _known_problem(root, candidates, unknown)
        except UntriableError as error:
            problem = f"it cannot be tried here: {error}"
        if problem:
            first = unknown[0]
            model = type(first.models[candidates[0]]).__name__
            attention = type(first.module).__name__
            raise NotImplementedError(
                f"{model} with {attention} ({first.name}) is not among the architectures that were tested with "
                f"Transformers {transformers.__version__}, and {problem.removesuffix('.')}. Give such layers "
                f"'softmax', or set {SKIP_VARIABLE}=1 to patch the model as it is, and compare its outputs yourself."
            )


# -------------------------------------------------------------------------------------------------------- What is known


@functools.cache
def _table() -> frozenset[str]:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return frozenset(name for name, versions in table.items() if transformers.__version__ in versions)


def architecture_name(layer: AttentionLayer) -> str:
    """Return the name of a layer's architecture in the table: its nearest model, class, direction and terms."""
    around = base_class(type(layer.around))
    folder = around.__module__.split(".")[-2]
    direction = "causal" if layer.causal else "bidirectional"
    return " ".join((folder, around.__qualname__, type(layer.module).__qualname__, direction, *layer.terms))


def is_listed(layer: AttentionLayer) -> bool:
    """Return whether the table lists a layer's architecture, all of whose classes are Transformers' own.

    A flag that a user sets on a module gives it the other direction, for masks too, which exact attention does not.
    """
    names = {architecture_name(replace(layer, causal=causal)) for causal in (True, False)}
    return not _is_foreign(layer) and not names.isdisjoint(_table())


def _is_foreign(layer: AttentionLayer) -> bool:
    classes = map(type, (layer.module, *layer.parents.values()))
    return any(cls.__module__.partition(".")[0] not in ("transformers", "torch") for cls in classes)


def _candidates(layer: AttentionLayer) -> tuple[str, ...]:
    """Return the names of the models that a layer can be tried in, the best one first.

    The nearest one has the fewest inputs; classes of the user's own may do anything in the outer ones.
    """
    return tuple(reversed(layer.models) if _is_foreign(layer) else layer.models)


def _known_problem(root: PreTrainedModel, candidates: Sequence[str], layers: Sequence[AttentionLayer]) -> str:
    """Return "" or why these layers of a model do not work, from the cache folder or by a trial."""
    path, names = _problem_file(layers), [layer.name for layer in layers]
    if path is not None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # There is none yet, or it is damaged.
            return str(json.loads(path.read_text(encoding="utf-8"))["reason"])
    reason = try_layers(root, candidates, names)
    if path is not None:
        with contextlib.suppress(OSError):  # A full disk keeps nobody from patching.
            atomic_write(path, json.dumps({"model": type(root).__name__, "layers": names, "reason": reason}))
    return reason


def _problem_file(layers: Sequence[AttentionLayer]) -> Path | None:
    """Return the file of a verdict, by all that it may depend on but for the weights; None where it cannot be kept.

    Those are the versions of this package and of Transformers, the files with the classes around the layers, and the
    switches of their config.
    """
    parts = [__version__, transformers.__version__, *(layer.name for layer in layers)]
    classes: set[type] = set()
    for layer in layers:
        classes |= {base_class(type(module)) for module in (layer.module, *layer.parents.values())}
    try:
        for cls in sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)):
            digest = hashlib.sha256(Path(inspect.getfile(cls)).read_bytes()).hexdigest()
            parts.append(f"{cls.__module__}.{cls.__qualname__} {digest}")
        folder = cache_folder()
    except (OSError, TypeError, BuildError):  # A class of a notebook is in no file, and may be another one tomorrow.
        return None
    models = {next(iter(layer.models)): layer.around for layer in layers}
    parts += [repr(_switches(models[name].config)) for name in sorted(models)]
    return folder / "trials" / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.json"


# ------------------------------------------------------------------------------------------------------------ The trial


def try_layers(root: PreTrainedModel, candidates: Sequence[str], names: Sequence[str]) -> str:
    """Return "" if layers of a model work with linear attention, else what went wrong, as an end of a sentence.

    Args:
        root: The model, which is left as it is, patched or not.
        candidates: The names of models in it that may run; the first that takes the inputs of a trial does.
        names: The names of the attention modules to try.

    Raises:
        UntriableError: None of the candidates runs, or a layer is not reached.
    """
    for name, tensor in root.named_parameters():
        if tensor.is_meta or type(tensor).__module__.startswith("torch.distributed"):
            raise UntriableError(f"the weights ({name}) are {'not loaded' if tensor.is_meta else 'shards'}")
    gpus = range(torch.cuda.device_count())
    device = next(root.parameters()).device
    with torch.no_grad(), torch.random.fork_rng(gpus), torch.autocast(device.type, enabled=False):
        try:
            twin = _twin(root)
            left = _shorten(twin, names)
            return _try_twin(twin, candidates, left)
        except UntriableError:  # It may need all of its layers, or others than the first ones.
            return _try_twin(_twin(root), candidates, names)


def _try_twin(twin: PreTrainedModel, candidates: Sequence[str], names: Sequence[str]) -> str:
    part, inputs, expected = _run_exactly(twin, candidates)
    try:
        _patch(twin, names, TOKEN_WINDOW if "input_ids" in inputs else IMAGE_WINDOW)
    except (NotImplementedError, ValueError) as error:
        raise UntriableError(f"a window does not fit ({error})") from error
    for way, outputs in expected.items():
        if problem := _compare(way, part, inputs, outputs):
            return problem
    # A module may run and yet compute its attention elsewhere, as before.
    reached: set[nn.Module] = set()
    with observe_attention(twin, lambda call: reached.add(call.module)):
        _in_one_pass(part, inputs)
    for name in names:
        if twin.get_submodule(name) not in reached:
            raise UntriableError(f"the inputs of a trial do not reach the attention of {name}")
    return ""


def _twin(root: PreTrainedModel) -> PreTrainedModel:
    """Return an exact copy of a model in evaluation mode, without hooks, which shares all but the small parameters."""
    torch.manual_seed(0)
    memo: dict[int, Any] = {id(tensor): tensor for tensor in root.parameters()}
    for tensor in root.parameters():
        if type(tensor) is nn.Parameter and tensor.is_floating_point() and 0 < tensor.numel() <= SMALL:
            scale = NOISE if tensor.dim() < 2 else tensor.shape[-1] ** -0.5 / 2
            memo[id(tensor)] = nn.Parameter(tensor + scale * torch.randn_like(tensor), requires_grad=False)
    for module in root.modules():
        hooks = [value for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict)]
        memo.update({id(value): OrderedDict() for value in hooks})
    try:
        twin = copy.deepcopy(root, memo).eval()
    except (TypeError, RuntimeError) as error:
        raise UntriableError(f"{type(error).__name__}: {error}") from error
    if is_patched(twin):
        remove_layers(twin, [twin])
    return twin


def _shorten(twin: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Keep the first layers of each stack, with each kind of these attention modules; return the names that are left.

    Modules are of one kind if they have the same class and switches.
    """
    modules: dict[str, Any] = dict(twin.named_modules())
    left = list(names)
    for stack in [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]:
        kinds: set[str] = set()
        length = LEAST_LAYERS
        inside = [name for name in left if name.startswith(f"{stack}.")]
        for name in inside:
            kind = f"{type(modules[name])} {_switches(modules[name])}"
            if kind not in kinds:
                kinds.add(kind)
                length = max(length, _number(name, stack) + 1)
        if inside:
            twin.set_submodule(stack, modules[stack][:length])
            left = [name for name in left if name not in inside or _number(name, stack) < length]
    return left


def _number(name: str, stack: str) -> int:
    """Return the number of the layer in a stack that a module lies in."""
    return int(name.removeprefix(f"{stack}.").partition(".")[0])


def _switches(holder: object) -> list[tuple[str, Any]]:
    """Return the attributes of a module or config that are no sizes."""
    return sorted((name, value) for name, value in vars(holder).items() if isinstance(value, bool | str | None))


def _patch(twin: PreTrainedModel, names: Sequence[str], window_size: int) -> None:
    """Put a window over the whole input into these layers."""
    window = {"attention": "window", "window_size": window_size, "feature_map": "hedgehog"}
    config = LinearAttentionConfig.parse({"default": EXACT, **dict.fromkeys(names, window)})
    install_layers([twin], plan_layers(twin, config, twin))


def _run_exactly(twin: PreTrainedModel, candidates: Sequence[str]) -> tuple[Any, Inputs, dict[str, list[Tensor]]]:
    """Return the first candidate that runs, its inputs and its outputs in every way in which it runs."""
    problem = "it takes neither tokens nor images or sounds of a known size"
    for name in candidates:
        part: Any = twin.get_submodule(name)
        for inputs in _inputs(part):
            outputs, error = _exact_outputs(part, inputs)
            if ONE_PASS in outputs:
                return part, inputs, outputs
            problem = f"the exact model raises {type(error).__name__}: {error}"
    raise UntriableError(problem)


def _exact_outputs(part: Any, inputs: Inputs) -> tuple[dict[str, list[Tensor]], Exception | None]:
    """Return the outputs of a model in every way in which it runs, and why it does not in the last other one."""
    outputs, problem = dict[str, list[Tensor]](), None
    for way, run in WAYS.items():
        try:
            torch.manual_seed(0)  # Some models draw numbers, such as which patches they hide.
            outputs[way] = run(part, inputs)
        except Exception as error:  # noqa: BLE001  (a model may raise anything on inputs that it does not expect)
            problem = error
            if way == ONE_PASS:
                break
    return outputs, problem


def _inputs(model: Any) -> Iterator[Inputs]:
    """Iterate over the inputs that a model may take: two rows of tokens, two images or sounds, or flat patches."""
    names, config = inspect.signature(model.forward).parameters, model.config
    if "input_ids" in names:
        text = {"input_ids": _tokens(model)}
        yield {**text, **accepted(model, decoder_input_ids=text["input_ids"].flip(1))}
    size, channels, patch, times, bins, positions, width = (_first_integer(config, *options) for options in SIZES)
    shapes = {
        "pixel_values": (2, channels, size, size),
        "input_features": (2, LENGTH, width) if width else (2, bins, 2 * positions),
        "input_values": (2, SAMPLES),
    }
    first = next(model.parameters())
    frames = torch.ones(2, 2 * positions, dtype=torch.long, device=first.device)
    for name, shape in shapes.items():
        if name in names and all(shape):
            mask = accepted(model, input_features_mask=frames) if name == "input_features" else {}
            yield {name: torch.randn(shape).to(first), **mask}
    grid = torch.tensor(GRID, device=first.device)
    patches = torch.randn(int(grid.prod(1).sum()), channels * max(times, 1) * patch**2).to(first)
    for name in ("grid_thw", "image_grid_thw"):
        if name in names:
            yield {name: grid, **accepted(model, hidden_states=patches, pixel_values=patches)}


def _first_integer(config: Any, *names: str) -> int:
    """Return the first of these fields of a config that is an integer; 0 where none is."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


def _tokens(model: Any) -> Tensor:
    """Return random ordinary tokens `[2, L]`; the first few are special ones in most vocabularies."""
    size = min(100, getattr(model.config.get_text_config(), "vocab_size", 100))
    return torch.randint(min(5, size - 1), size, (2, LENGTH), device="cpu").to(model.device)


def _compare(way: str, part: Any, inputs: Inputs, expected: list[Tensor]) -> str:
    """Return "" where a patched model gives the exact outputs, else the difference."""
    torch.manual_seed(0)
    try:
        actual = WAYS[way](part, inputs)
    except NotImplementedError as error:
        # Where the package refuses a cache or a mask in plain words, nobody is misled.
        is_refusal = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(str(Path(__file__).parents[1]))
        text = str(error).partition(". ")[0]
        return "" if is_refusal and way != ONE_PASS else f"a trial ({way}) was refused: {text}"
    except Exception as error:  # noqa: BLE001  (a trial finds whatever is raised)
        return f"a trial ({way}) raised {type(error).__name__}: {error}"
    limit = max(TOLERANCE.get(tensor.dtype, COARSE) for tensor in part.parameters())
    difference = max(map(_difference, actual, expected), default=0.0)
    if len(actual) == len(expected) and difference <= limit:
        return ""
    return f"in a trial ({way}) its outputs differed from the exact ones by {difference:.2g} of their size"


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Return `‖a - b‖ / ‖b‖`; infinite for other shapes and for values that are not finite."""
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
        return float("inf")
    size = expected.double().norm().clamp(min=1e-12)
    return float((actual.double() - expected.double()).norm() / size)


def _in_one_pass(model: Any, inputs: Inputs) -> list[Tensor]:
    return _outputs(model(**inputs, **accepted(model, use_cache=False)))


def _padded_on_the_left(model: Any, inputs: Inputs) -> list[Tensor]:
    """Return the outputs at the tokens that are no padding, at the positions that `generate` gives."""
    if not {"input_ids", "attention_mask"} <= inspect.signature(model.forward).parameters.keys():
        return []
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :PADDING] = 0
    options = {"attention_mask": mask, "use_cache": False, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    if not takes_cache(model):
        options.pop("position_ids")
    output = _by_token(model(**inputs, **accepted(model, **options)), LENGTH)
    return [output if "decoder_input_ids" in inputs else output[mask.bool()]]


def _in_pieces(cuts: Sequence[int], model: Any, inputs: Inputs) -> list[Tensor]:
    """Return the outputs of consecutive pieces, each with the cache of those before it; none without a cache."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    if not takes_cache(model) or name not in inputs:
        return []
    cache, outputs = None, []
    for start, stop in itertools.pairwise(cuts):
        piece = {**inputs, name: inputs[name][:, start:stop], **cache_argument(model, cache)}
        output = model(**piece, **accepted(model, use_cache=True))
        outputs.append(_by_token(output, stop - start))
        cache = output_cache(output)
        if cache is None:
            return []
    return outputs


ONE_PASS = "in one pass"
WAYS: dict[str, Callable[[Any, Inputs], list[Tensor]]] = {
    ONE_PASS: _in_one_pass,
    "with padding on the left": _padded_on_the_left,
    "in pieces, with a cache": functools.partial(_in_pieces, CUTS),
    "token by token, with a cache": functools.partial(_in_pieces, CUTS_BY_TOKEN),
}


def _outputs(output: Any) -> list[Tensor]:
    """Return the floating tensors of a model's output, without those of caches."""
    values = output.values() if isinstance(output, dict) else output
    leaves = tree_leaves([value for value in values if not isinstance(value, Cache)])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _by_token(output: Any, length: int) -> Tensor:
    """Return the output `[B, L, …]` with a row for every token; of other outputs the first."""
    tensors = _outputs(output)
    return next((tensor for tensor in tensors if tensor.dim() > 2 and tensor.shape[1] == length), tensors[0])
