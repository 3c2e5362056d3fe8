"""`hf-linear-attn` in a process that accelerate takes for one of several GPUs': only there does it shard a model."""

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from hf_linear_attn.cli import main

if __name__ == "__main__":
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    raise SystemExit(main())
