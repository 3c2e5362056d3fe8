"""lm_eval around a converted decoder, on a task of our own. Skipped where lm_eval is not installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_linear_attn as hla
from hf_linear_attn.measure.harness import harness_model
from tests.small import patch_small
from tests.tiny_models import DECODERS, save_checkpoint, tiny_model
from tests.tiny_text import TOKENS, tiny_tokenizer


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A multiple-choice task of twelve questions: which of three words comes next?"""
    rows = [
        {
            "question": " ".join(TOKENS[(index + step) % len(TOKENS)] for step in range(4 + index % 3)),
            "choices": [TOKENS[(3 * index + step) % len(TOKENS)] for step in range(3)],
            "answer": index % 3,
        }
        for index in range(12)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    settings = {
        "task": "next_word",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "next_word.yaml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    return tmp_path


def accuracy(wrapped: Any, folder: Path, limit: int | None = None) -> float:
    """Share of right answers to the questions of the task in a folder, as lm_eval counts them."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    output = lm_eval.simple_evaluate(wrapped, tasks=["next_word"], task_manager=manager, limit=limit, bootstrap_iters=0)
    return output["results"]["next_word"]["acc,none"]


@torch.no_grad()
def expected(model: PreTrainedModel, task: Path) -> float:
    """Share of questions whose right word has the largest log probability, one forward pass for each word."""
    tokenizer = tiny_tokenizer()
    rows = [json.loads(line) for line in (task / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    right = 0
    for row in rows:
        prompt = tokenizer(row["question"], add_special_tokens=False)["input_ids"]
        choices = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in row["choices"]]
        logits = model(torch.tensor([prompt])).logits[0, -1]
        right += int(logits[choices].argmax()) == row["answer"]
    return right / len(rows)


@pytest.mark.parametrize("family", DECODERS, ids=str)
@pytest.mark.parametrize("name", ["elu", "window"])
def test_a_task_of_our_own(family: object, name: str, task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(task / "cache"))
    model = patch_small(tiny_model(str(family)).eval(), name)
    result = accuracy(harness_model(model, _unpadded_tokenizer(), batch_size=5), task / "tasks")
    assert result == pytest.approx(expected(model, task))


def _unpadded_tokenizer() -> PreTrainedTokenizerFast:
    """Without special tokens around a text: questions end where the answer begins. lm_eval asks for an end token."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "[SEP]"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    return tokenizer


def test_a_checkpoint_and_what_is_wrong_with_tokenizers(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(task / "cache"))
    folder = save_checkpoint(task / "gpt2", "gpt2")
    reference = _unpadded_tokenizer()
    model = hla.patch_model(tiny_model("gpt2"), "elu")
    model.save_pretrained(task / "linear")
    reference.save_pretrained(task / "linear")
    assert 0 <= accuracy(harness_model(str(task / "linear")), task / "tasks", limit=6) <= 1
    assert hla.is_patched(harness_model(str(task / "linear")).model)
    assert not hla.is_patched(harness_model(str(folder), reference).model)
    with pytest.raises(ValueError, match="tokenizer"):
        harness_model(model)
    with pytest.raises(ValueError, match="end-of-sequence"):
        harness_model(model, tiny_tokenizer())


def test_what_to_install_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-linear-attn\[lm-eval\]'"):
        harness_model(tiny_model("gpt2"), tiny_tokenizer())
