"""Rows of text as token ids: inputs of a classifier, full blocks for causal language models, passages for the others.

Text is encoded through `Dataset.map`. So encoded data is in the cache of the data set; a data set in memory, or beside
whose files nothing can be written, is encoded in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .files import import_datasets
from .text import check_length, cut_blocks, ended_documents, special_tokens, token_passages, tokenize

if TYPE_CHECKING:
    from datasets import Dataset

DROPPED = "__dropped__"

BATCH_SIZE = 1000


@dataclass(frozen=True)
class Encoded:
    """Token ids (and `token_type_ids` and `labels` where there are any), and what of the text is not among them."""

    dataset: Dataset
    truncated: int = 0  # rows that were cut
    dropped: int | None = 0  # tokens that were cut off these rows, or fill no block; None: they are not counted


def encode_pairs(dataset: Dataset, tokenizer: Any, columns: Sequence[str], max_length: int) -> Encoded:
    """Encode one or two text columns as one sequence with the tokenizer's special tokens.

    A row has at most `max_length` tokens, special ones included; of a pair the longer text is truncated first. The
    column `label` becomes `labels`.

    Raises:
        ValueError: A row (it is named) that the tokenizer cannot read; a `max_length` that leaves no token beside the
            special ones.
    """
    special = tokenizer.num_special_tokens_to_add(pair=len(columns) == 2)
    check_length(max_length, special, least=special + len(columns))

    def encode(batch: dict[str, list[Any]], rows: list[int]) -> dict[str, list[Any]]:
        texts = [batch[name] for name in columns]
        encoded = tokenize(tokenizer, texts, rows)
        dropped = [max(len(ids) - max_length, 0) for ids in encoded["input_ids"]]
        if any(dropped):  # a second time, now that we know how many tokens are cut off
            encoded = tokenize(tokenizer, texts, rows, truncation=True, max_length=max_length)
            _reset(tokenizer)
        for row, ids in zip(rows, encoded["input_ids"], strict=True):
            if not ids:
                raise ValueError(f"Row {row}: the tokenizer makes no tokens of it. Remove the row.")
        return {**encoded, DROPPED: dropped}

    encoded = _map(dataset, tokenizer, encode, list(columns), ["label"]).rename_column("label", "labels")
    dropped = encoded[DROPPED][:]
    encoded = encoded.remove_columns(DROPPED)
    return Encoded(encoded, sum(map(bool, dropped)), sum(dropped))


def encode_targets(dataset: Dataset, tokenizer: Any, columns: Sequence[str], max_length: int) -> Encoded:
    """Encode two text columns, each cut to `max_length` tokens: the first as inputs, the second as `labels`.

    Only inputs count as truncated and dropped. Raises as `encode_pairs`.
    """
    source, target = columns

    def encode(batch: dict[str, list[Any]], rows: list[int]) -> dict[str, list[Any]]:
        encoded = tokenizer(text_target=batch[target], truncation=True, max_length=max_length)
        return {"label": encoded["input_ids"]}

    targets = _map(dataset, tokenizer, encode, [target], [source])
    return encode_pairs(targets, tokenizer, [source], max_length)


def encode_blocks(dataset: Dataset, tokenizer: Any, text_column: str, max_length: int) -> Encoded:
    """Encode a text column as full blocks for causal language models.

    The rows are those of `packed_rows`: the documents are joined in order, each followed by the end-of-sequence token
    if the tokenizer has one, and split into blocks of `max_length` tokens that begin with what the tokenizer puts
    before a text. The remainder that fills no block is counted in `dropped`; too little text for one block is a shorter
    one. Empty rows add nothing, not even the end token. Raises as `encode_pairs`, and where there is nothing to
    predict.
    """
    before = special_tokens(tokenizer, filter(None, dataset[text_column]))[0]
    check_length(max_length, len(before), least=max(len(before) + 1, 2))  # a token, and one that it predicts

    def encode(batch: dict[str, list[Any]], rows: list[int]) -> dict[str, list[Any]]:
        return {"input_ids": ended_documents(tokenizer, batch[text_column], rows)}

    encoded = _map(dataset, tokenizer, encode, [text_column])
    parts = [table["input_ids"].combine_chunks().flatten() for table in encoded.with_format("arrow").iter(BATCH_SIZE)]
    tokens = np.concatenate([np.asarray(part, dtype=np.int32) for part in parts] or [np.zeros(0, np.int32)])
    blocks = cut_blocks(tokens, before, max_length)
    if blocks.shape[1] < 2:
        raise ValueError(f"{len(tokens)} tokens leave nothing to predict. Give more text.")
    dropped = len(tokens) - len(blocks) * (blocks.shape[1] - len(before))
    return Encoded(import_datasets().Dataset.from_dict({"input_ids": blocks}), dropped=dropped)


def encode_passages(dataset: Dataset, tokenizer: Any, text_column: str, max_length: int) -> Encoded:
    """Cut a text column into the passages of `token_passages`. Raises as `encode_pairs`.

    The ends of documents that are left out are not counted.
    """

    def encode(batch: dict[str, list[Any]], rows: list[int]) -> dict[str, list[Any]]:
        return {"input_ids": token_passages(tokenizer, batch[text_column], max_length)}

    encoded = _map(dataset, tokenizer, encode, [text_column])
    return Encoded(encoded, dropped=None)


def row_lengths(dataset: Dataset, column: str = "input_ids") -> list[int]:
    """Return the number of tokens of each row."""
    import pyarrow.compute as pc

    tables = dataset.with_format("arrow").iter(BATCH_SIZE)
    lengths: list[int] = []
    for table in tables:
        lengths += pc.list_value_length(table[column]).to_pylist()
    return lengths


def _reset(tokenizer: Any) -> None:
    """Drop what a fast tokenizer keeps of truncation and padding, which is part of the key of a data set's cache."""
    tokenizer("", verbose=False)


def _map(
    dataset: Dataset, tokenizer: Any, function: Callable[..., Any], columns: list[str], labels: Sequence[str] = ()
) -> Dataset:
    """The data set with what the function makes of the columns in place of all but the labels."""
    _reset(tokenizer)
    dataset = dataset.select_columns([*columns, *labels])
    folders = [Path(file["filename"]).parent for file in dataset.cache_files]
    return dataset.map(
        function,
        batched=True,
        batch_size=BATCH_SIZE,
        with_indices=True,
        remove_columns=columns,
        keep_in_memory=not folders or not all(os.access(folder, os.W_OK) for folder in folders),
        desc="Encoding",
    )
