"""Context parallelism: each process has a slice of the sequence, and sends sums over keys instead of all keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ..ops.ranks import Ranks
from .context import layer_context, mechanism_of
from .packing import model_context


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
    group = group.get_group() if isinstance(group, DeviceMesh) else group
    ranks = Ranks(group, distributed.get_rank(group), distributed.get_world_size(group))
    contexts = []
    for module in model.modules():
        context = layer_context(module)
        if context is None:
            continue
        mechanism = mechanism_of(module)
        if mechanism is None or context.causal not in mechanism.context_parallel:
            kind = "softmax" if mechanism is None else type(mechanism).__name__
            raise NotImplementedError(
                f"{context.name or type(module).__name__} ({kind}) cannot be split over processes by context_parallel. "
                "'window' can, and the kernelized mechanisms ('hedgehog', 'elu', …)."
            )
        contexts.append(context)
    if not contexts:
        raise ValueError(f"This {type(model).__name__} is not patched. Call patch_model(model, name) first.")
    hooks = []
    for module in model.modules():
        around = model_context(module)
        if around is None:
            continue
        if around.token_mixer or "position_ids" not in around.arguments:
            reason = f"has {around.token_mixer}" if around.token_mixer else "takes no position_ids"
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
    context = model_context(module)
    assert context is not None
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
