"""What length is worth: a model trained and judged at several lengths, with exact and with linear attention.

    python -m recipes.benchmarks.long_table proteins --source deeploc2_swissprot.csv.xz --work WORK
    python -m recipes.benchmarks.long_table reviews --source IMDB --model MODEL --work WORK

Needs the `train` extra. Proteins: does a protein have a segment in a membrane? A small ESM encoder (rotary positions, a
token a residue) is trained from random weights. The csv has the columns `sequence`, `membrane` (0 or 1) and `partition`
(homologous proteins share one); the last two partitions are held out. Reviews: IMDB, with an encoder whose learned
positions are extended.

For each seed and variant a model is trained on short inputs (settings `teacher`); a pretrained one with exact
attention, and then converted by attention transfer (`transfer`). It goes through the same steps (`distill`, the task's
loss alone) at each length; inputs are cut to it. Held-out inputs are scored once, after the last step: nothing is
chosen by them. `--pieces` scores the variants (default: the exact one) of the shortest length once more, on pieces of
that length, by the largest score. A finished row is in `--out` at once, and is not repeated. Settings:
`recipes/benchmarks/configs/long-table-*.yaml`, with `--section.name value` over it. What a step costs is measured by
`long_costs.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import hf_linear_attn as hla
from hf_linear_attn.training import convert as stages
from hf_linear_attn.training.options import ConvertConfig, FinetuneConfig, StageConfig, TrainingRunConfig
from hf_linear_attn.utils.arguments import parse_config
from hf_linear_attn.utils.environment import environment
from hf_linear_attn.utils.files import write_json
from hf_linear_attn.utils.options import to_dict

from .long_data import Row, read_scored, write_proteins, write_reviews

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
EXACT = "softmax"
#: A segment in a membrane has some 20 residues. Local: exact attention to the neighbours, and nothing else.
WINDOW = {"attention": "window", "window_size": 16}
LOCAL = {**WINDOW, "mix_init": -30.0}
LUNA = {"attention": "luna", "num_packed": 16}
#: Padded tokens of a batch that is scored; a longer input is a batch of its own.
SCORED_TOKENS = 8192
BOOTSTRAP = 1000


@dataclass(frozen=True)
class Part:
    """One set of long inputs.

    Attributes:
        write: makes the files of a folder from the command line's arguments.
        strata: name -> inputs longer than the first and not longer than the second number.
        lengths: to train and score at.
        variants: what is compared, name -> layers as `patch_model` takes them; None: exact attention.
    """

    write: Callable[[argparse.Namespace, Path, int], None]
    strata: dict[str, tuple[int, float]]
    lengths: tuple[int, ...]
    variants: dict[str, dict[str, Any] | None]


PARTS = {
    "proteins": Part(
        write_proteins,
        {"<= 1,024": (0, 1024), "> 1,024": (1024, np.inf), "> 2,048": (2048, np.inf)},
        (512, 1024, 4096),
        {
            EXACT: None,
            "local + softmax": {"default": EXACT, "0": LOCAL, "1": LOCAL},
            "window": {"default": WINDOW},
            "local + hedgehog": {"default": "hedgehog", "0": LOCAL, "1": LOCAL},
            "local + luna": {"default": LUNA, "0": LOCAL, "1": LOCAL},
        },
    ),
    "reviews": Part(
        write_reviews,
        {"> 512": (512, np.inf), "> 1,024": (1024, np.inf)},
        (512, 2048),
        {EXACT: None, "hedgehog": {"default": "hedgehog"}, "window": {"default": "window"}},
    ),
}


# --------------------------------------------------------------------------------------------------------------------
# Training


def train_short(base: ConvertConfig, plan: Path | None, folder: Path, out: Path) -> Path:
    """A model, exact or with a plan's mechanisms from the start, trained on short inputs."""
    if not (out / "results.json").exists():
        config = finetune_config(
            base,
            base.teacher,
            tokenizer=str(folder / "tokenizer"),
            plan=plan and str(plan),
            data=replace(base.data, dataset=str(folder / "short")),
            output=str(out),
            resume=out.exists(),
        )
        stages.finetune(config, console=Console(stderr=True))
    return out / "model"


def finetune_config(base: ConvertConfig, stage: StageConfig, **changes: Any) -> FinetuneConfig:
    """The options of a fine-tuning with one stage of a conversion."""
    shared = {entry.name: getattr(base, entry.name) for entry in fields(TrainingRunConfig)}
    train = StageConfig(**{entry.name: getattr(stage, entry.name) for entry in fields(StageConfig)})
    return FinetuneConfig(**{**shared, "attention": None, **changes}, train=train)


def short_model(base: ConvertConfig, name: str, part: Part, folder: Path, output: Path) -> Path:
    """The model that goes on at each length. Pretrained: the exact one is trained, and converted by attention transfer
    on the same inputs. From random weights: there is nothing to convert."""
    layers, out = part.variants[name], output / f"{slug(name)}-short"
    plan = None
    if layers is not None:
        plan = output / f"{slug(name)}-plan.json"
        output.mkdir(parents=True, exist_ok=True)
        write_json(plan, layers)
    if plan is None or base.model_type is not None:
        return train_short(base, plan, folder, out)
    teacher = train_short(base, None, folder, output / f"{EXACT}-short")
    if not (out / "results.json").exists():
        config = replace(
            base,
            model=str(teacher),
            attention=None,
            plan=str(plan),
            data=replace(base.data, dataset=str(folder / "short")),
            teacher=replace(base.teacher, num_train_epochs=0.0, max_steps=None),
            distill=replace(base.distill, num_train_epochs=0.0, max_steps=None),
            output=str(out),
            resume=out.exists(),
        )
        stages.convert(config, console=Console(stderr=True))
    return out / "model"


def slug(name: str) -> str:
    return name.replace(" + ", "-")


def train_long(base: ConvertConfig, source: Path, folder: Path, length: int, out: Path) -> dict[str, Any]:
    """Go on at a length, and say how long it took."""
    began, used = time.perf_counter(), time.process_time()
    config = finetune_config(
        base,
        base.distill,
        model=str(source),
        model_type=None,
        config_overrides={},
        max_length=length,
        data=replace(base.data, dataset=str(folder / "long"), max_length=length),
        output=str(out),
        overwrite=out.exists(),
    )
    results = stages.finetune(config, console=Console(stderr=True))
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


def encode(tokenizer: Any, text: str, length: int) -> list[int]:
    return tokenizer(text, truncation=True, max_length=length, verbose=False)["input_ids"]


def encode_pieces(tokenizer: Any, text: str, length: int) -> list[list[int]]:
    """The whole text in pieces of a length that overlap by a quarter."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first, *_, last = tokenizer("", verbose=False)["input_ids"]
    capacity = length - 2
    starts = range(0, max(len(ids) - capacity // 4, 1), capacity - capacity // 4)
    return [[first, *ids[start : start + capacity], last] for start in starts]


@torch.no_grad()
def margins(model: Any, inputs: Sequence[list[int]], pad: int, precision: str) -> torch.Tensor:
    """Logit of the first label less that of the second, `[len(inputs)]`."""
    margins_of_batches: list[torch.Tensor] = []
    start = 0
    while start < len(inputs):
        stop = start + 1
        while stop < len(inputs) and len(inputs[stop]) * (stop + 1 - start) <= SCORED_TOKENS:
            stop += 1
        rows = [torch.tensor(ids) for ids in inputs[start:stop]]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        batch = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths).long()}
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(**batch).logits.float()
        margins_of_batches.append(logits[:, 0] - logits[:, 1])
        start = stop
    return torch.cat(margins_of_batches)


def classification_metrics(scores: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> dict[str, float]:
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
    whole = [pieces_of or [encode(tokenizer, row["text"], length)] for pieces_of, row in zip(each, rows, strict=True)]
    began, used = time.perf_counter(), time.process_time()
    margins_of_pieces = margins(
        model.eval(), [ids for pieces_of in whole for ids in pieces_of], tokenizer.pad_token_id, precision
    ).numpy()
    spent = {"score_seconds": time.perf_counter() - began, "score_cpu_seconds": time.process_time() - used}
    # The largest of the first label: one segment is enough for "membrane", which comes first by its name.
    ends = np.cumsum([len(pieces_of) for pieces_of in whole])
    best = np.array(
        [margins_of_pieces[end - len(pieces_of) : end].max() for end, pieces_of in zip(ends, whole, strict=True)]
    )
    chosen = {name: (lengths > low) & (lengths <= high) for name, (low, high) in part.strata.items()}
    metrics = {
        name: classification_metrics(best[selected], labels[selected])
        for name, selected in chosen.items()
        if len({*labels[selected]}) == 2
    }
    return {"strata": metrics, **{name: round(value, 1) for name, value in spent.items()}}


# --------------------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def is_done(path: Path, key: Row) -> bool:
    return any(all(row[name] == value for name, value in key.items()) for row in read_rows(path))


def stated(base: ConvertConfig) -> dict[str, Any]:
    """Options without paths."""
    options = to_dict(base)
    options.update(model=None, tokenizer=None, output=None)
    options["data"]["dataset"] = None
    return options


def measure(arguments: argparse.Namespace, base: ConvertConfig, key: Row, part: Part) -> None:
    """One row: train at its length unless its model is there already, and score."""
    seeded = replace(base, seed=key["seed"])
    folder, seed_folder = arguments.work / arguments.part, arguments.work / arguments.part / f"seed{key['seed']}"
    out = seed_folder / f"{slug(key['variant'])}-{key['length']}-{key['steps']}"
    trained = out / "trained.json"
    if not trained.exists():
        source = short_model(seeded, key["variant"], part, folder, seed_folder)
        spent = train_long(seeded, source, folder, key["length"], out)
        write_json(trained, spent)
    model = hla.load_pretrained(str(out / "model")) if part.variants[key["variant"]] else exact_model(out / "model")
    row = {
        **key,
        "layers": part.variants[key["variant"]],
        **score(model, folder, part, key["length"], key["pieces"], "bf16" if base.bf16 else "no"),
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
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--pieces", action="store_true", help="score models of the shortest length in pieces")
    parser.add_argument("--scored", type=int, default=1000, help="held-out proteins up to 1,024, or reviews")
    parser.add_argument("--short", type=int, default=600, help="reviews to begin with")
    parser.add_argument("--long", type=int, default=400, help="long reviews to go on with")
    parser.add_argument("--config", help="default: recipes/benchmarks/configs/long-table-PART.yaml")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.model is not None:
        rest = ["--model", arguments.model, *rest]
    part = PARTS[arguments.part]
    arguments.out = arguments.out or RESULTS / "long" / f"{arguments.part}.json"
    config = arguments.config or str(HERE / "configs" / f"long-table-{arguments.part}.yaml")
    base = parse_config(ConvertConfig, ["--config", config, *rest], program="long_table")
    if not (arguments.work / arguments.part / "scored.csv").exists():
        part.write(arguments, arguments.work / arguments.part, base.data.max_length - 2)
    lengths = arguments.lengths or part.lengths
    jobs = [(name, length, False) for length in lengths for name in arguments.variants or part.variants]
    if arguments.pieces:
        jobs = [(name, min(lengths), True) for name in arguments.variants or [EXACT]]
    for seed in arguments.seeds:
        for name, length, pieces in jobs:
            key = {"variant": name, "length": length, "steps": base.distill.max_steps, "seed": seed, "pieces": pieces}
            if not is_done(arguments.out, key):
                measure(arguments, base, key, part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
