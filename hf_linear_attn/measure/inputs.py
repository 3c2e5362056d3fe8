"""Inputs to time models with: any tokens, at any length that the whole model can take."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..integration.discovery import longest_input
from ..integration.positions import has_position_table
from ..registry import AttentionEntry


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


def timing_options(entry: AttentionEntry, options: Mapping[str, Any], limit: int | None, length: int) -> dict[str, Any]:
    """Return the options of a mechanism that is timed at up to `length` tokens.

    A mechanism that is built for a largest length gets that one where the model's own limit is smaller.
    """
    sized = any(item.name == "max_length" for item in fields(entry.options))
    return {**options, "max_length": length} if sized and (limit is None or length > limit) else dict(options)


def possible_lengths(model: PreTrainedModel, lengths: Sequence[int]) -> tuple[list[int], str]:
    """Return the lengths that the whole model can take, and a sentence about those beyond its positions (or "")."""
    limit = longest_input(model)
    if limit is None or max(lengths, default=0) <= limit:
        return list(lengths), ""
    if not accepts_longer_inputs(model):
        possible = [length for length in lengths if length <= limit] or [limit]
        return possible, f"The model takes {limit:,} positions; longer inputs were not timed."
    beyond = "start again from zero" if has_position_table(model) else "continue"
    return list(lengths), f"† Beyond the model's {limit:,} positions they {beyond}; no quality was measured there."
