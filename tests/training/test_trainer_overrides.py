"""The private methods of `transformers.Trainer` that we override: few, and each where the Trainer still calls it.

A failure here means that an update of Transformers has moved something. Each case says what hangs on the method, and
what to do.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from hf_linear_attn.training.distillation import DistillationTrainer, FinetuningTrainer
from hf_linear_attn.training.resumable import ResumableTrainer
from tests.training.tiny_data import Rows, classifier, collate, config

#: Method -> its parameters, the methods of the Trainer that call it, and what to do if they no longer do.
OVERRIDES: dict[str, tuple[list[str], set[str], str]] = {
    "_get_train_sampler": (
        ["train_dataset"],
        {"_get_dataloader"},
        "Give get_train_dataloader the EpochSampler in another way; without it, resumed runs see other batches.",
    ),
    "_save_checkpoint": (
        ["model", "trial"],
        {"_maybe_log_save_evaluate"},
        "Find what writes a checkpoint now, and let it write to a hidden folder that is renamed when it is complete.",
    ),
    "_get_output_dir": (
        ["trial"],
        {"_save_checkpoint"},
        "Find where _save_checkpoint takes its folder from: it must write to the hidden one.",
    ),
    "_determine_best_metric": (
        ["metrics", "trial"],
        {"_maybe_log_save_evaluate"},
        "Find where save_strategy='best' withdraws should_save: a signal must save in any step.",
    ),
}


def test_few_private_methods_are_overridden() -> None:
    private = {name for name, value in vars(Trainer).items() if callable(value) and name.startswith("_")}
    ours = {name for cls in (ResumableTrainer, FinetuningTrainer, DistillationTrainer) for name in vars(cls)}
    assert {name for name in private & ours if not name.startswith("__")} == set(OVERRIDES)
    assert len(OVERRIDES) <= 4


@pytest.mark.parametrize("name", OVERRIDES)
def test_the_trainer_has_the_method(name: str) -> None:
    parameters, _, remedy = OVERRIDES[name]
    method = getattr(Trainer, name, None)
    assert method is not None, f"Trainer.{name} is gone. {remedy}"
    actual = list(inspect.signature(method).parameters)[1:]
    assert actual == parameters, f"Trainer.{name} takes {actual} now. {remedy}"
    assert list(inspect.signature(getattr(ResumableTrainer, name)).parameters)[1:] == parameters


def test_the_trainer_calls_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run: who calls each of our methods, apart from ourselves."""
    callers: dict[str, set[str]] = {name: set() for name in OVERRIDES}

    def spy(name: str) -> Any:
        original = getattr(ResumableTrainer, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            code = sys._getframe(1).f_code
            if code.co_filename == inspect.getsourcefile(Trainer):
                callers[name].add(code.co_name)
            return original(self, *args, **kwargs)

        return method

    for name in OVERRIDES:
        monkeypatch.setattr(ResumableTrainer, name, spy(name))
    arguments = config(
        tmp_path, max_steps=2, save_strategy="best", eval_strategy="steps", eval_steps=1, metric_for_best_model="loss"
    )
    data: dict[str, Any] = {"train_dataset": Rows(16), "eval_dataset": Rows(8, 1), "data_collator": collate}
    FinetuningTrainer(classifier(), arguments, **data).train()
    for name, (_, expected, remedy) in OVERRIDES.items():
        assert callers[name] >= expected, f"Trainer.{name} is called by {callers[name] or 'nothing'}. {remedy}"


def test_epochs_begin_with_their_callback(tmp_path: Path) -> None:
    """The epoch of a batch is told by `on_epoch_begin`: the Trainer must call it before it reads the first batch."""
    epochs: list[tuple[int, int]] = []
    trainer = FinetuningTrainer(
        classifier(), config(tmp_path, max_steps=5), train_dataset=Rows(16), data_collator=collate
    )
    original = trainer.data_collator.collator

    def collator(rows: list[Any]) -> Any:
        epochs.append((int(trainer.data_collator._epoch), len(rows)))
        return original(rows)

    trainer.data_collator.collator = collator
    trainer.train()
    assert [epoch for epoch, _ in epochs] == [0, 0, 1, 1, 2, 2]
