"""A book read as one stream: the loss by position, at constant memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_linear_attn as hla
from hf_linear_attn.data.text import pad_token, padded_batches, read_text, text_rows
from hf_linear_attn.streaming import cache_bytes, read_stream, stream_losses

from .runner import Cell, Cells, Rows

#: Losses are averaged up to each of these positions of the stream.
RANGES = (512, 2048, 8192, 32768, 131072, 524288)

#: Characters that are encoded at a time.
BLOCK_CHARACTERS = 1 << 16


def stream(
    model: str,
    text: str,
    attention: tuple[str, ...] = ("window",),
    positions: tuple[str, ...] = ("wrap", "restart"),
    chunk_length: int = 256,
    period: int | None = None,
    max_length: int | None = None,
    tokens: int | None = None,
    steps: int = 60,
    train_text: str | None = None,
    train_length: int = 256,
    every: int = 50_000,
    seed: int = 0,
) -> Cells:
    """Read a book with a decoder, piece by piece or token by token: losses by position, and the memory on the way.

    What no linear attention can do is give positions a meaning that the model has not learned. `continue` counts on (a
    learned table ends, rotary angles become unfamiliar), `wrap` counts anew after a period and keeps the state,
    `restart` drops the state as well: that is the loss to compare with, since it needs no memory of the past.

    A model of a million parameters reads a book of 3 MB in some minutes on one core.

    Args:
        model: Folder or Hub name of a decoder. A patched checkpoint is read as it is.
        text: The book, a UTF-8 text file of any size.
        attention: Mechanisms for a model that is not patched; softmax: exact attention.
        positions: continue, wrap, restart.
        chunk_length: Tokens read at a time.
        period: Count anew after so many; by default what the model is made for.
        max_length: Extend a learned table of positions to so many.
        tokens: Stop after so many; by default at the end.
        steps: Of attention transfer on the train text, by which a patched model learns to mimic itself.
        train_text: A text file; by default docstrings of the standard library.
        train_length: Tokens of its sequences.
        every: Tokens between two looks at the memory.
        seed: Of random features and learned parts.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    mimicry = {"text": train_text, "length": train_length, "steps": steps}
    for name in attention:
        load = cache(partial(_load, model, tokenizer, name, max_length, seed, **mimicry))
        for counting in positions:
            options = {"chunk_length": chunk_length, "positions": counting, "period": period}
            facts = {"model": Path(model).name, "text": Path(text).name, "attention": name, **options}
            facts |= {"max_length": max_length, "tokens": tokens, "steps": steps, "train_length": train_length}
            facts |= {"train_text": train_text and Path(train_text).name, "seed": seed}
            call = partial(_read, load, partial(file_tokens, text, tokenizer), tokens, every, options)
            yield Cell(facts, call, {"every": every})


def _load(
    source: str,
    tokenizer: Any,
    name: str,
    max_length: int | None,
    seed: int,
    *,
    text: str | None,
    length: int,
    steps: int,
) -> Any:
    """Return the decoder, patched and trained to mimic exact attention where it is not patched yet."""
    torch.manual_seed(seed)
    if getattr(AutoConfig.from_pretrained(source), "linear_attention", None) is not None:
        return hla.load_pretrained(source).eval()
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    if name == "softmax":
        return model
    hla.patch_model(model, name, max_length=max_length)
    if steps and hla.list_attentions()[name]["learned"]:
        length = min(length, model.config.max_position_embeddings)
        sequences = text_rows(tokenizer, read_text(text).train, length, 8 * steps, causal=True)
        hla.transfer_attention(model, padded_batches(sequences, 8, pad_token(tokenizer)), steps=steps)
    return model.eval()


def file_tokens(path: str | Path, tokenizer: Any, block_characters: int = BLOCK_CHARACTERS) -> Iterator[int]:
    """Yield the tokens of a text file, encoded block by block, after the tokenizer's begin token if it has one.

    Blocks end with a line, or between words where a line is longer.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no UTF-8 text.
    """
    if tokenizer.bos_token_id is not None:
        yield tokenizer.bos_token_id
    rest = ""
    with Path(path).open(encoding="utf-8") as file:
        while True:
            try:
                read = file.read(block_characters)
            except UnicodeDecodeError as error:
                raise ValueError(f"{str(path)!r} is no UTF-8 text ({error}).") from error
            text = rest + read
            cut = len(text) if not read else max(text.rfind("\n") + 1, 0) or max(text.rfind(" "), 0) or len(text)
            if not text:
                return
            rest = text[cut:]
            yield from tokenizer(text[:cut], add_special_tokens=False, verbose=False)["input_ids"]


def _read(load: Any, tokens: Any, count: int | None, every: int, options: dict[str, Any]) -> Rows:
    """Read the text once: the losses, and lines with the memory. A line has the largest states since the last one."""
    edges, began = torch.tensor(RANGES), time.perf_counter()
    losses_of, counts = (torch.zeros(len(RANGES) + 1, dtype=torch.float64) for _ in range(2))
    lines: list[dict[str, Any]] = []
    stop, due, state_bytes = 0, every, 0
    for piece, losses in stream_losses(read_stream(load(), islice(tokens(), count), **options)):
        stop, state_bytes = piece.start + piece.ids.shape[1], max(state_bytes, cache_bytes(piece.cache))
        ranges = torch.bucketize(torch.arange(stop - len(losses), stop), edges, right=True)
        losses_of.index_add_(0, ranges, losses)
        counts.index_add_(0, ranges, torch.ones_like(losses))
        if stop >= due:
            lines.append({"tokens": stop, "state_bytes": state_bytes, "resident_bytes": resident_bytes()})
            due, state_bytes = due + every, 0
    if not stop:
        raise ValueError("The text is empty.")
    if not lines or lines[-1]["tokens"] < stop:
        lines.append({"tokens": stop, "state_bytes": state_bytes, "resident_bytes": resident_bytes()})
    starts, stops = (0, *RANGES), (*RANGES, stop)
    parts = zip(starts, stops, losses_of.tolist(), counts.tolist(), strict=True)
    by_range = [{"from": a, "to": b, "tokens": int(n), "loss": total / n} for a, b, total, n in parts if n]
    loss = float(losses_of.sum() / counts.sum().clamp_min(1))
    rate = stop / (time.perf_counter() - began)
    return [{"read": stop, "loss": loss, "ranges": by_range, "lines": lines, "tokens_per_second": rate}]


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
