"""FSDP2 and ZeRO (DeepSpeed) in two processes on a CPU (gloo): the losses of data parallelism, whole checkpoints,
resumption, refusals."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_linear_attn import load_pretrained
from hf_linear_attn.training.sharding import check_launch, check_sharding
from tests.subprocesses import ROOT, run_python
from tests.training.test_two_processes import complaint, settings_file, start
from tests.training.tiny_runs import forget, log_rows, save_decoder, save_encoder, save_task, save_text

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install '.[dev]'")
KINDS = [
    "fsdp2",
    pytest.param("zero3", marks=needs_deepspeed),
    pytest.param("zero2", marks=[needs_deepspeed, pytest.mark.long]),
]
#: Of whole conversions. (`test_trainers_sharding.py` has the trainers in ZeRO-3.)
CONVERTED = ["fsdp2", *(pytest.param(kind, marks=[needs_deepspeed, pytest.mark.long]) for kind in ("zero3", "zero2"))]


def sharding(kind: str) -> dict[str, str]:
    """What `accelerate launch` tells its processes, given the configuration in recipes/accelerate."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    name = "fsdp2" if kind == "fsdp2" else "deepspeed"
    config = str(ROOT / "recipes" / "accelerate" / f"{name}.yaml")
    namespace = launch_command_parser().parse_args(["--config_file", config, "glue.py"])
    arguments, defaults, _ = _validate_launch_command(namespace)
    if kind == "fsdp2":
        environment: dict[str, str] = prepare_multi_gpu_env(arguments)
        return {key: value for key, value in environment.items() if "FSDP" in key}
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    _, environment = prepare_deepspeed_cmd_env(arguments)
    return {
        **{key: value for key, value in environment.items() if "DEEPSPEED" in key},
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": kind[-1],
    }


def start_sharded(kind: str, settings: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**sharding(kind), **environment}
    return start(settings, 2, *flags, "--device", "auto", module="tests.training.sharded_worker", **variables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharding")
    save_encoder(path / "encoder", hidden_dropout_prob=0.0)
    save_task(path / "task", validation=27)
    done = start(settings_file(path, "copies", 4), 2)
    assert done.returncode == 0, complaint(done)
    return path


@pytest.fixture(scope="module", params=CONVERTED)
def kind(request: pytest.FixtureRequest, folder: Path) -> str:
    """A way to shard. Its run is in the folder of its name."""
    kind: str = request.param
    done = start_sharded(kind, settings_file(folder, kind, 4))
    assert done.returncode == 0, complaint(done)
    return kind


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["teacher", "distill"])
def test_losses_are_those_of_data_parallelism(stage: str, folder: Path, kind: str) -> None:
    copies, sharded = (
        [line["loss"] for line in log_rows(folder / name, stage) if "loss" in line] for name in ("copies", kind)
    )
    assert len(copies) >= 2
    assert sharded == pytest.approx(copies, rel=1e-3)


@pytest.mark.slow
def test_the_model_was_sharded(folder: Path, kind: str) -> None:
    """Checkpoints are pieces, one of each process."""
    steps = list((folder / kind / "checkpoints" / "distill").glob("checkpoint-*"))
    assert steps
    for step in steps:
        if kind == "fsdp2":
            for part in ("pytorch_model_fsdp_0", "optimizer_0"):
                assert {path.name for path in (step / part).glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
        else:
            pieces = sorted(path.name for path in step.glob("global_step*/*optim_states.pt"))
            assert [name.split("_mp_rank")[0][-1] for name in pieces] == ["0", "1"]


@pytest.mark.slow
def test_checkpoints_are_whole(folder: Path, kind: str) -> None:
    copies, sharded = (load_file(str(folder / name / "model" / "model.safetensors")) for name in ("copies", kind))
    assert copies.keys() == sharded.keys()
    for name, tensor in copies.items():
        assert (sharded[name] - tensor).norm() <= 0.02 * tensor.norm() + 1e-4, name
    assert load_pretrained(folder / kind / "model").num_parameters() > 0


@pytest.mark.slow
def test_a_resumed_run_ends_where_it_did(folder: Path, kind: str) -> None:
    before = (folder / kind / "model" / "model.safetensors").read_bytes()
    forget(folder / kind, "distill", "distilled")
    done = start_sharded(kind, folder / f"{kind}.yaml", "--resume")
    assert done.returncode == 0, complaint(done)
    assert "distill: resumes from checkpoint-4" in done.stderr
    assert (folder / kind / "model" / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_adapters(folder: Path, kind: str) -> None:
    name = f"adapters-{kind}"
    done = start_sharded(kind, settings_file(folder, name, 4, distill__lora_rank=2))
    assert done.returncode == 0, complaint(done)
    assert load_pretrained(folder / name / "model").num_parameters() > 0


def decoder_loss(folder: Path, name: str, run: Callable[[Path], subprocess.CompletedProcess[str]]) -> float:
    """The last loss of a decoder with tied weights, checkpointed activations and accumulated gradients."""
    changes = {
        "task_type": "causal-lm",
        "model": str(save_decoder(folder / "decoder")),
        "attention": "window",
        "data__dataset": str(save_text(folder / "text")),
        "data__text_columns": ["text"],
        "distill__gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    }
    done = run(settings_file(folder, name, 4, **changes))
    assert done.returncode == 0, complaint(done)
    loss: float = json.loads((folder / name / "results.json").read_text(encoding="utf-8"))["scores"]["distilled"][
        "loss"
    ]
    return loss


@pytest.fixture(scope="module")
def loss_of_copies(folder: Path) -> float:
    return decoder_loss(folder, "tied-copies", partial(start, processes=2))


@pytest.mark.long
def test_a_decoder_with_tied_weights_and_gradient_checkpointing(folder: Path, kind: str, loss_of_copies: float) -> None:
    name = f"tied-{kind}"
    assert decoder_loss(folder, name, partial(start_sharded, kind)) == pytest.approx(loss_of_copies, rel=1e-3)
    converted = load_pretrained(folder / name / "model")
    assert converted.get_output_embeddings().weight is converted.get_input_embeddings().weight


@pytest.mark.long
@needs_deepspeed
def test_zero_autocasts_and_keeps_float32_weights(folder: Path) -> None:
    """The random features of favor+ are a buffer, which bfloat16 would round for good. Two matrices are large enough
    for ZeRO-3 to hand them around in pieces."""
    wide = save_encoder(folder / "wide", hidden_dropout_prob=0.0, intermediate_size=4096)
    changes = {"model": str(wide), "attention": "favor+", "bf16": True}
    for name, run in (("half-copies", partial(start, processes=2)), ("half-zero3", partial(start_sharded, "zero3"))):
        done = run(settings_file(folder, name, 4, **changes))
        assert done.returncode == 0, complaint(done)
    copies, sharded = (
        load_file(str(folder / name / "model" / "model.safetensors")) for name in ("half-copies", "half-zero3")
    )
    losses = [
        [line["loss"] for line in log_rows(folder / name, "distill") if "loss" in line]
        for name in ("half-copies", "half-zero3")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    features = dict(load_pretrained(folder / "half-zero3" / "model").named_buffers())
    buffers = [name for name, tensor in features.items() if name in copies and tensor.is_floating_point()]
    assert buffers
    for name in buffers:
        assert torch.equal(copies[name], sharded[name]), name
    assert {tensor.dtype for tensor in sharded.values() if tensor.is_floating_point()} == {torch.float32}
    large = [tensor for tensor in sharded.values() if tensor.numel() > 100_000]
    assert large
    assert all((tensor.bfloat16().float() != tensor).any() for tensor in large)


@pytest.mark.slow
def test_weights_that_one_process_loads_are_refused(folder: Path) -> None:
    done = start_sharded("fsdp2", settings_file(folder, "efficient", 4), FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    assert done.returncode != 0
    assert "Set it to false" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="accelerate shards here")
@pytest.mark.parametrize(
    ("name", "device"),
    [("FSDP", "auto"), pytest.param("DEEPSPEED", "cpu", marks=[needs_deepspeed, pytest.mark.long])],
)
def test_without_gpus_nothing_is_sharded_in_silence(name: str, device: str, folder: Path) -> None:
    """accelerate would take each process for the only one, or share the work without sharding the model."""
    path = settings_file(folder, f"no-gpu-{name}-{device}", 4)
    done = start(path, 2, "--device", device, **{f"ACCELERATE_USE_{name}": "true"})
    assert done.returncode != 0
    assert f"shard by {name}, which it does on GPUs only" in done.stderr
    assert not (folder / f"no-gpu-{name}-{device}").exists()


def test_a_launch_of_several_processes_that_is_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process, unless there is MPI, and sets this."""
    process: Any = SimpleNamespace(num_processes=1, distributed_type=SimpleNamespace(value="NO"))
    for name in ("WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    check_launch(process)  # --num_processes 1
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match=r"this is one process\. Start them with torchrun"):
        check_launch(process)
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun --nproc_per_node 1
    check_launch(process)


@pytest.mark.slow
def test_accelerate_launch_on_cpus_says_that_it_is_one_process(folder: Path) -> None:
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "hf_linear_attn"]
    done = run_python(*launch, "convert", "--config", settings_file(folder, "launched", 4))
    assert done.returncode != 0
    assert "this is one process. Start them with torchrun" in done.stderr
    assert not (folder / "launched").exists()


@pytest.mark.parametrize(("kind", "message"), [("FSDP", "FSDP with fsdp_version 1"), ("MEGATRON_LM", "LM, which")])
def test_other_ways_to_shard_are_refused(kind: str, message: str) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), is_fsdp2=False, num_processes=1)
    with pytest.raises(NotImplementedError, match=message):
        check_sharding(accelerator)


@pytest.mark.parametrize(
    ("config", "precision", "message"),
    [
        ({"optimizer": {"type": "AdamW"}}, "no", "optimizer.type = 'AdamW'"),
        ({"scheduler": {"type": "WarmupLR"}}, "no", "scheduler.type = 'WarmupLR'"),
        ({"tensor_parallel": {"autotp_size": 2}}, "no", "tensor_parallel.autotp_size = 2"),
        ({}, "fp16", "mixed precision 'fp16'.*Use bf16"),
    ],
)
def test_what_deepspeed_may_not_decide(config: dict[str, Any], precision: str, message: str) -> None:
    accelerator: Any = SimpleNamespace(
        distributed_type=SimpleNamespace(value="DEEPSPEED"),
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config)),
        mixed_precision=precision,
        num_processes=1,
    )
    with pytest.raises(ValueError, match=message):
        check_sharding(accelerator)
