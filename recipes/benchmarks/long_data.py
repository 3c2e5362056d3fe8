"""Long inputs as files: proteins and film reviews, short ones to begin with, long ones to go on with, held-out ones.

Used by `long_table.py`.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_linear_attn.data.files import read_text
from hf_linear_attn.data.tasks import load_task

#: ESM's tokens: one a residue, with the special ones in their places.
VOCABULARY = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
TEST_PARTITIONS = 2
LONG_PROTEIN, LONG_REVIEW = 1024, 512

Row = dict[str, Any]


def write_rows(path: Path, rows: Iterable[tuple[str, str, int]]) -> None:
    """A csv file of text, label and length."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "length"])
        writer.writerows(rows)


def write_parts(folder: Path, short: Sequence[Any], long: Sequence[Any], scored: Sequence[Any]) -> None:
    """Short inputs to begin with, inputs to go on with, and what is scored. A validation split must exist: it decides
    nothing."""
    for name, rows in (("short", short), ("long", long)):
        write_rows(folder / name / "train.csv", rows)
        write_rows(folder / name / "validation.csv", [*scored[:8], *scored[-8:]])
    write_rows(folder / "scored.csv", scored)


def write_proteins(arguments: argparse.Namespace, folder: Path, short_length: int) -> None:
    """Short: whole proteins of the training partitions. Long: all beyond 1,024 residues and as many others. Scored: all
    held-out proteins beyond 1,024 residues, and `--scored` others."""
    from transformers import EsmTokenizer

    proteins = [
        (row["sequence"], "membrane" if float(row["membrane"]) else "soluble", int(row["partition"]))
        for row in csv.DictReader(read_text(Path(arguments.source)).splitlines())
    ]
    random.Random(0).shuffle(proteins)
    training_partitions = sorted({row[2] for row in proteins})[:-TEST_PARTITIONS]
    train = [(text, label, len(text)) for text, label, partition in proteins if partition in training_partitions]
    rest = [(text, label, len(text)) for text, label, partition in proteins if partition not in training_partitions]
    short = [row for row in train if row[2] <= short_length]
    long = [row for row in train if row[2] > LONG_PROTEIN]
    others = [row for row in train if row[2] <= LONG_PROTEIN][: len(long)]
    scored = [row for row in rest if row[2] <= LONG_PROTEIN][: arguments.scored]
    scored += [row for row in rest if row[2] > LONG_PROTEIN]
    write_parts(folder, short, [*long, *others], scored)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    EsmTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "tokenizer")


def write_reviews(arguments: argparse.Namespace, folder: Path, short_length: int) -> None:
    """Short: any reviews. Long and scored: reviews beyond 512 tokens, of the training and of the test part."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.save_pretrained(folder / "tokenizer")
    loaded = load_task("imdb", folder=arguments.source)

    def draw(split: str, count: int, above: int, skip: int = 0) -> list[tuple[str, str, int]]:
        order = list(range(len(loaded[split])))
        random.Random(0).shuffle(order)
        rows: list[tuple[str, str, int]] = []
        for index in order[skip:]:
            row = loaded[split][index]
            length = len(tokenizer(row["text"], verbose=False)["input_ids"])
            if length > above:
                rows.append((row["text"], ("negative", "positive")[row["label"]], length))
            if len(rows) == count:
                break
        return rows

    short = draw("train", arguments.short, 0)
    long = draw("train", arguments.long, LONG_REVIEW, skip=arguments.short)
    write_parts(folder, short, long, draw("validation", arguments.scored, LONG_REVIEW))


def read_scored(folder: Path) -> list[Row]:
    """Held-out inputs in order of length, so that batches hold little padding."""
    with (folder / "scored.csv").open(encoding="utf-8", newline="") as file:
        return sorted(csv.DictReader(file), key=lambda row: int(row["length"]))
