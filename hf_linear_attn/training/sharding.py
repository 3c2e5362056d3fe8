"""Training on models that accelerate shards over processes (FSDP2): what may be configured, and whole weights again.

Only the stages of gradient steps are sharded, with their gradients and optimizer states. Attention transfer trains the
learned parts alone; it and the teacher keep whole copies on each device.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

#: What wrappers put into the names of parameters.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether accelerate shards the model by FSDP2."""
    return accelerator.distributed_type.value == "FSDP" and accelerator.is_fsdp2


def check_sharding(accelerator: Accelerator) -> None:
    """Raise where accelerate is configured for a way to shard the model that cannot be served.

    Raises:
        NotImplementedError: FSDP1, DeepSpeed or Megatron.
        ValueError: weights that only one process loads.
    """
    kind = accelerator.distributed_type.value
    if is_sharded(accelerator):
        plugin: Any = accelerator.state.fsdp_plugin
        if plugin.cpu_ram_efficient_loading:
            raise ValueError(
                "fsdp_cpu_ram_efficient_loading leaves every process but the first without weights, which patching and "
                "attention transfer need. Set it to false (as recipes/accelerate/fsdp2.yaml does)."
            )
    elif kind.startswith(("FSDP", "DEEPSPEED", "MEGATRON")):
        raise NotImplementedError(
            f"accelerate is configured for {kind}{' with fsdp_version 1' if kind == 'FSDP' else ''}, which this "
            "training does not support. Use FSDP2 (recipes/accelerate/fsdp2.yaml) or data parallelism (ddp.yaml), and "
            "LoRA (distill.lora_rank) where memory is short."
        )


def name_layers(accelerator: Accelerator, model: Any) -> None:
    """Tell accelerate which modules to shard each by itself, unless the configuration does.

    Those that the model names, but for its embeddings, which accelerate shards once more: that is an error.
    """
    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.transformer_cls_names_to_wrap is not None:
        return
    embeddings = model.get_input_embeddings()
    named = {
        type(module).__name__
        for module in model.modules()
        if type(module).__name__ in (model._no_split_modules or ()) and embeddings not in module.children()
    }
    plugin.transformer_cls_names_to_wrap = sorted(named)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a sharded model with whole tensors, on the CPU. Every process must call it, and gets it."""
    from torch.distributed.tensor import DTensor

    found = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            found[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
    return found
