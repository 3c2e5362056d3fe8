"""Text: the documentation that comes with Python, the part of a text that is held out, rows of tokens, and batches."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from ..utils.options import OptionError
from .files import shortened

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

#: Docstrings of the standard library shorter than this are left out: they say too little.
MIN_DOCSTRING = 40

#: A text with fewer documents is running text, whose end is held out.
MIN_DOCUMENTS = 10

#: Where a text is cut into two, a space is looked for among so many characters.
LONGEST_WORD = 64


def cut_end(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Return documents without the end of the text that they are, and this end, which has a share of the characters.

    A document is cut at white space, if there is any near.
    """
    characters = int(share * sum(map(len, documents)))
    before, end = list(documents), list[str]()
    while before and len(before[-1]) <= characters:
        end.insert(0, before.pop())
        characters -= len(end[0])
    if before and characters:
        text = before.pop()
        cut = len(text) - characters
        space = re.compile(r"\s").search(text, cut, cut + LONGEST_WORD)  # some scripts have no spaces between words
        cut = space.start() if space else cut
        before.append(text[:cut].strip())
        end.insert(0, text[cut:].strip())
    return [document for document in before if document], [document for document in end if document]


def text_rows(
    tokenizer: Any, documents: Sequence[str], length: int, count: int | None = None, *, causal: bool
) -> list[list[int]]:
    """Return rows of at most `length` tokens of documents, at most `count` of them (None: all), evenly spread.

    Rows for a causal model are packed: the documents are joined, an end-of-sequence token after each, and cut into rows
    that all have the full length. Rows for a bidirectional model are passages of single documents, because it would
    read what stands beside them, too (see `token_passages`).
    """
    rows = packed_rows(tokenizer, documents, length) if causal else token_passages(tokenizer, documents, length)
    return rows if count is None else evenly_spread(rows, count)


def describe_rows(documents: int, length: int, *, causal: bool) -> str:
    """Return how `text_rows` makes rows of so many documents, for a person to read."""
    count = f"{documents:,} documents" if documents >= MIN_DOCUMENTS else "running text"
    how = "packed into rows of" if causal else "cut into passages of at most"
    return f"{count}, {how} {length:,} tokens"


def packed_rows(tokenizer: Any, documents: Sequence[str], length: int) -> list[list[int]]:
    """Return rows of `length` tokens of joined documents, or one shorter row where there is too little text.

    Each row begins with what the tokenizer puts before a text, such as `<bos>`; each document ends with the
    end-of-sequence token, if there is one. Empty documents add nothing, and tokens that do not fill a row are left out.
    """
    ended = (ended_documents(tokenizer, [document])[0] for document in documents)
    tokens = np.fromiter(chain.from_iterable(ended), np.int32)
    blocks = cut_blocks(tokens, special_tokens(tokenizer, documents)[0], length)
    return cast(list[list[int]], blocks.tolist())


def ended_documents(tokenizer: Any, documents: Sequence[str], rows: Sequence[int] = ()) -> list[list[int]]:
    """Return the tokens of documents, the end-of-sequence token after each, if there is one; none of an empty document.

    `rows` are the numbers of the documents, as in `tokenize`.
    """
    ending = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenize(tokenizer, [documents], rows, add_special_tokens=False)
    return [[*ids, *ending] if ids else [] for ids in encoded["input_ids"]]


def cut_blocks(tokens: np.ndarray, before: Sequence[int], length: int) -> np.ndarray:
    """Return tokens `[n]` as rows `[count, length]` that each begin with those `before` a text.

    Tokens that do not fill a row are left out; too few for one row are a shorter one.
    """
    capacity = max(length - len(before), 1)
    count = len(tokens) // capacity
    if not count:
        count, capacity = 1, len(tokens)
    beginnings = np.tile(np.array(before, dtype=tokens.dtype), (count, 1))
    return np.hstack([beginnings, tokens[: count * capacity].reshape(count, capacity)])


@cache
def standard_library_documents() -> tuple[str, ...]:
    """Return one document per module of the standard library: its docstrings in order of appearance.

    The sources are parsed, not imported. The same Python version always gives the same documents.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    excluded = ("this", "test")
    names = sorted(name for name in sys.stdlib_module_names if not name.startswith("_") and name not in excluded)
    seen: set[str] = set()
    documents = []
    for name, file in product(names, ("{}.py", "{}/__init__.py")):
        every = docstrings(folder / file.format(name))
        texts = [text for text in every if len(text) >= MIN_DOCSTRING and text not in seen]
        seen.update(texts)
        documents.append("\n\n".join(texts))
    return tuple(document for document in documents if document)


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a Python file, without indentation; none if there is no such file or it is broken."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield inspect.cleandoc(text)


def token_passages(tokenizer: Any, documents: Sequence[str], length: int) -> list[list[int]]:
    """Return sequences of at most `length` tokens, with the tokenizer's special tokens.

    Each document is cut into pieces; a piece shorter than a quarter of the length (or eight tokens) is dropped unless
    it is a complete document.
    """
    before, after = special_tokens(tokenizer, documents)
    special = len(before) + len(after)
    check_length(length, special, least=special + 1)
    capacity = length - special
    shortest = max(length // 4, 8)
    passages: list[list[int]] = []
    for document in documents:
        ids = encode_text(tokenizer, document)
        pieces = [[*before, *ids[start : start + capacity], *after] for start in range(0, len(ids), capacity)]
        passages += [piece for piece in pieces if len(piece) >= shortest or len(pieces) == 1]
    return passages


def check_length(length: int, special: int, least: int) -> None:
    """Raise an OptionError unless rows of so many tokens have room for text beside their special tokens."""
    if not isinstance(length, int) or length < least:
        beside = f" beside {special} special token{'s' if special > 1 else ''}" if special else ""
        raise OptionError("data.max_length", f"{length!r} leaves no room for text{beside}. Give {least} or more.")


def evenly_spread(rows: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the rows, evenly spread."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of a text; a ValueError if the tokenizer cannot read it."""
    try:
        # `verbose=False`: that a text is longer than the model's limit is why it is cut afterwards.
        return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    except Exception as error:
        raise _unreadable([text], error) from error


def tokenize(
    tokenizer: Any, columns: Sequence[Sequence[str]], rows: Sequence[int] = (), **options: Any
) -> dict[str, list[Any]]:
    """Return the `input_ids` of a column of texts or of pairs, two columns, and `token_type_ids` where there are any.

    A ValueError shows the first text that the tokenizer cannot read, and its number if those of the `rows` are given.
    """
    try:
        encoded = tokenizer(*columns, return_attention_mask=False, verbose=False, **options)
    except Exception as error:
        if len(columns[0]) > 1:  # find the text
            for index in range(len(columns[0])):
                one = slice(index, index + 1)
                tokenize(tokenizer, [column[one] for column in columns], rows[one], **options)
        where = f" in row {rows[0]}" if rows else ""
        raise _unreadable([column[0] for column in columns], error, where) from error
    return {name: list(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded}


def _unreadable(texts: Sequence[str], error: Exception, where: str = "") -> ValueError:
    remedy = "Give a text that the model was made for, or repair its tokenizer.json."
    return ValueError(f"The tokenizer cannot read {', '.join(map(shortened, texts))}{where} ({error}). {remedy}")


def special_tokens(tokenizer: Any, documents: Iterable[str]) -> tuple[list[int], list[int]]:
    """Return what the tokenizer puts before and after a sequence, as seen on the first document that has tokens."""
    samples = (document[:200] for document in documents)
    sample, bare = next(((one, ids) for one in samples if (ids := encode_text(tokenizer, one))), ("", []))
    if not bare:
        return [], []
    full = encode_text(tokenizer, sample, add_special_tokens=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def padded_batches(sequences: Sequence[Sequence[int]], batch_size: int, pad: int) -> list[dict[str, Tensor]]:
    """Return batches `input_ids, attention_mask [batch_size, longest]`, padded on the right with the token `pad`."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    batches = []
    for start in range(0, len(sequences), batch_size):
        rows = [torch.tensor(sequence) for sequence in sequences[start : start + batch_size]]
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        batches.append({"input_ids": pad_sequence(rows, batch_first=True, padding_value=pad), "attention_mask": mask})
    return batches


def pad_token(tokenizer: Any) -> int:
    """Return the padding token; where there is none any token will do, because it is masked."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
