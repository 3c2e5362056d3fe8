"""What a stranger's file or the network could do: nothing.

Escaping in reports is tested with the reports, files of plans and checkpoints in `tests/faults`.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

import hf_linear_attn as hla
from hf_linear_attn.cli import main
from hf_linear_attn.study.convert import convert
from tests.faults.checks import CreatesFileWhenUnpickled
from tests.small import patched
from tests.tiny_models import BERT
from tests.training.tiny_runs import convert_config, save_encoder, save_task

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_linear_attn"

#: Calls that run what a file holds, or that read a file in a way that may.
FORBIDDEN = {
    "eval", "exec", "pickle.load", "pickle.loads", "torch.load", "joblib.load", "numpy.load", "np.load", "os.system",
    "yaml.unsafe_load", "yaml.full_load", "marshal.loads", "subprocess.getoutput",
}  # fmt: skip


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """File, dotted name and node of every call in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
                yield path.relative_to(ROOT).as_posix(), ast.unparse(node.func), node


def test_nothing_in_the_package_runs_what_a_file_holds() -> None:
    assert [(path, name) for path, name, _ in calls() if name in FORBIDDEN] == []


def test_no_shell_and_no_trust_by_default() -> None:
    for path, name, node in calls():
        for keyword in node.keywords:
            value_of_keyword = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            assert not (keyword.arg == "shell" and value_of_keyword is not False), (path, name)
            assert not (keyword.arg == "trust_remote_code" and value_of_keyword is not False), (path, name)
            assert not (keyword.arg == "weights_only" and value_of_keyword is not True), (path, name)
            assert not (keyword.arg == "autoescape" and value_of_keyword is not True), (path, name)


def test_yaml_is_read_with_safe_loaders() -> None:
    """`yaml.load` takes its loader as the second argument: one that is derived from the safe one."""
    readers = [(path, node) for path, name, node in calls() if name == "yaml.load"]
    for path, node in readers:
        loader = ast.unparse(node.args[1]) if len(node.args) > 1 else ""
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"class {loader}(yaml.SafeLoader)" in source, path


# --------------------------------------------------------------------------------------------------------------------
# Code beside a checkpoint


@pytest.fixture
def strange(tmp_path: Path) -> tuple[Path, Path]:
    """A patched checkpoint whose code file was replaced by something else; the second path appears where it runs."""
    folder, mark = tmp_path / "checkpoint", tmp_path / "ran"
    patched("hedgehog", BERT).save_pretrained(folder)
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass BertForMaskedLM:\n    pass\n"
    (folder / "modeling_hf_linear_attn.py").write_text(code, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"]["AutoConfig"] = "modeling_hf_linear_attn.BertForMaskedLM"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder, mark


@pytest.mark.slow
def test_code_beside_a_checkpoint_does_not_run_unless_trusted(strange: tuple[Path, Path], tmp_path: Path) -> None:
    folder, mark = strange
    hla.load_pretrained(str(folder))
    with pytest.raises(ValueError, match="runs linear attention"):
        AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=False)
    main(["info", str(folder)])
    main(["patch", str(folder), str(tmp_path / "out"), "--attention", "elu"])
    assert not mark.exists()


@pytest.mark.slow
def test_what_a_class_name_in_a_config_may_be(tmp_path: Path) -> None:
    """Names of model classes of Transformers only; nothing else is looked up, let alone imported."""
    patched("hedgehog", BERT).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    for name in ("Trainer", "os.system", "utils", "__builtins__", "pipeline"):
        config = {**json.loads(path.read_text(encoding="utf-8")), "architectures": [name]}
        path.write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(ValueError, match="no model class"):
            hla.load_pretrained(str(tmp_path))


# --------------------------------------------------------------------------------------------------------------------
# Pickles


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth"])
def test_a_pickle_in_a_checkpoint_of_training_is_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_linear_attn.training.distillation import FinetuningTrainer

    paths: Any = (save_encoder(tmp_path / "encoder"), save_task(tmp_path / "task"), tmp_path / "out")
    original = FinetuningTrainer.training_step

    def training_step(self: FinetuningTrainer, *args: Any, **kwargs: Any) -> Any:
        if Path(self.args.output_dir).name == "distill" and self.state.global_step == 2:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(FinetuningTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            convert(convert_config(*paths))
    (checkpoint,) = (tmp_path / "out" / "checkpoints" / "distill").glob("checkpoint-*")
    assert (checkpoint / name).is_file()
    torch.save({"state": CreatesFileWhenUnpickled(str(tmp_path / "ran"))}, checkpoint / name)
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        convert(convert_config(*paths, resume=True))
    assert not (tmp_path / "ran").exists()


# --------------------------------------------------------------------------------------------------------------------
# The network

OFFLINE = """
import importlib, pkgutil, socket, sys, tempfile

def refuse(*args, **kwargs):
    raise AssertionError(f"the network was wanted: {args[1:]}")

socket.socket.connect = socket.socket.connect_ex = refuse
socket.create_connection = socket.getaddrinfo = refuse
import hf_linear_attn
for module in pkgutil.walk_packages(hf_linear_attn.__path__, "hf_linear_attn."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:  # an extra, or a package for GPUs, that is not installed
            assert "pip install" in str(error) or error.name == "triton", error
from transformers import BertConfig, BertModel
model = hf_linear_attn.patch_model(BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)))
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    hf_linear_attn.load_pretrained(folder)
print("done")
"""


@pytest.mark.slow
def test_importing_patching_saving_and_loading_need_no_network() -> None:
    """With the Hub allowed, so that nothing but the code itself keeps it from being asked."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    assert done.stdout.endswith("done\n"), done.stderr[-2000:]
