"""The rows of recurrent states: several states joined to one of all their rows, and what padding can be dropped again.

Most entries of a state have one size whatever the row has read, and rows are stacked. Some grow: exact heads store a
key for each column of the batch, padding included (`mechanisms.softmax`), so that shorter rows get padding before
theirs; the slots of finished blocks (`ops.linformer`) are counted for each row, so that it comes behind.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .common import State

#: Entries with one place for each column of the batch, and their dimension of columns.
COLUMNS = {"exact_key": 2, "exact_value": 2, "exact_mask": 1}

#: Entries `[B, G, N, …]` of which each row uses the first `slot_count`.
SLOTS = ("slot_key", "slot_value")


def join_rows(states: Sequence[State], padding: Sequence[int]) -> State:
    """Return one state with the rows of all.

    Args:
        states: States of one mechanism.
        padding: For each state, the columns of padding to put before its own, so that all have as many.

    Raises:
        ValueError: The states have different entries.
    """
    if len({frozenset(state) - {"exact_mask"} for state in states}) > 1:
        names = sorted(set().union(*states))
        raise ValueError(f"States of different mechanisms or options cannot be joined: not all have {names}.")
    has_mask = any(padding) or any("exact_mask" in state for state in states)
    if has_mask and "exact_key" in states[0]:
        states = [{**state, "exact_mask": _exact_mask(state)} for state in states]
    joined = {}
    for name in states[0]:
        parts = [state[name] for state in states]
        if name in COLUMNS:
            parts = [_pad_before(part, COLUMNS[name], count) for part, count in zip(parts, padding, strict=True)]
        elif name in SLOTS:
            slots = max(part.shape[2] for part in parts)
            parts = [pad(part, (0, 0, 0, slots - part.shape[2])) for part in parts]
        joined[name] = torch.cat(parts)
    return joined


def drop_padding(state: State, columns: int) -> State:
    """Return a state without its first `columns`, which are padding in all rows, and without slots that no row uses."""
    dropped = dict(state)
    for name, dim in COLUMNS.items():
        if name in state and columns:
            rest = state[name].shape[dim] - columns
            dropped[name] = state[name].narrow(dim, columns, rest).clone(memory_format=torch.contiguous_format)
    if "slot_count" in state:
        used = int(state["slot_count"].max())
        dropped |= {name: state[name][:, :, :used].clone() for name in SLOTS}
    return dropped


def _exact_mask(state: State) -> Tensor:
    """Return which columns of exact heads are tokens, `[B, n]`; the stored one may be of one row for all."""
    key = state["exact_key"]
    mask = state.get("exact_mask")
    if mask is None:
        return torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    return mask.expand(key.shape[0], -1)


def _pad_before(tensor: Tensor, dim: int, count: int) -> Tensor:
    if not count:
        return tensor
    sizes = list(tensor.shape)
    sizes[dim] = count
    return torch.cat([tensor.new_zeros(sizes), tensor], dim)
