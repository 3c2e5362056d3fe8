"""Rows of token ids -> padded batches of tensors, and the labels of masked and of causal language modelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

#: Positions with this label do not count, in every loss of PyTorch and Transformers.
IGNORED = -100

#: What a token column is filled up with; input_ids with the padding token.
FILL = {"token_type_ids": 0, "attention_mask": 0, "labels": IGNORED}

#: Of the chosen tokens, the share replaced by the mask token and the share replaced by a random one (BERT).
MASKED, RANDOM = 0.8, 0.1


def collate_padded(rows: Sequence[Mapping[str, Any]], pad_id: int, *, multiple: int = 1) -> dict[str, Tensor]:
    """Rows padded on the right to the longest, or to the next multiple of `multiple`.

    Args:
        rows: each with `input_ids`, and all or none of `token_type_ids`, `attention_mask`, `labels`; labels are one
            number a row or one a token.
        pad_id: the padding token.
        multiple: lengths are rounded up to a multiple of it.

    Returns:
        `input_ids`, `attention_mask` (1 at tokens) and, where the rows have them, `token_type_ids`: int64
        `[batch, length]`. `labels`: int64 or float32 `[batch]`, or int64 `[batch, length]` with -100 at padding.

    Raises:
        ValueError: no rows, an empty row, rows with different or unknown columns, or a column of another length.
    """
    _check_rows(rows, multiple)
    lengths = [len(row["input_ids"]) for row in rows]
    longest = -(-max(lengths) // multiple) * multiple
    batch = {"input_ids": _padded(rows, "input_ids", pad_id, longest)}
    counts = torch.tensor(lengths)[:, None]
    batch["attention_mask"] = (torch.arange(longest)[None] < counts).long()
    for name in rows[0]:
        if name in FILL:
            single = name == "labels" and torch.as_tensor(rows[0][name]).ndim == 0
            batch[name] = (
                torch.tensor([row[name] for row in rows]) if single else _padded(rows, name, FILL[name], longest)
            )
    return batch


def _padded(rows: Sequence[Mapping[str, Any]], name: str, fill: int, length: int) -> Tensor:
    padded = torch.full((len(rows), length), fill)
    for index, row in enumerate(rows):
        values = torch.as_tensor(row[name])
        if values.shape != (len(row["input_ids"]),):
            raise ValueError(
                f"Row {index} of the batch has {len(row['input_ids'])} tokens, but {name} of the shape "
                f"{tuple(values.shape)}."
            )
        padded[index, : len(values)] = values
    return padded


def _check_rows(rows: Sequence[Mapping[str, Any]], multiple: int) -> None:
    if not isinstance(multiple, int) or multiple < 1:
        raise ValueError(f"multiple must be a whole number of at least 1, got {multiple!r}.")
    if not rows:
        raise ValueError("A batch needs at least one row.")
    known = {"input_ids", *FILL}
    for index, row in enumerate(rows):
        if "input_ids" not in row or not set(row) <= known:
            raise ValueError(
                f"Row {index} of the batch has the columns {', '.join(map(str, row))}; it needs input_ids and may have "
                f"{', '.join(FILL)}. Encode the data set first."
            )
        if set(row) != set(rows[0]):
            raise ValueError(f"Rows of a batch differ in their columns: {', '.join(row)}, {', '.join(rows[0])}.")
        if not len(row["input_ids"]):
            raise ValueError(f"Row {index} of the batch holds no tokens.")


def mask_tokens(
    batch: Mapping[str, Tensor], tokenizer: Any, generator: torch.Generator, probability: float = 0.15
) -> dict[str, Tensor]:
    """A batch for masked language modelling (Devlin et al. 2019, arXiv:1810.04805).

    Each token is chosen with the probability given. Of the chosen 80 % become the mask token, 10 % a random token that
    is not special, and 10 % stay. Special tokens (the unknown token among them) and padding are never chosen. If chance
    chooses none of a whole batch, the token with the smallest draw is, since a loss over no token is nan.

    Args:
        batch: with `input_ids` and `attention_mask` `[batch, length]`; it is not changed.
        tokenizer: for its mask token, its special tokens and its size.
        generator: the only source of randomness; on the CPU, so that every device sees the same masks.

    Returns:
        The batch with the masked `input_ids`, and `labels` `[batch, length]`: the true token where chosen, else -100.

    Raises:
        ValueError: the tokenizer has no mask token, the probability is not in (0, 1], or nothing can be chosen.
    """
    if getattr(tokenizer, "mask_token_id", None) is None:
        raise ValueError("The tokenizer has no mask token. Train this model as a causal language model instead.")
    if not 0 < probability <= 1:
        raise ValueError(f"The probability to mask a token must lie in (0, 1], got {probability!r}.")
    ids = batch["input_ids"]
    special = torch.tensor(sorted(tokenizer.all_special_ids), device=ids.device)
    eligible = batch["attention_mask"].bool() & ~torch.isin(ids, special)
    if not bool(eligible.any()):
        raise ValueError("A batch holds nothing but special tokens and padding: there is nothing to mask.")
    draw = _uniform(ids, generator).masked_fill(~eligible, 2.0)
    chosen = draw < probability if bool(draw.min() < probability) else draw == draw.min()
    action = _uniform(ids, generator)
    ordinary = torch.arange(len(tokenizer))
    ordinary = ordinary[~torch.isin(ordinary, special.cpu())]
    picks = torch.randint(len(ordinary), ids.shape, generator=generator)
    masked = torch.where(chosen & (action < MASKED), torch.full_like(ids, tokenizer.mask_token_id), ids)
    swap = chosen & (action >= MASKED) & (action < MASKED + RANDOM)
    masked = torch.where(swap, ordinary[picks].to(ids), masked)
    return {**batch, "input_ids": masked, "labels": ids.masked_fill(~chosen, IGNORED)}


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=generator).to(like.device)


def causal_labels(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with `labels = input_ids`, -100 at padding; the model shifts them by one itself."""
    ignored = batch["attention_mask"] == 0
    return {**batch, "labels": batch["input_ids"].masked_fill(ignored, IGNORED)}
