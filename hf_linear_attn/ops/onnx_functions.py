"""The nodes of `ops.graph_nodes` as functions of ONNX operators, for any batch and length.

Their operators are those of opset 18, which every runtime has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from .graph_nodes import DOMAIN
from .onnx_sums import causal_delta, causal_efficient, causal_sums
from .onnx_window import bidirectional_window, window

if TYPE_CHECKING:
    import onnx_ir as ir

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Window": bidirectional_window,
    "CausalWindow": window,
    "CausalSums": causal_sums,
    "CausalEfficient": causal_efficient,
    "CausalDelta": causal_delta,
}


def replace_nodes(model: ir.Model) -> None:
    """Replace the nodes of `DOMAIN` in an ONNX model by calls of functions, which the model then has."""
    import onnxscript

    names: dict[Any, str] = {}
    for node in model.graph.all_nodes():
        if node.domain != DOMAIN:
            continue
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        present = tuple(value is not None for value in node.inputs)
        key = (node.op_type, present, tuple(attributes.items()))
        if key not in names:
            names[key] = f"{node.op_type}{len(names)}"
            inputs = [
                None if value is None else onnxscript.ir.val(f"input_{index}", value.dtype)
                for index, value in enumerate(node.inputs)
            ]
            function = onnxscript.build_function(
                partial(_FUNCTIONS[node.op_type], **attributes),
                inputs,
                domain=DOMAIN,
                name=names[key],
                opset_imports={"": model.opset_imports[""]},
            )
            model.functions[function.identifier()] = function
        node.op_type = names[key]
        node.attributes.clear()
    model.opset_imports[DOMAIN] = 1
