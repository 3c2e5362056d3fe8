"""Text: a file, or the documentation that comes with Python, split into train and held-out documents and batches."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import files

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

#: Docstrings of the standard library shorter than this are left out: they say too little.
MIN_DOCSTRING = 40

#: Every fifth document is held out.
HELD_OUT_EVERY = 5

#: A text with fewer characters cannot be split into something to train and something to measure on.
MIN_CHARACTERS = 2000


@dataclass(frozen=True)
class Text:
    """Documents of one source. The held-out ones are never trained on. Of a path the source is the name only."""

    source: str
    sha256: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]


def read_text(path: str | None) -> Text:
    """Read a text file, or the docstrings of the standard library if `path` is None."""
    if path is None:
        version = ".".join(map(str, sys.version_info[:3]))
        source = f"docstrings of the standard library of Python {version}, one document per module"
        return text_of(standard_library_documents(), source)
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no text file {path!r}. Give an existing file.")
    return text_of(files.text_documents(Path(path)), Path(path).name)


def text_of(documents: Sequence[str], source: str) -> Text:
    """Split documents, which are from a source, into train and held-out ones; a ValueError if they are too short."""
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    characters = sum(map(len, documents))
    if characters < MIN_CHARACTERS:
        raise ValueError(f"{source!r} has {characters} characters; at least {MIN_CHARACTERS} are needed.")
    train, held_out = split_train(documents)
    return Text(source, digest, tuple(train), tuple(held_out))


def split_train(documents: Sequence[str]) -> list[list[str]]:
    """Return train and held-out documents: every fifth one; of fewer than ten, the last fifth of the running text."""
    if len(documents) >= 2 * HELD_OUT_EVERY:
        last = HELD_OUT_EVERY - 1
        train = [document for index, document in enumerate(documents) if index % HELD_OUT_EVERY != last]
        return [train, list(documents[last::HELD_OUT_EVERY])]
    return [[part] for part in cut_text("\n\n".join(documents), 1 / HELD_OUT_EVERY)]


def cut_text(text: str, share: float) -> tuple[str, str]:
    """Return a text up to a space near its end, and the rest, which has this share of the characters."""
    cut = len(text) - int(share * len(text))
    space = text.find(" ", cut)
    cut = space if space > 0 else cut
    return text[:cut].strip(), text[cut:].strip()


def standard_library_documents() -> list[str]:
    """Return one document per module of the standard library: its docstrings in order of appearance.

    The sources are parsed, not imported. The same Python version always gives the same documents.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    excluded = ("this", "test")
    names = sorted(name for name in sys.stdlib_module_names if not name.startswith("_") and name not in excluded)
    seen: set[str] = set()
    documents = []
    for path in (path for name in names for path in (folder / f"{name}.py", folder / name / "__init__.py")):
        texts = [text for text in docstrings(path) if len(text) >= MIN_DOCSTRING and text not in seen]
        seen.update(texts)
        documents.append("\n\n".join(texts))
    return [document for document in documents if document]


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


def token_passages(tokenizer: Any, documents: Sequence[str], length: int, count: int | None = None) -> list[list[int]]:
    """Return sequences, at most `count` (None: all), of at most `length` tokens, with the tokenizer's special tokens.

    Each document is cut into pieces; a piece shorter than a quarter of the length (or eight tokens) is dropped unless
    it is a complete document. If there are more than `count`, they are taken evenly over the documents.
    """
    before, after = special_tokens(tokenizer, documents)
    capacity = length - len(before) - len(after)
    shortest = max(length // 4, 8)
    passages: list[list[int]] = []
    for document in documents:
        ids = encode_text(tokenizer, document)
        pieces = [[*before, *ids[start : start + capacity], *after] for start in range(0, len(ids), capacity)]
        passages += [piece for piece in pieces if len(piece) >= shortest or len(pieces) == 1]
    return passages if count is None else evenly_spread(passages, count)


def evenly_spread(rows: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the rows, evenly spread."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def token_documents(tokenizer: Any, documents: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Return complete documents with special tokens until `max_tokens` tokens are reached; the last one is cut."""
    before, after = special_tokens(tokenizer, documents)
    encoded: list[list[int]] = []
    for document in documents:
        if max_tokens < 2:
            break
        encoded.append([*before, *encode_text(tokenizer, document), *after][:max_tokens])
        max_tokens -= len(encoded[-1])
    return encoded


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of a text; a ValueError if the tokenizer cannot read it."""
    try:
        # `verbose=False`: that a document is longer than the model's limit is why it is cut afterwards.
        return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    except Exception as error:
        remedy = "Give a text that the model was made for, or repair its tokenizer.json."
        raise ValueError(f"The model's tokenizer cannot read {files.shortened(text)} ({error}). {remedy}") from error


def special_tokens(tokenizer: Any, documents: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return what the tokenizer puts before and after a sequence, as seen on the shortest of the documents."""
    sample = min(documents, key=len)
    bare, full = encode_text(tokenizer, sample), encode_text(tokenizer, sample, add_special_tokens=True)
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
