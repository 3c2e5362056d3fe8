"""The folder of a run of `convert`, `finetune` or `plan`: what it stores, and how it goes on where it was stopped."""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..integration.context import saved_tensors
from ..measure.metric import is_shown
from ..training.options import TrainingRunConfig
from ..training.resumable import InterruptedRunError, SignalWatch
from ..training.sharding import check_launch, runs_on_cpu
from ..utils.environment import environment, json_safe
from ..utils.files import check_output, clear_folder, open_output, remove_partial_files
from ..utils.json_lines import JsonLinesFile
from ..utils.options import OptionError, flatten, to_dict
from ..utils.progress import LineProgress, Progress
from .study import LEARNED_FOLDER, RECORDS_FILE, Conditions, Records, Study

#: In the folder of a run: its study, which another command does not take for one of its own.
STUDY_FOLDER = "study"
LOG_FILE = "log.jsonl"
RESULTS_FILE = "results.json"

#: The record of what a resumed run must find as it was: `processes`, the facts (`data`) and the `checksum` of the data,
#: and the hash of the exact model's weights (`model`), if it is not trained first.
IDENTITY = "processes"

#: How to go on with a run that was interrupted.
RESUME = "Continue with the same options and --resume."

#: Options that may be paths.
PATHS = ("model", "tokenizer", "plan", "data.dataset", "data.folder")

#: Options that a resumed run may change, because they do not affect the result.
FREE_OPTIONS = ("resume", "overwrite", "output", "save_steps", "report_to")


class StageLog(TrainerCallback):
    """The log of one stage in a file of JSON lines, its progress on the screen, and its periodic checkpoints.

    Each line of the file has the step and the stage. A resumed run first removes those of steps that it repeats.

    With `save_strategy="best"` the Trainer saves only where an evaluation is the best so far, and with `"steps"` it
    wants `save_steps` to be a multiple of `eval_steps`: a long run with few evaluations would lose many steps. So
    `save_steps` here are those between checkpoints besides the ones of `save_strategy` (0: none).
    """

    def __init__(
        self,
        stage: str,
        path: Path | None,
        progress: Progress | None = None,
        *,
        steps: int = 0,
        save_steps: int = 0,
    ) -> None:
        self.stage = stage
        self.progress = progress or Progress()
        self.steps = steps
        self.save_steps = save_steps
        self.file = None if path is None else JsonLinesFile(path)  # None: another process writes it

    def begin(self, step: int) -> None:
        """Remove the lines of the steps after this one, which are about to be repeated."""
        if self.file is not None:
            self.file.remove(lambda row: row.get("stage") == self.stage and (row.get("step") or 0) > step)

    def write_measured(self, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a measurement, in place of those of a process that was killed before it stored them."""
        if self.file is not None:
            self.file.remove(lambda row: row.get("stage") == self.stage and row.get("step") == 0)
        self.write(0, metrics)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line. Report the metrics of an evaluation, and the loss if the last line is a while ago."""
        metrics = {
            name.removeprefix("eval_"): value
            for name, value in values.items()
            if name.startswith("eval_") and not name.endswith(("runtime", "per_second", "preparation_time", "stderr"))
        }
        if metrics or ("loss" in values and self.progress.line_is_due):
            text = f": {format_metrics(metrics)}" if metrics else f", loss {values['loss']:.4f}"
            self.progress.log(f"{self.stage}: step {step} of {self.steps}{text}")
        if self.file is not None:
            self.file.append(json_safe({"step": step, "stage": self.stage, **values}))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the lines of the steps that are about to be repeated."""
        self.steps = state.max_steps
        self.begin(state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint."""
        if self.save_steps and state.global_step % self.save_steps == 0 and state.global_step < state.max_steps:
            control.should_save = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Log the loss, or the metrics of an evaluation."""
        self.write(state.global_step, logs or {})


def format_metrics(values: Mapping[str, float]) -> str:
    """Return metrics in one line, without their errors and what says how much was measured."""
    shown = {name: value for name, value in values.items() if is_shown(name)}
    return ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)


class RunFolder:
    """The folder of a run: a study in `study/`, and `log.jsonl`, `model/` and `results.json` beside it.

    `checkpoints/` is what a stage can resume from until it is finished. All processes of a run read the folder, and the
    first one writes it. Progress is reported on the console, by default stderr.

    `finished` has the result of each finished stage by its name: what the metric says of a model, under the names of
    `conversion_result.Scores` or that of a choice (`20% exact heads`), what a training did, and facts (`processes`, see
    `IDENTITY`, `exact_heads`, `linear parts`, `recall, …`, `speed`). `record` stores one; `once` and `trained` do what
    is not stored yet, and store it.

    Raises:
        ValueError: There is no output folder, or it holds another run or other files.
        OSError: The folder cannot be written to.
    """

    #: A `ConvertConfig` or a `FinetuneConfig`, which have different sections.
    config: Any

    def __init__(self, config: TrainingRunConfig, tool: str, console: Console | None = None) -> None:
        if config.output is None:
            raise OptionError("output", "is missing: give a folder for the result.")
        self.config, self.tool, self.folder = config, tool, Path(config.output)
        check_output(
            self.folder,
            [f"{STUDY_FOLDER}/{RECORDS_FILE}", RESULTS_FILE],
            overwrite=config.overwrite,
            resume=config.resume,
            source=config.model,
            option="output",
        )
        self.use_cpu = runs_on_cpu(config.device == "cpu")
        self.process = PartialState(cpu=self.use_cpu)
        check_launch(self.process)
        self.is_main_process = bool(self.process.is_main_process)
        self.progress = LineProgress(console, shown=self.is_main_process)
        self.log_file = self.folder / LOG_FILE if self.is_main_process else None
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        hardware = environment(self.process.device)["hardware"]
        machine = {name: hardware[name] for name in ("device", "cpu", "threads")}
        self._machine: dict[str, Any] = broadcast_object_list([machine])[0]  # all processes look up the same records
        self.study = self._open_study()
        #: What is known of each stage: its metrics, or what its training did.
        self.finished: dict[str, Any] = {}
        for record in self.study.records:
            if record.label and record.id == self._conditions(record.label).id:
                self.finished[record.label] = {row["metric"]: row["value"] for row in record.values}
        count = self.process.num_processes
        if (before := self.finished.get(IDENTITY, {}).get("processes", count)) != count:
            remedy = f"Batches would have another size: resume it with {before}."
            raise ValueError(f"resume: {str(self.folder)!r} was begun with {before} processes, now {count}. {remedy}")
        self._identity: dict[str, Any] = {}
        self._is_prepared = False

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """All options by their names. A path is absolute: the same folder may be written in another way next time."""
        options = flatten(to_dict(self.config))
        paths = {name: Path(options[name]).expanduser() for name in PATHS if options.get(name) is not None}
        return options | {name: str(path.resolve()) for name, path in paths.items() if path.exists()}

    def _open_study(self) -> Study:
        """Return the study in the folder, of which only the first process writes anything."""
        config, path = self.config, self.folder / STUDY_FOLDER / RECORDS_FILE
        records = Records(path if config.resume and path.is_file() else None)
        if records.runs:
            last = list(records.runs.values())[-1]
            before, now = flatten(last.settings), self._settings
            if changes := _changes(before, now, FREE_OPTIONS):
                remedy = "Use the same options, with the same version of hf-linear-attn."
                raise ValueError(f"resume: {str(self.folder)!r} has other options ({changes}). {remedy}")
            if changes := _changes(last.environment["versions"], environment()["versions"]):
                self.progress.log(f"Finished stages are those of other versions ({changes}).")
        records.path = path if self.is_main_process else None
        records.start_run(self.tool, self._settings, environment(self.process.device))
        return Study(path.parent, records, self.progress, writes=self.is_main_process)

    def _conditions(self, stage: str) -> Conditions:
        settings = {name: value for name, value in self._settings.items() if name not in FREE_OPTIONS}
        device = self._machine if stage == "speed" else {}
        model = str(self._settings["model"])
        return Conditions(model, measurement=stage, seed=self.config.seed, settings=settings, device=device)

    def identify_data(self, facts: Mapping[str, Any], checksum: int) -> None:
        """Set what identifies the data of the task; a ValueError if a resumed run began with other rows."""
        self._identity = {"data": facts, "checksum": checksum}
        before = {**self._identity, **self.finished.get(IDENTITY, {})}
        changes = _changes(before["data"], facts)
        if changes or before["checksum"] != checksum:
            remedy = "Give those, or another output folder."
            changes = changes or "as many rows and tokens, but not the same"
            raise ValueError(f"resume: {str(self.folder)!r} was begun with other data ({changes}). {remedy}")

    def identify_model(self, fingerprint: str) -> None:
        """Set the hash of the exact model's weights; a ValueError if a resumed run began with others."""
        self._identity["model"] = fingerprint
        if self.finished.get(IDENTITY, {}).get("model", fingerprint) != fingerprint:
            problem = f"{str(self.folder)!r} was begun with other weights of {self.config.model!r}"
            raise ValueError(f"resume: {problem}. Give those, or another output folder.")

    def prepare_folder(self) -> None:
        """Write the options, in place of an earlier result that the run replaces. Called before anything is written."""
        if self.is_main_process and not self._is_prepared:
            if self.config.overwrite:
                clear_folder(self.folder)
            for folder in (self.folder, *(self.folder / name for name in ("checkpoints", STUDY_FOLDER))):
                remove_partial_files(folder)
        if self._identity and IDENTITY not in self.finished:
            self.record(IDENTITY, {"processes": self.process.num_processes, **self._identity})
        self._is_prepared = True
        self.process.wait_for_everyone()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context manager: SIGINT and SIGTERM end the run, in any stage, and say what is stored and how to go on."""

        def stop(number: int) -> None:
            raise InterruptedRunError(self.progress.doing, RESUME, number)

        watch = SignalWatch(stop)
        watch.start()
        try:
            yield
        except InterruptedRunError as error:
            stages = [name for name in self.finished if name != IDENTITY]
            stored = f"{', '.join(stages)} in {str(self.folder)!r}" if stages else "no finished stage"
            raise InterruptedRunError(f"{error.where}. Stored: {stored}", RESUME, error.number) from None
        finally:
            watch.stop()

    def record(self, stage: str, result: Mapping[str, Any]) -> None:
        """Store the result of a finished stage, which a resumed run does not repeat."""
        self.finished[stage] = json_safe(result)
        self.study.records.add(self._conditions(stage), result, label=stage)
        self.process.wait_for_everyone()

    def once(self, stage: str, compute: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the result of a stage: as it was stored, or else computed and stored."""
        if stage not in self.finished:
            self.record(stage, compute())
        return self.finished[stage]

    def trained(
        self,
        stage: str,
        model: nn.Module,
        train: Callable[[], tuple[Any, dict[str, Any]]],
        which: Callable[[str], bool] | None = None,
    ) -> Any:
        """Return a model with what a stage has learned: from the study, or else by `train`.

        The study calls `train` only where it has nothing stored; the model that it returns is trained already.

        Args:
            stage: The label of the stage.
            model: A complete model, as it was before the stage.
            train: Trains, and returns a complete model and what was done.
            which: Whether a name is that of a trained tensor; None: all are.
        """
        result: Any = model

        def values() -> tuple[Any, dict[str, Tensor]]:
            nonlocal result
            result, progress = train()
            self.finished[stage] = json_safe(progress)
            return progress, saved_tensors(result, which)

        is_finished = stage in self.finished
        parameters = self.study.learned(self._conditions(stage), values, label=stage)
        if is_finished:
            unexpected = result.load_state_dict(parameters, strict=False).unexpected_keys
            if unexpected:
                problem = f"{stage}: the stored parameters do not fit the model ({unexpected[0]})"
                raise ValueError(f"{problem}. Start anew with --overwrite.")
        self.process.wait_for_everyone()
        return result

    def remove_checkpoints(self) -> None:
        """Remove what a finished run could have resumed from, but not what its trackers wrote."""
        if self.is_main_process:
            shutil.rmtree(self.folder / STUDY_FOLDER / LEARNED_FOLDER, ignore_errors=True)
            for path in (self.folder / "checkpoints").glob("*/*"):
                if path.name != "runs":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            for folder in (*(self.folder / "checkpoints").glob("*"), self.folder / "checkpoints"):
                with suppress(OSError):  # Only empty folders can be removed.
                    folder.rmdir()
        self.process.wait_for_everyone()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Context manager of all stages: a run that fails before `log.jsonl` has a line leaves no folder."""
        if self.is_main_process:
            with open_output(self.folder, (LOG_FILE,)):
                self.process.wait_for_everyone()
                yield
        else:
            self.process.wait_for_everyone()
            yield


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str] = ()) -> str:
    """Return the first three differences of two mappings as text, but for free keys; empty if there are none."""
    differ = (key for key in {*before, *now} if before.get(key) != now.get(key))
    changed = sorted(key for key in differ if key not in free)
    return "; ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in changed[:3])
