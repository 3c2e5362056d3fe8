"""Attention transfer and distillation in one of several processes: `trainers_worker.py KIND FOLDER`."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

import hf_linear_attn as hla
from hf_linear_attn.training.distillation import DistillationConfig, DistillationTrainer
from hf_linear_attn.training.resumable import EpochSampler
from hf_linear_attn.training.sharding import check_sharding, fill_copy, meta_copy, reshard
from hf_linear_attn.training.transfer import TransferResult, transfer_attention
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


def accelerator_of(kind: str) -> Accelerator:
    """The accelerator that the same arguments of a Trainer make."""
    if kind == "ddp":
        return Accelerator(cpu=True)
    if kind == "fsdp2":
        return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(SHARDING[kind]["deepspeed"])))


def transfer(kind: str, student: Any, rows: Rows, validation: Rows) -> tuple[Any, TransferResult, int]:
    """The complete student, what the transfer did, and the bytes of parameters on this process meanwhile."""
    accelerator = accelerator_of(kind)
    check_sharding(accelerator)
    skeleton = meta_copy(student)

    def loader(dataset: Rows, sampler: Any = None) -> Any:
        loader: Any = DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=collate)
        return accelerator.prepare_data_loader(loader)

    done = transfer_attention(
        student, loader(rows, EpochSampler(len(rows), 0)), max_steps=6, validation=list(loader(validation)),
        eval_steps=3, accelerator=accelerator,
    )  # fmt: skip
    return fill_copy(skeleton, student), done, parameter_bytes(student)


def main(kind: str, folder: Path) -> None:
    sharding = SHARDING[kind]
    if sharding:
        pretend_gpus("deepspeed" in sharding)
        sharding = {**sharding, "use_cpu": False}
    common = {"per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, **sharding}
    data: dict[str, Any] = {"train_dataset": Rows(50), "eval_dataset": Rows(21, 1), "data_collator": collate}
    sizes: dict[str, int] = {}
    teacher = classifier()
    student = hla.patch_model(copy.deepcopy(teacher), "hedgehog")
    sizes["complete student"], sizes["complete teacher"] = parameter_bytes(student), parameter_bytes(teacher)
    student, transferred, sizes["transfer"] = transfer(kind, student, data["train_dataset"], data["eval_dataset"])
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
        "losses": [transferred.losses, logged(distillation)],
        "evaluations": [[loss for _, loss in transferred.evaluations], logged(distillation, "eval_loss")],
        "squared_norms": {name: float(value.double().square().sum()) for name, value in complete.named_parameters()},
        "checkpoint": sorted(path.name for path in (folder / "distill" / "checkpoint-6").iterdir()),
    }
    (folder / f"{process}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
