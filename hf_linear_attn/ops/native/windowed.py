"""Windowed attention by the compiled kernels: exact weights inside a window, kernelized ones beyond it."""

import torch
from torch import Tensor

from ..calls import Mix, WindowedCall
from ..common import InPlaceState, State, mask_tokens
from ..kernel_inputs import has_entries, window_entries
from ..sinks import attend_from_sinks, end_tokens, first_tokens, take_tokens
from ..window_tokens import gather_tokens
from . import binding
from .binding import Numbers, Tensors, differentiable, empty, output
from .terms import term_inputs

#: The entries of the state that a decoding step replaces.
_STATE = ("kv", "k_sum", "ring_key", "ring_value", "ring_mask", "count")
#: The entries that it writes into, where there are sinks.
_SINKS = ("sink_key", "sink_value")


def run_windowed(call: WindowedCall) -> tuple[Tensor, State | None]:
    """Compute a call. The causal form with a mask or a state takes its tokens from `gather_tokens`, padding first."""
    assert call.fused is not None
    learned, numbers = binding.map_arguments(call.fused)
    numbers |= {"window": call.window, "two_sided": not call.causal, "scaling": call.scaling}
    mix = call.log_mix if isinstance(call.log_mix, Mix) else None
    log_mix = call.log_mixing_weights() if mix is None else mix.base
    if mix is not None:
        learned["mix_weight"], numbers["mix_bound"] = mix.weight, mix.bound
    if call.state is not None and is_kernel_step(call, call.state):
        numbers["saturation"] = 0 if mix is None or mix.saturation is None else mix.saturation
        return _step(call, call.state, {**learned, "mix": log_mix}, numbers)
    terms = term_inputs(call)
    numbers["softcap"] = call.terms.softcap or 0.0
    log_mix = log_mix.float() + terms.pop("mix", 0.0)
    if mix is not None and mix.saturation is not None:
        log_mix = call.log_mixing_weights().float() + log_mix - mix.base
        del learned["mix_weight"]
    length = call.query.shape[2]
    mask = call.mask
    valid = None
    query_index = None
    if not length:
        return empty(*call.query.shape[:3], call.value.shape[3], dtype=call.value.dtype), call.state
    sinks, first = first_tokens(call) if call.causal else (None, {})
    tokens = call.replace(log_mix=log_mix)
    if call.causal and (mask is not None or call.state is not None):
        tokens, valid, query_index, ring = gather_tokens(call, log_mix)
        mask = None
    inputs = {"query": tokens.query, "key": tokens.key, "value": tokens.value, "mix": tokens.log_mixing_weights()}
    if valid is not None:
        inputs["skip"] = (~valid).sum(dim=1)
        numbers["offset"] = call.window
    if mask is not None:
        inputs["mask"] = mask
    if not call.causal:
        numbers["sinks"] = call.sinks
    elif sinks is not None:
        inputs |= {"sink_key": sinks.key, "sink_value": sinks.value, "sink_position": sinks.position}
    inputs |= terms
    after: State = {}
    if call.needs_grad():
        out = differentiable("windowed", {**inputs, **learned}, numbers)
    else:
        outputs = {"out": output(inputs)}
        if call.state is not None:
            inputs |= {name: call.state[name] for name in ("kv", "k_sum")}
        if call.return_state:
            sizes = *call.key.shape[:2], call.num_features
            after = {"kv": empty(*sizes, call.value.shape[3]), "k_sum": empty(*sizes)}
            outputs |= {f"next_{name}": tensor for name, tensor in after.items()}
        binding.run("windowed", {**inputs, **learned}, outputs, numbers)
        out = outputs["out"]
    if not call.causal:
        return (attend_from_sinks(out, call, end_tokens(call)) if call.terms else out), None
    if query_index is not None:
        out = mask_tokens(take_tokens(out, query_index), call.mask)
    if not call.return_state:
        return out, None
    if valid is None:
        key, value = (tensor[:, :, -call.window :] for tensor in (call.key, call.value))
        ring = gather_tokens(call.replace(key=key, value=value), log_mix).ring
    return out, {**after, **ring, **first}


def is_kernel_step(call: WindowedCall, state: State) -> bool:
    """Return whether the kernel for one token applies: it reads whole vectors, and a ring of the inputs' dtype."""
    if call.query.shape[2] != 1 or call.value.shape[3] % binding.lanes():
        return False
    return has_entries(state, window_entries(call))


def _step(call: WindowedCall, state: State, learned: Tensors, numbers: Numbers) -> tuple[Tensor, State]:
    numbers |= {"ring_capacity": call.window, "int8_rows": call.cache_dtype is torch.int8}
    inputs = {**learned, "query": call.query, "key": call.key, "value": call.value}
    if call.mask is not None:
        inputs["mask"] = call.mask
    outputs = {"out": output(inputs)}
    before = {name: state[name].contiguous() for name in _STATE}
    sinks = {name: state[name].contiguous() for name in _SINKS} if call.sinks else {}
    if isinstance(state, InPlaceState):
        after = before
        outputs |= before
    else:
        after = {name: torch.empty_like(tensor) for name, tensor in before.items()}
        inputs |= before
        outputs |= {f"next_{name}": tensor for name, tensor in after.items()}
        sinks = {name: tensor.clone() for name, tensor in sinks.items()}
    filled = binding.run("windowed_step", inputs, {**outputs, **sinks}, numbers)
    if filled is None or not isinstance(state, InPlaceState):
        return outputs["out"], {**after, **sinks}
    state.update(after, **sinks)
    state.launch = binding.Launch("windowed_step", filled, learned)
    return outputs["out"], state
