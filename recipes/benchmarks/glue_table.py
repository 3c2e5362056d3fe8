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
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_linear_attn.training import convert as stages
from hf_linear_attn.training.options import ConvertSettings, FinetuneSettings, ModelSettings
from hf_linear_attn.training.saving import write_json
from hf_linear_attn.training.settings import as_mapping, read_arguments, read_settings

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
#: Rows of the table: mechanism and options. In their default sizes the window and the slots hold most of these short
#: inputs: smaller ones show what the rest is worth. Other mechanisms can be asked for by name.
MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("window", {}),
    "hedgehog": ("hedgehog", {}),
    "window of 8": ("window", {"window_size": 8}),
    "linformer of 16": ("linformer", {"num_slots": 16}),
    "linformer of 32": ("linformer", {"num_slots": 32}),
    "linformer of 64": ("linformer", {"num_slots": 64}),
    "elu": ("elu", {}),
    "favor+": ("favor+", {}),
}
TASKS = ("rte", "mrpc", "stsb", "cola", "sst2")

#: What is changed for each kind of run.
VARIANTS: dict[str, dict[str, float]] = {"distilled": {}, "no distillation": {"logits": 0.0, "hidden": 0.0}}


def variant_settings(
    base: ConvertSettings, task: str, seed: int, mechanism: str | None, variant: str
) -> ConvertSettings:
    """One run's settings, without its folders. mechanism: a row's name, or that of a mechanism; None: the control."""
    attention, options = (None, {}) if mechanism is None else MECHANISMS.get(mechanism, (mechanism, {}))
    return replace(
        base,
        model=replace(base.model, attention=attention, options={**base.model.options, **options}),
        data=replace(base.data, task=task),
        distill=replace(base.distill, **VARIANTS[variant]),
        run=replace(base.run, seed=seed, control=mechanism is None),
    )


def run_teacher(base: ConvertSettings, model: str, task: str, seed: int, work: Path) -> Path:
    """The exact model, fine-tuned on the task."""
    folder = work / "teacher"
    if not (folder / "results.json").exists():
        settings = FinetuneSettings(
            model=ModelSettings(source=model, attention=None),
            data=replace(base.data, task=task),
            train=base.teacher,
            run=replace(base.run, seed=seed, output=str(folder), resume=folder.exists()),
        )
        stages.finetune(settings, console=Console(stderr=True))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return folder / "model"


def run_row(settings: ConvertSettings, teacher: Path, folder: Path) -> dict[str, Any]:
    """Convert, and keep the numbers only."""
    chosen = replace(
        settings,
        model=replace(settings.model, source=str(teacher)),
        teacher=replace(settings.teacher, epochs=0.0, steps=None),
        run=replace(settings.run, output=str(folder), resume=folder.exists()),
    )
    began = time.perf_counter()
    results = stages.convert(chosen, console=Console(stderr=True))
    results["seconds"] = time.perf_counter() - began
    return results


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as a row holds them: what rows must agree in to stand in one table."""
    held = json.loads(json.dumps(settings))
    held["teacher"] = None
    for section, key in (("model", "source"), ("run", "output"), ("data", "folder"), ("run", "resume")):
        held[section][key] = None
    return held


def is_done(rows: list[dict[str, Any]], key: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a row is there already. Raises a ValueError if it was made with other settings."""
    for row in rows:
        if all(row[name] == value for name, value in key.items()):
            if comparable(row["settings"]) != settings:
                raise ValueError(f"The row {key} was made with other settings. Give another --out, or remove it.")
            return True
    return False


def row_of(key: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """The row of a run: without paths and without the course of the training."""
    state = results["stages"]
    settings = results["settings"]
    settings["model"]["source"] = settings["run"]["output"] = settings["data"]["folder"] = None
    kept = {stage: state[stage] for stage in ("teacher", "patched", "transferred", "distilled") if stage in state}
    return {
        **key,
        "metric": results["goal"]["metric"],
        **kept,
        "seconds": round(results["seconds"], 1),
        "learned_parameters": results["learned_parameters"],
        "data": results["data"],
        "settings": settings,
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
    given = read_arguments(rest)
    if arguments.folder is not None:
        given["data.folder"] = arguments.folder
    base = read_settings(ConvertSettings, arguments.config, given)
    # Each variant has a control of its own: the exact model through the same losses.
    mechanisms = (None, *arguments.mechanisms)
    wanted = [(mechanism, variant) for variant in arguments.variants for mechanism in mechanisms]
    name = arguments.name or Path(arguments.model).name
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for mechanism, variant in wanted:
                key = {
                    "model": name,
                    "task": task,
                    "seed": seed,
                    "mechanism": mechanism or "softmax",
                    "variant": variant,
                }
                teacher_folder = arguments.work / name / task / f"seed{seed}"
                settings = variant_settings(base, task, seed, mechanism, variant)
                if is_done(read_rows(arguments.out), key, comparable(as_mapping(settings))):
                    continue
                teacher = run_teacher(base, arguments.model, task, seed, teacher_folder)
                folder = teacher_folder / f"{mechanism or 'softmax'}-{variant}"
                row = row_of(key, run_row(settings, teacher, folder))
                write_json(arguments.out, {"format_version": 1, "rows": [*read_rows(arguments.out), row]})
                shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
