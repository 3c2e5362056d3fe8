"""The attention function: one for every architecture that goes through Transformers' attention interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from ..mechanisms.base import AttentionInputs, LinearAttention
from ..mechanisms.softmax import softmax_weights
from ..ops.common import State
from .boundaries import BOUNDARIES, CARRIERS, boundaries_of, mark_cache
from .cache import LinearStateLayer, adopt, refuse_static, take_layer
from .discovery import self_attention
from .exact import observed_masks, run_exact, weights_wanted
from .mask import full_mask_to_bool, linear_attention_mask
from .offload import in_memory
from .packing import documents_of, run_packed

logger = logging.getLogger(__name__)

#: Name of our attention implementation, in Transformers' interface and in the `config.json` of patched checkpoints.
IMPLEMENTATION = "hf_linear_attn"
#: Name of the submodule that a patched attention module holds. (List it in PEFT's `modules_to_save`.)
SUBMODULE = "linear_attention"
#: On an attention module of a patched model: the implementation that computes it exactly.
EXACT = "_exact_implementation"
#: On a self-attention module of a patched model: whether it is causal. Its own flag may be absent, or not tell.
CAUSAL = "_is_causal_layer"
#: On an attention module of a patched model: its name in the model.
NAME = "_attention_name"
#: On an attention module: what sees inputs and exact outputs of each call instead of the linear form running; or None.
OBSERVER = "_attention_observer"

#: Arguments of the interface that change the weights in ways that the mechanisms do not know.
UNSUPPORTED = ("position_bias", "softcap", "s_aux", "cu_seqlens", "block_indices", "indices")


@dataclass(frozen=True)
class AttentionCall:
    """One self-attention call of a patched model that runs exactly (see `observe_attention`).

    query `[B, H, L, d]`, key `[B, G, S, d]`, value `[B, G, S, e]`, output `[B, H, L, e]` (exact), allowed
    `[B | 1, 1, L, S]` (keys that a query may see), padding `[B, S]` or None where no token is padding.
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

    def real_queries(self) -> Tensor:
        """`[B, H, L]`: queries that are real tokens and see a key; what padding computes for itself does not count."""
        seen = self.allowed.any(dim=-1).expand(self.query.shape[:3])
        if self.padding is None or self.padding.dim() != 2:
            return seen
        return seen & self.padding[:, None, -self.query.shape[2] :]

    def exact_weights(self) -> Tensor:
        """Softmax weights `[B, H, L, S]`."""
        return softmax_weights(self.query, self.key, self.allowed, self.scaling)

    def linear_weights(self) -> Tensor:
        """The weights that the mechanism implies for the same inputs, `[B, H, L, S]`."""
        return self.mechanism.attention_weights(
            self.query, self.key, scaling=self.scaling, causal=self.causal, mask=self.padding
        )

    def linear_output(self) -> Tensor:
        """The mechanism's output for the same inputs, `[B, H, L, e]`."""
        if self.padding is not None and self.padding.dim() == 4:
            return self.mechanism.dense_forward(
                self.query, self.key, self.value, scaling=self.scaling, causal=self.causal, mask=self.padding
            )
        inputs = AttentionInputs(self.query, self.key, self.value, self.scaling, self.causal, self.padding)
        return self.mechanism(inputs)[0]


Observer = Callable[[AttentionCall], None]


def linear_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    first_call: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function registered with `AttentionInterface`: query `[B, H, L, d]` -> `[B, L, H, e]` and weights or None."""
    exact = getattr(module, EXACT, None)
    if exact is None:
        raise RuntimeError(
            f"{type(module).__name__} was asked to run {IMPLEMENTATION!r} attention, but holds no linear attention: "
            "the checkpoint was loaded without it. Load it with hf_linear_attn.load_pretrained(path), or with "
            "trust_remote_code=True."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, CAUSAL, getattr(module, "is_causal", True)) if is_causal is None else is_causal
    causal = bool(causal) and getattr(getattr(module, "config", None), "is_causal", True) is not False
    mechanism = getattr(module, SUBMODULE, None)
    observer = getattr(module, OBSERVER, None)
    boundaries = boundaries_of(kwargs, attention_mask)
    if boundaries is not None:
        return _packed(module, boundaries, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs)
    if mechanism is None or observer is not None:
        out, weights = run_exact(
            module, exact, query, key, value, attention_mask, dropout, scaling, causal, is_causal, kwargs
        )
        if mechanism is not None and observer is not None and observer is not _ignore:
            padding, allowed = observed_masks(attention_mask, query, key, causal)
            observer(
                AttentionCall(
                    module, mechanism, query, key, value, padding, allowed, scaling, causal, out.transpose(1, 2)
                )
            )
        return out, weights
    _check_call(module, mechanism, query, key, kwargs)
    with _without_autocast(query.device.type), in_memory(mechanism):
        out, weights = _linear(
            module, mechanism, query, key, value, attention_mask, scaling, causal, first_call, kwargs
        )
    return out.transpose(1, 2).contiguous(), weights


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """(Entering a context takes longer than to ask whether it is needed: a decoding step feels it.)"""
    return torch.autocast(device_type=device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _packed(
    module: nn.Module,
    boundaries: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Documents packed into rows, each as if it were alone; a mask `[B, 1, L, L]` holds inside of them."""
    if not hasattr(module, CAUSAL) or key.shape[2] != query.shape[2]:
        raise NotImplementedError(
            f"{_label(module)} attends to another sequence of {key.shape[2]} tokens, which packed documents "
            f"({BOUNDARIES}, or position_ids that begin again) do not say how to share. Pass padded rows."
        )
    full = mask is not None and mask.dim() == 4
    documents = documents_of(boundaries.to(query.device), (query.shape[0], query.shape[2]), None if full else mask)
    alone = {name: held for name, held in kwargs.items() if name not in (*CARRIERS, "position_ids")}

    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, first_call: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        return linear_attention_forward(
            module, query, key, value, mask, dropout, scaling, is_causal, first_call, **alone
        )

    if mask is not None and full:
        # (The product is a new tensor, without the mark of boundaries.)
        return forward(query, key, value, full_mask_to_bool(mask, _label(module)) & documents.same_document())
    layer = take_layer()
    if layer is not None:
        layer.pass_over(key.shape[2])
    observed = getattr(module, OBSERVER, None) not in (None, _ignore)
    return run_packed(forward, documents, query, key, value, together=observed)


def _linear(
    module: nn.Module,
    mechanism: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    first_call: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    layer = take_layer()
    wanted = weights_wanted(kwargs)
    if mask is not None and mask.dim() == 4:
        if layer is not None and layer.tokens:
            raise NotImplementedError(
                "A 4D attention mask cannot be combined with a state that already holds tokens. Pass a 2D mask."
            )
        mask = full_mask_to_bool(mask, _label(module))
        if layer is not None:
            raise NotImplementedError("A 4D attention mask cannot be used with a cache. Pass use_cache=False.")
        if not getattr(mechanism, "dense_masks", False):
            raise NotImplementedError(
                f"This mechanism cannot honour a 4D attention mask of shape {tuple(mask.shape)} (packed documents, a "
                "prefix, or one made by hand). Pass a 2D padding mask, or use a kernelized mechanism."
            )
        _warn_quadratic()
        out = mechanism.dense_forward(query, key, value, scaling=scaling, causal=causal, mask=mask)
    else:
        mask = _new_tokens(mask, layer, key)
        state = None if layer is None else layer.state_for(query)
        if wanted and state is not None:
            raise NotImplementedError(
                "output_attentions needs all keys, which a recurrent state has summed up. Pass use_cache=False."
            )
        if layer is not None and not causal:  # some models make a cache for whatever they run
            layer.pass_over(key.shape[2])
            layer = None
        out, after = mechanism(
            AttentionInputs(query, key, value, scaling, causal, mask, state, layer is not None, first_call)
        )
        if layer is not None:
            replay = _replay(mechanism, query, scaling) if layer.record_past else None
            layer.advance(after, key, value, mask, replay, held=out.requires_grad)
    weights = None
    if wanted:
        with in_memory(mechanism):  # its own call has put its weights away
            weights = mechanism.attention_weights(query, key, scaling=scaling, causal=causal, mask=mask)
        weights = weights.to(value.dtype)
    return out, weights


def _replay(mechanism: Any, query: Tensor, scaling: float) -> Callable[..., State | None]:
    heads, width = query.shape[1], query.shape[3]

    def replay(key: Tensor, value: Tensor, mask: Tensor | None, state: State | None) -> State | None:
        blank = key.new_zeros(key.shape[0], heads, key.shape[2], width)
        with in_memory(mechanism):
            _, after = mechanism(AttentionInputs(blank, key, value, scaling, True, mask, state, return_state=True))
        return after

    return replay


def _new_tokens(mask: Tensor | None, layer: LinearStateLayer | None, key: Tensor) -> Tensor | None:
    """The part of the padding mask that belongs to the new keys."""
    if mask is None:
        return None
    start = 0 if layer is None else layer.tokens
    stop = start + key.shape[2]
    if mask.dim() != 2 or mask.shape[1] < stop:
        raise ValueError(
            f"The attention mask has shape {tuple(mask.shape)}; it must cover all {stop} tokens seen so far "
            f"({start} in the cache and {key.shape[2]} new ones)."
        )
    return mask[:, start:stop]


def _check_call(module: nn.Module, mechanism: Any, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{_label(module)} passes {name!r} to its attention, which linear attention cannot honour. Give the "
                "layer 'softmax'."
            )
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{_label(module)} attends from {query.shape[2]} queries to {key.shape[2]} keys. Linear self-attention "
            "needs one key per query: give a layer that pools its keys, or that attends to another sequence, "
            "'softmax'; a cache must be one that generate() or the model made."
        )
    shape = mechanism.shape
    given = (query.shape[1], key.shape[1], query.shape[3])
    if given != (shape.num_heads, shape.num_key_value_heads, shape.head_dim):
        raise ValueError(
            f"{_label(module)} has {given[0]} heads, {given[1]} key-value heads of size {given[2]}; its linear "
            f"attention was built for {shape.num_heads}, {shape.num_key_value_heads} and {shape.head_dim}. Give the "
            "layer 'softmax'."
        )


def _label(module: nn.Module) -> str:
    name = getattr(module, NAME, "")
    return f"{type(module).__name__} ({name})" if name else type(module).__name__


_warned: set[str] = set()


def _warn_quadratic() -> None:
    if "quadratic" not in _warned and not torch.compiler.is_compiling():
        _warned.add("quadratic")
        logger.warning(
            "A 4D attention mask (packed documents, a prefix, or one made by hand) is honoured in the quadratic form "
            "of linear attention: exact masking, O(L²) time and memory. A 2D padding mask keeps it linear."
        )


# --------------------------------------------------------------------------------------------------------------------
# Hooks and modes


def before_attention(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of every self-attention module of a patched model: puts our state into the cache in use."""
    implementation: Any = module.config._attn_implementation  # type: ignore[union-attr]
    if implementation != IMPLEMENTATION:
        raise ValueError(
            f"The attention implementation of this patched model was changed to {implementation!r}, which would bring "
            f"softmax attention back. Call unpatch_model(model) instead, or set it back to {IMPLEMENTATION!r}."
        )
    take_layer()  # left over where an earlier call raised
    # Called past_key_values almost everywhere (layer_past in GPT-NeoX), and seldom passed by position.
    cache = next((given for given in (*kwargs.values(), *args) if isinstance(given, Cache)), None)
    index = getattr(module, "layer_idx", None)
    if cache is None or index is None:
        return
    mark_cache(cache, index, kwargs)
    if getattr(module, SUBMODULE, None) is None or getattr(module, OBSERVER, None) is not None:
        refuse_static(cache, index)
    else:
        adopt(cache, index).arm()


def attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The attention modules of a patched model that hold a linear attention."""
    for module in model.modules():
        if getattr(module, EXACT, None) is not None and getattr(module, SUBMODULE, None) is not None:
            yield module


@contextmanager
def observe_attention(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Run a patched model with exact attention, and call `observer` with each patched layer's inputs and exact output.

    Every layer then sees the hidden states of the exact model. Attention transfer and the measures of fidelity are
    built on this. The model's caches hold keys and values while it lasts: use new ones.
    """
    with _observed(list(attention_modules(model)), observer):
        yield


def exact_attention(model: Any, layers: Iterable[int] | None = None) -> Any:
    """Context manager: the patched model computes exact attention, as before it was patched.

    Args:
        model: a patched model.
        layers: only these self-attention layers (indices as in `patch_model`, negative ones from the end); layers that
            are not patched are exact anyway. The outputs are bit-equal to those of a model in which only the other
            layers are patched: nothing has to be built to try another choice. None: all of them.

    Raises:
        TypeError, ValueError: an index that is no integer, or out of range.
    """
    if layers is None:
        return _observed(list(attention_modules(model)), _ignore)
    found = self_attention(model)
    chosen = {_checked_index(index, len(found)) for index in layers}
    modules = [found[index].module for index in sorted(chosen)]
    return _observed([module for module in modules if getattr(module, SUBMODULE, None) is not None], _ignore)


def _checked_index(index: int, count: int) -> int:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"layers must hold integers, got {index!r} ({type(index).__name__}).")
    if not -count <= index < count:
        raise ValueError(f"Layer index {index} is out of range: the model has {count} self-attention layers.")
    return index % count


@contextmanager
def _observed(modules: list[nn.Module], observer: Observer) -> Iterator[None]:
    before = [getattr(module, OBSERVER, None) for module in modules]
    for module in modules:
        setattr(module, OBSERVER, observer)
    try:
        yield
    finally:
        for module, held in zip(modules, before, strict=True):
            setattr(module, OBSERVER, held)


def _ignore(call: AttentionCall) -> None:
    return None


def register() -> None:
    """Make the implementation known to Transformers (done once, on import of the package's patching)."""
    AttentionInterface.register(IMPLEMENTATION, linear_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, linear_attention_mask)
