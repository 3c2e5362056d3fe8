"""Text to measure on: a file, or the documentation that comes with Python. Split into a train and a held-out part."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Marks the end of a document in many text files for language models.
END_OF_TEXT = "<|endoftext|>"

#: Docstrings of the standard library shorter than this are left out: they say too little.
MIN_DOCSTRING = 40

#: Every fifth document is held out.
HELD_OUT_EVERY = 5

#: A text with fewer characters cannot be split into something to train and something to measure on.
MIN_CHARACTERS = 2000


@dataclass(frozen=True)
class Text:
    """Documents of one source. The held-out ones are never trained on."""

    source: str
    sha256: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def characters(self) -> int:
        return sum(map(len, self.train)) + sum(map(len, self.held_out))


def read_text(path: str | None) -> Text:
    """The text of a file, or the docstrings of the standard library if `path` is None.

    Raises:
        OSError: the file is missing or unreadable.
        ValueError: it is no UTF-8 text, or too short.
    """
    if path is None:
        documents = standard_library_documents()
        version = ".".join(map(str, sys.version_info[:3]))
        source = f"docstrings of the standard library of Python {version}, one document a module"
    else:
        documents = split_documents(_read_file(Path(path)))
        source = str(path)
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    characters = sum(map(len, documents))
    if characters < MIN_CHARACTERS:
        remedy = "Give a longer text." if path is not None else "Give a text with --text FILE."
        raise ValueError(f"{source!r} holds {characters} characters; at least {MIN_CHARACTERS} are needed. {remedy}")
    train, held_out = split_train(documents)
    return Text(source, digest, tuple(train), tuple(held_out))


def _read_file(path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(
            f"There is no text file {str(path)!r}. Give an existing file, or leave --text out to use Python's own "
            "documentation."
        )
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder. Give a text file.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 text ({error}). Convert it, or give another file.") from error


def split_documents(text: str) -> list[str]:
    """The documents of a text, without repetitions.

    Split at `<|endoftext|>` if it occurs. A text with blank lines is one running document; a text without any holds one
    document a line (sentences, SMILES strings, log lines).
    """
    text = text.replace("\r\n", "\n")
    if END_OF_TEXT in text:
        parts: Iterable[str] = text.split(END_OF_TEXT)
    elif "\n\n" in text.strip():
        parts = [text]
    else:
        parts = text.split("\n")
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def split_train(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Train and held-out documents: every fifth is held out; of fewer than ten, the last fifth of the running text."""
    if len(documents) >= 2 * HELD_OUT_EVERY:
        last = HELD_OUT_EVERY - 1
        train = [document for index, document in enumerate(documents) if index % HELD_OUT_EVERY != last]
        return train, list(documents[last::HELD_OUT_EVERY])
    running = "\n\n".join(documents)
    cut = len(running) * (HELD_OUT_EVERY - 1) // HELD_OUT_EVERY
    space = running.find(" ", cut)
    cut = space if space > 0 else cut
    return [running[:cut].strip()], [running[cut:].strip()]


def standard_library_documents() -> list[str]:
    """One document a module of the standard library: its docstrings in order of appearance.

    The sources are parsed, not imported. The same Python version always gives the same documents.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(
        name for name in sys.stdlib_module_names if not name.startswith("_") and name not in ("this", "test")
    )
    seen: set[str] = set()
    documents = []
    for name in names:
        found = [folder / f"{name}.py", folder / name / "__init__.py"]
        for path in (path for path in found if path.is_file()):
            kept = [text for text in docstrings(path) if len(text) >= MIN_DOCSTRING and text not in seen]
            seen.update(kept)
            if kept:
                documents.append("\n\n".join(kept))
    return documents


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a Python file, without indentation."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield inspect.cleandoc(text)


# --------------------------------------------------------------------------------------------------------------------
# Tokens


def passages(tokenizer: Any, documents: Sequence[str], length: int, count: int) -> list[list[int]]:
    """At most `count` sequences of at most `length` tokens, with the tokenizer's special tokens.

    Each document is cut into pieces; pieces under a quarter of the length (or eight tokens) are dropped unless they are
    the whole document. If there are more than `count`, an even spread over the documents is taken.
    """
    before, after = special_tokens(tokenizer, documents)
    room = length - len(before) - len(after)
    shortest = max(length // 4, 8)
    found: list[list[int]] = []
    for document in documents:
        ids = encode(tokenizer, document)
        pieces = [[*before, *ids[start : start + room], *after] for start in range(0, len(ids), room)]
        found += [piece for piece in pieces if len(piece) >= shortest or len(pieces) == 1]
    if len(found) > count:
        found = [found[index * len(found) // count] for index in range(count)]
    return found


def whole_documents(tokenizer: Any, documents: Sequence[str], budget: int) -> list[list[int]]:
    """Whole documents with special tokens until `budget` tokens are used up; the last one is cut."""
    before, after = special_tokens(tokenizer, documents)
    found: list[list[int]] = []
    for document in documents:
        if budget < 2:
            break
        found.append([*before, *encode(tokenizer, document), *after][:budget])
        budget -= len(found[-1])
    return found


def encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Token ids, with special tokens around them if `special`.

    Raises:
        ValueError: the tokenizer cannot read this text.
    """
    try:
        # `verbose=False`: that a document is longer than the model's limit is why it is cut afterwards.
        return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    except Exception as error:
        shown = text if len(text) <= 40 else f"{text[:40]}…"
        raise ValueError(
            f"The model's tokenizer cannot read {shown!r} ({error}). Give a text that the model was made for with "
            "--text FILE, or repair its tokenizer.json."
        ) from error


def special_tokens(tokenizer: Any, documents: Sequence[str]) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a sequence; found on the shortest of the documents."""
    sample = min(documents, key=len)
    bare, full = encode(tokenizer, sample), encode(tokenizer, sample, special=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def make_batches(sequences: Sequence[Sequence[int]], size: int, pad: int) -> list[dict[str, Tensor]]:
    """Batches `input_ids, attention_mask [size, longest]`, padded on the right."""
    import torch

    batches = []
    for start in range(0, len(sequences), size):
        part = sequences[start : start + size]
        longest = max(map(len, part))
        ids = torch.full((len(part), longest), pad)
        mask = torch.zeros(len(part), longest, dtype=torch.long)
        for row, sequence in enumerate(part):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def pad_id(tokenizer: Any) -> int:
    """The padding token; where there is none any token will do, since it is masked."""
    return next((held for held in (tokenizer.pad_token_id, tokenizer.eos_token_id) if held is not None), 0)
