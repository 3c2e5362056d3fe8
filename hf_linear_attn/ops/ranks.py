"""The processes that share a sequence, and what they send to each other, with gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .common import KVState


class Ranks(NamedTuple):
    """The processes that share a sequence, this one's number among them, and how many there are."""

    group: Any
    rank: int
    size: int

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all processes `[n, …]`; gradients flow back to each of them."""
        gathered: Tensor = _Gather.apply(tensor, self)
        return gathered

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all processes, with a gradient."""
        total: Tensor = _Total.apply(tensor, self)
        return total

    def earlier(self, device: torch.device) -> Tensor:
        """Return which processes have an earlier slice, `[n]`."""
        return torch.arange(self.size, device=device) < self.rank

    def gather_states(self, kv_state: KVState, *others: Tensor) -> tuple[KVState, list[Tensor]]:
        """Gather sums over keys, and other tensors `[B, G, …]`, in one message: `[n, B, G, …]` each."""
        scales = [] if kv_state.log_scale is None else [kv_state.log_scale.unsqueeze(-1)]
        tensors = [kv_state.total, *scales, *others]
        sizes = [tensor[0, 0].numel() for tensor in tensors]
        message = torch.cat([tensor.flatten(2).to(kv_state.total.dtype) for tensor in tensors], dim=-1)
        parts = self.gather(message).split(sizes, dim=-1)
        shaped = [part.unflatten(-1, tensor.shape[2:]) for part, tensor in zip(parts, tensors, strict=True)]
        scale = None if kv_state.log_scale is None else shaped.pop(1).squeeze(-1)
        return KVState(shaped[0], scale), shaped[1:]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        gathered = tensor.new_empty(ranks.size, *tensor.shape)
        distributed.all_gather(list(gathered), tensor.contiguous(), group=ranks.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        reduced = torch.empty_like(gradient[0])
        distributed.reduce_scatter(reduced, list(gradient.contiguous()), group=ctx.ranks.group)
        return reduced, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        total = tensor.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(gradient, ctx.ranks), None
