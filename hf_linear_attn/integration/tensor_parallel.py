"""Tensor parallelism: each process has some of the heads of a patched model.

Transformers shards projections by the plan of a model (`from_pretrained(…, tp_plan="auto")`). A layer whose projections
are split has the learned parts of its own heads only, as `DTensor` shards: saving gathers them, loading reads a part.
"""

from dataclasses import replace
from typing import Any

from torch import distributed, nn
from transformers import PreTrainedModel

from ..feature_maps.base import FeatureMap
from ..mechanisms.base import LinearAttention
from ..mechanisms.head_mixture import HeadMixture
from .context import SHARDED_HEADS, SUBMODULE
from .install import Plan

#: Name of our style in the plans of tensor parallelism.
STYLE = "linear_attention_heads"


def shard_heads(mechanism: LinearAttention, mesh: Any) -> None:
    """Leave a mechanism the heads of this process: each of its parameters `[heads, …]` becomes a shard.

    Args:
        mechanism: The mechanism of all heads, with the same values in every process.
        mesh: The one-dimensional mesh over which the layer's projections are split.

    Raises:
        ValueError: The heads are no multiple of the processes.
        NotImplementedError: Heads share a parameter, or some of the heads are exact.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    shape, size = mechanism.shape, mesh.size()
    heads = (shape.num_heads, shape.num_key_value_heads)
    if any(number % size for number in heads):
        raise ValueError(
            f"{heads[0]} heads and {heads[1]} key-value heads cannot be split over {size} processes. Choose a tp_size "
            "that divides both."
        )
    shared = [name for name, value in mechanism.named_parameters() if not value.dim() or value.shape[0] not in heads]
    mixture = isinstance(mechanism, HeadMixture)
    if mixture or shared:
        reason = "its exact_heads are chosen among all heads" if mixture else f"its heads share {shared[0]}"
        raise NotImplementedError(
            f"{type(mechanism).__name__} does not run under tensor parallelism: {reason}. Choose a mechanism with "
            "parameters of each head, such as 'window' or 'hedgehog'."
        )
    local_shape = replace(shape, num_heads=heads[0] // size, num_key_value_heads=heads[1] // size)
    for module in mechanism.modules():
        for name, value in module._parameters.items():
            if value is not None:
                shard = distribute_tensor(value.detach(), mesh, [Shard(0)], src_data_rank=None)
                module._parameters[name] = nn.Parameter(shard, value.requires_grad)
        if isinstance(module, LinearAttention | FeatureMap):
            module.shape = local_shape
    setattr(mechanism, SHARDED_HEADS, True)


def tensor_parallel_plan(model: PreTrainedModel, planned: Plan) -> dict[str, str] | None:
    """Return the model's plan of tensor parallelism with these layers; where it is split already, shard mechanisms.

    A layer is entered if its projections are split by columns, so that its attention sees some of the heads. None where
    there is no plan, or a single process.
    """
    plan = model._tp_plan
    if not plan or not distributed.is_available() or not distributed.is_initialized():
        return None
    from transformers.distributed.tensor_parallel import (
        ALL_PARALLEL_STYLES,
        TensorParallelLayer,
        replace_layer_number_by_wildcard,
    )

    class HeadParallel(TensorParallelLayer):
        """The style of a mechanism: it shards when the model is split, before the weights are loaded."""

        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            shard_heads(module, mesh)  # type: ignore[arg-type]
            return module

    ALL_PARALLEL_STYLES[STYLE] = HeadParallel()
    completed = dict(plan)
    mesh = model._device_mesh if (model._tp_size or 1) > 1 else None
    for layer, _, mechanism in planned.values():
        name = replace_layer_number_by_wildcard(layer.name)
        if any(rule.rpartition(".")[0] == name and style == "colwise" for rule, style in plan.items()):
            completed[f"{name}.{SUBMODULE}"] = STYLE
            if mesh is not None:
                shard_heads(mechanism, mesh["tp"])
    return completed
