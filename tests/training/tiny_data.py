"""Tiny data sets and configs for the trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hf_linear_attn.training.distillation import FinetuningConfig
from tests.tiny_models import VOCABULARY, tiny_model


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of 4 to 11 tokens.

    Args:
        size: Number of rows.
        seed: Seed of the tokens.
        targets: `"class"`: whether the first token is large; `"score"`: that token as a fraction; `"tokens"`: labels of
            a language model.
    """

    def __init__(self, size: int, seed: int = 0, targets: str = "class") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(size):
            length = int(torch.randint(4, 12, (1,), generator=generator))
            ids = torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
            labels = {"class": int(ids[0] > 30), "score": ids[0] / VOCABULARY, "tokens": ids}[targets]
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (longest - len(values))

    labels = [padded(row["labels"], -100) if isinstance(row["labels"], list) else row["labels"] for row in rows]
    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor(labels),
    }


def collate_masked(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Mask tokens at random, drawn from torch's generator, as Transformers' collator does."""
    batch = collate(rows)
    selected = (torch.rand(batch["input_ids"].shape) < 0.4) & batch["attention_mask"].bool()
    selected[:, 0] = True
    batch["labels"] = batch["input_ids"].masked_fill(~selected, -100)
    batch["input_ids"] = batch["input_ids"].masked_fill(selected, 3)
    return batch


def classifier(seed: int = 1, dropout: float = 0.0, **config: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    return tiny_model("bert", AutoModelForSequenceClassification, hidden_dropout_prob=dropout, **config)


def config(folder: Path, cls: type[FinetuningConfig] = FinetuningConfig, **changes: Any) -> Any:
    """Six steps on the CPU."""
    defaults: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "use_cpu": True,
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    return cls(output_dir=str(folder), **{**defaults, **changes})


def logged(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(model: Any, expected: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(state[name], tensor)]
    assert not different
