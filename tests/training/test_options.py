"""Every setting has a help text, shows in the help with its default, and refuses what makes no sense."""

from __future__ import annotations

import argparse
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest

from hf_linear_attn.training.options import (
    ConvertSettings,
    DataSettings,
    DistillSettings,
    FinetuneSettings,
    ModelSettings,
    RunSettings,
    TeacherSettings,
    TrainSettings,
    TransferSettings,
)
from hf_linear_attn.training.settings import describe

SECTIONS = (ModelSettings, DataSettings, TrainSettings, TeacherSettings, TransferSettings, DistillSettings, RunSettings)


@pytest.mark.parametrize("cls", [*SECTIONS, FinetuneSettings, ConvertSettings])
def test_every_setting_has_a_help_text(cls):
    hints = get_type_hints(cls)
    for entry in fields(cls):
        if not is_dataclass(hints[entry.name]):
            assert len(entry.metadata["help"]) > 8, entry.name
            assert not entry.metadata["help"].endswith("."), entry.name


@pytest.mark.parametrize("cls", [FinetuneSettings, ConvertSettings])
def test_help_lists_every_setting_with_its_default(cls):
    parser = argparse.ArgumentParser(prog="x")
    describe(parser, cls)
    shown = " ".join(parser.format_help().split())
    assert "--kind {classification,causal-lm,masked-lm}" in shown
    defaults = cls()
    for section in fields(cls)[1:]:
        for entry in fields(getattr(defaults, section.name)):
            assert f"--{section.name}.{entry.name} " in shown
    assert ("(default: window)" in shown) is (cls is ConvertSettings)
    assert "(default: None)" not in shown
    assert "(default: 512,2048)" in shown
    assert vars(parser.parse_args([])) == {}


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (DataSettings, {"max_length": 0}, "data.max_length must be positive, got 0"),
        (ModelSettings, {"max_length": 0}, "^model.max_length must be positive, got 0"),
        (ModelSettings, {"max_length": 9, "type": "bert"}, r"model.overrides \{max_position_embeddings: 9\}"),
        (ModelSettings, {"max_length": 9, "from_config": True}, "extends positions that were trained"),
        (DataSettings, {"max_train": -1}, "data.max_train must be positive"),
        (DataSettings, {"validation_share": 1.0}, "data.validation_share must lie between 0 and 1, got 1.0"),
        (DataSettings, {"mask_probability": 0.0}, "data.mask_probability must lie between 0 and 1"),
        (DataSettings, {"task": "rte", "source": "x"}, "Give data.task or data.source, not both"),
        (TrainSettings, {"lr": 0.0}, "^train.lr must be positive, got 0.0"),
        (TrainSettings, {"lr": float("nan")}, "^train.lr must be positive, got nan"),
        (TrainSettings, {"epochs": float("nan")}, "^train.epochs must not be negative, got nan"),
        (TrainSettings, {"warmup": 1.0}, r"^train.warmup must lie in \[0, 1\), got 1.0"),
        (TrainSettings, {"steps": 0}, "^train.steps must be positive"),
        # A section names itself, not the one that it is made from.
        (TeacherSettings, {"lr": -1.0}, "^teacher.lr must be positive, got -1.0"),
        (TeacherSettings, {"warmup": -0.1}, "^teacher.warmup must lie in"),
        (DistillSettings, {"lr": -1.0}, "^distill.lr must be positive"),
        (DistillSettings, {"epochs": -1.0}, "^distill.epochs must not be negative"),
        (DistillSettings, {"temperature": 0.0}, "^distill.temperature must be positive"),
        (DistillSettings, {"logits": 0.0, "task": 0.0, "hidden": 0.0}, "there is no loss to minimise"),
        (TransferSettings, {"steps": -1}, "^transfer.steps must not be negative"),
        (TransferSettings, {"batch_size": 0}, "^transfer.batch_size must be positive"),
        (RunSettings, {"keep": 0}, "^run.keep must be positive"),
        (RunSettings, {"seed": -1}, "^run.seed must not be negative"),
        (RunSettings, {"speed_lengths": (512, 0)}, r"^run.speed_lengths must be positive, got \(512, 0\)"),
        (RunSettings, {"resume": True, "overwrite": True}, "exclude each other"),
        (FinetuneSettings, {"train": TrainSettings(epochs=0)}, "there is nothing to train"),
    ],
)
def test_refused(cls, values, message):
    with pytest.raises(ValueError, match=message):
        cls(**values)
