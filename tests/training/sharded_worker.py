"""`hf-linear-attn` in a process that accelerate takes for one of several GPUs: only there does it shard a model."""

import os

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from hf_linear_attn.cli import main

if __name__ == "__main__":
    PartialState(cpu=True)
    zero = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED if zero else DistributedType.MULTI_GPU
    raise SystemExit(main())
