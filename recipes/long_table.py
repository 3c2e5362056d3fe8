"""What length is worth: a model trained and judged at several lengths, with exact and with linear attention.

    python recipes/long_table.py proteins --source deeploc2_swissprot.csv.xz --work WORK
    python recipes/long_table.py reviews --source IMDB --model MODEL --work WORK

Needs the `train` extra. Proteins: does a protein have a segment in a membrane? A small ESM encoder (rotary positions, a
token a residue) is trained from random weights. The csv has the columns `sequence`, `membrane` (0 or 1) and `partition`
(homologous proteins share one); the last two partitions are held out. Reviews: IMDB, with an encoder whose learned
positions are extended.

For each seed the exact model is trained once on short inputs (settings `teacher`), converted to each mechanism by
attention transfer (`transfer`), and each of these goes through the same steps (`distill`, the task's loss alone) at
each length; inputs are cut to it. Held-out inputs are scored once, after the last step: nothing is chosen by them.
`--pieces` scores the exact model of the shortest length once more, on pieces of that length, by its largest score. A
finished row is in `--out` at once, and is not repeated. Settings: `recipes/configs/long-table-*.yaml`, with
`--section.name value` over it. What a step costs is measured by `long_costs.py`.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import hf_linear_attn as hla
from hf_linear_attn.data.files import read_text
from hf_linear_attn.data.tasks import load_task
from hf_linear_attn.evaluation.report import environment
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.training import convert as stages
from hf_linear_attn.training.options import ConvertSettings, FinetuneSettings, ModelSettings, TrainSettings
from hf_linear_attn.training.saving import write_json
from hf_linear_attn.training.settings import as_mapping, read_arguments, read_settings

HERE = Path(__file__).parent
EXACT = "softmax"
#: ESM's tokens: one a residue, with the special ones in their places.
VOCABULARY = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
HELD_OUT_PARTITIONS = 2
LONG_PROTEIN, LONG_REVIEW = 1024, 512
#: Padded tokens of a batch that is scored; a longer input is a batch of its own.
SCORED_TOKENS = 8192
BOOTSTRAP = 1000

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One set of long inputs.

    Attributes:
        write: makes the files of a folder from the command line's arguments.
        strata: name -> inputs longer than the first and not longer than the second number.
        lengths: to train and score at.
        mechanisms: to compare.
    """

    write: Callable[[argparse.Namespace, Path, int], None]
    strata: dict[str, tuple[int, float]]
    lengths: tuple[int, ...]
    mechanisms: tuple[str, ...]


# --------------------------------------------------------------------------------------------------------------------
# Data


def write_rows(path: Path, rows: Iterable[tuple[str, str, int]]) -> None:
    """A csv file of text, label and length."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "length"])
        writer.writerows(rows)


def write_parts(folder: Path, short: Sequence[Any], long: Sequence[Any], held_out: Sequence[Any]) -> None:
    """Short inputs to begin with, inputs to go on with, and what is scored. A validation split must exist: it decides
    nothing."""
    for name, rows in (("short", short), ("long", long)):
        write_rows(folder / name / "train.csv", rows)
        write_rows(folder / name / "validation.csv", [*held_out[:8], *held_out[-8:]])
    write_rows(folder / "scored.csv", held_out)


def write_proteins(arguments: argparse.Namespace, folder: Path, short_length: int) -> None:
    """Short: whole proteins of the training partitions. Long: all beyond 1,024 residues and as many others. Scored: all
    held-out proteins beyond 1,024 residues, and `--scored` others."""
    from transformers import EsmTokenizer

    held = [
        (row["sequence"], "membrane" if float(row["membrane"]) else "soluble", int(row["partition"]))
        for row in csv.DictReader(read_text(Path(arguments.source)).splitlines())
    ]
    random.Random(0).shuffle(held)
    kept = sorted({row[2] for row in held})[:-HELD_OUT_PARTITIONS]
    train = [(text, label, len(text)) for text, label, partition in held if partition in kept]
    rest = [(text, label, len(text)) for text, label, partition in held if partition not in kept]
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

    def draw(split: str, wanted: int, above: int, skip: int = 0) -> list[tuple[str, str, int]]:
        order = list(range(len(loaded[split])))
        random.Random(0).shuffle(order)
        found: list[tuple[str, str, int]] = []
        for index in order[skip:]:
            row = loaded[split][index]
            length = len(tokenizer(row["text"], verbose=False)["input_ids"])
            if length > above:
                found.append((row["text"], ("negative", "positive")[row["label"]], length))
            if len(found) == wanted:
                break
        return found

    short = draw("train", arguments.short, 0)
    long = draw("train", arguments.long, LONG_REVIEW, skip=arguments.short)
    write_parts(folder, short, long, draw("validation", arguments.scored, LONG_REVIEW))


PARTS = {
    "proteins": Part(
        write_proteins,
        {"<= 1,024": (0, 1024), "> 1,024": (1024, np.inf), "> 2,048": (2048, np.inf)},
        (512, 1024, 4096),
        (EXACT, "window", "hedgehog"),
    ),
    "reviews": Part(
        write_reviews,
        {"> 512": (512, np.inf), "> 1,024": (1024, np.inf)},
        (512, 2048),
        (EXACT, "hedgehog", "window"),
    ),
}


# --------------------------------------------------------------------------------------------------------------------
# Training


def train_short(base: ConvertSettings, folder: Path, out: Path) -> Path:
    """The exact model, trained on short inputs."""
    if not (out / "results.json").exists():
        model = replace(base.model, attention=None, options={}, tokenizer=str(folder / "tokenizer"))
        settings = FinetuneSettings(
            model=model,
            data=replace(base.data, source=str(folder / "short")),
            train=only_training(base.teacher),
            run=replace(base.run, output=str(out), resume=out.exists()),
        )
        stages.finetune(settings, console=Console(stderr=True))
    return out / "model"


def only_training(section: TrainSettings) -> TrainSettings:
    return TrainSettings(**{field.name: getattr(section, field.name) for field in fields(TrainSettings)})


def convert_short(base: ConvertSettings, mechanism: str, teacher: Path, folder: Path, out: Path) -> Path:
    """The same with linear attention, after attention transfer on the same inputs."""
    if mechanism == EXACT:
        return teacher
    if not (out / "results.json").exists():
        known = {field.name for field in fields(ATTENTIONS.get(mechanism).options)}
        options = {name: value for name, value in base.model.options.items() if name in known}
        settings = replace(
            base,
            model=ModelSettings(source=str(teacher), attention=mechanism, options=options),
            data=replace(base.data, source=str(folder / "short")),
            teacher=replace(base.teacher, epochs=0.0, steps=None),
            distill=replace(base.distill, epochs=0.0, steps=None),
            run=replace(base.run, output=str(out), resume=out.exists()),
        )
        stages.convert(settings, console=Console(stderr=True))
    return out / "model"


def train_long(base: ConvertSettings, source: Path, folder: Path, length: int, out: Path) -> dict[str, Any]:
    """Go on at a length, and say how long it took."""
    began, used = time.perf_counter(), time.process_time()
    settings = FinetuneSettings(
        model=ModelSettings(source=str(source), attention=None, max_length=length),
        data=replace(base.data, source=str(folder / "long"), max_length=length),
        train=only_training(base.distill),
        run=replace(base.run, output=str(out), overwrite=out.exists()),
    )
    results = stages.finetune(settings, console=Console(stderr=True))
    return {
        "tokens": results["stages"]["train"]["tokens"],
        "truncated": results["data"]["train_truncated"],
        "training_rows": results["data"]["train_rows"],
        "training_seconds": round(results["stages"]["train"]["seconds"], 1),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
    }


# --------------------------------------------------------------------------------------------------------------------
# Scores


def read_scored(folder: Path) -> list[Row]:
    """Held-out inputs in order of length, so that batches hold little padding."""
    with (folder / "scored.csv").open(encoding="utf-8", newline="") as file:
        return sorted(csv.DictReader(file), key=lambda row: int(row["length"]))


def encode(tokenizer: Any, text: str, length: int) -> list[int]:
    return tokenizer(text, truncation=True, max_length=length, verbose=False)["input_ids"]


def encode_pieces(tokenizer: Any, text: str, length: int) -> list[list[int]]:
    """The whole text in pieces of a length that overlap by a quarter."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first, *_, last = tokenizer("", verbose=False)["input_ids"]
    room = length - 2
    starts = range(0, max(len(ids) - room // 4, 1), room - room // 4)
    return [[first, *ids[start : start + room], last] for start in starts]


@torch.no_grad()
def margins(model: Any, inputs: Sequence[list[int]], pad: int, precision: str) -> torch.Tensor:
    """Logit of the first label less that of the second, `[len(inputs)]`."""
    from hf_linear_attn.data.collate import collate_padded

    found: list[torch.Tensor] = []
    start = 0
    while start < len(inputs):
        stop = start + 1
        while stop < len(inputs) and len(inputs[stop]) * (stop + 1 - start) <= SCORED_TOKENS:
            stop += 1
        batch = collate_padded([{"input_ids": ids} for ids in inputs[start:stop]], pad)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(**batch).logits.float()
        found.append(logits[:, 0] - logits[:, 1])
        start = stop
    return torch.cat(found)


def judge(scores: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> dict[str, float]:
    """Accuracy, Matthews correlation with the standard deviation of its bootstrap, area under the ROC curve."""
    from sklearn.metrics import roc_auc_score

    said = scores > 0
    cells = np.array([(said & labels).sum(), (said & ~labels).sum(), (~said & labels).sum(), (~said & ~labels).sum()])
    drawn = np.random.default_rng(0).multinomial(len(labels), cells / len(labels), BOOTSTRAP)
    return {
        "rows": len(labels),
        "accuracy": float((said == labels).mean()),
        "mcc": float(matthews(cells)),
        "mcc_error": float(matthews(drawn).std()),
        "auc": float(roc_auc_score(labels, scores)),
    }


def matthews(cells: np.ndarray[Any, Any]) -> Any:
    """Of true positives, false positives, false negatives and true negatives `[..., 4]`; 0 where it is not defined."""
    tp, fp, fn, tn = np.moveaxis(cells.astype(float), -1, 0)
    below = np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return np.where(below > 0, (tp * tn - fp * fn) / np.where(below > 0, below, 1.0), 0.0)


def score(model: Any, folder: Path, part: Part, length: int, pieces: bool, precision: str) -> dict[str, Any]:
    """Metrics by stratum, and the seconds that scoring took."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows = read_scored(folder)
    first = model.config.id2label[0]
    labels = np.array([row["label"] == first for row in rows])
    lengths = np.array([int(row["length"]) for row in rows])
    each = [encode_pieces(tokenizer, row["text"], length) if pieces else None for row in rows]
    whole = [held or [encode(tokenizer, row["text"], length)] for held, row in zip(each, rows, strict=True)]
    began, used = time.perf_counter(), time.process_time()
    found = margins(model.eval(), [ids for held in whole for ids in held], tokenizer.pad_token_id, precision).numpy()
    spent = {"score_seconds": time.perf_counter() - began, "score_cpu_seconds": time.process_time() - used}
    # The largest of the first label: one segment is enough for "membrane", which comes first by its name.
    ends = np.cumsum([len(held) for held in whole])
    best = np.array([found[end - len(held) : end].max() for end, held in zip(ends, whole, strict=True)])
    chosen = {name: (lengths > low) & (lengths <= high) for name, (low, high) in part.strata.items()}
    judged = {name: judge(best[kept], labels[kept]) for name, kept in chosen.items() if len({*labels[kept]}) == 2}
    return {"strata": judged, **{name: round(value, 1) for name, value in spent.items()}}


# --------------------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def is_done(path: Path, key: Row) -> bool:
    return any(all(row[name] == value for name, value in key.items()) for row in read_rows(path))


def stated(base: ConvertSettings) -> dict[str, Any]:
    """Settings without paths."""
    held = as_mapping(base)
    for section, name in (("model", "source"), ("model", "tokenizer"), ("data", "source"), ("run", "output")):
        held[section][name] = None
    return held


def measure(arguments: argparse.Namespace, base: ConvertSettings, key: Row, part: Part) -> None:
    """One row: train at its length unless its model is there already, and score."""
    seeded = replace(base, run=replace(base.run, seed=key["seed"]))
    folder, place = arguments.work / arguments.part, arguments.work / arguments.part / f"seed{key['seed']}"
    out = place / f"{key['mechanism']}-{key['length']}-{key['steps']}"
    trained = out / "trained.json"
    if not trained.exists():
        teacher = train_short(seeded, folder, place / "short")
        source = convert_short(seeded, key["mechanism"], teacher, folder, place / f"{key['mechanism']}-short")
        spent = train_long(seeded, source, folder, key["length"], out)
        write_json(trained, spent)
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    model = hla.load_pretrained(str(out / "model")) if key["mechanism"] != EXACT else exact_model(out / "model")
    row = {
        **key,
        **score(model, folder, part, key["length"], key["pieces"], base.run.precision),
        "training": json.loads(trained.read_text(encoding="utf-8")),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "settings": stated(seeded),
        "environment": environment(torch.device("cpu")),
    }
    write_json(arguments.out, {"format_version": 1, "part": arguments.part, "rows": [*read_rows(arguments.out), row]})


def exact_model(path: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--source", required=True, help="the csv file of proteins, or the folder of IMDB")
    parser.add_argument("--model", help="the pretrained encoder, for reviews")
    parser.add_argument("--work", type=Path, required=True, help="folder for data and checkpoints")
    parser.add_argument("--out", type=Path, help="the result (default: recipes/results/long/PART.json)")
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--mechanisms", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--pieces", action="store_true", help="score the exact model of the shortest length in pieces")
    parser.add_argument("--scored", type=int, default=1000, help="held-out proteins up to 1,024, or reviews")
    parser.add_argument("--short", type=int, default=600, help="reviews to begin with")
    parser.add_argument("--long", type=int, default=400, help="long reviews to go on with")
    parser.add_argument("--config", help="default: recipes/configs/long-table-PART.yaml")
    arguments, rest = parser.parse_known_args(argv)
    given = read_arguments(rest)
    if arguments.model is not None:
        given["model.source"] = arguments.model
    part, name = PARTS[arguments.part], arguments.part
    arguments.out = arguments.out or HERE / "results" / "long" / f"{name}.json"
    base = read_settings(ConvertSettings, arguments.config or str(HERE / "configs" / f"long-table-{name}.yaml"), given)
    if not (arguments.work / name / "scored.csv").exists():
        part.write(arguments, arguments.work / name, base.data.max_length - 2)
    lengths = arguments.lengths or part.lengths
    wanted = [(mechanism, length) for length in lengths for mechanism in arguments.mechanisms or part.mechanisms]
    jobs = [(*pair, False) for pair in wanted]
    if arguments.pieces:
        jobs = [(EXACT, min(lengths), True)]
    for seed in arguments.seeds:
        for mechanism, length, pieces in jobs:
            steps = base.distill.steps
            key = {"mechanism": mechanism, "length": length, "steps": steps, "seed": seed, "pieces": pieces}
            if not is_done(arguments.out, key):
                measure(arguments, base, key, part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
