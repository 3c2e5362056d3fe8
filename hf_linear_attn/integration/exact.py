"""Exact attention in a patched model: layers of a mixture, cross-attention, and layers that run exactly for a while."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from ..config import check_integers, layer_number
from ..mechanisms.base import AttentionInputs, LinearAttention
from ..mechanisms.softmax import exact_weights
from ..ops.terms import Terms, distances, no_terms
from .adapters import adapter_of
from .context import InterfaceCall, attention_modules, in_memory, layer_context
from .discovery import causal_flag, self_attention
from .mask import check_length, full_mask_to_bool


@dataclass(frozen=True)
class AttentionCall:
    """One self-attention call of a patched model that runs exactly (see `observe_attention`).

    Attributes:
        module: The attention module.
        mechanism: Its linear attention.
        query: `[B, H, L, d]`.
        key: `[B, G, S, d]`.
        value: `[B, G, S, e]`.
        padding: `[B, S]` True for real tokens, a full mask, or None where no token is padding.
        allowed: `[B | 1, 1, L, S]`, the keys that a query may see.
        scaling: τ, the factor of `q·k`.
        causal: Whether a token sees earlier ones only.
        output: `[B, H, L, e]`, exact.
        start: Position of the first query in a bidirectional call of some of the queries; None otherwise.
        terms: What the model adds to its logits.
    """

    module: nn.Module
    mechanism: LinearAttention
    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None
    allowed: Tensor
    scaling: float
    causal: bool
    output: Tensor
    start: int | None = None
    terms: Terms = field(default_factory=no_terms)

    def real_queries(self) -> Tensor:
        """Return `[B, H, L]`: the queries that are real tokens and see a key, not those of padding."""
        sees_a_key = self.allowed.any(dim=-1).expand(self.query.shape[:3])
        if self.padding is None or self.padding.dim() != 2:
            return sees_a_key
        return sees_a_key & self.inputs().of_queries(self.padding).unsqueeze(1)

    def exact_weights(self) -> Tensor:
        """Return the softmax weights `[B, H, L, S]`."""
        return exact_weights(replace(self.inputs(), mask=self.allowed))

    def linear_weights(self) -> Tensor:
        """Return the weights that the mechanism implies for the same inputs, `[B, H, L, S]`."""
        with in_memory(self.mechanism):
            return self.mechanism.attention_weights(self.inputs())

    def outside(self) -> Tensor | None:
        """Return which keys the linear branch of a hybrid weighs (see `LinearAttention.outside`)."""
        return self.mechanism.outside(self.inputs())

    def linear_output(self) -> Tensor:
        """Return the mechanism's output for the same inputs, `[B, H, L, e]`."""
        with in_memory(self.mechanism):
            if self.padding is not None and self.padding.dim() == 4:
                return self.mechanism.dense_forward(self.inputs())
            return self.mechanism(self.inputs())[0]

    def inputs(self) -> AttentionInputs:
        """Return what the mechanism receives."""
        tensors = (self.query, self.key, self.value)
        return AttentionInputs(*tensors, self.scaling, self.causal, self.padding, start=self.start, terms=self.terms)


Observer = Callable[[AttentionCall], Tensor | None]


def observe_attention(model: nn.Module, observer: Observer) -> AbstractContextManager[None]:
    """Run a patched model with exact attention, and call `observer` with each patched layer's inputs and exact output.

    Every layer then sees the hidden states of the exact model, unless the observer returns a tensor `[B, H, L, e]`:
    that replaces the output. Attention transfer, the measures of fidelity and the choice of exact heads are built on
    this. Caches of the model contain keys and values inside of this context: do not pass them on.
    """
    return _running_exactly(list(attention_modules(model)), observer)


def exact_attention(model: Any, layers: Iterable[int] | None = None) -> AbstractContextManager[None]:
    """Context manager inside of which a patched model computes exact attention, as before it was patched.

    Args:
        model: A patched model.
        layers: Only these self-attention layers (indices as in `patch_model`, negative ones from the end); layers that
            are not patched are exact anyway. The outputs are bit-equal to those of a model in which only the other
            layers are patched: nothing has to be built to try another choice. None: all of them.

    Raises:
        TypeError: An index is no integer.
        ValueError: An index is out of range.
    """
    if layers is None:
        return _running_exactly(list(attention_modules(model)), None)
    modules = [layer.module for layer in self_attention(model)]
    numbers = {layer_number(index, len(modules)) for index in check_integers(layers, "layers", "layer")}
    return _running_exactly([modules[number] for number in sorted(numbers)], None)


@contextmanager
def _running_exactly(modules: list[nn.Module], observer: Observer | None) -> Iterator[None]:
    contexts = [context for module in modules if (context := layer_context(module)) is not None]
    previous = [(context.runs_exactly, context.observer) for context in contexts]
    for context in contexts:
        context.runs_exactly = True
        context.observer = observer
    try:
        yield
    finally:
        for context, values in zip(contexts, previous, strict=True):
            context.runs_exactly, context.observer = values


def run_exact(call: InterfaceCall, mechanism: LinearAttention | None) -> tuple[Tensor, Tensor | None]:
    """Run the exact attention of a layer as `_attend` does, and show it to the layer's observer if there is one."""
    out, weights = _exact_output(call)
    observer = call.context.observer
    if mechanism is not None and observer is not None:
        allowed = full_mask_to_bool(call.visible())
        padding = allowed if call.mask is not None and call.mask.dim() == 4 else call.mask
        tensors = (call.query, call.key, call.value, padding, allowed)
        replaced = observer(
            AttentionCall(
                call.module, mechanism, *tensors, call.scaling, call.causal, out.transpose(1, 2), terms=call.terms
            )
        )
        out = out if replaced is None else replaced.transpose(1, 2)
    return out, weights


def _exact_output(call: InterfaceCall) -> tuple[Tensor, Tensor | None]:
    """Run the model's former implementation, with the mask in the form that it expects."""
    adapter = adapter_of(call.module)
    if adapter is not None and adapter.outside:
        return _outside_output(call)
    query = call.query
    # The keys of a cache keep the precision that the model had then.
    key, value = (tensor.to(query.dtype) for tensor in (call.key, call.value))
    length = query.shape[2]
    keys = key.shape[2]
    implementation = _implementation(call)
    mask = _exact_mask(call, implementation)
    kwargs = call.kwargs
    if call.terms.bias is not None:
        distance = distances(length, keys, None, query.device)
        kwargs = {**kwargs, "position_bias": call.terms.by_distance(distance).unsqueeze(0)}
    is_causal = call.is_causal
    if is_causal is None and mask is None and call.causal != causal_flag(call.module, True):
        is_causal = call.causal  # The exact function would go by the module's flag.
    if is_causal is not None and implementation != "eager":
        kwargs = {**kwargs, "is_causal": is_causal}
    is_eager = implementation == "eager"
    function: Any = eager_function(call.module) if is_eager else ALL_ATTENTION_FUNCTIONS[implementation]
    module = _as_before(call.module, implementation) if "flash" in implementation else call.module
    out, weights = function(module, query, key, value, mask, dropout=call.dropout, scaling=call.scaling, **kwargs)
    if weights is None and attention_weights_requested(kwargs):
        inputs = replace(call.inputs(full_mask_to_bool(call.visible())), key=key)
        weights = exact_weights(inputs).to(value.dtype)
    return out, weights


def _implementation(call: InterfaceCall) -> str:
    """Return the model's former implementation, or another one for masks that it does not take."""
    implementation = call.context.exact_implementation
    has_full_mask = call.mask is not None and call.mask.dim() == 4
    if not has_full_mask or "flash" not in implementation:
        return implementation
    # Flash attention takes padding only, no pattern of a window, say.
    has_terms = any(call.kwargs.get(name) is not None for name in ("softcap", "s_aux"))
    return "eager" if has_terms else "sdpa"


def _exact_mask(call: InterfaceCall, implementation: str) -> Tensor | None:
    """Return the mask of a call in the form that an implementation expects; None where it needs none."""
    mask = call.mask
    length = call.query.shape[2]
    keys = call.key.shape[2]
    if mask is not None and mask.dim() == 2:
        seen = 0 if call.context.causal is None else keys - length
        check_length(mask, seen, keys - seen)
    takes_padding = "flash" in implementation
    is_additive = implementation != "sdpa" and not takes_padding
    if takes_padding or (mask is not None and mask.dim() == 4):
        full = mask
    elif call.context.causal and length > 1 and (mask is not None or length != keys or is_additive):
        full = call.visible()
    else:
        full = None if mask is None else mask[:, None, None, :].expand(-1, 1, length, -1)
    if full is None:
        return None
    if not full.is_floating_point():
        full = full.bool()
    if not is_additive:
        return full
    if full.dtype == torch.bool:
        query = call.query
        full = query.new_zeros(full.shape).masked_fill(~full, torch.finfo(query.dtype).min)
    return full.expand(call.query.shape[0], -1, -1, -1)


def _outside_output(call: InterfaceCall) -> tuple[Tensor, Tensor]:
    """Compute what a module outside of the attention interface did by itself."""
    weights = exact_weights(call.inputs(full_mask_to_bool(call.visible()))).to(call.value.dtype)
    dropped = torch.nn.functional.dropout(weights, call.dropout)
    value = call.value.repeat_interleave(weights.shape[1] // call.value.shape[1], dim=1)
    return (dropped @ value).transpose(1, 2).contiguous(), weights


def _as_before(module: Any, implementation: str) -> nn.Module:
    """Return a copy of a module whose config names this implementation: flash attention reads there which one to load.

    (Other threads, and the hooks of other layers, read the same config meanwhile.)
    """
    module = copy.copy(module)
    module.config = copy.copy(module.config)
    module.config._attn_implementation_internal = implementation
    return module


def eager_function(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the eager attention function of the module's own modeling file."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise NotImplementedError(
        f"The modeling file of {type(module).__name__} has no eager_attention_forward. Load the model with "
        "attn_implementation='sdpa'."
    )


def attention_weights_requested(kwargs: dict[str, Any]) -> bool:
    """Return whether the caller of the model has asked for `output_attentions`."""
    if kwargs.get("output_attentions"):
        return True
    collector = output_capturing._active_collector
    active = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return active is not None and any("attentions" in name for name in active)
