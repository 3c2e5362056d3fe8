"""FSDP2 in two processes on a CPU (gloo): the losses of data parallelism, whole checkpoints, resumption, refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from hf_linear_attn import load_pretrained
from hf_linear_attn.training.sharding import check_sharding

from .made_up import save_decoder, save_encoder, save_task, save_text
from .test_convert import lines
from .test_two_processes import ROOT, settings_file, start


def sharding() -> dict[str, str]:
    """What `accelerate launch` tells its processes, given recipes/accelerate/fsdp2.yaml."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    config = str(ROOT / "recipes" / "accelerate" / "fsdp2.yaml")
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", config, "glue.py"]))
    given: dict[str, str] = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in given.items() if "FSDP" in name}


def start_sharded(settings: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return start(settings, 2, *flags, module="tests.training.sharded_worker", **{**sharding(), **environment})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sharding")
    save_encoder(place / "encoder", hidden_dropout_prob=0.0)
    save_task(place / "task", validation=27)
    for name, run in (("copies", partial(start, processes=2)), ("sharded", start_sharded)):
        done = run(settings_file(place, name, 4))
        assert done.returncode == 0, done.stderr[-3000:]
    return place


@pytest.mark.parametrize("stage", ["teacher", "distill"])
def test_losses_are_those_of_data_parallelism(stage: str, folder: Path) -> None:
    copies, sharded = (
        [line["train/loss"] for line in lines(folder / name, stage) if "train/loss" in line]
        for name in ("copies", "sharded")
    )
    assert len(copies) >= 2
    assert sharded == pytest.approx(copies, rel=1e-3)


def test_the_model_was_sharded(folder: Path) -> None:
    """Checkpoints are pieces, one of each process."""
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        for kept in (folder / "sharded" / "checkpoints" / "distill").glob("step-*"):
            assert {path.name for path in (kept / part).glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}


def test_checkpoints_are_whole(folder: Path) -> None:
    copies, sharded = (load_file(str(folder / name / "model" / "model.safetensors")) for name in ("copies", "sharded"))
    assert copies.keys() == sharded.keys()
    for name, tensor in copies.items():
        assert (sharded[name] - tensor).norm() <= 0.02 * tensor.norm() + 1e-4, name
    assert load_pretrained(folder / "sharded" / "model").num_parameters() > 0


def test_a_resumed_run_ends_where_it_did(folder: Path) -> None:
    before = (folder / "sharded" / "model" / "model.safetensors").read_bytes()
    path = folder / "sharded" / "state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    for stage in ("distill", "distilled"):
        del state[stage]
    path.write_text(json.dumps(state), encoding="utf-8")
    shutil.rmtree(folder / "sharded" / "model")
    done = start_sharded(folder / "sharded.yaml", "--run.resume", "true")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "distill: goes on after step 4 of 6" in done.stderr
    assert (folder / "sharded" / "model" / "model.safetensors").read_bytes() == before


def test_adapters(folder: Path) -> None:
    done = start_sharded(settings_file(folder, "adapters", 4, distill__lora_rank=2))
    assert done.returncode == 0, done.stderr[-3000:]
    assert load_pretrained(folder / "adapters" / "model").num_parameters() > 0


def test_a_decoder_with_tied_weights_and_gradient_checkpointing(folder: Path) -> None:
    model, text = save_decoder(folder / "decoder"), save_text(folder / "text")
    changes = {
        "model__source": str(model),
        "data__source": str(text),
        "data__text": ["text"],
        "model__attention": "window",
    }
    losses = []
    for name, run in (("tied-copies", partial(start, processes=2)), ("tied-sharded", start_sharded)):
        path = settings_file(folder, name, 4, kind="causal-lm", run__gradient_checkpointing=True, **changes)
        done = run(path)
        assert done.returncode == 0, done.stderr[-3000:]
        results = json.loads((folder / name / "results.json").read_text(encoding="utf-8"))
        losses.append(results["stages"]["distilled"]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    converted = load_pretrained(folder / "tied-sharded" / "model")
    assert converted.get_output_embeddings().weight is converted.get_input_embeddings().weight


def test_weights_that_one_process_loads_are_refused(folder: Path) -> None:
    done = start_sharded(settings_file(folder, "efficient", 4), FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    assert done.returncode != 0
    assert "Set it to false" in done.stderr


@pytest.mark.parametrize(("kind", "message"), [("FSDP", "FSDP with fsdp_version 1"), ("DEEPSPEED", "DEEPSPEED, which")])
def test_other_ways_to_shard_are_refused(kind: str, message: str) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), is_fsdp2=False)
    with pytest.raises(NotImplementedError, match=message):
        check_sharding(accelerator)
