"""Nodes of exported graphs that stand for whole attention calls, as long as the graph is traced.

Traced operation by operation, a window has hundreds of nodes a layer, and each of their sizes is an expression of
`(L + 63) // 64` that torch simplifies again and again. A node of this domain hides all of it: `exporting` replaces it
by a function of ONNX operators (`ops.onnx_functions`), which take sizes from the tensors themselves.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

#: The domain of these nodes, which no finished graph has.
DOMAIN = "hf_linear_attn"

_placing: ContextVar[bool] = ContextVar("placing_nodes", default=False)


@contextmanager
def placing_nodes() -> Iterator[None]:
    """Let graphs of free lengths that are exported inside of a `with` statement have nodes of `DOMAIN`."""
    token = _placing.set(True)
    try:
        yield
    finally:
        _placing.reset(token)


def places_nodes(length: int | None, *tensors: Tensor) -> bool:
    """Return whether a call of a free length of tokens (None: any length) becomes a node, which computes in float32."""
    # The variable comes last: `torch.compile` cannot read it.
    if not torch.compiler.is_exporting() or isinstance(length, int) or not _placing.get():
        return False
    return all(tensor.dtype == torch.float32 for tensor in tensors)


def graph_node(
    name: str,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, int | float],
    *shapes: Sequence[int],
    dtypes: Sequence[torch.dtype] | None = None,
) -> Sequence[Tensor]:
    """Add a node to the graph that is traced, and return its outputs of these shapes and dtypes (None: float32)."""
    dtypes = [torch.float32] * len(shapes) if dtypes is None else dtypes
    return torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}", inputs, dict(attributes), dtypes=dtypes, shapes=shapes
    )
