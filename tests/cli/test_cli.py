"""The command line, end to end on tiny checkpoints."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import hf_linear_attn as hla
from hf_linear_attn import checkpoints
from hf_linear_attn.cli import VERBS, load_verb, main, parse_verb


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 checkpoint with files that stand for its tokenizer."""
    folder = tmp_path_factory.mktemp("source") / "gpt2"
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_head=2, n_embd=16, n_positions=64, vocab_size=50, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "README.md").write_text("the card of the original\n")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of an expected error, exit code 1."""
    assert run(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


# --------------------------------------------------------------------------------------------------------------------
# The frame


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"hf-linear-attn {hla.__version__}\n"


def test_nothing_passed_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "examples:" in capsys.readouterr().err


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_help_of_a_verb_is_short(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run(verb, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: hf-linear-attn {verb}")
    assert sum(line.startswith("  --") for line in lines) <= 40
    assert len(lines) <= 85, "one and a half screens, and the examples"
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_examples_of_a_verb_have_its_options(verb: str) -> None:
    for line in load_verb(verb).examples.splitlines():
        if line.startswith(f"hf-linear-attn {verb}") and "--config" not in line:
            parse_verb(verb, shlex.split(line)[2:])


def test_help_of_every_verb_is_light() -> None:
    """Neither torch nor transformers is loaded before a verb runs."""
    code = (
        "import sys; from hf_linear_attn.cli import VERBS, load_verb, main, parse_verb\n"
        "for arguments in (['--version'], ['--help'], *([verb, '--help'] for verb in VERBS)):\n"
        "    assert main(arguments) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["lst"], "unknown verb 'lst'. Did you mean 'list'"),
        (["--verson"], "unknown option '--verson'"),
        (["patch", "a", "b"], "--attention: give either attention (a name) or plan (a file)"),
        (
            ["patch", "a", "b", "--attention", "elu", "--plan", "p.json"],
            "--attention: give either attention",
        ),
        (["patch", "a", "b", "--attention", "elu", "--layers", "0;1"], "--layers: must be a list, each entry a whole"),
        (["patch", "a", "b", "--attention", "elu", "--options", "alpha"], 'Parser key "options": Expected a'),
        (["patch", "a", "b", "--attention", "elu", "--dtype", "float8"], 'Parser key "dtype":'),
        (["patch", "a", "b", "--plan", "p.json", "--layers", "0"], "write them into the file"),
        (["patch", "a", "b", "--atention", "elu"], "Did you mean '--attention'"),
        (["patch", "a", "b", "c"], "unrecognized arguments: c"),
        (["patch", "-o", "a"], "unrecognized arguments: -o"),
        (["evaluate", "a", "--data", "b"], "--data: unknown option. Did you mean"),
        (["patch", "a", "b", "--attention"], "argument --attention: expected one argument"),
        (["patch", "a", "--attention", "elu"], "the following arguments are required: output"),
        (["info"], "the following arguments are required: model"),
        (["info", "a", "--config", "missing.yaml"], "File does not exist: "),
        (["convert", "a", "--teacher.lr", "1"], "--teacher.lr: unknown option. Did you mean"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_errors_name_the_flags_that_were_typed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, complaint in (
        (
            ["convert", "a", "--data.max_length", "-1"],
            "--data.max_length: must be a whole number of at least 1, got -1.",
        ),
        (["convert", "a", "--resume", "--overwrite"], "error: --resume: excludes overwrite."),
        (["evaluate", "a", "--steps", "-1"], "error: --steps: must be a whole number"),
        (
            ["plan", "a", "--budget", "1x at 64", "--data.folder", "b"],
            "error: --data.folder: 'b' is the folder of a task",
        ),
    ):
        assert run(*arguments) == 2
        assert complaint in capsys.readouterr().err


def test_yaml_and_flags(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands later overrides, and `--print_config` shows what is used."""
    file = tmp_path / "patch.yaml"
    file.write_text(f"model: {gpt2}\nattention: favor+\noptions:\n  num_features: 8\nlayers: [0]\n")
    arguments = ["patch", "--config", file, gpt2, tmp_path / "out", "--layers", "-1", "0", "--options.seed", "3"]
    assert run(*arguments, "--print_config") == 0
    printed = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert yaml.safe_load(printed) == {
        "model": str(gpt2),
        "output": str(tmp_path / "out"),
        "attention": "favor+",
        "options": {"num_features": 8, "seed": 3},
        "layers": [-1, 0],
        "plan": None,
        "max_length": None,
        "dtype": "auto",
        "auto_class": None,
        "revision": None,
        "overwrite": False,
    }
    (tmp_path / "printed.yaml").write_text(printed)
    assert run("patch", "--config", tmp_path / "printed.yaml") == 0
    assert [layer.attention for layer in hla.patch_report(hla.load_pretrained(str(tmp_path / "out"))).layers] == [
        "favor+",
        "softmax",
        "favor+",
    ]


def test_interrupt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_linear_attn.registry.list_attentions", interrupt)
    assert run("list") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_traceback_on_request(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"there is no config\.json in it"):
        run("info", tmp_path, "--traceback")


#: Runs each command line of the JSON in the first argument, and prints which of the other modules are loaded.
LOADED = (
    "import json, sys; from hf_linear_attn.cli import main\n"
    "codes = [main(arguments) for arguments in json.loads(sys.argv[1])]\n"
    "sys.stderr.write(json.dumps([codes, sorted({*sys.argv[2:]} & {*sys.modules})]))\n"
)


def loaded(commands: list[list[str]], *modules: str) -> list[object]:
    """Return the exit codes of commands in a new process, and which of the modules it has loaded then."""
    process = [sys.executable, "-c", LOADED, json.dumps(commands), *modules]
    done = subprocess.run(process, check=True, capture_output=True, text=True)
    return json.loads(done.stderr.splitlines()[-1])


def test_what_needs_no_model_is_light(tmp_path: Path) -> None:
    """Neither torch nor transformers is loaded to read a config, or to say that there is no such model or file."""
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[]")
    rest = {
        "info": [],
        "patch": ["out", "--attention", "elu"],
        "export": ["out"],
        "evaluate": [],
        "plan": ["--budget", "1.5x", "--data.dataset", "x.txt"],
        "convert": ["--data.dataset", "x.csv", "--output", "out"],
        "finetune": ["--data.dataset", "x.csv", "--output", "out"],
    }
    sources = (str(tmp_path / "missing"), "no/such/folder", "not a name", str(tmp_path / "broken"))
    commands = [["info", str(tmp_path)], ["info", str(tmp_path), "--json"]]
    commands += [[verb, source, *others] for verb, others in rest.items() for source in sources]
    assert loaded(commands, "torch", "transformers") == [[0, 0, *[1] * (len(commands) - 2)], []]


@pytest.mark.slow
def test_names_of_mechanisms_load_torch_only(tmp_path: Path) -> None:
    """A mechanism's file has its module, which needs torch; neither Transformers nor torch's compiler is needed."""
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    patch = ["patch", str(tmp_path), str(tmp_path / "out"), "--attention"]
    commands = [
        ["list"],
        ["list", "window"],
        ["list", "hegdehog"],
        [*patch, "hegdehog"],
        [*patch, "elu", "--options.x", "1"],
    ]
    assert loaded(commands, "transformers", "torch._dynamo") == [[0, 0, 1, 1, 1], []]


@pytest.mark.slow
def test_errors_have_no_traceback() -> None:
    """`python -m` is the same command."""
    done = subprocess.run(
        [sys.executable, "-m", "hf_linear_attn", "list", "hegdehog"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: Unknown attention mechanism 'hegdehog'. Did you mean 'hedgehog'")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m hf_linear_attn list --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------------------------------------
# list and env


def test_list_names_every_mechanism(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert run("list") == 0
    shown = capsys.readouterr().out
    for name, entry in hla.list_attentions().items():
        assert f" {name} " in shown
        assert entry["paper"] in shown


def test_list_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == hla.list_attentions()
    assert run("list", "favor+", "--json") == 0
    assert list(json.loads(capsys.readouterr().out)) == ["favor+"]


@pytest.mark.parametrize("name", sorted(hla.list_attentions()))
def test_list_one(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run("list", name) == 0
    shown = capsys.readouterr().out
    for option in hla.list_attentions()[name]["options"]:
        assert f"  {option} = " in shown


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("env") == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["hf-linear-attn"] == hla.__version__
    assert shown["torch"].startswith(torch.__version__.partition("+")[0])
    assert {"python", "transformers", "accelerate", "peft", "platform", "cpu", "threads", "cuda"} <= set(shown)
    assert shown["kernels"].startswith(("native", "none"))


# --------------------------------------------------------------------------------------------------------------------
# patch


def test_patch_equals_patch_model(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "out"
    arguments = ("--attention", "favor+", "--layers", "-1", "0", "--options.num_features", "8", "--options.seed", "3")
    assert run("patch", gpt2, target, *arguments) == 0
    assert "2 of 3 self-attention layers are linear" in capsys.readouterr().out

    expected = hla.patch_model(
        AutoModelForCausalLM.from_pretrained(gpt2), "favor+", layers=[-1, 0], num_features=8, seed=3
    )
    reloaded = hla.load_pretrained(str(target))
    tokens = torch.arange(20).reshape(2, 10)
    assert torch.equal(reloaded(tokens).logits, expected(tokens).logits)
    for name in ("tokenizer.json", "merges.txt", "1_Pooling/config.json"):
        assert (target / name).read_bytes() == (gpt2 / name).read_bytes()
    assert not (target / "README.md").exists(), "the card of the original does not describe the patched model"
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert (target.stat().st_mode & 0o777) == (target.parent.stat().st_mode & 0o777)


def test_patch_plan_and_dtype(gpt2: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"default": "elu", "0": "softmax", "-1": {"attention": "window", "window_size": 4}}))
    assert run("patch", gpt2, tmp_path / "out", "--plan", plan, "--dtype", "bfloat16") == 0
    reloaded = hla.load_pretrained(str(tmp_path / "out"))
    assert reloaded.dtype == torch.bfloat16
    assert [layer.attention for layer in hla.patch_report(reloaded).layers] == ["softmax", "elu", "window"]


def test_patch_auto_class(gpt2: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert run("patch", gpt2, target, "--attention", "elu", "--auto_class", "AutoModel") == 0
    assert json.loads((target / "config.json").read_text())["architectures"] == ["GPT2Model"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--attention", "hedghog"], "Did you mean 'hedgehog'"),
        (["--attention", "elu", "--options.alpa", "1"], "Did you mean 'alpha'"),
        (["--attention", "elu", "--options.alpha", "7"], "alpha must be a finite number above 0 and of at most 1"),
        (["--attention", "elu", "--layers", "0", "9"], "out of range: the model has 3"),
        (["--attention", "linformer"], "Use 'linformer-causal'"),
        (["--attention", "elu", "--auto_class", "AutoModelForLM"], "no model class 'AutoModelForLM'"),
        (["--plan", "missing.json"], "there is no such file"),
        (["--plan", "list.json"], "must contain an object"),
        (["--plan", "broken.json"], "is not JSON"),
        (["--plan", "wrong.json"], "'wrong.json': 'decoder.x' matches no"),
    ],
)
def test_patch_refuses(
    gpt2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    complaint: str,
) -> None:
    """Nothing appears at DST, and no weight is read."""
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[]")
    Path("broken.json").write_text("{")
    Path("wrong.json").write_text('{"decoder.x": "elu"}')
    Path("good.json").write_text('{"0": "elu"}')
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(GPT2LMHeadModel, "from_pretrained", None)
    expected = complaint.removeprefix("'wrong.json': ")
    assert expected in error_of(capsys, "patch", gpt2, "out", *flags)
    assert sorted(tmp_path.iterdir()) == before


def test_patch_sources_that_cannot_be(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(source: Path | str) -> str:
        return error_of(capsys, "patch", source, tmp_path / "out", "--attention", "elu")

    for name in ("./nowhere", "org/model"):
        assert f"{name!r} cannot be loaded" in refusal(name)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no config.json in it" in refusal(empty)
    patched = tmp_path / "patched"
    assert run("patch", gpt2, patched, "--attention", "elu") == 0
    capsys.readouterr()
    assert "is patched already" in refusal(patched)
    nameless = tmp_path / "nameless"
    GPT2Config(n_layer=1, n_head=2, n_embd=16).save_pretrained(nameless)
    assert "Pass auto_class" in refusal(nameless)
    assert not (tmp_path / "out").exists()


def test_truncated_weights(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes((gpt2 / "model.safetensors").read_bytes()[:2000])
    assert "truncated or corrupt" in error_of(capsys, "patch", broken, tmp_path / "out", "--attention", "elu")


def test_target_in_use(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(target: Path, *flags: str) -> str:
        return error_of(capsys, "patch", gpt2, target, "--attention", "elu", *flags)

    file = tmp_path / "file"
    file.write_text("mine")
    assert "is a file" in refusal(file)
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "diary.txt").write_text("mine")
    for flags in ([], ["--overwrite"]):
        assert "not a result of this command (diary.txt)" in refusal(notes, *flags)
    assert (notes / "diary.txt").read_text() == "mine"
    weights = (gpt2 / "model.safetensors").read_bytes()
    assert "would be lost" in refusal(gpt2, "--overwrite")
    assert "would be lost" in refusal(gpt2.parent, "--overwrite")
    assert (gpt2 / "model.safetensors").read_bytes() == weights


def test_overwrite_replaces_the_whole_folder(gpt2: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert run("patch", gpt2, target, "--attention", "hedgehog") == 0
    (target / "left-over.txt").write_text("old")
    assert run("patch", gpt2, target, "--attention", "elu", "--overwrite") == 0
    assert not (target / "left-over.txt").exists()
    assert not [name for name in load_file(target / "model.safetensors") if "linear_attention" in name]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError("No space left on device")])
def test_a_save_that_fails_leaves_nothing(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    target = tmp_path / "out"
    assert run("patch", gpt2, target, "--attention", "hedgehog") == 0
    before = (target / "model.safetensors").read_bytes()

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(checkpoints, "copy_companions", fail)
    code = run("patch", gpt2, target, "--attention", "elu", "--overwrite")
    assert code == (130 if isinstance(failure, KeyboardInterrupt) else 1)
    assert (target / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --------------------------------------------------------------------------------------------------------------------
# info


def test_info(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    assert run("patch", gpt2, target, "--attention", "hedgehog", "--layers", "1") == 0
    report = hla.patch_report(hla.load_pretrained(str(target)))
    (target / "model.safetensors").unlink()  # the weights are not needed
    capsys.readouterr()
    assert run("info", target) == 0
    shown = capsys.readouterr().out
    assert str(report) in shown
    assert f"format 1, written by hf-linear-attn {hla.__version__}" in shown
    assert run("info", target, "--json") == 0
    info = json.loads(capsys.readouterr().out)
    assert info["patched"]
    assert info["added_parameters"] == report.parameters
    assert info["state_bytes"] == report.state_bytes > 0
    assert [layer["attention"] for layer in info["layers"]] == ["softmax", "hedgehog", "softmax"]


def test_info_without_linear_attention(gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", gpt2) == 0
    assert "GPT2LMHeadModel without linear attention" in capsys.readouterr().out
    assert run("info", gpt2, "--json") == 0
    assert json.loads(capsys.readouterr().out)["patched"] is False


def test_info_of_a_newer_format(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    assert run("patch", gpt2, target, "--attention", "elu") == 0
    config = json.loads((target / "config.json").read_text())
    config["linear_attention"]["format_version"] = 99
    (target / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert "pip install -U hf-linear-attn" in error_of(capsys, "info", target)


@pytest.mark.slow
def test_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = BertConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=16, vocab_size=50)
    BertModel(config).save_pretrained(tmp_path / "bert")
    assert (
        run("patch", tmp_path / "bert", tmp_path / "out", "--attention", "linformer", "--options.num_slots", "4") == 0
    )
    assert run("info", tmp_path / "out") == 0
    assert "2 of 2 self-attention layers are linear" in capsys.readouterr().out


@pytest.mark.slow
def test_a_terminal_without_some_characters_gets_replacements() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "hf_linear_attn", "list"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert b"window" in run.stdout
