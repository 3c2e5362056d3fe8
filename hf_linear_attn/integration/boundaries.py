"""Where the documents of a packed batch begin: read from position ids, handed to the layers, and never lost.

`before_model` runs before each model around patched layers. Where `position_ids` begin again it adds the boundaries as
`cu_seq_lens_q`, the argument in which Transformers hands them to flash attention. Some models keep it from their
layers, so the masks that they make meanwhile carry the boundaries too. `after_model` objects if no layer was reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import source_guards
from .cache import FILLED_CACHE, self_attention_cache
from .context import ModelRun, forward_context
from .discovery import AttentionLayer
from .models import model_around, parent_names
from .packing import BOUNDARIES, MASK_BOUNDARIES

#: Transformers' arguments that describe a packed batch.
BOUNDARY_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: Name of the attribute of a model around patched layers that is its `ModelContext`.
MODEL_CONTEXT = "_linear_attention_model_context"

BOUNDARIES_LOST = (
    "{} does not hand cu_seq_lens_q to its attention, so that packed documents would see each other. Pass padded rows "
    "with an attention_mask."
)


@torch.compiler.disable
def find_documents(position_ids: Tensor, *, any_jump: bool = False) -> Tensor | None:
    """Return the boundaries `[n + 1]` of the documents in position ids `[B, S]`; None where each row is one document.

    A document is a run of positions that go up by one, and all begin with the same one (0; 2 in RoBERTa), or anywhere
    with `any_jump`. Anything else says nothing about documents: permuted, repeated or skipped positions.
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
class ModelContext:
    """What the hooks must know of a model around patched layers.

    Attributes:
        arguments: Names of the arguments of its `forward`, in order.
        takes_any_argument: Whether `forward` takes any keyword argument.
        passes_arguments_on: Whether these reach its attention, as far as the source says.
        causal: The direction of its layers.
        token_mixer: A part that mixes tokens without attention (see `token_mixer`), or "".
    """

    arguments: tuple[str, ...]
    takes_any_argument: bool
    passes_arguments_on: bool
    causal: bool
    token_mixer: str

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[str], causal: bool) -> ModelContext:
        """Describe a model around self-attention layers of these names."""
        names, kwargs = source_guards.argument_names(type(model))
        path = [model.get_submodule(name) for name in (layers[0], *parent_names(layers[0]))]
        passes_on = all(
            source_guards.passes_keyword_arguments_on(type(module))
            for module in path
            if not isinstance(module, nn.ModuleList)
        )
        return cls(names, kwargs is not None, passes_on, causal, token_mixer(model, layers))


def token_mixer(model: nn.Module, attention: Sequence[str]) -> str:
    """Return name and class of a part of a model that mixes tokens without regard to boundaries of documents; or "".

    That is a convolution over the sequence, or a layer without attention in a stack of layers that have it (`attention`
    are the names of the attention modules).
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not any(layer.startswith(f"{name}.") for layer in attention):
            continue
        for number, part in enumerate(module):
            path = f"{name}.{number}"
            has_attention = any(layer.startswith(f"{path}.") for layer in attention)
            convolves = any(isinstance(m, nn.Conv1d) and m.kernel_size[0] > 1 for m in part.modules())
            if has_attention and not convolves:
                continue
            if not any(BOUNDARIES in source_guards.forward_source(type(inner)) for inner in part.modules()):
                return f"{path} ({type(part).__name__})"
    return ""


def boundaries_of(kwargs: dict[str, Any], mask: Tensor | None) -> Tensor | None:
    """Return the boundaries `[n + 1]` that a layer received, as an argument or with its mask; or None."""
    boundaries = kwargs.get(BOUNDARIES)
    if boundaries is None and mask is not None:
        boundaries = getattr(mask, MASK_BOUNDARIES, None)
    if boundaries is not None and forward_context.runs:
        forward_context.runs[-1].layers_reached += 1
    return boundaries


# --------------------------------------------------------------------------------------------------------------------
# Hooks


def add_model_hooks(model: nn.Module, layers: Sequence[AttentionLayer]) -> None:
    """Put the hooks on every model around these self-attention layers: the nearest `PreTrainedModel` of each."""
    modules = dict(model.named_modules())
    for layer in layers:
        name = model_around(layer.name, modules)
        parent = modules[name]
        if hasattr(parent, MODEL_CONTEXT):
            continue
        prefix = f"{name}." if name else ""
        inside = [other.name.removeprefix(prefix) for other in layers if other.name.startswith(prefix)]
        setattr(parent, MODEL_CONTEXT, ModelContext.of(parent, inside, layer.causal))
        parent.register_forward_pre_hook(before_model, with_kwargs=True)
        parent.register_forward_hook(after_model, always_call=True)


def remove_hooks(module: nn.Module, *others: Callable[..., Any]) -> None:
    """Remove the hooks of a model around patched layers, and others, from a module, where it has them."""
    vars(module).pop(MODEL_CONTEXT, None)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if hook in (before_model, after_model, *others)]:
            for table in (hooks, module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called):
                table.pop(number, None)


def before_model(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hand boundaries on where position ids begin again: forward pre-hook of a model around patched layers.

    The mask of ones that is added with them keeps Transformers from making a mask `[B, 1, L, L]` of the same documents.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        forward_context.runs.append(ModelRun(module))
    context: ModelContext = getattr(module, MODEL_CONTEXT)
    positional = dict(zip(context.arguments, args, strict=False))
    inputs = {**positional, **kwargs}
    boundaries = inputs.get(BOUNDARIES)
    if boundaries is None and not (context.causal and compiling):
        # (While compiling, a decoder is handed the full mask that Transformers then makes of its positions.)
        boundaries = _boundaries_from_positions(module, context, inputs)
    tokens = _tokens(inputs)
    if boundaries is None or tokens is None:
        return None
    _check_packed_inputs(module, context, inputs)
    added: dict[str, Any] = {}
    if inputs.get(BOUNDARIES) is None and context.takes_any_argument:
        added = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    if inputs.get("attention_mask") is None and "attention_mask" in context.arguments:
        added["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if not compiling:
        forward_context.runs[-1] = ModelRun(module, boundaries, (tokens.shape[0], tokens.shape[1]))
    if set(positional) & set(added):  # An explicit None was passed by position.
        args = tuple(added.pop(name, value) for name, value in positional.items())
    return args, {**kwargs, **added}


def after_model(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Raise if no layer has seen the boundaries: forward hook of a model around patched layers."""
    if forward_context.runs:  # There is none where the model is compiled as a whole.
        _end_run(module, output)


@torch.compiler.disable
def _end_run(module: nn.Module, output: Any) -> None:
    if forward_context.runs[-1].module is not module:
        return
    run = forward_context.runs.pop()
    if run.boundaries is not None and output is not None and not run.layers_reached:
        raise NotImplementedError(BOUNDARIES_LOST.format(type(module).__name__))


def _check_packed_inputs(module: nn.Module, context: ModelContext, inputs: dict[str, Any]) -> None:
    """Raise where documents could not be separated."""
    kind = type(module).__name__
    if "position_ids" in context.arguments and inputs.get("position_ids") is None:
        raise ValueError(
            f"{BOUNDARIES} needs position_ids that begin again with each document: without them {kind} counts "
            "positions over all documents. DataCollatorWithFlattening makes both."
        )
    if context.token_mixer:
        raise NotImplementedError(
            f"Packed documents (position_ids that begin again, or {BOUNDARIES}) would run into each other in {kind}: "
            f"{context.token_mixer} mixes tokens without attention and knows no boundaries. Pass padded rows."
        )
    if torch.compiler.is_compiling() and not context.passes_arguments_on:  # Elsewhere the masks carry the boundaries.
        raise NotImplementedError(BOUNDARIES_LOST.format(kind))
    cache = self_attention_cache(inputs.values())
    if cache is not None and int(cache.get_seq_length()):
        raise NotImplementedError(FILLED_CACHE)


def _boundaries_from_positions(module: nn.Module, context: ModelContext, inputs: dict[str, Any]) -> Tensor | None:
    """Return the boundaries of the documents that positions describe; None where each row is one document."""
    positions, tokens = inputs.get("position_ids"), _tokens(inputs)
    if not isinstance(positions, Tensor) or inputs.get("attention_mask") is not None or tokens is None:
        return None
    if positions.dim() != 2 or positions.shape[1] < 2:
        return None
    use_cache = inputs.get("use_cache")
    if use_cache is None:
        use_cache = getattr(getattr(module, "config", None), "use_cache", False)
    # This is Transformers' own rule where there can be no cache; with one it takes positions for positions.
    any_jump = context.causal and self_attention_cache(inputs.values()) is None and not use_cache
    return find_documents(positions.expand(tokens.shape[0], -1), any_jump=any_jump)


def _tokens(inputs: dict[str, Any]) -> Tensor | None:
    return next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
