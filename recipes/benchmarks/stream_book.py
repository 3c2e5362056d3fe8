"""Read a book with a decoder, piece by piece or token by token, at constant memory; report the loss by position.

    python -m recipes.benchmarks.stream_book --model PATH --text book.txt
    python -m recipes.benchmarks.stream_book --model PATH --text book.txt --positions wrap --chunk-length 1
    python -m recipes.benchmarks.stream_book --model PATH --text book.txt --attention softmax --positions restart

Needs the package only. `--model` is a folder or a Hub name: a patched checkpoint is read as it is, any other decoder is
patched with `--attention` first, and trained to mimic itself on the text of `--train-text` for `--steps` steps. The
screen shows, as it goes: tokens read, the loss of the tokens since the line before, bytes of the states, resident
memory. Memory is compared after the first line and at the end; exit code 1 means that it grew. `--out` adds the run to
a JSON file. A model of a million parameters reads a book of 3 MB in some minutes on one core.

What no linear attention can do is give positions a meaning that the model has not learned. `--positions continue`
counts on (a learned table ends, rotary angles grow strange), `wrap` counts anew after `--period` tokens and keeps the
state, `restart` drops the state as well: that is the loss to compare with, since it needs no memory of the past. The
losses by position tell what the state is worth, and where it begins to harm.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.data.text import pad_token, padded_batches, read_text, text_rows
from hf_linear_attn.streaming import POSITIONS, cache_bytes, read_stream, stream_losses
from hf_linear_attn.utils.environment import environment, json_safe

#: Losses are summed up to each of these positions of the stream.
RANGES = (512, 2048, 8192, 32768, 131072, 524288)
#: Growth of the resident memory that passes for noise of the allocator.
NOISE_BYTES = 16 << 20

#: Characters that are encoded at a time.
BLOCK_CHARACTERS = 1 << 16

console = Console()


def resident_bytes() -> int | None:
    """Resident memory of this process; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


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


def load(arguments: argparse.Namespace, tokenizer: Any) -> PreTrainedModel:
    """The decoder, patched and trained to mimic itself where that is asked for."""
    if getattr(AutoConfig.from_pretrained(arguments.model), "linear_attention", None) is not None:
        return hla.load_pretrained(arguments.model).eval()
    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    if arguments.attention != "softmax":
        hla.patch_model(model, arguments.attention, max_length=arguments.max_length)
        mimic(model, tokenizer, arguments)
    return model.eval()


def mimic(model: PreTrainedModel, tokenizer: Any, arguments: argparse.Namespace) -> None:
    if not arguments.steps or not hla.list_attentions()[arguments.attention]["learned"]:
        return
    length, count = min(arguments.train_length, model.config.max_position_embeddings), 8 * arguments.steps
    sequences = text_rows(tokenizer, read_text(arguments.train_text).train, length, count, causal=True)
    batches = padded_batches(sequences, 8, pad_token(tokenizer))
    result = hla.transfer_attention(model, batches, steps=arguments.steps)
    if result.losses:
        console.print(
            f"Attention transfer: {result.steps} steps, loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}."
        )


class LossTotals:
    """Losses by position of the stream, and since the last line on the screen."""

    def __init__(self) -> None:
        self.edges = torch.tensor(RANGES)
        self.loss = torch.zeros(len(RANGES) + 1, dtype=torch.float64)
        self.count = torch.zeros(len(RANGES) + 1, dtype=torch.float64)
        self.recent: tuple[float, int] = (0.0, 0)

    def add(self, stop: int, losses: torch.Tensor) -> None:
        where = torch.bucketize(torch.arange(stop - len(losses), stop), self.edges, right=True)
        self.loss.index_add_(0, where, losses)
        self.count.index_add_(0, where, torch.ones_like(losses))
        self.recent = (self.recent[0] + float(losses.sum()), self.recent[1] + len(losses))

    def since_last(self) -> float:
        loss, count = self.recent
        self.recent = (0.0, 0)
        return loss / max(count, 1)

    def ranges(self) -> list[dict[str, Any]]:
        starts, stops = (0, *RANGES), (*RANGES, None)
        rows = zip(starts, stops, self.loss.tolist(), self.count.tolist(), strict=True)
        return [{"from": a, "to": b, "tokens": int(n), "loss": total / n} for a, b, total, n in rows if n]


def read(model: PreTrainedModel, tokenizer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Read the text once; what it cost, and the losses. The state of a line is the largest since the line before."""
    tokens = file_tokens(arguments.text, tokenizer)
    if arguments.tokens is not None:
        tokens = (token for token, _ in zip(tokens, range(arguments.tokens), strict=False))
    pieces = read_stream(
        model,
        tokens,
        chunk_length=arguments.chunk_length,
        positions=arguments.positions,
        period=arguments.period,
    )
    totals, due, lines, began, stop, state_bytes = LossTotals(), arguments.every, [], time.perf_counter(), 0, 0
    for piece, losses in stream_losses(pieces):
        stop, state_bytes = piece.start + piece.ids.shape[1], max(state_bytes, cache_bytes(piece.cache))
        totals.add(stop, losses)
        if stop >= due:
            lines.append(show(stop, totals.since_last(), state_bytes))
            due, state_bytes = due + arguments.every, 0
    if not stop:
        raise ValueError(f"{arguments.text!r} holds no text.")
    if totals.recent[1]:
        lines.append(show(stop, totals.since_last(), state_bytes))
    seconds = time.perf_counter() - began
    total = float(totals.loss.sum() / totals.count.sum().clamp_min(1))
    return {
        "tokens": stop,
        "loss": total,
        "ranges": totals.ranges(),
        "lines": lines,
        "tokens_per_second": stop / seconds,
    }


def show(stop: int, loss: float, state_bytes: int) -> dict[str, Any]:
    memory = resident_bytes()
    memory_text = "?" if memory is None else f"{memory / 2**20:,.0f} MiB"
    console.print(f"{stop:>12,} tokens  loss {loss:.3f}  states {state_bytes:,} bytes  resident {memory_text}")
    return {"tokens": stop, "loss": loss, "state_bytes": state_bytes, "resident_bytes": memory}


def growth(lines: list[dict[str, Any]]) -> dict[str, int | None]:
    """Bytes that states and resident memory have grown by from the first line to the last."""

    def grown(name: str) -> int | None:
        values = [line[name] for line in lines]
        return None if None in values else values[-1] - values[0]

    return {name: grown(name) for name in ("state_bytes", "resident_bytes")}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hub name of a decoder, patched or not")
    parser.add_argument("--text", required=True, help="the book: a UTF-8 text file of any size")
    parser.add_argument(
        "--attention", default="window", help="mechanism for a model that is not patched; softmax: exact"
    )
    parser.add_argument("--max-length", type=int, help="extend a learned table of positions to so many, when patching")
    parser.add_argument("--steps", type=int, default=60, help="steps of attention transfer (default: 60)")
    parser.add_argument("--train-text", help="text for it (default: docstrings of the standard library)")
    parser.add_argument("--train-length", type=int, default=256, help="tokens of its sequences (default: 256)")
    parser.add_argument("--chunk-length", type=int, default=256, help="tokens read at a time (default: 256)")
    parser.add_argument("--positions", default="wrap", choices=list(POSITIONS), help="how to count (default: wrap)")
    parser.add_argument("--period", type=int, help="count anew after so many (default: what the model is made for)")
    parser.add_argument("--tokens", type=int, help="stop after so many (default: the whole text)")
    parser.add_argument("--every", type=int, default=50_000, help="tokens a line on the screen (default: 50,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to add the run to")
    arguments = parser.parse_args(argv)
    if arguments.every < 1 or (arguments.tokens is not None and arguments.tokens < 2):
        parser.error("--every must be at least 1, --tokens at least 2")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = load(arguments, tokenizer)
    result = read(model, tokenizer, arguments)
    result["growth"] = growth(result["lines"])
    console.print(
        f"{result['tokens']:,} tokens, {result['tokens_per_second']:,.0f} a second, loss {result['loss']:.3f}"
    )
    for row in result["ranges"]:
        upper = "…" if row["to"] is None else f"{row['to']:,}"
        console.print(f"  positions {row['from']:>9,} to {upper:>9}: loss {row['loss']:.3f}")
    grown = result["growth"]
    console.print(
        f"Grown since the first line: states {grown['state_bytes']}, resident {grown['resident_bytes']} bytes."
    )
    if arguments.out is not None:
        add(arguments, model, result)
    return 1 if grown["state_bytes"] > 0 or (grown["resident_bytes"] or 0) > NOISE_BYTES else 0


def add(arguments: argparse.Namespace, model: PreTrainedModel, result: dict[str, Any]) -> None:
    """Add the run to the file, in the place of an earlier one with the same settings."""
    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "every")}
    for name in ("model", "text", "train_text"):
        settings[name] = None if settings[name] is None else Path(settings[name]).name
    report = hla.patch_report(model) if hla.is_patched(model) else None
    row = {
        "settings": settings,
        "attention": sorted({layer.attention for layer in report.layers}) if report else ["softmax"],
        **result,
        "environment": environment(model.device),
    }
    rows = json.loads(arguments.out.read_text(encoding="utf-8"))["rows"] if arguments.out.exists() else []
    rows = [row_before for row_before in rows if row_before["settings"] != settings] + [json_safe(row)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format_version": 1, "rows": rows}, indent=1, allow_nan=False)
    partial = arguments.out.with_name(f".{arguments.out.name}.part")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
