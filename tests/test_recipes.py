"""Every recipe and every YAML file: read, complete, and run for two steps on a tiny model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_linear_attn.training.entry import SETTINGS, recipe
from hf_linear_attn.training.settings import flat, read_settings
from tests.training.made_up import save_decoder, save_encoder, save_task, save_text

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
SCRIPTS = {"glue": "convert", "long_documents": "convert", "masked_lm": "convert", "causal_lm": "convert"}
SCRIPTS["pretrain"] = "finetune"

pytestmark = pytest.mark.skipif(not CONFIGS, reason="needs the repository's recipes, and runs outside of it")


def script_of(config: Path) -> str:
    """The script that a YAML file belongs to."""
    name = config.stem if config.stem.endswith("-table") else config.stem.rpartition("-")[0]
    return name.replace("-", "_")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_settings_can_be_read(config: Path) -> None:
    settings: Any = read_settings(SETTINGS[SCRIPTS.get(script_of(config), "convert")], str(config))
    assert settings.kind in ("classification", "causal-lm", "masked-lm")
    header = config.read_text(encoding="utf-8")
    for word in ("# needs:", "# run:", "# expect:"):
        assert word in header, f"{config.name} lacks {word}"
    held = yaml.safe_load(header)
    known = flat(settings)
    for section, values in held.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, dict):
                continue
            kept = known[f"{section}.{name}"]
            assert kept == (value if not isinstance(value, list) else list(value))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_command_in_the_header_names_this_recipe(config: Path) -> None:
    text = config.read_text(encoding="utf-8").replace("\\\n#", "")
    (command,) = re.findall(r"^# run:\s+(.*)$", text, re.MULTILINE)
    script = re.search(r"recipes/(\w+)\.py", command)
    assert script is not None
    assert script[1] == script_of(config)
    assert (ROOT / "recipes" / f"{script[1]}.py").exists()


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_reads_its_files(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    held = load_config_from_file(str(ROOT / "recipes" / "accelerate" / f"{name}.yaml"))
    assert held.num_processes == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recipes")
    save_encoder(place / "encoder")
    save_decoder(place / "decoder")
    save_task(place / "task")
    save_text(place / "text")
    return place


SMALL = ["--data.max_length", "16", "--run.cpu", "true", "--run.speed_lengths", "[]", "--run.precision", "no"]
STAGES = ["--transfer.steps", "2", "--distill.steps", "2", "--transfer.batch_size", "4", "--distill.batch_size", "4"]


def words(folder: Path, name: str, out: Path) -> list[str]:
    """What turns a recipe's settings into two steps of a tiny model."""
    text, encoder = str(folder / "text" / "text.txt"), ["--model.source", str(folder / "encoder")]
    task = ["--data.task", "null", "--data.source", str(folder / "task"), "--data.text", "sentence"]
    teacher = ["--teacher.steps", "2", "--teacher.batch_size", "4"]
    own = {
        "glue": [*encoder, *task, *teacher, *STAGES],
        "long_documents": [*encoder, *task, *teacher, *STAGES],
        "masked_lm": [*encoder, "--data.source", text, *teacher, *STAGES],
        "causal_lm": ["--model.source", str(folder / "decoder"), "--data.source", text, *STAGES],
        "pretrain": ["--data.source", text, "--train.steps", "2", "--train.batch_size", "4"],
    }[name]
    if name == "pretrain":
        own += ["--model.train_tokenizer", "300", "--model.overrides.n_embd", "16", "--model.overrides.n_head", "2"]
    return [*own, *SMALL, "--run.output", str(out)]


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_small_settings_run(name: str, folder: Path, tmp_path: Path) -> None:
    config = ROOT / "recipes" / "configs" / f"{name.replace('_', '-')}-cpu.yaml"
    out = tmp_path / "out"
    assert recipe(SCRIPTS[name], str(config), words(folder, name, out)) == 0
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    steps = {stage: held["step"] for stage, held in results["stages"].items() if "step" in held}
    assert steps == ({"train": 2} if name == "pretrain" else {**steps, "distill": 2})
    assert (out / "model" / "README.md").exists()
    assert (out / "model" / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["glue", "pretrain"])
def test_scripts_run_as_they_are(name: str, folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "recipes" / f"{name}.py"), *words(folder, name, tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Result: {tmp_path / 'out' / 'model'}" in done.stderr


def test_a_trained_tokenizer_reads_any_text(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = ROOT / "recipes" / "configs" / "pretrain-cpu.yaml"
    assert recipe("finetune", str(config), words(folder, "pretrain", tmp_path / "out")) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    strange = "Ünïcödé → \x00 𝄞"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange
    assert tokenizer.eos_token == "<|endoftext|>"
    held = json.loads((tmp_path / "out" / "model" / "config.json").read_text(encoding="utf-8"))
    assert held["vocab_size"] == len(tokenizer) <= 300
    assert held["eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("more", "words_told"),
    [
        (["--model.source", "x"], "not both"),
        (["--model.type", "gpt3"], "gpt3"),
        (["--model.train_tokenizer", "100"], "257"),
        (["--model.train_tokenizer", "null"], "model.tokenizer"),
        (["--model.overrides.n_layers", "2"], "n_layers"),
    ],
)
def test_bad_pretraining_settings_are_told(
    more: list[str], words_told: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ROOT / "recipes" / "configs" / "pretrain-cpu.yaml"
    assert recipe("finetune", str(config), [*words(folder, "pretrain", tmp_path / "out"), *more]) == 1
    assert words_told in capsys.readouterr().err
