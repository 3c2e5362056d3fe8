"""Inputs of any length for a model, beyond the positions of its table too: for timing."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .discovery import longest_input


def has_position_table(model: PreTrainedModel) -> bool:
    """Return whether positions are looked up in a table of limited size. Rotary positions are computed instead."""
    config = model.config.get_text_config(decoder=False)
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return not rotary and longest_input(model) is not None


def accepts_longer_inputs(model: PreTrainedModel) -> bool:
    """Return whether `synthetic_inputs` can be longer than the model's positions."""
    return not has_position_table(model) or "position_ids" in inspect.signature(model.forward).parameters


def synthetic_inputs(
    model: PreTrainedModel, tokens: Sequence[int], length: int, batch_size: int = 1
) -> dict[str, Tensor]:
    """Return inputs `[batch_size, length]`: the tokens, row after row, repeated as needed.

    Positions beyond the model's table start again from zero. That does not change the speed; the outputs at such
    lengths mean nothing and are not used.
    """
    total = batch_size * length
    repeated = (list(tokens) * (total // len(tokens) + 1))[:total]
    ids = torch.tensor(repeated, device=model.device).view(batch_size, length)
    # We pass a mask of ones: position ids that start again would otherwise be read as several packed documents.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name, positions in position_inputs(model, length).items():
        inputs[name] = positions.expand(batch_size, -1)
    accepted = inspect.signature(model.forward).parameters
    if "token_type_ids" in accepted and getattr(model.config, "type_vocab_size", None):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs


def position_inputs(model: PreTrainedModel, length: int, start: int = 0) -> dict[str, Tensor]:
    """Return `position_ids [1, length]` that start again from zero where the model's table ends, or an empty dict."""
    limit = longest_input(model)
    if limit is None or start + length <= limit or not has_position_table(model):
        return {}
    return {"position_ids": torch.arange(start, start + length, device=model.device)[None] % limit}
