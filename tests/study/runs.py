"""Small runs of `evaluate`, for its tests, and a folder of what they read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import BertForSequenceClassification

import hf_linear_attn as hla
from hf_linear_attn.study.evaluate import run_evaluate
from hf_linear_attn.study.evaluation import Evaluation
from hf_linear_attn.study.options import EvaluateConfig, with_options
from tests.tiny_models import save_checkpoint, tiny_model
from tests.tiny_text import TOKENS, sample_text, tiny_tokenizer

SMALL: dict[str, Any] = {
    "quick": True,
    "lengths": (16,),
    "seconds": 1e-9,
    "steps": 1,
    "batch_size": 1,
    "max_length": 32,
}


#: Of the decoder that is saved: enough for the prompts of recall.
DECODER_POSITIONS = 192


def save_folder(folder: Path) -> Path:
    """Checkpoints of each kind, with converted and tuned ones, a text, a task, sentence pairs."""
    save_checkpoint(folder / "bert", "bert")
    save_checkpoint(folder / "gpt2", "gpt2", max_position_embeddings=DECODER_POSITIONS)
    (folder / "text.txt").write_text(sample_text(), encoding="utf-8")
    _classifiers(folder)
    rows = [" ".join(TOKENS[(start * 7 + step) % len(TOKENS)] for step in range(8)) for start in range(60)]
    (folder / "glue" / "SST-2").mkdir(parents=True)
    (folder / "glue" / "STS-B").mkdir()
    for name, part in (("train.tsv", rows[:40]), ("dev.tsv", rows[40:])):
        lines = [f"{text}\t{index % 2}" for index, text in enumerate(part)]
        (folder / "glue" / "SST-2" / name).write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf-8")
    (folder / "glue" / "RTE").mkdir()
    for name, part in (("train.tsv", rows[:40]), ("dev.tsv", rows[40:])):
        labels = ("entailment", "not_entailment")
        lines = [f"{index}\t{text}\t{rows[index]}\t{labels[index % 2]}" for index, text in enumerate(part)]
        lines = ["index\tsentence1\tsentence2\tlabel", *lines]
        (folder / "glue" / "RTE" / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name in ("sts-train.csv", "sts-dev.csv"):
        lines = [
            f"g\tf\t2030\t{index}\t{index % 5}.0\t{text}\t{rows[index // 2]}" for index, text in enumerate(rows[:20])
        ]
        (folder / "glue" / "STS-B" / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _classifiers(folder: Path) -> None:
    """Two tasks: a fine-tuned classifier, two conversions that differ in their weights, and a tuned exact model."""
    torch.manual_seed(0)
    _save_conversions(folder, "", {0: "negative", 1: "positive"})
    _save_conversions(folder, "rte-", {0: "entailment", 1: "not_entailment"})


def _save_conversions(folder: Path, task: str, labels: dict[int, str]) -> None:
    model = tiny_model("bert", BertForSequenceClassification, id2label=labels)
    for kind, attention in (("classifier", None), ("run0", "elu"), ("run1", "elu"), ("tuned", None)):
        name = f"{task}{kind}"
        model.classifier.weight.data += 0.5 * torch.randn(model.classifier.weight.shape)
        if attention is not None:
            hla.patch_model(model, attention)
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
        if attention is not None:
            hla.unpatch_model(model)


def run(source: Path | str, **options: Any) -> tuple[Evaluation, str]:
    """The evaluation and the screen."""
    stream = io.StringIO()
    config = with_options(EvaluateConfig(model=str(source)), {**SMALL, **options})
    return run_evaluate(config, console=Console(file=stream, width=180)), stream.getvalue()
