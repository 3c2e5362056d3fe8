"""The attention function: one for every architecture that goes through Transformers' attention interface."""

# Needed: torch.compile breaks the graph where a function is defined with annotations that are evaluated (torch 2.13).
from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from ..mechanisms.base import AttentionInputs, LinearAttention
from ..mechanisms.head_mixture import linear_mechanism
from ..ops.common import InPlaceState, State
from ..ops.prepared import run_prepared
from ..ops.terms import NO_TERMS, Terms
from ..utils.models import BOUNDARY_ARGUMENTS
from .cache import LinearStateLayer, self_attention_cache, state_layer
from .cache_argument import named_cache
from .context import (
    IMPLEMENTATION,
    SUBMODULE,
    InterfaceCall,
    LayerContext,
    forward_context,
    in_memory,
    layer_context,
    mechanism_of,
)
from .discovery import Direction, causal_flag, config_value, declared_direction, layer_index
from .exact import attention_weights_requested, run_exact
from .mask import check_length, full_mask_to_bool, linear_attention_mask, padding_of
from .models import has_adapter
from .packing import BOUNDARIES, boundaries_of, document_numbers, documents_of, run_packed

logger = logging.getLogger(__name__)

#: Arguments of the interface that change the weights, or bring keys from elsewhere, in ways unknown to the mechanisms.
UNSUPPORTED = frozenset(("cu_seqlens", "block_indices", "indices", "block_table"))


def linear_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module of a patched model; registered with `AttentionInterface`.

    The arguments are those of `InterfaceCall`; `scaling` is `d ** -0.5` by default, `dropout` is for exact attention.

    Returns:
        The output `[B, L, H, e]`, and the weights `[B, H, L, S]` where the caller requested them, else None.
    """
    context = layer_context(module)
    if context is None:
        raise RuntimeError(
            f"{type(module).__name__} was asked to run {IMPLEMENTATION!r} attention, but has no linear attention: "
            "the checkpoint was loaded without it, or an exact model was set to this implementation. Load it with "
            "hf_linear_attn.load_pretrained(path), or with trust_remote_code=True; or set it to 'sdpa' again."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling * 1.0
    if torch.is_autocast_enabled(query.device.type):
        # Rotary positions leave queries and keys in float32; exact attention takes all in the dtype of autocast, too.
        query, key = query.to(value.dtype), key.to(value.dtype)
    # Moonshine passes False where there is nothing to choose: a single query sees all keys, and a mask [B, S] is one of
    # causal attention.
    if is_causal is False and (query.shape[2] == 1 or (attention_mask is not None and attention_mask.dim() == 2)):
        is_causal = None if context.causal else is_causal
    causal = causal_flag(module, True) if context.causal is None else context.causal
    declared = declared_direction(module)
    causal = bool(causal if is_causal is None else is_causal) and declared.allowed
    boundaries = boundaries_of(kwargs, attention_mask)
    if not causal or context.causal is None:
        attention_mask = padding_of(attention_mask)
    call = InterfaceCall(
        module,
        context,
        query,
        key,
        value,
        attention_mask,
        dropout,
        scaling,
        causal,
        is_causal,
        kwargs,
        terms=terms_of(context, kwargs),
    )
    _check_direction(call, declared)
    if context.masks_causal and attention_mask is not None and attention_mask.dim() == 2:
        call.causal = True
        call.mask = call.visible()
    if context.ranks is not None:
        _check_slice(call, boundaries)
    return _attend(call) if boundaries is None else _attend_packed(call, boundaries)


def terms_of(context: LayerContext, kwargs: dict[str, Any]) -> Terms:
    """Return what the arguments of a self-attention call add to its logits.

    A patched model passes its position bias as a table of distances (see `adapters`).
    """
    if context.causal is None:
        return NO_TERMS
    bias = kwargs.get("position_bias")
    bias = None if bias is None or bias.shape[2] > 1 else bias[0, :, 0]
    positions = bias, kwargs.get("disentangled"), kwargs.get("alibi_slopes")
    return Terms(kwargs.get("s_aux"), kwargs.get("softcap") or None, *positions)


def _check_direction(call: InterfaceCall, declared: Direction) -> None:
    """Raise where a self-attention layer runs in another direction than that it was patched for."""
    context = call.context
    if context.causal is None or (declared == context.declared and call.causal == context.causal):
        return
    raise ValueError(
        f"{call.label} was {'causal' if context.causal else 'bidirectional'} when this model was patched. Now its flag "
        f"is_causal is {declared.flag}, config.is_causal {declared.allowed}, and the argument is_causal "
        f"{call.is_causal}. A mechanism is built for one direction: set it back, or call unpatch_model(model), change "
        "it and patch again."
    )


def _attend(call: InterfaceCall) -> tuple[Tensor, Tensor | None]:
    mechanism = mechanism_of(call.module)
    if mechanism is None or call.context.runs_exactly:
        return run_exact(call, mechanism)
    if (token := _prepared_token(call, mechanism)) is not None:
        return token.transpose(1, 2).contiguous(), None
    _check_call(call, mechanism)
    if mechanism.training and isinstance(mechanism, LinearAttention) and not torch.compiler.is_compiling():
        _warn_of_adapter(call, mechanism)
    device = call.query.device.type
    # (Where autocast is off already we save the time of entering a context.)
    autocast_off = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
    with autocast_off, in_memory(mechanism):
        out, weights = _run_linear(call, mechanism)
    return out.transpose(1, 2).contiguous(), weights


def _prepared_token(call: InterfaceCall, mechanism: Any) -> Tensor | None:
    """Compute a token by the step that its state has prepared; None where there is none for this call.

    What is done around other calls takes longer than the kernel of a step, which is for calls of the same sizes whose
    weights are in memory. Hooks on the mechanism need the other way.
    """
    layer: Any = forward_context.cache_layers[-1] if forward_context.cache_layers else None
    state = None if layer is None else layer.state
    if not isinstance(state, InPlaceState) or state.prepared is None or torch.jit.is_tracing():
        return None
    if mechanism._forward_hooks or mechanism._forward_pre_hooks or not UNSUPPORTED.isdisjoint(call.kwargs):
        return None
    if attention_weights_requested(call.kwargs) or (call.mask is not None and call.mask.dim() == 4):
        return None
    inputs = _inputs_from_cache(call, layer)
    step = run_prepared(mechanism, inputs)
    if step is None:
        return None
    forward_context.take_cache_layer()
    layer.advance(step[1], inputs)
    return step[0]


def _attend_packed(call: InterfaceCall, boundaries: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute documents packed into rows, each as if it were a row of its own.

    A full mask `[B | 1, H | 1, L, L]` applies inside of the documents.
    """
    query = call.query
    mask = call.mask
    keys = call.key.shape[2]
    if call.context.causal is None or keys != query.shape[2]:
        raise NotImplementedError(
            f"{call.label} attends to another sequence of {keys} tokens, which packed documents "
            f"({BOUNDARIES}, or position_ids that begin again) do not say how to share. Pass padded rows."
        )
    full_mask = mask if mask is not None and mask.dim() == 4 else None
    boundaries = boundaries.to(query.device)
    documents = documents_of(boundaries, (query.shape[0], query.shape[2]), mask if full_mask is None else None)
    names = (*BOUNDARY_ARGUMENTS, "position_ids")
    call = replace(call, kwargs={name: value for name, value in call.kwargs.items() if name not in names})
    if full_mask is not None:
        numbers = document_numbers(boundaries, documents.shape)[:, None]
        allowed = full_mask_to_bool(full_mask, call.label) & (numbers[..., :, None] == numbers[..., None, :])
        return _attend(replace(call, mask=allowed))
    layer = forward_context.take_cache_layer()
    if layer is not None:
        layer.skip_tokens(keys)
    return run_packed(_attend, call, documents)


def _run_linear(call: InterfaceCall, mechanism: Any) -> tuple[Tensor, Tensor | None]:
    """Run the mechanism; return the output `[B, H, L, e]`, and the weights where they are requested."""
    layer: LinearStateLayer | None = forward_context.take_cache_layer()
    weights_requested = attention_weights_requested(call.kwargs) and not forward_context.only_cross_weights
    if call.mask is not None and call.mask.dim() == 4:
        inputs = call.inputs(_check_full_mask(call, mechanism, layer))
        out = mechanism.dense_forward(inputs)
    else:
        inputs = _inputs_from_cache(call, layer)
        if weights_requested and inputs.state is not None:
            raise NotImplementedError(
                "output_attentions needs all keys, which a recurrent state has summed up. Pass use_cache=False."
            )
        out, state = mechanism(inputs)
        if layer is not None and inputs.return_state:
            _advance(call, mechanism, layer, inputs, out, state)
    if not weights_requested:
        return out, None
    with in_memory(mechanism):  # accelerate has unloaded the weights after the mechanism's own forward.
        weights = mechanism.attention_weights(inputs)
    return out, weights.to(call.value.dtype)


def _inputs_from_cache(call: InterfaceCall, layer: LinearStateLayer | None) -> AttentionInputs:
    """Return what the mechanism receives: the tokens of a call, and the state that its layer of the cache has."""
    mask, length = call.mask, call.key.shape[2]
    if mask is not None:
        start = 0 if layer is None else layer.tokens
        check_length(mask, start, length)
        if layer is not None:
            layer.check_mask(mask)
        mask = mask.narrow(1, start, length)
    state = None if layer is None else layer.state_for(call.query)
    if layer is not None and not call.causal:  # Some encoders create a cache, which they do not need.
        layer.skip_tokens(length)
    return AttentionInputs(
        call.query,
        call.key,
        call.value,
        call.scaling,
        call.causal,
        mask,
        state,
        return_state=layer is not None and call.causal,
        first_call=call.first_call,
        ranks=call.context.ranks,
        terms=call.terms,
    )


def _advance(
    call: InterfaceCall,
    mechanism: Any,
    layer: LinearStateLayer,
    inputs: AttentionInputs,
    out: Tensor,
    state: State | None,
) -> None:
    """Store the state after a call in its layer of the cache."""

    def replay(recorded: AttentionInputs) -> State | None:
        with in_memory(mechanism):
            return mechanism(recorded)[1]

    layer.advance(state, inputs, replay, in_graph=out.requires_grad)
    if call.module.training and out.requires_grad and inputs.state is None and not torch.compiler.is_compiling():
        logger.warning_once(  # type: ignore[attr-defined]
            "A forward pass in training keeps the state for a later one, and a gradient through it is not fused: pass "
            "use_cache=False, which is several times faster."
        )


def _warn_of_adapter(call: InterfaceCall, mechanism: LinearAttention) -> None:
    """Warn before new features are drawn in the base of a PEFT adapter, which holds no copy of them."""
    feature_map = linear_mechanism(mechanism).feature_map
    if feature_map is None or not feature_map.redraws:
        return
    root = forward_context.runs[0].module if forward_context.runs else call.module
    if has_adapter(root):
        logger.warning_once(  # type: ignore[attr-defined]
            f"redraw_every={feature_map.options.redraw_every} draws new features in the base model of an adapter, "
            f"whose file does not hold them: loaded again, it would run with others. List {SUBMODULE!r} in "
            "modules_to_save, patch without redraw_every, or save the merged model."
        )


def _check_slice(call: InterfaceCall, boundaries: Tensor | None) -> None:
    reasons = {
        "a cache": forward_context.take_cache_layer() is not None,
        "packed documents": boundaries is not None,
        "a full attention mask": call.mask is not None and call.mask.dim() == 4,
        "exact attention": call.context.runs_exactly,
        "terms in the logits": bool(call.terms),
        "output_attentions": attention_weights_requested(call.kwargs),
    }
    refused = [reason for reason, applies in reasons.items() if applies]
    if refused:
        raise NotImplementedError(
            f"{call.label} cannot run with {' or '.join(refused)} inside of context_parallel. Pass padded rows "
            "with a 2D mask and use_cache=False."
        )


def _check_full_mask(call: InterfaceCall, mechanism: Any, layer: LinearStateLayer | None) -> Tensor:
    """Return a full mask as booleans; raise where the mechanism or the cache cannot apply it."""
    assert call.mask is not None
    mask = full_mask_to_bool(call.mask, call.label)
    if layer is not None:
        has_exact_model = not forward_context.runs and not torch.compiler.is_compiling()
        around = " The exact model around this layer makes such a mask of a 2D one: patch it as a whole."
        raise NotImplementedError(
            "A 4D attention mask cannot be used with a cache. Pass use_cache=False, or a 2D mask where a state holds "
            f"tokens already.{around if has_exact_model else ''}"
        )
    mechanism.check_mask(mask)
    batch, heads, length, _ = call.query.shape
    sizes = (batch, heads, length, call.key.shape[2])
    broadcasts = all(size in (1, whole) for size, whole in zip(mask.shape[:3], sizes, strict=False))
    if not broadcasts or mask.shape[3] != sizes[3]:
        raise ValueError(
            f"The attention mask has shape {tuple(mask.shape)}, and {call.label} attends from {length} tokens to "
            f"{sizes[3]}, in {batch} rows and {heads} heads. Pass a mask {sizes}, with 1 for rows or heads that share "
            "one."
        )
    if not torch.compiler.is_compiling():
        logger.warning_once(  # type: ignore[attr-defined]
            "A 4D attention mask (packed documents, a prefix, or one of your own) is applied in the quadratic form "
            "of linear attention: exact masking, O(L²) time and memory. A 2D padding mask keeps it linear."
        )
    return mask


def _check_call(call: InterfaceCall, mechanism: Any) -> None:
    if torch.jit.is_tracing():  # it would miss what kernels write, and keep the padding of its example for every input
        raise NotImplementedError(
            f"{call.label}: torch.jit.trace, and what uses it (torch.onnx.export(dynamo=False), "
            "SummaryWriter.add_graph), cannot record linear attention. Use hf_linear_attn.export or torch.export."
        )
    for name in UNSUPPORTED & call.kwargs.keys():
        if call.kwargs[name] is not None:
            raise NotImplementedError(
                f"{call.label} passes {name!r} to its attention, which linear attention cannot apply. Give the "
                "layer 'softmax'."
            )
    bias = call.kwargs.get("position_bias")
    if bias is not None and bias.shape[2] > 1:
        raise NotImplementedError(
            f"{call.label} adds a bias of its own for each pair of tokens, which linear attention cannot apply. Give "
            "the layer 'softmax'."
        )
    query, key = call.query, call.key
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{call.label} attends from {query.shape[2]} queries to {key.shape[2]} keys. Linear self-attention "
            "needs one key per query: give a layer that pools its keys, or that attends to another sequence, "
            "'softmax'; a cache must be one that generate() or the model made."
        )
    shape = mechanism.shape
    sizes = (query.shape[1], key.shape[1], query.shape[3])
    if sizes != (shape.num_heads, shape.num_key_value_heads, shape.head_dim):
        raise ValueError(
            f"{call.label} has {sizes[0]} heads, {sizes[1]} key-value heads of size {sizes[2]}; its linear "
            f"attention was built for {shape.num_heads}, {shape.num_key_value_heads} and {shape.head_dim}. Give the "
            "layer 'softmax'."
        )


# ---------------------------------------------------------------------------------------------------------------- Hooks


def before_attention(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put our state into the cache in use: forward pre-hook of every self-attention module of a patched model."""
    implementation = config_value(module, "_attn_implementation_internal")
    if implementation != IMPLEMENTATION:
        raise ValueError(
            f"The attention implementation of this patched model was changed to {implementation!r}, which would bring "
            f"softmax attention back. Call unpatch_model(model) instead, or set it back to {IMPLEMENTATION!r}."
        )
    named = named_cache(kwargs)
    if named is not None and not isinstance(named, Cache):
        raise NotImplementedError(
            "The cache that was passed has pages of keys for continuous batching, in which a state of linear attention "
            "has no place. Serve the model by hf_linear_attn.serving.Engine or `hf-linear-attn serve`."
        )
    forward_context.take_cache_layer()  # An earlier call that raised may have left one.
    # By its type: the argument has several names (layer_past in GPT-NeoX), and is seldom passed by position.
    cache = self_attention_cache((*kwargs.values(), *args) if named is None else (named,))
    index = layer_index(module)
    if cache is None or index is None:
        return
    context = layer_context(module)
    if mechanism_of(module) is not None and not (context is not None and context.runs_exactly):
        packed = kwargs.get(BOUNDARIES) is not None or forward_context.packed_run() is not None
        state_layer(cache, index).expect_update(packed)


# A model that is patched, or loaded from a patched checkpoint, finds the implementation under its name.
AttentionInterface.register(IMPLEMENTATION, linear_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, linear_attention_mask)
