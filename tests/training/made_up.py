"""A tiny task that can be learned, with a tiny checkpoint, on disk; what a run left there."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import BertForSequenceClassification, BertModel

from hf_linear_attn.training.options import ConvertSettings, FinetuneSettings
from hf_linear_attn.training.settings import build
from tests.helpers import WORDS, sample_text, save_checkpoint


def save_encoder(folder: Path, *, head: bool = False, **changes: Any) -> Path:
    """A tiny BERT with dropout, so that random states that a resumed run does not restore show."""
    cls = BertForSequenceClassification if head else BertModel
    config = {"hidden_dropout_prob": 0.1, "initializer_range": 0.1, **changes}
    return save_checkpoint(folder, "bert", cls, mask=True, seed=1, **config)


def save_decoder(folder: Path) -> Path:
    return save_checkpoint(folder, "gpt2", mask=True, seed=1, resid_pdrop=0.1)


def save_task(folder: Path, *, rows: int = 96, validation: int = 27, scores: bool = False, seed: int = 0) -> Path:
    """Sentences with a label: which of `red` and `blue` they hold (as a score: how many `red`)."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for name, count in (("train", rows), ("validation", validation)):
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["sentence", "label"])
            for _ in range(count):
                length = int(torch.randint(3, 9, (1,), generator=generator))
                words = [WORDS[int(torch.randint(24, 49, (1,), generator=generator))] for _ in range(length)]
                reds = int(torch.randint(0, 3, (1,), generator=generator))
                if scores:
                    words += ["red"] * reds
                    label: Any = float(reds)
                else:
                    label = "warm" if reds else "cold"
                    words.insert(length // 2, "red" if reds else "blue")
                writer.writerow([" ".join(words), label])
    return folder


def save_text(folder: Path, lines: int = 120) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "text.txt"
    path.write_text(sample_text(lines), encoding="utf-8")
    return path


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Dotted names laid over nested settings."""
    held = json.loads(json.dumps(base))
    for name, value in changes.items():
        *sections, last = name.split(".")
        place = held
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return held


def convert_settings(model: Path, data: Path, output: Path, **changes: Any) -> ConvertSettings:
    """Seconds for all stages, with dropout in all. Changes are given with `__` for the dot. (Not the default mechanism:
    its window would hold these inputs whole.)"""
    base = {
        "model": {"source": str(model), "attention": "hedgehog"},
        "data": {"source": str(data), "text": ["sentence"], "max_length": 16},
        "teacher": {"steps": 8, "batch_size": 8, "lr": 3e-3, "evaluations": 2},
        "transfer": {"steps": 4, "batch_size": 8, "evaluate_every": 2},
        "distill": {"steps": 6, "batch_size": 8, "lr": 3e-3, "evaluations": 2, "dropout": True},
        "run": {
            "output": str(output),
            "checkpoint_every": 2,
            "cpu": True,
            "speed_lengths": [],
            "trackers": [],
        },
    }
    return build(ConvertSettings, merged(base, {key.replace("__", "."): value for key, value in changes.items()}), "")


def finetune_settings(model: Path, data: Path, output: Path, **changes: Any) -> FinetuneSettings:
    base = {
        "model": {"source": str(model), "attention": None},
        "data": {"source": str(data), "text": ["sentence"], "max_length": 16},
        "train": {"steps": 6, "batch_size": 8, "lr": 3e-3, "evaluations": 2},
        "run": {"output": str(output), "checkpoint_every": 2, "cpu": True, "speed_lengths": [], "trackers": []},
    }
    return build(FinetuneSettings, merged(base, {key.replace("__", "."): value for key, value in changes.items()}), "")


def quiet() -> Console:
    return Console(file=io.StringIO())


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def lines(out: Path, stage: str) -> list[dict[str, Any]]:
    held = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in held if line.get("stage") == stage]
