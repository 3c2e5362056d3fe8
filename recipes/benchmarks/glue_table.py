"""What conversion costs on GLUE, mechanism by mechanism, beside the softmax control through the same steps.

    python -m recipes.benchmarks.glue_table --model MODEL --folder GLUE --work WORK

Needs the `train` extra. For every task and seed the exact model is fine-tuned once. From it every mechanism is
converted (attention transfer, then distillation), and once more without distillation (attention transfer, then the
task's own loss); the control goes through the same distillation with exact attention. A finished run is a row of
`--out` at once, and is not repeated by a second call. Settings: `recipes/benchmarks/configs/glue-table.yaml`, with
`--section.name value` over it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_linear_attn.training import convert as stages
from hf_linear_attn.training.options import ConvertConfig, FinetuneConfig, StageConfig, TrainingRunConfig
from hf_linear_attn.utils.arguments import parse_config
from hf_linear_attn.utils.files import write_json
from hf_linear_attn.utils.options import to_dict

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
#: Rows of the table, and what of the options each changes; the mechanism is that of the name unless it is given. In
#: their default sizes the window and the slots hold most of these short inputs: smaller ones show what the rest is
#: worth. Other mechanisms can be asked for by name.
MECHANISMS: dict[str, dict[str, Any]] = {
    "window": {},
    "hedgehog": {},
    "window of 8": {"attention": "window", "options": {"window_size": 8}},
    "window of 16": {"attention": "window", "options": {"window_size": 16}},
    "window of 16, 20 % of the heads exact": {
        "attention": "window",
        "options": {"window_size": 16},
        "exact_share": 0.2,
    },
    "hedgehog with global tokens": {"attention": "window", "options": {"window_size": 1}},
    "hedgehog with global tokens, 20 % of the heads exact": {
        "attention": "window",
        "options": {"window_size": 1},
        "exact_share": 0.2,
    },
    "linformer of 16": {"attention": "linformer", "options": {"num_slots": 16}},
    "linformer of 32": {"attention": "linformer", "options": {"num_slots": 32}},
    "linformer of 64": {"attention": "linformer", "options": {"num_slots": 64}},
    "elu": {},
    "favor+": {},
}
TASKS = ("rte", "mrpc", "stsb", "cola", "sst2")

#: What is changed for each kind of run.
VARIANTS: dict[str, dict[str, float]] = {
    "distilled": {},
    "no distillation": {"logits_weight": 0.0, "hidden_weight": 0.0},
}


def variant_config(base: ConvertConfig, task: str, seed: int, mechanism: str | None, variant: str) -> ConvertConfig:
    """The options of one run, without its folders. mechanism: a row's name, or that of a mechanism; None: control."""
    row: dict[str, Any] = {} if mechanism is None else MECHANISMS.get(mechanism, {})
    changes = {"attention": mechanism, **row, "options": {**base.options, **row.get("options", {})}}
    return replace(
        base,
        **changes,
        data=replace(base.data, task=task),
        distill=replace(base.distill, **VARIANTS[variant]),
        seed=seed,
        control=mechanism is None,
    )


def run_teacher(base: ConvertConfig, model: str, task: str, seed: int, work: Path, folder_of_data: str | None) -> Path:
    """The exact model, fine-tuned on the task."""
    folder = work / "teacher"
    if not (folder / "results.json").exists():
        shared = {entry.name: getattr(base, entry.name) for entry in fields(TrainingRunConfig)}
        config = FinetuneConfig(
            **{
                **shared,
                "model": model,
                "attention": None,
                "options": {},
                "data": replace(base.data, task=task, folder=folder_of_data),
                "seed": seed,
                "output": str(folder),
                "resume": folder.exists(),
            },
            train=StageConfig(**{entry.name: getattr(base.teacher, entry.name) for entry in fields(StageConfig)}),
        )
        stages.finetune(config, console=Console(stderr=True))
    return folder / "model"


def run_row(config: ConvertConfig, teacher: Path, folder: Path, folder_of_data: str | None) -> dict[str, Any]:
    """Convert, and keep the numbers only."""
    chosen = replace(
        config,
        model=str(teacher),
        data=replace(config.data, folder=folder_of_data),
        teacher=replace(config.teacher, num_train_epochs=0.0, max_steps=None),
        output=str(folder),
        resume=folder.exists(),
    )
    began = time.perf_counter()
    results = stages.convert(chosen, console=Console(stderr=True))
    results["seconds"] = time.perf_counter() - began
    return results


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def comparable(config: dict[str, Any]) -> dict[str, Any]:
    """Options as a row has them, those that are set: what rows must agree in to be in one table."""
    data = {**config["data"], "folder": None}
    options = {**config, "data": data, "teacher": None, "model": None, "output": None, "resume": None}
    return json.loads(json.dumps(without_unset(options)))


def without_unset(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are not None, nor empty."""
    values = {name: without_unset(value) if isinstance(value, dict) else value for name, value in options.items()}
    return {name: value for name, value in values.items() if value not in (None, {}, [])}


def is_done(rows: list[dict[str, Any]], key: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether a row is there already. Raises a ValueError if it was made with other settings."""
    for row in rows:
        if all(row[name] == value for name, value in key.items()):
            if comparable(row["settings"]) != config:
                raise ValueError(f"The row {key} was made with other settings. Give another --out, or remove it.")
            return True
    return False


def row_of(key: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """The row of a run: without paths and without the course of the training."""
    state = results["stages"]
    config = results["config"]
    config["model"] = config["output"] = config["data"]["folder"] = None
    stages = {stage: state[stage] for stage in ("teacher", "patched", "transferred", "distilled") if stage in state}
    return {
        **key,
        "metric": results["goal"]["metric"],
        **stages,
        "seconds": round(results["seconds"], 1),
        "learned_parameters": results["learned_parameters"],
        "data": results["data"],
        "settings": without_unset(config),
        "environment": results["environment"],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the pretrained encoder")
    parser.add_argument("--name", help="what it is called in the results (default: the last part of --model)")
    parser.add_argument("--folder", help="folder with the GLUE files (default: the Hub)")
    parser.add_argument("--work", type=Path, required=True, help="folder for teachers and checkpoints")
    parser.add_argument("--out", type=Path, default=RESULTS / "glue.json")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--config", default=str(HERE / "configs" / "glue-table.yaml"))
    arguments, rest = parser.parse_known_args(argv)
    base = parse_config(ConvertConfig, ["--config", arguments.config, *rest], program="glue_table")
    # Each variant has a control of its own: the exact model through the same losses.
    mechanisms = (None, *arguments.mechanisms)
    runs = [(mechanism, variant) for variant in arguments.variants for mechanism in mechanisms]
    name = arguments.name or Path(arguments.model).name
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for mechanism, variant in runs:
                key = {
                    "model": name,
                    "task": task,
                    "seed": seed,
                    "mechanism": mechanism or "softmax",
                    "variant": variant,
                }
                teacher_folder = arguments.work / name / task / f"seed{seed}"
                config = variant_config(base, task, seed, mechanism, variant)
                if is_done(read_rows(arguments.out), key, comparable(to_dict(config))):
                    continue
                teacher = run_teacher(base, arguments.model, task, seed, teacher_folder, arguments.folder)
                folder = teacher_folder / f"{mechanism or 'softmax'}-{variant}"
                row = row_of(key, run_row(config, teacher, folder, arguments.folder))
                write_json(arguments.out, {"format_version": 1, "rows": [*read_rows(arguments.out), row]})
                shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
