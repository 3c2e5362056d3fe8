"""Every YAML file of the recipes: read, complete, and run for two steps on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_linear_attn.cli import main, parse_verb
from hf_linear_attn.utils.options import flatten, to_dict
from tests.subprocesses import ROOT, run_python
from tests.training.tiny_runs import save_inputs

CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
#: Settings of which the verb is all -> the verb.
VERBS = {"glue": "convert", "long-documents": "convert", "masked-lm": "convert", "causal-lm": "convert"}
VERBS["pretrain"] = "finetune"

pytestmark = pytest.mark.skipif(not CONFIGS, reason="needs the repository's recipes, and runs outside of it")


def recipe_of(config: Path) -> str:
    """The recipe that a YAML file belongs to."""
    return config.stem.rpartition("-")[0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_options_can_be_read(config: Path) -> None:
    options: Any = parse_verb(VERBS.get(recipe_of(config), "convert"), ["--config", str(config)])
    header = config.read_text(encoding="utf-8")
    for word in ("# needs:", "# run:", "# expect:"):
        assert word in header, f"{config.name} lacks {word}"
    flat = flatten(to_dict(options))
    for name, value in flatten(yaml.safe_load(header)).items():
        assert flat[name] == value


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_command_in_the_header_names_this_recipe(config: Path) -> None:
    text = config.read_text(encoding="utf-8").replace("\\\n#", "")
    (command,) = re.findall(r"^# run:\s+(.*)$", text, re.MULTILINE)
    if (name := recipe_of(config)) in VERBS:
        assert re.search(rf"hf.linear.attn {VERBS[name]} --config recipes/configs/{config.name} ", command)
    else:
        script = f"recipes/{name.replace('-', '_')}.py"
        assert script in command
        assert (ROOT / script).exists()


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_reads_its_files(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(ROOT / "recipes" / "accelerate" / f"{name}.yaml"))
    assert loaded.num_processes == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_inputs(tmp_path_factory.mktemp("recipes"))


SMALL = ["--data.max_length", "16", "--device", "cpu", "--speed.lengths", "[]", "--bf16", "false"]


def stage(name: str) -> list[str]:
    """Two steps of one stage."""
    return [f"--{name}.max_steps", "2", f"--{name}.per_device_train_batch_size", "4"]


def arguments_of(folder: Path, name: str, out: Path) -> list[str]:
    """What turns a recipe's options into two steps of a tiny model."""
    text, encoder = str(folder / "text" / "text.txt"), [str(folder / "encoder")]
    task = ["--data.task", "null", "--data.dataset", str(folder / "task"), "--data.text_columns", "sentence"]
    stages = [*stage("transfer"), *stage("distill")]
    options = {
        "glue": [*encoder, *task, *stage("teacher"), *stages],
        "long-documents": [*encoder, *task, *stage("teacher"), *stages],
        "masked-lm": [*encoder, "--data.dataset", text, *stage("teacher"), *stages],
        "causal-lm": [str(folder / "decoder"), "--data.dataset", text, *stages],
        "pretrain": ["--data.dataset", text, *stage("train")],
    }[name]
    if name == "pretrain":
        options += ["--train_tokenizer", "300", "--config_overrides.n_embd", "16", "--config_overrides.n_head", "2"]
    config = ROOT / "recipes" / "configs" / f"{name}-cpu.yaml"
    return [VERBS[name], "--config", str(config), *options, *SMALL, "--output", str(out)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VERBS))
def test_small_settings_run(name: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(arguments_of(folder, name, out)) == 0
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results["training"]["train" if name == "pretrain" else "distill"]["step"] == 2
    assert (out / "model" / "README.md").exists()
    assert (out / "model" / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glue", "pretrain"])
def test_commands_run_as_they_are(name: str, folder: Path, tmp_path: Path) -> None:
    done = run_python("-m", "hf_linear_attn", *arguments_of(folder, name, tmp_path / "out"), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Result: {tmp_path / 'out' / 'model'}" in done.stderr


@pytest.mark.slow
def test_a_trained_tokenizer_reads_any_text(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    assert main(arguments_of(folder, "pretrain", tmp_path / "out")) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    strange = "Ünïcödé → \x00 𝄞"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange
    assert tokenizer.eos_token == "<|endoftext|>"
    model_config = json.loads((tmp_path / "out" / "model" / "config.json").read_text(encoding="utf-8"))
    assert model_config["vocab_size"] == len(tokenizer) <= 300
    assert model_config["eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["MODEL"], 1, "not both"),
        (["--model_type", "gpt3"], 1, "gpt3"),
        (["--train_tokenizer", "100"], 2, "--train_tokenizer: must be a whole number of at least 257"),
        (["--train_tokenizer", "null"], 2, "train_tokenizer"),
        (["--config_overrides.n_layers", "2"], 1, "n_layers"),
    ],
)
def test_bad_options_of_pretraining(
    more: list[str], code: int, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    more = [str(model) if one == "MODEL" else one for one in more]
    assert main([*arguments_of(folder, "pretrain", tmp_path / "out"), *more]) == code
    assert message in capsys.readouterr().err
