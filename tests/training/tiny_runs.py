"""A tiny task that can be learned, with a tiny checkpoint, on disk; what a run left there."""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from rich.console import Console
from transformers import BertForSequenceClassification, BertModel

from hf_linear_attn.training.options import ConvertConfig, FinetuneConfig
from tests.tiny_models import save_checkpoint
from tests.tiny_text import TOKENS, sample_text


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
                sentence = [TOKENS[int(torch.randint(24, 49, (1,), generator=generator))] for _ in range(length)]
                reds = int(torch.randint(0, 3, (1,), generator=generator))
                if scores:
                    sentence += ["red"] * reds
                    label: Any = float(reds)
                else:
                    label = "warm" if reds else "cold"
                    sentence.insert(length // 2, "red" if reds else "blue")
                writer.writerow([" ".join(sentence), label])
    return folder


def save_text(folder: Path, lines: int = 120) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "text.txt"
    path.write_text(sample_text(lines), encoding="utf-8")
    return path


def save_inputs(folder: Path) -> Path:
    """An encoder, a decoder, a task and a text, each in a folder of its name."""
    save_encoder(folder / "encoder")
    save_decoder(folder / "decoder")
    save_task(folder / "task")
    save_text(folder / "text")
    return folder


def with_changes(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of nested options with changes, given with `__` for the dot."""
    values = json.loads(json.dumps(base))
    for name, value in changes.items():
        *sections, last = name.split("__")
        section = values
        for key in sections:
            section = section.setdefault(key, {})
        section[last] = value
    return values


def build(config_class: type, values: dict[str, Any]) -> Any:
    """A config dataclass from nested options."""
    hints = get_type_hints(config_class)
    arguments = {}
    for name, value in values.items():
        if is_dataclass(hints[name]):
            value = build(hints[name], value)
        elif isinstance(value, list):
            value = tuple(value)
        arguments[name] = value
    return config_class(**arguments)


def convert_config(model: Path, data: Path, output: Path, /, **changes: Any) -> ConvertConfig:
    """Options of a conversion that takes seconds, with dropout in all stages. (Not the default mechanism: its window
    would attend to these inputs exactly.)"""
    base = {
        "model": str(model),
        "attention": "hedgehog",
        "output": str(output),
        "device": "cpu",
        "save_steps": 2,
        "speed": {"lengths": []},
        "report_to": [],
        "data": {"dataset": str(data), "text_columns": ["sentence"], "max_length": 16},
        "teacher": {"max_steps": 8, "per_device_train_batch_size": 8, "learning_rate": 3e-3, "eval_steps": 0.5},
        "transfer": {"max_steps": 4, "per_device_train_batch_size": 8, "eval_steps": 2},
        "distill": {
            "max_steps": 6,
            "per_device_train_batch_size": 8,
            "learning_rate": 3e-3,
            "eval_steps": 0.5,
            "disable_dropout": False,
        },
    }
    return build(ConvertConfig, with_changes(base, changes))


def finetune_config(model: Path, data: Path, output: Path, /, **changes: Any) -> FinetuneConfig:
    """Options of a fine-tuning that takes seconds."""
    base = {
        "model": str(model),
        "output": str(output),
        "device": "cpu",
        "save_steps": 2,
        "speed": {"lengths": []},
        "report_to": [],
        "data": {"dataset": str(data), "text_columns": ["sentence"], "max_length": 16},
        "train": {"max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 3e-3, "eval_steps": 0.5},
    }
    return build(FinetuneConfig, with_changes(base, changes))


def quiet() -> Console:
    return Console(file=io.StringIO())


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


class Killed(BaseException):
    """Stands for the death of the process: nothing cleans up after it that a dead process could not."""


def kill(*args: Any, **kwargs: Any) -> None:
    raise Killed


def forget(out: Path, *stages: str) -> None:
    """Let a finished run be one that was killed after its last checkpoint: its records lack the stages."""
    path = out / "study" / "records.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line).get("label") not in stages), encoding="utf-8")
    (out / "results.json").unlink()
    shutil.rmtree(out / "model")


def stored(out: Path, label: str) -> dict[str, Any]:
    """What the study of a run holds of a stage."""
    lines = [json.loads(line) for line in (out / "study" / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    record = next(line for line in reversed(lines) if line.get("label") == label)
    return {row["metric"]: row["value"] for row in record["values"]}


def log_rows(out: Path, stage: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row.get("stage") == stage]
