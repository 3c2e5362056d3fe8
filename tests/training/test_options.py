"""Every option has a help text and its default in the help, and bad values are errors that name the option."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import get_type_hints

import pytest
import torch

from hf_linear_attn import patch_model
from hf_linear_attn.cli import main
from hf_linear_attn.data.config import DataConfig, TimingConfig
from hf_linear_attn.integration.discovery import self_attention
from hf_linear_attn.study.models import default_task_type, patch_as_configured, read_attention
from hf_linear_attn.training.options import (
    ConvertConfig,
    DistillConfig,
    FinetuneConfig,
    StageConfig,
    TeacherConfig,
    TransferConfig,
)
from hf_linear_attn.utils.options import OptionError, make_config
from tests.tiny_models import tiny_config, tiny_model

SECTIONS = (DataConfig, StageConfig, TeacherConfig, TransferConfig, DistillConfig)


@pytest.mark.parametrize("config_class", [*SECTIONS, FinetuneConfig, ConvertConfig])
def test_every_option_has_a_help_text(config_class):
    hints = get_type_hints(config_class)
    for entry in fields(config_class):
        if not is_dataclass(hints[entry.name]):
            assert len(entry.metadata["help"]) > 8, entry.name
            assert not entry.metadata["help"].endswith("."), entry.name


@pytest.mark.parametrize(("verb", "config_class"), [("finetune", FinetuneConfig), ("convert", ConvertConfig)])
def test_help_lists_every_option_with_its_default(verb, config_class, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([verb, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    defaults = config_class()
    for entry in fields(config_class):
        value, hidden = getattr(defaults, entry.name), entry.metadata["brief"]
        names = [f"{entry.name}.{inner.name}" for inner in fields(value)] if is_dataclass(value) else [entry.name]
        for name in names:
            shown = name.rpartition(".")[2] if hidden else f"--{name} "
            assert shown in text or name == "model"
    assert ("(default: window)" in text) is (verb == "convert")
    assert "--task_type {classification,causal-lm,masked-lm,embedding,seq2seq-lm}" in text
    assert "(default: None)" not in text
    assert "(default: 512 2048)" in text


@pytest.mark.parametrize(
    ("config_class", "values", "message"),
    [
        (DataConfig, {"max_length": 0}, "^max_length: must be a whole number of at least 1, got 0"),
        (DataConfig, {"max_train_samples": -1}, "^max_train_samples: must be a whole number of at least 1"),
        (DataConfig, {"validation_size": 1.0}, "^validation_size: .* above 0 and below 1, got 1.0"),
        (DataConfig, {"mlm_probability": 0.0}, "^mlm_probability: must be a finite number above 0 and below 1"),
        (DataConfig, {"task": "rte", "dataset": "x"}, "^task: excludes dataset"),
        (DataConfig, {"folder": "x"}, "^folder: .*give the task, too"),
        (StageConfig, {"learning_rate": 0.0}, "^learning_rate: must be a finite number above 0, got 0.0"),
        (StageConfig, {"learning_rate": float("nan")}, "^learning_rate: must be a finite number above 0, got nan"),
        (StageConfig, {"num_train_epochs": float("nan")}, "^num_train_epochs: .* finite number of at least 0, got nan"),
        (StageConfig, {"warmup_steps": -0.1}, "^warmup_steps: must be a finite number of at least 0, got -0.1"),
        (StageConfig, {"max_steps": 0}, "^max_steps: must be a whole number of at least 1"),
        (TeacherConfig, {"learning_rate": -1.0}, "^learning_rate: must be a finite number above 0, got -1.0"),
        (DistillConfig, {"learning_rate": -1.0}, "^learning_rate: must be a finite number above 0"),
        (DistillConfig, {"temperature": 0.0}, "^temperature: must be a finite number above 0"),
        (DistillConfig, {"logits_weight": 0.0, "task_weight": 0.0, "hidden_weight": 0.0}, "no loss to minimise"),
        (TransferConfig, {"max_steps": -1}, "^max_steps: must be a whole number of at least 0"),
        (TransferConfig, {"per_device_train_batch_size": 0}, "^per_device_train_batch_size: .* of at least 1"),
        (ConvertConfig, {"max_length": 0}, "^max_length: must be a whole number of at least 1, got 0"),
        (FinetuneConfig, {"max_length": 9, "model_type": "bert"}, r"config_overrides \{max_position_embeddings: 9\}"),
        (FinetuneConfig, {"max_length": 9, "from_config": True}, "^max_length: extends positions that were trained"),
        (ConvertConfig, {"seed": -1}, "^seed: must be a whole number of at least 0"),
        (TimingConfig, {"lengths": (512, 0)}, r"^lengths: .* a whole number of at least 16, got \(512, 0\)"),
        (ConvertConfig, {"resume": True, "overwrite": True}, "^resume: excludes overwrite"),
        (ConvertConfig, {"bf16": True, "fp16": True}, "^bf16: excludes fp16"),
        (FinetuneConfig, {"train": StageConfig(num_train_epochs=0)}, "there is nothing to train"),
        (FinetuneConfig, {"options": {"window_size": 32}}, "^options: is for a mechanism: give attention"),
        (
            ConvertConfig,
            {"task_type": "embedding", "data": DataConfig(mlm_probability=0.3)},
            "^data.mlm_probability: is for masked-lm",
        ),
        (
            ConvertConfig,
            {"task_type": "causal-lm", "data": DataConfig(metrics=("accuracy",))},
            "^data.metrics: is for classification",
        ),
        (StageConfig, {"eval_steps": 0, "patience": 2}, "^patience: counts evaluations"),
        (FinetuneConfig, {"tokenizer": "x", "train_tokenizer": 500}, "^train_tokenizer: trains one"),
        (ConvertConfig, {"control": True, "attention": None}, "^control: is trained beside a linear model"),
        (ConvertConfig, {"control": True, "distill": DistillConfig(0.0)}, "^control: is trained beside"),
        (ConvertConfig, {"exact_share": 1.5}, "^exact_share: .* of at least 0 and below 1, got 1.5"),
        (
            ConvertConfig,
            {"task_type": "masked-lm", "distill": DistillConfig(carried_length=8)},
            "needs task_type causal-lm",
        ),
        (
            ConvertConfig,
            {"distill": DistillConfig(carried_length=8), "task_type": "causal-lm", "data": DataConfig(max_length=9)},
            "^distill.carried_length: leaves no token to predict in rows of 9, got 8",
        ),
    ],
)
def test_bad_values_name_the_option(config_class, values, message):
    with pytest.raises(ValueError, match=message):
        config_class(**values)


def test_a_budget_sets_the_training_that_is_not_given():
    budget = {"budget": "2% perplexity"}
    usual, short = ConvertConfig().completed("causal-lm"), ConvertConfig(**budget).completed("causal-lm")
    assert (usual.transfer.max_steps, usual.distill.max_steps, usual.distill.num_train_epochs) == (200, None, 3.0)
    assert (short.transfer.max_steps, short.distill.max_steps, short.distill.num_train_epochs) == (0, 80, None)
    own = {"transfer": TransferConfig(200), "distill": DistillConfig(3.0, learning_rate=1e-4)}
    config = ConvertConfig(**budget, **own).completed("causal-lm")
    assert config.completed("causal-lm") == config
    assert (config.transfer.max_steps, config.distill.max_steps, config.distill.num_train_epochs) == (200, None, 3.0)
    assert (config.distill.learning_rate, config.distill.per_device_train_batch_size) == (1e-4, 1)
    assert not ConvertConfig(**budget, distill=DistillConfig(0.0)).completed("causal-lm").distill.enabled
    # What is given counts, even if it is the usual value.
    same = DistillConfig(per_device_train_batch_size=32, learning_rate=5e-5)
    encoder = ConvertConfig(budget="0.01 cosine", distill=same).completed("embedding")
    assert (encoder.distill.per_device_train_batch_size, encoder.distill.learning_rate) == (32, 5e-5)
    assert encoder.transfer.per_device_train_batch_size == 8


def test_a_plan_gets_the_seed_of_the_run(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"default": "favor+", "0": {"attention": "favor+", "seed": 5}}')
    config, model = ConvertConfig(plan=str(path), seed=3), tiny_model("llama")
    patch_as_configured(model, config, read_attention(config))
    seeds = [layer.module.linear_attention.options.seed for layer in self_attention(model)]
    assert seeds == [5, *[3] * (len(seeds) - 1)]


def test_a_feature_map_in_a_window_gets_the_seed_of_the_run():
    options = {"feature_map": "favor+", "feature_map_options": {"num_features": 8}}

    def drawn(**changes):
        model = tiny_model("llama")
        config = ConvertConfig(attention="window", options={**options, **changes}, seed=3)
        patch_as_configured(model, config, read_attention(config))
        return self_attention(model)[0].module.linear_attention.feature_map.weight

    def of_seed(seed):
        config = {"num_features": 8, "seed": seed}
        model = patch_model(tiny_model("llama"), "window", feature_map="favor+", feature_map_options=config)
        return self_attention(model)[0].module.linear_attention.feature_map.weight

    assert torch.equal(drawn(), of_seed(3))
    assert torch.equal(drawn(feature_map_options={"num_features": 8, "seed": 5}), of_seed(5))
    assert not torch.equal(of_seed(3), of_seed(5))


def test_options_override_those_of_a_config_one_by_one():
    options = {"data": {"dataset": "x", "max_length": 64}, "distill": {"max_steps": 50}, "speed": {"lengths": None}}
    config = make_config(ConvertConfig, None, options)
    assert config.completed("classification").speed.lengths == (512, 2048), "null: the usual ones"
    changed = make_config(ConvertConfig, config, {"data": {"max_eval_samples": 9}, "distill": {"learned_lr": 1e-3}})
    assert (changed.data.dataset, changed.data.max_length, changed.data.max_eval_samples) == ("x", 64, 9)
    assert (changed.distill.max_steps, changed.distill.learned_lr) == (50, 1e-3)


def test_a_config_without_its_budget_is_the_usual_one():
    usual = ConvertConfig(task_type="causal-lm", model="m")
    budget = make_config(ConvertConfig, usual, {"budget": "25% cache at 8192"})
    longer = make_config(ConvertConfig, budget, {"distill": {"num_train_epochs": 2.0}}).completed("causal-lm")
    assert (longer.distill.num_train_epochs, longer.distill.max_steps) == (2.0, None)
    assert make_config(ConvertConfig, budget, {"budget": None}) == usual
    assert replace(budget, budget=None) == usual


def test_the_task_type_is_that_of_the_model_unless_it_gets_a_new_head(tmp_path):
    for name, kind, classes in (("decoder", "gpt2", ["GPT2LMHeadModel"]), ("encoder", "bert", ["BertModel"])):
        tiny_config(kind, architectures=classes).save_pretrained(tmp_path / name)
    decoder, encoder = str(tmp_path / "decoder"), str(tmp_path / "encoder")
    assert default_task_type(ConvertConfig(model=decoder)) == "causal-lm"
    assert default_task_type(ConvertConfig(model=encoder)) == "embedding"
    assert default_task_type(ConvertConfig(model=encoder, data=DataConfig(task="sst2"))) == "classification"
    for trains in (FinetuneConfig(model=decoder), ConvertConfig(model=encoder, teacher=TeacherConfig(max_steps=1))):
        assert default_task_type(trains) == "classification"
    with pytest.raises(OptionError, match=r"data.metrics: is for classification .* not causal-lm"):
        ConvertConfig(data=DataConfig(metrics=("accuracy",))).completed("causal-lm")
    with pytest.raises(OptionError, match=r"budget: is for causal-lm, embedding, classification .* not masked-lm"):
        ConvertConfig(budget="1% perplexity").completed("masked-lm")
