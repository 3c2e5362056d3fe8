"""Text -> token ids: rows of a task, full blocks for causal language models, documents for masked ones.

Everything goes through `Dataset.map`, so that what was encoded once is found again in the cache of the data set. A data
set that lies in memory, or beside whose files nothing can be written, is encoded in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import import_datasets, shown
from .sources import check_columns

if TYPE_CHECKING:
    from datasets import Dataset

TRUNCATED = "__truncated__"
BATCH = 1000


@dataclass(frozen=True)
class Encoded:
    """Token ids, and what became of the text.

    Attributes:
        dataset: with `input_ids`, and `token_type_ids` and `labels` where there are any.
        rows: number of rows.
        tokens: number of tokens in them.
        truncated: rows that were cut to the length.
        dropped: tokens left out because they did not fill a block.
    """

    dataset: Dataset
    rows: int
    tokens: int
    truncated: int = 0
    dropped: int = 0


def encode_pairs(
    dataset: Dataset, tokenizer: Any, columns: Sequence[str], max_length: int, label: str | None = "label"
) -> Encoded:
    """One or two text columns, encoded as one sequence with the tokenizer's special tokens, cut to `max_length`.

    Args:
        dataset: one split.
        columns: one or two text columns.
        max_length: tokens of a row, special tokens counted; of a pair the longer part is cut first.
        label: the column that becomes `labels`; None: no labels.

    Raises:
        ValueError: an unknown column; a row without text, with a hidden label (-1), or that the tokenizer cannot read
            (the row is named); a `max_length` that leaves no room beside the special tokens.
    """
    if not 1 <= len(columns) <= 2:
        raise ValueError(f"One or two text columns can be encoded, got {len(columns)}: {', '.join(columns)}.")
    check_columns(dataset, columns, label)
    special = tokenizer.num_special_tokens_to_add(pair=len(columns) == 2)
    if not isinstance(max_length, int) or max_length <= special + len(columns) - 1:
        raise ValueError(
            f"max_length={max_length!r} leaves no room for text beside {special} special tokens. "
            "Raise --data.max_length."
        )
    if label is not None:
        _check_labels(dataset, label)
    kept = list(columns) if label is None else [*columns, label]

    def encode(batch: dict[str, list[Any]], rows: list[int]) -> dict[str, list[Any]]:
        return _encode_rows(tokenizer, [batch[name] for name in columns], rows, max_length)

    _reset(tokenizer)
    found = _map(dataset.select_columns(kept), encode, list(columns))
    if label is not None and label != "labels":
        found = found.rename_column(label, "labels")
    truncated = sum(found[TRUNCATED][:])
    found = found.remove_columns(TRUNCATED)
    return Encoded(found, len(found), _count_tokens(found), truncated)


def encode_documents(dataset: Dataset, tokenizer: Any, text_column: str, max_length: int) -> Encoded:
    """One row a document with special tokens, cut to `max_length` (for masked language models). Errors as above."""
    return encode_pairs(dataset, tokenizer, [text_column], max_length, label=None)


def encode_blocks(
    dataset: Dataset, tokenizer: Any, text_column: str, block_length: int, *, eos: bool = True
) -> Encoded:
    """Full blocks of `block_length` tokens for causal language models.

    The documents are joined in order, each followed by the end-of-sequence token if `eos`, and the running whole is cut
    into blocks; the remainder that fills no block is dropped and counted in `dropped`. No other special tokens. Empty
    rows add nothing, not even the end token.

    Raises:
        ValueError: as `encode_pairs`; no end-of-sequence token; fewer tokens than one block.
    """
    import numpy as np

    datasets = import_datasets()
    if not isinstance(block_length, int) or block_length < 2:
        raise ValueError(f"block_length must be a whole number of at least 2, got {block_length!r}.")
    end = tokenizer.eos_token_id if eos else None
    if eos and end is None:
        raise ValueError("The tokenizer has no end-of-sequence token. Set one, or encode with eos=False.")
    check_columns(dataset, [text_column], None)
    ending = [] if end is None else [end]

    def encode(batch: dict[str, list[Any]], rows: list[int]) -> dict[str, list[Any]]:
        found = _tokenize(tokenizer, [batch[text_column]], rows, add_special_tokens=False)
        return {"input_ids": [[*ids, *ending] if ids else [] for ids in found["input_ids"]]}

    _reset(tokenizer)
    found = _map(dataset.select_columns([text_column]), encode, [text_column])
    parts = [table["input_ids"].combine_chunks().flatten() for table in found.with_format("arrow").iter(BATCH)]
    running = np.concatenate([np.asarray(part, dtype=np.int32) for part in parts] or [np.zeros(0, np.int32)])
    count = len(running) // block_length
    if not count:
        raise ValueError(f"{len(running)} tokens do not fill one block of {block_length}. Shorten --data.block_length.")
    blocks = running[: count * block_length].reshape(count, block_length)
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    made = datasets.Dataset.from_dict({"input_ids": blocks}, features=features)
    return Encoded(made, count, blocks.size, dropped=len(running) - blocks.size)


def _encode_rows(tokenizer: Any, texts: list[list[Any]], rows: list[int], max_length: int) -> dict[str, list[Any]]:
    """Encoded rows; only those that are too long are encoded a second time, cut."""
    found = _tokenize(tokenizer, texts, rows)
    long = [index for index, ids in enumerate(found["input_ids"]) if len(ids) > max_length]
    for index in long:
        parts = [[column[index]] for column in texts]
        cut = _tokenize(tokenizer, parts, [rows[index]], truncation=True, max_length=max_length)
        for name in found:
            found[name][index] = cut[name][0]
    if long:
        _reset(tokenizer)
    for row, ids in zip(rows, found["input_ids"], strict=True):
        if not ids:
            raise ValueError(f"Row {row}: the tokenizer makes no tokens of it. Take the row out.")
    cut_rows = set(long)
    return {**found, TRUNCATED: [index in cut_rows for index in range(len(rows))]}


def _tokenize(tokenizer: Any, texts: list[list[Any]], rows: list[int], **options: Any) -> dict[str, list[Any]]:
    """`input_ids` and, if the tokenizer gives them, `token_type_ids` of rows; errors name the row."""
    for index, row in enumerate(rows):
        for column in texts:
            if not isinstance(column[index], str):
                raise ValueError(f"Row {row}: expected text, found {shown(column[index])}.")
    # `verbose=False`: that a text is longer than the model's limit is why it is cut afterwards.
    options = {"return_attention_mask": False, "verbose": False, **options}
    try:
        made = tokenizer(*texts, **options)
    except Exception as error:
        if len(rows) > 1:  # find the row
            for index, row in enumerate(rows):
                _tokenize(tokenizer, [[column[index]] for column in texts], [row], **options)
        text = shown(" | ".join(column[0] for column in texts))
        raise ValueError(f"Row {rows[0]}: the tokenizer cannot read {text} ({error}).") from error
    return {name: list(made[name]) for name in ("input_ids", "token_type_ids") if name in made}


def _reset(tokenizer: Any) -> None:
    """Drop the truncation and padding that a fast tokenizer keeps from a call, or from its file.

    They are part of what the cache of a data set is found by: left over from another call they would hide it.
    """
    tokenizer("", verbose=False)


def _map(dataset: Dataset, function: Callable[..., Any], remove: list[str]) -> Dataset:
    in_memory = not dataset.cache_files or not all(
        os.access(Path(held["filename"]).parent, os.W_OK) for held in dataset.cache_files
    )
    return dataset.map(
        function,
        batched=True,
        batch_size=BATCH,
        with_indices=True,
        remove_columns=remove,
        keep_in_memory=in_memory,
        desc="Encoding",
    )


def _check_labels(dataset: Dataset, label: str) -> None:
    for row, value in enumerate(dataset[label][:]):
        if value is None or (isinstance(value, int) and value < 0):
            raise ValueError(f"Row {row}: the label is {value!r}. Splits with hidden labels cannot be trained on.")


def _count_tokens(dataset: Dataset) -> int:
    return sum(len(table["input_ids"].combine_chunks().flatten()) for table in dataset.with_format("arrow").iter(BATCH))


def row_lengths(dataset: Dataset) -> list[int]:
    """Tokens of each row."""
    import pyarrow.compute as pc

    tables = dataset.with_format("arrow").iter(BATCH)
    return [length for table in tables for length in pc.list_value_length(table["input_ids"]).to_pylist()]
