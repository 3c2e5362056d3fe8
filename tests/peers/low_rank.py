"""linformer: keys and values projected along the sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.mechanisms import AttentionInputs
from tests.inputs import padding_mask
from tests.peers.comparing import BATCH, DIM, HEADS, LENGTH, SCALING, Outputs, Package, compare, mechanism
from tests.reference import naive

LINFORMER = Package("linformer", "pip install linformer")
MODULE = "linformer"
SLOTS = 12
#: A row with padding keeps so many tokens.
UNPADDED = LENGTH - 12

PADDING = "takes no mask (a `mask` argument is swallowed without a word): padding is projected into the slots"


def layer(share: bool = False) -> Any:
    from linformer import LinformerSelfAttention

    return LinformerSelfAttention(HEADS * DIM, LENGTH, k=SLOTS, heads=HEADS, share_kv=share).double()


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, HEADS * DIM, dtype=torch.float64)


def heads(theirs: Any, x: Tensor) -> list[Tensor]:
    """q, k, and v where there is one."""
    projections = [theirs.to_q, theirs.to_k] + ([] if theirs.share_kv else [theirs.to_v])
    return [project(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for project in projections]


def ours_with(theirs: Any, sharing: str = "headwise") -> Any:
    """Ours with their projections `[n, k]`, cut for shorter inputs as theirs are."""
    module = mechanism("linformer", False, max_length=LENGTH, num_slots=SLOTS, fit="truncate", sharing=sharing)
    module.project_key.data = theirs.proj_k.T.unsqueeze(0)
    if module.project_value is not None:
        module.project_value.data = theirs.proj_v.T.unsqueeze(0)
    return module


def definition(q: Tensor, k: Tensor, v: Tensor, module: Any) -> Tensor:
    """Of rows without padding."""
    project_value = module.project_key if module.project_value is None else module.project_value
    first, second = (projection[..., : k.shape[2]] for projection in (module.project_key, project_value))
    return naive.linformer_attention(q, k, v, first, second, SCALING)


def out(theirs: Any, attended: Tensor) -> Tensor:
    return theirs.to_out(attended.transpose(1, 2).flatten(2))


def unmasked(length: int) -> Outputs:
    theirs, x = layer(), tokens(length)
    module, (q, k, v) = ours_with(theirs), heads(theirs, x)
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=False))
    return Outputs(theirs(x), out(theirs, ours), out(theirs, definition(q, k, v, module)))


@compare(LINFORMER, MODULE, mechanism="linformer", case="same projections, the length that they were made for")
def full_length() -> Outputs:
    return unmasked(LENGTH)


@compare(LINFORMER, MODULE, mechanism="linformer", case="same projections, a shorter input (ours with fit='truncate')")
def shorter() -> Outputs:
    return unmasked(UNPADDED)


@compare(LINFORMER, MODULE, mechanism="linformer", case="a row with 12 tokens of padding", differs=PADDING)
def padded_row() -> Outputs:
    """Real tokens of the second row; the definition is that of the row by itself."""
    theirs, x = layer(), tokens()
    mask = padding_mask([LENGTH, UNPADDED], LENGTH, "right")
    module, (q, k, v) = ours_with(theirs), heads(theirs, x)
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=False, mask=mask))
    short_q, short_k, short_v = (tensor[1:, :, :UNPADDED] for tensor in (q, k, v))
    unpadded = definition(short_q, short_k, short_v, module)
    return Outputs(theirs(x, mask=mask)[1, :UNPADDED], out(theirs, ours)[1, :UNPADDED], out(theirs, unpadded)[0])


@compare(
    LINFORMER,
    MODULE,
    mechanism="linformer",
    case="`share_kv`, where the keys are the values too; ours with sharing='kv' and v = k",
)
def shared() -> Outputs:
    """The paper shares E and F alone; theirs has no projection of values left."""
    theirs, x = layer(share=True), tokens()
    module = ours_with(theirs, "kv")
    q, k = heads(theirs, x)
    ours, _ = module(AttentionInputs(q, k, k, scaling=SCALING, causal=False))
    return Outputs(theirs(x), out(theirs, ours), out(theirs, definition(q, k, k, module)))
