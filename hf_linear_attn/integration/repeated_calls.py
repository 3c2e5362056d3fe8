"""Modules that a model has many times, each traced once for an ONNX graph.

Most of an export is tracing, operation by operation, and a model's layers are the same operations with other weights.
So the first call of each kind is traced between two nodes of `graph_nodes.DOMAIN`, and every other call of the kind is
one node, whose inputs are its tensors and its weights. `expand_calls` gives that node the operations of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from transformers.cache_utils import Cache

from ..feature_maps.base import AttentionShape
from ..mechanisms.base import LinearAttention
from ..ops.graph_nodes import DOMAIN, graph_node
from .cache_argument import find_cache
from .context import LayerContext, layer_context

#: The nodes before and after the first call of a kind, and that of every other.
_BEGIN, _END, _AGAIN = "CallBegins", "CallEnds", "CallAgain"

#: Values that are no tensors and may be part of a call.
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.SymInt)


@dataclass
class _Kind:
    """A kind of calls: its number in the graph, and what the first one returned."""

    number: int
    result: Any = None
    #: Its layer of the cache after the call.
    layer: Any = None


class _CannotShareError(Exception):
    """A call has values of another kind than tensors and plain ones."""


def _map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor of nested tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _map_tensors(function, part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_map_tensors(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{name: _map_tensors(function, getattr(value, name)) for name in names})
    if not isinstance(value, (*_PLAIN, Cache)):
        raise _CannotShareError
    return value


def _tensors(value: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    _map_tensors(tensors.append, value)
    return tensors


def _refilled(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a value with other tensors in place of its own."""
    remaining = iter(tensors)
    return _map_tensors(lambda _: next(remaining), value)


def _described(value: Any) -> str:
    """Return all of a call but the numbers in its tensors. A size that is a symbol may be another one in each layer."""

    def size_of(size: Any) -> str:
        return str(size) if isinstance(size, int) else "?"

    return repr(_map_tensors(lambda tensor: (tensor.dtype, *map(size_of, tensor.shape)), value))


@contextmanager
def tracing_once(model: nn.Module) -> Iterator[None]:
    """Trace each kind of layer and of mechanism once in each graph that is exported inside of a `with` statement.

    A layer of Transformers gets a cache, and is known to change its own part of it only. That it does nothing else but
    return tensors is for the caller to check, by the outputs of the graph.
    """
    modules = [*_layers(model), *(module for module in model.modules() if isinstance(module, LinearAttention))]
    keys = [_key_of(module) for module in modules]
    counts = Counter(keys)
    kinds: dict[Any, _Kind] = {}
    with ExitStack() as stack:
        for key, module in zip(keys, modules, strict=True):
            if counts[key] > 1 and "forward" not in vars(module):
                stack.callback(vars(module).pop, "forward")
                vars(module)["forward"] = partial(_run, kinds, key, module, module.forward)
        yield


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the largest parts of a model that have one attention each."""
    for child in module.children():
        attentions = sum(layer_context(part) is not None for part in child.modules())
        if attentions == 1:
            yield child
        elif attentions:
            yield from _layers(child)


def _key_of(module: nn.Module) -> Any:
    """Return what a module is but for its weights and its place in the model; what cannot be told is its own.

    The place of a layer is its `layer_idx`, by which it finds its part of a cache.
    """
    hidden = {*vars(nn.Module()), "layer_idx"}

    def fixed(value: Any) -> Any:
        if isinstance(value, AttentionShape):
            return replace(value, layer_index=0)
        if isinstance(value, LayerContext):
            return repr(replace(value, name=""))
        if isinstance(value, tuple | frozenset) and all(isinstance(part, _PLAIN) for part in value):
            return value
        return repr(value) if isinstance(value, _PLAIN) or is_dataclass(value) else id(value)

    return tuple(
        (name, type(part), tuple((key, fixed(value)) for key, value in vars(part).items() if key not in hidden))
        for name, part in module.named_modules()
    )


def _cache_index(module: nn.Module) -> int | None:
    """Return which layer of a cache is that of a module; None where it does not say."""
    indices = (vars(part).get("layer_idx") for part in module.modules())
    return next((index for index in indices if index is not None), None)


def _run(
    kinds: dict[Any, _Kind], key: Any, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a module, or place the node that stands for its call."""
    if not torch.compiler.is_exporting():
        return forward(*args, **kwargs)
    cache: Any = find_cache((*args, *kwargs.values()))
    index = None if cache is None else _cache_index(module)
    if cache is not None and (index is None or index >= len(cache.layers)):
        return forward(*args, **kwargs)
    state = None if cache is None else vars(cache.layers[index])
    weights = [*module.parameters(), *module.buffers()]
    call = (args, kwargs, state)
    try:
        kind_key = (get_proxy_mode(), key, _described((call, weights)))
    except _CannotShareError:
        return forward(*args, **kwargs)
    inputs = _tensors(call)
    kind = kinds.get(kind_key)
    if kind is not None:
        outputs = _place(_AGAIN, kind, [*inputs, *weights], _tensors(kind.result))
        return _returned(kind, cache, index, outputs)
    kind = kinds[kind_key] = _Kind(len(kinds))
    args, kwargs, state = _refilled(call, _place(_BEGIN, kind, [*inputs, *weights], inputs))
    if cache is not None:
        vars(cache.layers[index]).update(state)
    result = forward(*args, **kwargs)
    if cache is not None:
        kind.layer = copy(cache.layers[index])
        result = (result, vars(kind.layer))
    outputs = _tensors(result)
    kind.result = result
    return _returned(kind, cache, index, _place(_END, kind, outputs, outputs))


def _returned(kind: _Kind, cache: Any, index: int | None, outputs: Sequence[Tensor]) -> Any:
    """Return what a call of a kind returns with its own outputs, and store its part of the cache."""
    result = _refilled(kind.result, outputs)
    if cache is None:
        return result
    result, state = result
    cache.layers[index] = copy(kind.layer)
    vars(cache.layers[index]).update(state)
    return result


def _place(name: str, kind: _Kind, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Place a node whose outputs are like some tensors."""
    shapes = [tensor.shape for tensor in outputs]
    return graph_node(name, inputs, {"kind": kind.number}, *shapes, dtypes=[tensor.dtype for tensor in outputs])


# ---------------------------------------------------------------------------------------------------------------- ONNX


def expand_calls(model: Any) -> None:
    """Give an ONNX model the operations of each call that `tracing_once` made a node, as functions."""
    nodes = [node for node in model.graph if node.domain == DOMAIN]
    begins = {_kind_of(node): node for node in nodes if node.op_type == _BEGIN}
    ends = {_kind_of(node): node for node in nodes if node.op_type == _END}
    for number, end in ends.items():  # a call inside of another ends before it
        again = [node for node in nodes if node.op_type == _AGAIN and _kind_of(node) == number]
        _expand(model, begins[number], end, again)


def _kind_of(node: Any) -> int:
    kind: int = node.attributes["kind"].value
    return kind


def _expand(model: Any, begin: Any, end: Any, again: Sequence[Any]) -> None:
    """Replace the nodes of one kind."""
    import onnx_ir as ir

    graph = model.graph
    # Of a tensor the call reads what its first node returns, of a weight what it was given.
    given = [*begin.outputs, *begin.inputs[len(begin.outputs) :]]
    own = _depending(graph, given, end)
    computed = [value for value in dict.fromkeys(end.inputs) if value.producer() in own]
    read = dict.fromkeys(chain.from_iterable(node.inputs for node in graph if node in own))
    known = {None, *given}
    shared = [value for value in read if value not in known and value.producer() not in own]
    if again and computed:
        body = ir.convenience.extract(graph, [*dict.fromkeys(given), *shared], computed)
        body.initializers.clear()
        function = ir.Function(DOMAIN, f"Call{_kind_of(end)}", graph=body, attributes=())
        model.functions[function.identifier()] = function
    for node in again:
        places: dict[Any, Any] = dict(zip(given, node.inputs, strict=True))
        if computed:
            values = [places[value] for value in dict.fromkeys(given)]
            call = ir.node(function.name, [*values, *shared], domain=DOMAIN, num_outputs=len(computed))
            graph.insert_before(node, call)
            places.update(zip(computed, call.outputs, strict=True))
        _replace(graph, node, [places.get(value, value) for value in end.inputs])
    _replace(graph, begin, begin.inputs[: len(begin.outputs)])
    _replace(graph, end, end.inputs)


def _depending(graph: Any, given: Iterable[Any], end: Any) -> set[Any]:
    """Return the nodes on the way from some values to a node: the others serve all calls alike."""
    after: set[Any] = set(given)
    for node in graph:
        if not after.isdisjoint(node.inputs):
            after.update(node.outputs)
    depending: set[Any] = set()
    waiting = list(end.inputs)
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if value in after and value not in given and node not in depending:
            depending.add(node)
            waiting += [value for value in node.inputs if value is not None]
    return depending


def _replace(graph: Any, node: Any, values: Sequence[Any]) -> None:
    """Let other values stand for the outputs of a node, and remove it; outputs of the graph keep their names."""
    import onnx_ir as ir

    for output, value in zip(node.outputs, values, strict=True):
        if output.is_graph_output():
            if value.producer() is None or value.is_graph_output():  # it has a name of its own
                same = ir.node("Identity", [value])
                graph.insert_before(node, same)
                value = same.outputs[0]
            value.name, value.type, value.shape = output.name, output.type, output.shape
        ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
