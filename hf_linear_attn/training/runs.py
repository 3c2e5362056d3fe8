"""What all recipes share: a folder for the result, an accelerator, the record of finished stages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

from .loop import Loop, Progress
from .models import quiet_transformers
from .objectives import Objective
from .options import ConvertSettings, FinetuneSettings, RunSettings, TrainSettings
from .problems import Problem
from .saving import (
    check_space,
    check_writable,
    clear_leftovers,
    training_bytes,
    whole_folder,
    write_json,
)
from .settings import as_mapping, flat, flatten
from .sharding import check_sharding, runs_on_cpu
from .stream import BatchStream
from .tracking import JsonLinesTracker, Reporter, installed_trackers, short

SETTINGS_FILE = "settings.json"
STATE_FILE = "state.json"
LOG_FILE = "log.jsonl"
#: Settings that a resumed run may change: they do not touch the result.
FREE_SETTINGS = (
    "run.resume",
    "run.overwrite",
    "run.output",
    "run.checkpoint_every",
    "run.keep",
    "run.trackers",
    "run.workers",
    "run.push_to_hub",
    "run.private",
)


class Run:
    """One run of a recipe in its folder.

    The folder: `settings.json`, `state.json` (results of finished stages), `log.jsonl`, `checkpoints/`, `model/` (the
    result, which appears whole).
    """

    def __init__(
        self,
        settings: FinetuneSettings | ConvertSettings,
        *,
        train: TrainSettings,
        console: Console | None = None,
    ) -> None:
        run = settings.run
        if run.output is None:
            raise ValueError("No folder for the result: give run.output.")
        self.settings = settings
        self.run_settings: RunSettings = run
        self.folder = Path(run.output)
        trackers = installed_trackers(run.trackers)
        _check_folder(self.folder, settings)
        self.log = JsonLinesTracker(self.folder / LOG_FILE, resume=run.resume)
        # Accelerate remembers the precision of the first run in a process, and refuses another one in the next.
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(
            gradient_accumulation_steps=train.accumulation,
            mixed_precision=run.precision,
            cpu=runs_on_cpu(run.cpu) or None,
            log_with=[*trackers, self.log],
            project_config=ProjectConfiguration(project_dir=str(self.folder), logging_dir=str(self.folder / "logs")),
        )
        check_sharding(self.accelerator)
        self._open_folder()
        self.reporter = Reporter(self.accelerator, console)
        self.accelerator.init_trackers("run", config={key: str(value) for key, value in flat(settings).items()})
        self.state: dict[str, Any] = self._read_state()

    # ---------------------------------------------------------------------------------------------- the folder

    def _open_folder(self) -> None:
        if self.accelerator.is_main_process:
            if self.run_settings.overwrite and self.folder.is_dir():
                for path in self.folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            check_writable(self.folder)
            for place in (self.folder, self.folder / "checkpoints"):
                clear_leftovers(place)
            if not _started(self.folder):
                write_json(self.folder / SETTINGS_FILE, as_mapping(self.settings))
        self.accelerator.wait_for_everyone()

    def _read_state(self) -> dict[str, Any]:
        path = self.folder / STATE_FILE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def record(self, stage: str, result: Any) -> None:
        """A stage is finished: its result is on disk, and is not computed again by a resumed run."""
        self.state[stage] = result
        if self.accelerator.is_main_process:
            write_json(self.folder / STATE_FILE, self.state)
        self.accelerator.wait_for_everyone()

    # ---------------------------------------------------------------------------------------------- stages

    def seed(self) -> None:
        """Fresh heads and random features are the same in every run of the same seed."""
        torch.manual_seed(self.run_settings.seed)

    def metrics(self, stage: str, model: nn.Module, problem: Problem) -> dict[str, float]:
        """Evaluate once, and remember."""
        if stage not in self.state:
            model.to(self.accelerator.device).eval()
            found = problem.evaluate(model, self.accelerator, self.evaluation_batch())
            self.record(stage, found)
            self.accelerator.log({"stage": stage, **found}, step=0)
            self.reporter.say(f"{stage}: {short(found)}")
        return self.state[stage]

    def evaluation_batch(self) -> int:
        """Examples of one forward pass without gradients on one process."""
        if self.run_settings.evaluation_batch_size is not None:
            return self.run_settings.evaluation_batch_size
        section: TrainSettings = getattr(self.settings, "distill", None) or self.settings.train  # type: ignore[union-attr]
        return 2 * section.batch_size

    def stream(self, problem: Problem, rows: Any, batch_size: int, accumulation: int = 1) -> BatchStream:
        """This process's part of the training batches."""
        from ..data.encode import row_lengths

        processes = self.accelerator.num_processes
        return BatchStream(
            rows,
            problem.collate,
            batch_size=batch_size,
            seed=self.run_settings.seed,
            process=self.accelerator.process_index,
            processes=processes,
            workers=self.run_settings.workers,
            lengths=row_lengths(rows) if problem.data.group_by_length else None,
            together=batch_size * processes * accumulation,
        )

    def stage(
        self, name: str, model: nn.Module, objective: Objective, problem: Problem, train: TrainSettings
    ) -> tuple[Progress, nn.Module]:
        """One gradient stage over the training data, and the model with the best step's weights: the same object, or
        another one where accelerate shards it."""
        accelerator = self.accelerator
        needed = training_bytes(model, self.run_settings.keep)
        if accelerator.is_main_process:
            check_space(self.folder, needed)
        if self.run_settings.gradient_checkpointing:
            base: Any = model
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        batch = self.evaluation_batch()
        loop = Loop(
            name,
            model,
            objective,
            self.stream(problem, problem.train, train.batch_size, train.accumulation),
            accelerator=accelerator,
            train=train,
            run=self.run_settings,
            folder=self.folder,
            evaluate=lambda prepared: problem.evaluate(prepared, accelerator, batch),
            goal=problem.goal,
            reporter=self.reporter,
            log=self.log,
        )
        progress = loop.run()
        accelerator.free_memory()
        return progress, loop.result.to(accelerator.device)

    def save(self, target: Path, model: PreTrainedModel, problem: Problem, card: str | None = None) -> None:
        """Write a checkpoint with its tokenizer, whole, from the main process."""
        if self.accelerator.is_main_process:
            with whole_folder(target) as aside, quiet_transformers():
                model.save_pretrained(aside)
                problem.tokenizer.save_pretrained(aside)
                if card is not None:
                    (aside / "README.md").write_text(card, encoding="utf-8")
        self.accelerator.wait_for_everyone()

    def push(self, folder: Path) -> None:
        """Upload the result, if a repository is given."""
        repository = self.run_settings.push_to_hub
        if repository is None or not self.accelerator.is_main_process:
            return
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repository, private=self.run_settings.private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Add a linear-attention model")
        self.reporter.say(f"Pushed to https://huggingface.co/{repository}")

    def close(self) -> None:
        """End the trackers, and the process group of a run with several processes."""
        self.accelerator.end_training()


def _check_folder(folder: Path, settings: FinetuneSettings | ConvertSettings) -> None:
    """Refuse to mix two runs in one folder."""
    run = settings.run
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"run.output {str(folder)!r} is a file. Give a folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    path = folder / SETTINGS_FILE
    if not path.is_file():
        raise ValueError(f"run.output {str(folder)!r} holds files of something else. Give another folder.")
    if run.overwrite or not _started(folder):
        return
    if not run.resume:
        raise ValueError(
            f"run.output {str(folder)!r} holds another run. Go on with it (run.resume true), replace it (run.overwrite "
            "true), or give another folder."
        )
    before = flatten(json.loads(path.read_text(encoding="utf-8")))
    now = flatten(json.loads(json.dumps(as_mapping(settings))))
    changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key) and key not in FREE_SETTINGS)
    if changed:
        told = "; ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in changed[:3])
        raise ValueError(f"run.resume: the settings differ from those of {str(folder)!r} ({told}). Use the same ones.")


def _started(folder: Path) -> bool:
    """Whether a run got further than reading its data and its model."""
    return any((folder / name).exists() for name in (STATE_FILE, "checkpoints", "model"))
