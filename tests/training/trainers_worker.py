"""Attention transfer and distillation in one of several processes: `trainers_worker.py KIND FOLDER`."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import hf_linear_attn as hla
from hf_linear_attn.training.arguments import AttentionTransferConfig, DistillationConfig
from hf_linear_attn.training.sharding import reshard
from hf_linear_attn.training.trainers import DistillationTrainer
from hf_linear_attn.training.transfer import AttentionTransferTrainer
from tests.training.sharded_worker import pretend_gpus
from tests.training.tiny_data import Rows, classifier, collate, config, logged

#: Arguments that shard a model. By default DeepSpeed replicates small parameters.
SHARDING: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}},
    **{
        f"zero{stage}": {
            "deepspeed": {
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "train_batch_size": "auto",
                "gradient_clipping": "auto",
            }
        }
        for stage in (2, 3)
    },
}


def parameter_bytes(model: Any) -> int:
    """Return the bytes of the parameters on this process: those of its shards, where the model is sharded."""
    total = 0
    for parameter in model.parameters():
        local: Any = getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter))
        total += local.numel() * local.element_size()
    return total


def main(kind: str, folder: Path) -> None:
    sharding = SHARDING[kind]
    if sharding:
        pretend_gpus("deepspeed" in sharding)
        sharding = {**sharding, "use_cpu": False}
    common = {"per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, **sharding}
    data = {"train_dataset": Rows(50), "eval_dataset": Rows(21, 1), "data_collator": collate}
    sizes: dict[str, int] = {}
    teacher = classifier()
    student = hla.patch_model(copy.deepcopy(teacher), "hedgehog")
    sizes["complete student"], sizes["complete teacher"] = parameter_bytes(student), parameter_bytes(teacher)
    transfer = AttentionTransferTrainer(student, config(folder / "transfer", AttentionTransferConfig, **common), **data)
    transfer.train()
    sizes["transfer"] = parameter_bytes(transfer.model)
    student = transfer.complete_model()
    arguments = config(folder / "distill", DistillationConfig, learning_rate=1e-3, **common)
    distillation = DistillationTrainer(student, teacher, arguments, **data)
    distillation.train()
    for model in (distillation.model, distillation.teacher):
        reshard(model)
    sizes["student"], sizes["teacher"] = parameter_bytes(distillation.model), parameter_bytes(distillation.teacher)
    complete = distillation.complete_model()
    process = distillation.args.process_index
    result = {
        "sizes": sizes,
        "losses": [logged(transfer), logged(distillation)],
        "evaluations": [logged(transfer, "eval_loss"), logged(distillation, "eval_loss")],
        "squared_norms": {name: float(value.double().square().sum()) for name, value in complete.named_parameters()},
        "checkpoint": sorted(path.name for path in (folder / "distill" / "checkpoint-6").iterdir()),
    }
    (folder / f"{process}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
