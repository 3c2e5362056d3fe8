"""Where the weights of a model lie in a run of several processes: a copy on each, or shards.

FSDP2 and ZeRO-3 of DeepSpeed (Rajbhandari et al. 2020, arXiv:1910.02054) shard weights, gradients and optimizer states;
ZeRO-1 and ZeRO-2 shard the latter only. Model and teacher are shards while a stage of a conversion trains, and complete
copies in the memory of each process between two stages.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.integrations import unset_hf_deepspeed_config

from ..integration.context import SUBMODULE, attention_modules, mechanism_of

#: What wrappers put into the names of parameters.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
#: On a model: the engine of DeepSpeed that gathers its shards in forward passes.
ENGINE = "_zero_inference_engine"


def runs_on_cpu(use_cpu: bool) -> bool:
    """Return whether to run on the CPU: by request, or without an accelerator.

    Unless it is asked for the CPU there, accelerate takes each of several processes for the only one, and Transformers
    refuses bf16.
    """
    return use_cpu or (not _requested_sharding() and not torch.accelerator.is_available())


def _requested_sharding() -> str | None:
    """Return the kind of sharding that `accelerate launch` has asked for in the environment."""
    kinds = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
    return next((kind for kind in kinds if os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true"), None)


def check_launch(process: PartialState | Accelerator) -> None:
    """Raise a ValueError unless the processes know of each other, and sharding, where it is configured, has GPUs."""
    requested = _requested_sharding()
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    unconnected = process.num_processes < launched
    if requested is not None and (unconnected or process.distributed_type.value in ("NO", "MULTI_CPU")):
        remedy = "Where there are GPUs, do not ask for the CPU; else use torchrun, and no configuration of accelerate."
        raise ValueError(f"accelerate is configured to shard by {requested}, which it does on GPUs only. {remedy}")
    cpu_requested = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1") and "MASTER_PORT" in os.environ
    if cpu_requested and process.num_processes == 1 and "WORLD_SIZE" not in os.environ:
        problem = "accelerate launch was asked for several processes on CPUs, which it starts through MPI only"
        raise ValueError(f"{problem}; this is one process. Start them with torchrun --nproc_per_node NUMBER.")
    if unconnected:
        counts = f"{launched} processes were started, and accelerate knows of {process.num_processes}"
        raise ValueError(f"{counts}: each would do the whole run. Start them with torchrun or accelerate launch.")


def check_sharding(accelerator: Accelerator) -> None:
    """Refuse configurations of accelerate that are not supported, and complete that of DeepSpeed."""
    kind = accelerator.distributed_type.value
    check_launch(accelerator)
    if kind == "DEEPSPEED":
        _configure_zero(accelerator)
    elif kind == "FSDP" and accelerator.is_fsdp2:
        plugin: Any = accelerator.state.fsdp_plugin
        if plugin.cpu_ram_efficient_loading:
            problem = "leaves every process but the first without weights, which patching and attention transfer need"
            remedy = "Set it to false (as recipes/accelerate/fsdp2.yaml does)."
            raise ValueError(f"fsdp_cpu_ram_efficient_loading {problem}. {remedy}")
    elif kind.startswith(("FSDP", "MEGATRON")):
        raise NotImplementedError(
            f"accelerate is configured for {kind}{' with fsdp_version 1' if kind == 'FSDP' else ''}, which this "
            "training does not support. Use FSDP2 or DeepSpeed (recipes/accelerate/fsdp2.yaml, deepspeed.yaml) or data "
            "parallelism (ddp.yaml), and LoRA (distill.lora_rank) where memory is short."
        )


def _configure_zero(accelerator: Accelerator) -> None:
    plugin: Any = accelerator.state.deepspeed_plugin
    # Otherwise Transformers would load models as shards, whatever zero3_init_flag says, which patching cannot read.
    unset_hf_deepspeed_config()
    config = plugin.deepspeed_config
    for section, key in (("optimizer", "type"), ("scheduler", "type"), ("tensor_parallel", "autotp_size")):
        if config.get(section, {}).get(key):
            problem = f"{section}.{key} = {config[section][key]!r}, which this training does not support"
            reason = "its settings choose the optimizer and the schedule, and layers are whole"
            raise ValueError(f"DeepSpeed's configuration has {problem}: {reason}. Leave it out.")
    precision = accelerator.mixed_precision
    if precision not in ("no", "bf16"):
        raise ValueError(f"DeepSpeed with mixed precision {precision!r} is not supported. Use bf16 or no.")
    config.update(
        bf16={"enabled": False},
        fp16={"enabled": False},
        # Without its list of modules whose weights and gradients DeepSpeed would hand around rounded.
        torch_autocast={"enabled": precision == "bf16", "dtype": "bfloat16", "lower_precision_safe_modules": []},
    )


def shards_models(accelerator: Accelerator) -> bool:
    """Whether models are shards, or engines of DeepSpeed."""
    return accelerator.is_fsdp2 or accelerator.state.deepspeed_plugin is not None


def autocast(accelerator: Accelerator | None) -> Any:
    """Return a context of the run's mixed precision; one that changes nothing without an accelerator."""
    if accelerator is None:
        return nullcontext()
    if accelerator.distributed_type.value != "DEEPSPEED":
        return accelerator.autocast()
    # accelerate leaves it to DeepSpeed, whose engine sees to the calls of its own model only.
    plugin: Any = accelerator.state.deepspeed_plugin
    enabled = plugin.deepspeed_config["torch_autocast"]["enabled"]
    return torch.autocast(accelerator.device.type, torch.bfloat16, enabled=enabled)


def shard_frozen_model(accelerator: Accelerator, model: Any) -> Any:
    """Shard a model that runs without an optimizer: a teacher, or the model of an attention transfer.

    Under FSDP2 and ZeRO-3 all parameters become shards, in place, but the learned parts of mechanisms, whose gradients
    attention transfer computes inside the forward pass. Otherwise the model is moved to the device as it is.
    """
    plugin: Any = accelerator.state.deepspeed_plugin
    stage = plugin.deepspeed_config["zero_optimization"]["stage"] if plugin is not None else 0
    if not accelerator.is_fsdp2 and int(stage) < 3:
        return model.to(accelerator.device)
    if accelerator.is_fsdp2:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        name_layers(accelerator, model)
        with _without_mechanisms(model):
            fsdp2_prepare_model(accelerator, model)
    elif ENGINE not in vars(model):
        import deepspeed

        config = _without_auto(plugin.deepspeed_config)
        for name in ("optimizer", "scheduler", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping"):
            config.pop(name, None)
        config["train_micro_batch_size_per_gpu"] = 1
        with _without_mechanisms(model):
            engine, *_ = deepspeed.initialize(model=model, config=config)
        object.__setattr__(model, ENGINE, engine)
    for module in attention_modules(model):
        mechanism_of(module).to(accelerator.device)
    return model


def _without_auto(config: Any) -> Any:
    """Return a copy of a configuration of DeepSpeed without what Transformers' Trainer would decide."""
    if not isinstance(config, dict):
        return config
    return {name: _without_auto(value) for name, value in config.items() if value != "auto"}


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered for a forward pass and not yet freed: those of the last modules."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def release(model: Any) -> None:
    """Undo what an earlier trainer or evaluation has left on a model, so that accelerate can prepare it again."""
    reshard(model)
    # accelerate marks a model that it has prepared for an evaluation, and would then train it without DDP.
    vars(model).pop("_is_accelerate_prepared", None)
    engine = vars(model).pop(ENGINE, None)
    if engine is not None:
        engine.destroy()


@contextmanager
def _without_mechanisms(model: Any) -> Iterator[None]:
    """Context manager in which the model lacks its mechanisms, so that they are not sharded."""
    removed = [(module, module._modules.pop(SUBMODULE)) for module in list(attention_modules(model))]
    try:
        yield
    finally:
        for module, mechanism in removed:
            module._modules[SUBMODULE] = mechanism


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters have no memory. Its buffers are copies."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


def fill_copy(skeleton: nn.Module, model: nn.Module) -> nn.Module:
    """Return a copy of a `meta_copy` with the parameters of its model, which has been sharded since, whole on the CPU.

    Every process must call it.
    """
    values = {}
    for name, parameter in model.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        values[name] = nn.Parameter(_gathered(parameter), parameter.requires_grad)
    # Parameters that several modules share, such as tied weights, stay shared.
    return copy.deepcopy(skeleton, {id(empty): values[name] for name, empty in skeleton.named_parameters()})


def _gathered(parameter: Any) -> Tensor:
    if not _is_zero_shard(parameter):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return full.detach().to("cpu", copy=True)
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().to("cpu", copy=True)


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters of a model are shards."""
    return any(isinstance(parameter, DTensor) or _is_zero_shard(parameter) for parameter in model.parameters())


def _is_zero_shard(parameter: Tensor) -> bool:
    """Whether a parameter is a shard of ZeRO-3, which DeepSpeed gives a number."""
    return hasattr(parameter, "ds_id")


def name_layers(accelerator: Accelerator, model: Any) -> None:
    """Name the classes of the modules that FSDP2 shards one by one, unless the configuration of accelerate does.

    They are those that Transformers does not split, without the one that has the embeddings: accelerate shards these by
    themselves, and raises an error if they are shards already.
    """
    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.transformer_cls_names_to_wrap is not None:
        return
    embeddings = model.get_input_embeddings()
    names = {
        type(module).__name__
        for module in model.modules()
        if type(module).__name__ in (model._no_split_modules or ()) and embeddings not in module.children()
    }
    plugin.transformer_cls_names_to_wrap = sorted(names)
