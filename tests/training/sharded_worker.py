"""`hf-linear-attn` in a process that accelerate takes for one of several GPUs: only there does it shard a model."""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import training_args

from hf_linear_attn.cli import main
from tests.training.checkpoint_worker import keep_checkpoints


def pretend_gpus(deepspeed: bool) -> None:
    """Let accelerate take every process for one of several GPUs, whenever its state is made anew, and Transformers for
    one that computes in bfloat16."""
    training_args.is_torch_bf16_gpu_available = lambda: True
    initialize = PartialState.__init__

    def patched(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        first = not PartialState._shared_state
        kwargs.pop("backend", None)
        initialize(self, cpu=True, **kwargs)
        if first:
            kind = DistributedType.DEEPSPEED if deepspeed else DistributedType.MULTI_GPU
            PartialState._shared_state["distributed_type"] = kind

    PartialState.__init__ = patched  # type: ignore[method-assign]


if __name__ == "__main__":
    keep_checkpoints()
    pretend_gpus(os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true")
    raise SystemExit(main())
