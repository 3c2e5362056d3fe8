"""What `convert` writes, `evaluate` measures of its checkpoint, and a metric called by hand: the same number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from transformers import AutoTokenizer, BartForConditionalGeneration, BertForMaskedLM

import hf_linear_attn as hla
from hf_linear_attn.checkpoints import load_checkpoint
from hf_linear_attn.data.config import DataConfig
from hf_linear_attn.data.task_data import load_task_data
from hf_linear_attn.study.conversion_result import ConversionResult
from hf_linear_attn.study.evaluated_model import load_evaluated_model
from hf_linear_attn.study.kinds import KINDS
from hf_linear_attn.study.options import EvaluateConfig
from tests.tiny_models import save_checkpoint
from tests.training.tiny_runs import quiet, save_decoder, save_encoder, save_task, save_text

CASES = {
    "causal-lm": "decoder",
    "embedding": "encoder",
    "classification": "tuned",
    "classification, several labels": "several",
    "masked-lm": "masked",
    "seq2seq-lm": "bart",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("numbers")
    save_encoder(root / "encoder")
    save_encoder(root / "tuned", head=True)
    save_checkpoint(root / "masked", "bert", BertForMaskedLM, mask=True, seed=1)
    save_checkpoint(root / "bart", "bart", BartForConditionalGeneration, seed=1)
    save_decoder(root / "decoder")
    save_task(root / "task")
    save_text(root / "text")
    names = {0: "warm", 1: "blue", 2: "cold"}
    save_encoder(root / "several", head=True, id2label=names, problem_type="multi_label_classification")
    (root / "tags").mkdir()
    for name in ("train", "validation"):
        table = pandas.read_csv(root / "task" / f"{name}.csv")
        for label in ("cold", "warm"):
            table[label] = (table["label"] == label).astype(int)
        table["blue"] = [int("blue" in text.split()) for text in table["sentence"]]
        table.to_csv(root / "tags" / f"{name}.csv")
    return root


@pytest.mark.parametrize("case", CASES)
def test_every_way_of_measuring_gives_the_same_number(case: str, folder: Path, tmp_path: Path) -> None:
    model, out, task_type = str(folder / CASES[case]), tmp_path / "out", case.partition(",")[0]
    columns = {"classification": ("sentence",), "seq2seq-lm": ("sentence", "label")}.get(task_type, ("text",))
    source = folder / "text" / "text.txt" if columns == ("text",) else folder / "task"
    data: dict[str, Any] = {"dataset": str(source), "text_columns": columns, "max_length": 16}
    if case != task_type:
        data |= {"dataset": str(folder / "tags"), "label_column": ("blue", "cold", "warm")}
    hla.convert(
        model=model,
        output=str(out),
        task_type=task_type,
        attention="hedgehog",
        data=data,
        device="cpu",
        transfer={"max_steps": 2, "per_device_train_batch_size": 4},
        distill={"max_steps": 2, "per_device_train_batch_size": 4},
        speed={"lengths": []},
        report_to=[],
        console=quiet(),
    )
    result = ConversionResult.load(out / "results.json")
    evaluation = hla.evaluate(
        model, DataConfig(**data), task_type=task_type, converted=(str(out / "model"),), timing=False
    )
    (label,) = evaluation.mechanisms
    score = evaluation.scores[0]
    (exact,), (converted,) = (evaluation.select(score.measurement, name) for name in ("exact", label))
    assert dict(exact) == dict(result.scores.teacher)
    assert dict(converted) == dict(result.final)
    # By hand: the rows, the metric of their kind, the model.
    kind, tokenizer = KINDS[task_type], AutoTokenizer.from_pretrained(model)
    teacher, _ = load_checkpoint(model, kind.model_class, dtype=torch.float32)
    head = teacher.config if task_type == "classification" else None
    rows = load_task_data(task_type, tokenizer, DataConfig(**data), seed=3, head=head)
    metric = kind.metric(rows, teacher)
    assert metric(teacher) == dict(result.scores.teacher)
    assert metric(load_checkpoint(str(out / "model"), kind.model_class)[0]) == dict(result.final)


def test_the_masked_tokens_of_a_transfer_are_those_of_its_seed(folder: Path) -> None:
    data = DataConfig(dataset=str(folder / "text" / "text.txt"), max_length=16)
    evaluated = load_evaluated_model(str(folder / "masked"), EvaluateConfig(data=data, task_type="masked-lm"))
    first, again, other = (torch.cat([x["labels"] for x in evaluated.training_batches(seed)[0]]) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
