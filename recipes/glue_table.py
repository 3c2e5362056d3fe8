"""What conversion costs on GLUE, mechanism by mechanism, beside the softmax control through the same steps.

    python recipes/glue_table.py --model MODEL --folder GLUE --work /tmp/glue-table

Needs the `train` extra. For every task and seed the exact model is fine-tuned once. From it every mechanism is
converted (attention transfer, then distillation), and once more without distillation (attention transfer, then the
task's own loss); the control goes through the same distillation with exact attention. A finished run is a row of
`--out` at once, and is not repeated by a second call. Settings: `recipes/configs/glue-table.yaml`, with
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
from hf_linear_attn.training.settings import read_arguments, read_settings

HERE = Path(__file__).parent
MECHANISMS = ("hedgehog", "window", "linformer", "elu", "favor+")
TASKS = ("rte", "mrpc", "stsb", "cola", "sst2")

#: What is changed for each kind of run.
VARIANTS: dict[str, dict[str, float]] = {"distilled": {}, "no distillation": {"logits": 0.0, "hidden": 0.0}}


def variant_settings(
    base: ConvertSettings, task: str, seed: int, mechanism: str | None, variant: str
) -> ConvertSettings:
    """One run's settings, without its folders. mechanism None: the control."""
    return replace(
        base,
        model=replace(base.model, attention=mechanism),
        data=replace(base.data, task=task),
        distill=replace(base.distill, **VARIANTS[variant]),
        run=replace(base.run, seed=seed, control=mechanism is None),
    )


def run_teacher(base: ConvertSettings, model: str, task: str, seed: int, work: Path) -> Path:
    """The exact model, fine-tuned on the task."""
    folder = work / task / f"seed{seed}" / "teacher"
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
    shutil.rmtree(folder)
    results["seconds"] = time.perf_counter() - began
    return results


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


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
    parser.add_argument("--folder", help="folder with the GLUE files (default: the Hub)")
    parser.add_argument("--work", type=Path, required=True, help="folder for teachers and checkpoints")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "glue.json")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--config", default=str(HERE / "configs" / "glue-table.yaml"))
    arguments, rest = parser.parse_known_args(argv)
    base = read_settings(ConvertSettings, arguments.config, {**read_arguments(rest), "data.folder": arguments.folder})
    wanted = [(None, "distilled")] + [
        (mechanism, variant) for variant in arguments.variants for mechanism in arguments.mechanisms
    ]
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for mechanism, variant in wanted:
                key = {"task": task, "seed": seed, "mechanism": mechanism or "softmax", "variant": variant}
                rows = read_rows(arguments.out)
                if any(all(row[name] == value for name, value in key.items()) for row in rows):
                    continue
                teacher = run_teacher(base, arguments.model, task, seed, arguments.work)
                settings = variant_settings(base, task, seed, mechanism, variant)
                folder = arguments.work / task / f"seed{seed}" / f"{mechanism or 'softmax'}-{variant}"
                row = row_of(key, run_row(settings, teacher, folder))
                write_json(
                    arguments.out,
                    {
                        "format_version": 1,
                        "model": Path(arguments.model).name,
                        "rows": [*read_rows(arguments.out), row],
                    },
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
