"""Patched models on several devices: each process has some of the heads, or a slice of the sequence.

Tensor parallelism: Transformers shards projections by the plan of a model (`from_pretrained(…, tp_plan="auto")`). A
layer whose projections are split has the learned parts of its own heads only, as `DTensor` shards: saving gathers them,
loading reads a part. Context parallelism: `context_parallel`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import distributed, nn
from transformers import PreTrainedModel

from ..mechanisms.base import LinearAttention
from ..mechanisms.head_mixture import HeadMixture
from ..ops.ranks import Ranks
from .context import OWN_HEADS, SUBMODULE, layer_context
from .layers import Plan
from .packing import MODEL_CONTEXT, ModelContext

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
        if hasattr(module, "shape"):
            setattr(module, "shape", local_shape)  # noqa: B010
    setattr(mechanism, OWN_HEADS, True)


def plan_heads(model: PreTrainedModel, planned: Plan, mechanisms: dict[int, LinearAttention]) -> dict[str, str] | None:
    """Return the model's plan of tensor parallelism with these layers; where it is split already, shard mechanisms.

    A layer is entered if its projections are split by columns, so that its attention sees some of the heads. None where
    there is no plan, or a single process.
    """
    plan: dict[str, str] | None = getattr(model, "_tp_plan", None)
    if not plan or not distributed.is_available() or not distributed.is_initialized():
        return None
    try:
        from transformers.distributed.tensor_parallel import (
            ALL_PARALLEL_STYLES,
            TensorParallelLayer,
            replace_layer_number_by_wildcard,
        )
    except ImportError:
        return None  # Older versions shard in another way: the first call of a split layer says that heads are missing.

    class HeadParallel(TensorParallelLayer):
        """The style of a mechanism: it shards when the model is split, before the weights are loaded."""

        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            shard_heads(module, mesh)  # type: ignore[arg-type]
            return module

    ALL_PARALLEL_STYLES[STYLE] = HeadParallel()
    completed, mesh = dict(plan), model._device_mesh if (model._tp_size or 1) > 1 else None
    for index, (layer, _) in planned.items():
        name = replace_layer_number_by_wildcard(layer.name)
        if any(rule.rpartition(".")[0] == name and style == "colwise" for rule, style in plan.items()):
            completed[f"{name}.{SUBMODULE}"] = STYLE
            if mesh is not None:
                shard_heads(mechanisms[index], mesh["tp"])
    return completed


@contextmanager
def context_parallel(model: PreTrainedModel, group: Any) -> Iterator[None]:
    """Context manager inside of which each process passes its slice of the tokens to a patched model.

    The sequence `[B, n·L]` is split into contiguous slices in the order of the ranks; they may differ in length. Each
    process passes its part of `input_ids`, `attention_mask` and `position_ids` (the positions in the whole sequence),
    and receives the outputs of its tokens, those of one process with the whole sequence. A layer sends sums over keys,
    of a size that does not depend on the length, instead of keys and values. Padding may be anywhere.

    Backward passes belong inside too. The gradient of a parameter is that of the own tokens' loss in every process:
    their sum over the processes is that of the whole sequence. Labels that are shifted by one token need the first
    token of the next slice, which Transformers' own loss does not know: pass `shift_labels`.

    Args:
        model: A patched model in which every attention layer is linear, the same in all processes.
        group: A process group, or a one-dimensional `DeviceMesh` such as `accelerator.torch_device_mesh["cp"]`.

    Raises:
        ValueError: The model is not patched, or (in its forward pass) position ids are missing or not contiguous.
        NotImplementedError: A layer is exact, or its mechanism cannot be split; in the forward pass: caches, packed
            documents, full masks and `output_attentions`.
    """
    group = group.get_group() if hasattr(group, "get_group") else group
    ranks = Ranks(group, distributed.get_rank(group), distributed.get_world_size(group))
    contexts = []
    for module in model.modules():
        context = layer_context(module)
        if context is None:
            continue
        mechanism: Any = getattr(module, SUBMODULE, None)
        if mechanism is None or context.causal not in mechanism.context_parallel:
            kind = "softmax" if mechanism is None else type(mechanism).__name__
            raise NotImplementedError(
                f"{context.name or type(module).__name__} ({kind}) cannot be split over processes by context_parallel. "
                "'window' without store_size can, and the kernelized mechanisms ('hedgehog', 'elu', …)."
            )
        contexts.append(context)
    if not contexts:
        raise ValueError(f"This {type(model).__name__} is not patched. Call patch_model(model, name) first.")
    hooks = []
    for module in model.modules():
        model_context: ModelContext | None = getattr(module, MODEL_CONTEXT, None)
        if model_context is None:
            continue
        if model_context.token_mixer or "position_ids" not in model_context.arguments:
            reason = f"has {model_context.token_mixer}" if model_context.token_mixer else "takes no position_ids"
            raise NotImplementedError(f"{type(module).__name__} {reason}: a slice of a sequence cannot be computed.")
        hooks.append(module.register_forward_pre_hook(partial(_check_positions, ranks), with_kwargs=True, prepend=True))
    for context in contexts:
        context.ranks = ranks
    try:
        yield
    finally:
        for context in contexts:
            context.ranks = None
        for hook in hooks:
            hook.remove()


def _check_positions(ranks: Ranks, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check the positions of a slice, and leave out the cache unless one is asked for: forward pre-hook."""
    context: ModelContext = getattr(module, MODEL_CONTEXT)
    inputs = {**dict(zip(context.arguments, args, strict=False)), **kwargs}
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is None:
        raise ValueError("context_parallel needs position_ids: those of the slice in the whole sequence.")
    padded = mask is not None and not bool(mask.all())
    if not padded and (bool((positions.diff(dim=1) != 1).any()) or (ranks.rank and not bool(positions.all()))):
        raise ValueError(
            f"The position_ids of process {ranks.rank} are not those of a contiguous slice of one sequence. Packed "
            "documents are not supported, and torch's own context_parallel must not balance the load."
        )
    if "use_cache" in context.arguments and inputs.get("use_cache") is None:
        return args, {**kwargs, "use_cache": False}
    return None
