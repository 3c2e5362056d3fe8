"""Where the documents of a packed batch begin: read from position ids, handed to the layers, and never lost.

`before_model` runs before each model around patched layers. Where `position_ids` begin again it adds the boundaries as
`cu_seq_lens_q`, the argument in which Transformers hands them to flash attention. Some models keep it from their
layers, so the masks that they make meanwhile carry the boundaries too. `after_model` objects if no layer was reached.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .discovery import AttentionLayer, forward_source

#: Transformers' arguments that carry boundaries: `[n + 1]`, the first token of each document and the end.
BOUNDARIES = "cu_seq_lens_q"
CARRIERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: On a model around patched layers: what its `forward` takes (`ForwardArguments`).
ARGUMENTS = "_linear_attention_arguments"
#: On a mask: the boundaries of the batch that it was made for.
MARK = "_document_boundaries"
#: On a cache: a packed batch went through it.
PACKED = "_holds_packed_documents"

KEPT = (
    "{} does not hand cu_seq_lens_q to its attention, so that packed documents would see each other. Pass padded rows "
    "with an attention_mask."
)
FILLED = (
    "Packed documents (position_ids that begin again, or cu_seq_lens_q) cannot be combined with a cache that holds "
    "tokens: which document would go on? Pass use_cache=False, or generate from padded rows."
)


@torch.compiler.disable
def find_documents(position_ids: Tensor, *, any_jump: bool = False) -> Tensor | None:
    """`position_ids [B, S]` that begin again -> boundaries `[n + 1]` in the flattened batch; None for one a row.

    A document is a run of positions that go up by one, and all begin with the same one (0; 2 in RoBERTa). Anything else
    says nothing about documents: permuted, repeated or skipped positions. any_jump: every run is a document.
    """
    first = torch.ones_like(position_ids[:, :1], dtype=torch.bool)
    begins = torch.cat([first, position_ids.diff(dim=1) != 1], dim=1)
    starts = begins.flatten().nonzero().squeeze(1)
    if len(starts) == len(position_ids):
        return None
    if not any_jump:
        values = position_ids.reshape(-1)[starts]
        if len(starts) == position_ids.numel() or bool((values != values[0]).any()):
            return None
    end = torch.tensor([position_ids.numel()], device=starts.device)
    return torch.cat([starts, end]).to(torch.int32)


@dataclass(frozen=True)
class ForwardArguments:
    """What the `forward` of a model around patched layers takes, in order, and what is to be known of the model.

    more: it takes any keyword argument. hands_on: these reach its attention, as far as the source tells. causal: the
    direction of its layers. other_mixer: see there.
    """

    names: tuple[str, ...]
    more: bool
    hands_on: bool
    causal: bool
    other_mixer: str

    @classmethod
    def of(cls, model: nn.Module, layer: str, causal: bool, mixer: str) -> ForwardArguments:
        names, more = _arguments(type(model))
        path = [model]
        for part in layer.split("."):
            path.append(path[-1].get_submodule(part))
        hands_on = all(_passes_on(type(held)) for held in path if not isinstance(held, nn.ModuleList))
        return cls(names, more is not None, hands_on, causal, mixer)


def _arguments(kind: type) -> tuple[tuple[str, ...], str | None]:
    """Names of the arguments of a class's `forward`, and that of its `**kwargs`."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]  # type: ignore[attr-defined]
    names = tuple(held.name for held in parameters if held.kind is held.POSITIONAL_OR_KEYWORD)
    return names, next((held.name for held in parameters if held.kind is held.VAR_KEYWORD), None)


def _passes_on(kind: type) -> bool:
    """Whether `**kwargs` stand in the signature and in a call."""
    more = _arguments(kind)[1]
    return more is not None and forward_source(kind).count(f"**{more}") > 1


@dataclass
class Run:
    """A model around patched layers that runs. shape: B and S of a packed batch; reached: by how many layers so far."""

    module: nn.Module
    boundaries: Tensor | None = None
    shape: tuple[int, int] = (0, 0)
    reached: int = 0


class _Running(threading.local):
    """The models around patched layers that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Run] = []


_running = _Running()


def current() -> Run | None:
    """The innermost model that runs on a packed batch."""
    run = _running.stack[-1] if _running.stack else None
    return None if run is None or run.boundaries is None else run


def boundaries_of(kwargs: dict[str, Any], mask: Tensor | None) -> Tensor | None:
    """The boundaries that a layer was handed, `[n + 1]`, or None."""
    found = kwargs.get(BOUNDARIES)
    found = getattr(mask, MARK, None) if found is None else found
    if found is not None and _running.stack:
        _running.stack[-1].reached += 1
    return found


# --------------------------------------------------------------------------------------------------------------------
# Hooks


def watch(model: nn.Module, layers: Sequence[AttentionLayer]) -> None:
    """Put the hooks on every model around these self-attention layers: the nearest `PreTrainedModel` of each."""
    modules = dict(model.named_modules())
    for layer in layers:
        name = layer.name
        while name and not isinstance(modules[name], PreTrainedModel):
            name = name.rpartition(".")[0]
        around = modules[name]
        if hasattr(around, ARGUMENTS):
            continue
        prefix = f"{name}." if name else ""
        inside = [held.name.removeprefix(prefix) for held in layers if held.name.startswith(prefix)]
        setattr(around, ARGUMENTS, ForwardArguments.of(around, inside[0], layer.causal, other_mixer(around, inside)))
        around.register_forward_pre_hook(before_model, with_kwargs=True)
        around.register_forward_hook(after_model, always_call=True)


def other_mixer(model: nn.Module, attention: Sequence[str]) -> str:
    """A part of the model, by its name, that mixes tokens without attention and knows no boundaries; or "".

    A convolution over the sequence, or a layer without attention in a stack of layers that have it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and any(held.startswith(f"{name}.") for held in attention):
            for number, part in enumerate(module):
                place = f"{name}.{number}"
                other = not any(held.startswith(f"{place}.") for held in attention)
                mixes = other or any(isinstance(m, nn.Conv1d) and m.kernel_size[0] > 1 for m in part.modules())
                if mixes and not any(BOUNDARIES in forward_source(type(inner)) for inner in part.modules()):
                    return f"{place} ({type(part).__name__})"
    return ""


def unwatch(module: nn.Module) -> None:
    """Take the hooks off a module, where it has them."""
    vars(module).pop(ARGUMENTS, None)
    for hooks, flags, ours in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, before_model),
        (module._forward_hooks, module._forward_hooks_always_called, after_model),
    ):
        for number, hook in list(hooks.items()):
            if hook is ours:
                del hooks[number]
                flags.pop(number, None)


def before_model(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a model around patched layers: where position ids begin again, hand boundaries on.

    The mask of ones that goes with them keeps Transformers from making a mask `[B, 1, L, L]` of the same documents.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _running.stack.append(Run(module))
    takes: Any = getattr(module, ARGUMENTS)
    given = {**dict(zip(takes.names, args, strict=False)), **kwargs}
    boundaries = given.get(BOUNDARIES)
    if boundaries is None and not (takes.causal and compiling):
        # (While compiling, a decoder is handed the full mask that Transformers then makes of its positions.)
        boundaries = _from_positions(module, takes, given)
    tokens = _tokens(given)
    if boundaries is None or tokens is None:
        return None
    _check(module, takes, given)
    added: dict[str, Any] = {}
    if given.get(BOUNDARIES) is None and takes.more:
        added = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    if given.get("attention_mask") is None and "attention_mask" in takes.names:
        added["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if not compiling:
        _running.stack[-1] = Run(module, boundaries, (tokens.shape[0], tokens.shape[1]))
    placed = {name for name, _ in zip(takes.names, args, strict=False)}
    if placed & set(added):  # an explicit None by position
        args = tuple(added.pop(name, held) for name, held in zip(takes.names, args, strict=False))
    return args, {**kwargs, **added}


def after_model(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of the same model: boundaries that no layer has seen would be documents that see each other."""
    if _running.stack:  # empty where the model is compiled as a whole
        _finish(module, output)


@torch.compiler.disable
def _finish(module: nn.Module, output: Any) -> None:
    if _running.stack[-1].module is not module:
        return
    run = _running.stack.pop()
    if run.boundaries is not None and output is not None and not run.reached:
        raise NotImplementedError(KEPT.format(type(module).__name__))


def _check(module: nn.Module, takes: ForwardArguments, given: dict[str, Any]) -> None:
    """Raise where documents could not be kept apart."""
    kind = type(module).__name__
    if "position_ids" in takes.names and given.get("position_ids") is None:
        raise ValueError(
            f"{BOUNDARIES} needs position_ids that begin again with each document: without them {kind} counts "
            "positions over all documents. DataCollatorWithFlattening makes both."
        )
    if takes.other_mixer:
        raise NotImplementedError(
            f"Packed documents (position_ids that begin again, or {BOUNDARIES}) would run into each other in {kind}: "
            f"{takes.other_mixer} mixes tokens without attention and knows no boundaries. Pass padded rows."
        )
    if torch.compiler.is_compiling() and not takes.hands_on:  # elsewhere the masks carry them
        raise NotImplementedError(KEPT.format(kind))
    cache = _cache(given)
    if cache is not None and int(cache.get_seq_length()):
        raise NotImplementedError(FILLED)


def _from_positions(module: nn.Module, takes: ForwardArguments, given: dict[str, Any]) -> Tensor | None:
    """Boundaries of the documents that positions tell of; None where there is one document a row."""
    positions, tokens = given.get("position_ids"), _tokens(given)
    if not isinstance(positions, Tensor) or given.get("attention_mask") is not None or tokens is None:
        return None
    if positions.dim() != 2 or positions.shape[1] < 2:
        return None
    use_cache = given.get("use_cache")
    if use_cache is None:
        use_cache = getattr(getattr(module, "config", None), "use_cache", False)
    # As Transformers does where there can be no cache; with one it takes positions for positions.
    any_jump = takes.causal and _cache(given) is None and not use_cache
    return find_documents(positions.expand(tokens.shape[0], -1), any_jump=any_jump)


def _tokens(given: dict[str, Any]) -> Tensor | None:
    return next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)


def _cache(given: dict[str, Any]) -> Cache | None:
    return next((held for held in given.values() if isinstance(held, Cache)), None)


def mark_cache(cache: Cache, layer_index: int, kwargs: dict[str, Any]) -> None:
    """Let a packed batch go through an empty cache, and nothing come after it.

    Raises:
        NotImplementedError: the cache holds tokens, of a packed batch or before one.
    """
    packed = kwargs.get(BOUNDARIES) is not None or current() is not None
    if not packed and not getattr(cache, PACKED, False):
        return
    if int(cache.get_seq_length(layer_index)):
        raise NotImplementedError(FILLED)
    setattr(cache, PACKED, packed)
