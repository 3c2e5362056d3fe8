"""The stages of `convert` and `finetune`: each is measured or trained once, in a study."""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import broadcast_object_list
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import get_last_checkpoint

from ..checkpoints import copy_companions
from ..data.encoding import row_lengths
from ..data.task_data import TaskData, load_splits, load_task_data
from ..integration.context import saved_tensors
from ..measure.metric import Metric, is_shown
from ..measure.recall import RecallMetric
from ..measure.speed import measure_passes
from ..training.calibration import (
    CALIBRATION_LENGTH,
    CALIBRATION_TOKENS,
    Calibration,
    calibrate,
    leading_batches,
)
from ..training.distillation import DistillationTrainer, FinetuningConfig, FinetuningTrainer
from ..training.options import ConvertConfig, TrainingRunConfig
from ..training.resumable import EpochSampler, InterruptedRunError, InterruptionCallback, SeededCollator, SignalWatch
from ..training.sharding import check_launch, check_sharding, fill_copy, meta_copy, runs_on_cpu, shards_models
from ..training.transfer import exact_length, transfer_attention
from ..utils.environment import environment, has_slow_bfloat16, json_safe
from ..utils.files import (
    atomic_folder,
    check_disk_space,
    check_output,
    clear_folder,
    open_output,
    remove_partial_files,
)
from ..utils.formatting import near_matches
from ..utils.json_lines import JsonLinesFile
from ..utils.models import quiet_transformers
from ..utils.options import OptionError, flatten, to_dict
from ..utils.progress import LineProgress, Progress
from . import models
from .budgets import Budget
from .kinds import KINDS, Kind, input_columns
from .study import LEARNED_FOLDER, RECORDS_FILE, Conditions, Records, Study

#: Stages of gradient steps by a trainer, called as the sections of their options.
TRAINERS: dict[str, type[FinetuningTrainer]] = {
    "train": FinetuningTrainer,
    "teacher": FinetuningTrainer,
    "distill": DistillationTrainer,
}

#: In the folder of a run: its study, which another command does not take for one of its own.
STUDY_FOLDER = "study"
LOG_FILE = "log.jsonl"
RESULTS_FILE = "results.json"

#: The record of what a resumed run must find as it was: `processes`, the facts (`data`) and the `checksum` of the data,
#: and the hash of the exact model's weights (`model`), if it is not trained first.
IDENTITY = "processes"

#: The prompts that a budget is asked about what a model recalls: so many texts, at three depths each.
RECALL_TRIALS = 16

#: Seconds to time one length.
TIMING_SECONDS = 2.0

#: Number of checkpoints of a stage that a run keeps until the stage is finished.
SAVED_CHECKPOINTS = 2

#: How to go on with a run that was interrupted.
RESUME = "Continue with the same options and --resume."

#: Options that may be paths.
PATHS = ("model", "tokenizer", "plan", "data.dataset", "data.folder")

#: Options that a resumed run may change, because they do not affect the result.
FREE_OPTIONS = (*("resume", "overwrite", "output", "save_steps", "report_to"),)


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
        self.stage, self.progress, self.steps, self.save_steps = stage, progress or Progress(), steps, save_steps
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


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str] = ()) -> str:
    """Return the first three differences of two mappings as text, but for free keys; empty if there are none."""
    differ = (key for key in {*before, *now} if before.get(key) != now.get(key))
    changed = sorted(key for key in differ if key not in free)
    return "; ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in changed[:3])


class TrainingRun:
    """One run in its folder: a study in `study/`, and `log.jsonl`, `model/` and `results.json` beside it.

    `checkpoints/` is what a stage can resume from until it is finished. It reports its progress on the console, by
    default stderr.

    `state` has the result of each finished stage by its name: what the metric says of a model, under the names of
    `result.Scores` or that of a choice (`20% exact heads`), what a training did, and facts (`processes`, see
    `IDENTITY`, `exact_heads`, `linear parts`, `recall, …`, `speed`). `record` stores one; `once`, `measure` and
    `learned` do what is not stored yet, and store it; `evaluate`, `train` and `transfer` leave that to their caller.

    Raises:
        ValueError: There is no output folder, or it holds another run or other files; or the `arguments` of a stage are
            not those of its trainer.
        OSError: The folder cannot be written to.
    """

    #: The data of the task, once they are loaded, and the metric of the run, once the exact model is.
    data: TaskData
    metric: Metric

    def __init__(self, config: Any, tool: str, console: Console | None = None) -> None:
        if config.output is None:
            raise OptionError("output", "is missing: give a folder for the result.")
        self.config, self.tool = config, tool
        self.kind: Kind = KINDS[config.resolved_task_type]
        budget = getattr(config, "budget", None)
        self.budget = None if budget is None else Budget.parse(budget)
        self.folder = Path(config.output)
        self.trackers = installed_trackers(config.report_to)
        choice = {"overwrite": config.overwrite, "resume": config.resume}
        check_output(
            self.folder,
            [f"{STUDY_FOLDER}/{RECORDS_FILE}", RESULTS_FILE],
            **choice,
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
        self.state: dict[str, Any] = {}
        for record in self.study.records:
            if record.label and record.id == self._conditions(record.label).id:
                self.state[record.label] = {row["metric"]: row["value"] for row in record.values}
        count = self.process.num_processes
        if (before := self.state.get(IDENTITY, {}).get("processes", count)) != count:
            remedy = f"Batches would have another size: resume it with {before}."
            raise ValueError(f"resume: {str(self.folder)!r} was begun with {before} processes, now {count}. {remedy}")
        self._identity: dict[str, Any] = {}
        self._is_prepared = False
        if config.bf16 and has_slow_bfloat16(self.process.device.type):
            self.progress.log(
                "bf16: this processor has no AVX-512 and computes bfloat16 many times slower. Leave it out."
            )
        for section in TRAINERS:
            options = getattr(config, section, None)
            if options is not None and options.enabled:
                self._stage_arguments(section)

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

    def use_data(self, data: TaskData) -> None:
        """Set the data of the task; a ValueError if a resumed run began with other rows."""
        self.data, self._identity = data, {"data": data.facts, "checksum": data.checksum()}
        before = {**self._identity, **self.state.get(IDENTITY, {})}
        changes = _changes(before["data"], data.facts)
        if changes or before["checksum"] != self._identity["checksum"]:
            remedy = "Give those, or another output folder."
            changes = changes or "as many rows and tokens, but not the same"
            raise ValueError(f"resume: {str(self.folder)!r} was begun with other data ({changes}). {remedy}")

    def use_model(self, fingerprint: str) -> None:
        """Set the hash of the exact model's weights; a ValueError if a resumed run began with others."""
        self._identity["model"] = fingerprint
        if self.state.get(IDENTITY, {}).get("model", fingerprint) != fingerprint:
            problem = f"{str(self.folder)!r} was begun with other weights of {self.config.model!r}"
            raise ValueError(f"resume: {problem}. Give those, or another output folder.")

    def prepare_folder(self) -> None:
        """Write the options, in place of an earlier result that the run replaces. Called before anything is written."""
        if self.is_main_process and not self._is_prepared:
            if self.config.overwrite:
                clear_folder(self.folder)
            for folder in (self.folder, *(self.folder / name for name in ("checkpoints", STUDY_FOLDER))):
                remove_partial_files(folder)
        if self._identity and IDENTITY not in self.state:
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
            stages = [name for name in self.state if name != IDENTITY]
            stored = f"{', '.join(stages)} in {str(self.folder)!r}" if stages else "no finished stage"
            raise InterruptedRunError(f"{error.where}. Stored: {stored}", RESUME, error.number) from None
        finally:
            watch.stop()

    def record(self, stage: str, result: Mapping[str, Any]) -> None:
        """Store the result of a finished stage, which a resumed run does not repeat."""
        self.state[stage] = json_safe(result)
        self.study.records.add(self._conditions(stage), result, label=stage)
        self.process.wait_for_everyone()

    def once(self, stage: str, compute: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the result of a stage: as it was stored, or else computed and stored."""
        if stage not in self.state:
            self.record(stage, compute())
        return self.state[stage]

    def learned(
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
        trained: Any = model

        def values() -> tuple[Any, dict[str, Tensor]]:
            nonlocal trained
            trained, progress = train()
            self.state[stage] = json_safe(progress)
            return progress, saved_tensors(trained, which)

        is_finished = stage in self.state
        parameters = self.study.learned(self._conditions(stage), values, label=stage)
        if is_finished:
            missing = trained.load_state_dict(parameters, strict=False).unexpected_keys
            if missing:
                raise ValueError(f"{stage}: the stored parameters do not fit the model ({missing[0]}).")
        self.process.wait_for_everyone()
        return trained

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

    def load_data(self) -> None:
        """Read and encode the data, and say what they are."""
        config, tokenizer = self.config, self._tokenizer()
        max_length, reason = models.row_limit(config, tokenizer)
        with self.progress.working(f"reading {config.data.task or config.data.dataset or 'the data'}"):
            with self.process.main_process_first():
                rows = models.with_limits(self.kind, replace(config.data, max_length=max_length))
                data = load_task_data(config.task_type, tokenizer, rows, config.seed, head=models.head_of(config))
            is_conversion = isinstance(config, ConvertConfig) and not config.teacher.enabled
            if is_conversion and self.kind.task_type == "classification":
                models.check_head(config)
        for note in data.notes:
            self.progress.log(note)
        facts = data.facts
        held_out = sum(len(cast(Any, rows)) for rows in data.validation.values())
        train = f"{facts['train_rows']:,} rows of {facts['train_tokens']:,} tokens to train on"
        self.progress.log(f"Data: {data.rows}; {train}, {held_out:,} to validate on")
        if facts["train_truncated"]:
            share = facts["train_dropped_tokens"] / (facts["train_dropped_tokens"] + facts["train_tokens"])
            cut = f"{facts['train_truncated']:,} of {facts['train_rows']:,} training rows are cut"
            lost = f"they lose {100 * share:.1f} % of all tokens."
            self.progress.log(f"{cut} to {max_length:,} tokens ({reason}); {lost}")
        if repeated := facts["validation_repeated"]:
            rows_text = f"{repeated:,} of {held_out:,} validation rows are in the training data, too"
            self.progress.log(f"{rows_text}: their scores say little of new inputs.")
        if self.budget is not None and self.budget.cost == "cache" and self.budget.length > data.longest:
            asked = f"The budget is for {self.budget.length:,} tokens, and no row has more than {data.longest:,}"
            remedy = f"Longer rows: --data.max_length {self.budget.length}."
            self.progress.log(f"{asked}: what the model recalls is measured at {data.longest:,}. {remedy}")
        self.use_data(data)

    def _tokenizer(self) -> Any:
        """Return the model's tokenizer, or train one on the training text first and save it in the run's folder."""
        config = self.config
        if config.train_tokenizer is None:
            return models.load_tokenizer(config)
        folder = self.folder / "tokenizer"
        self.prepare_folder()
        if self.is_main_process and not folder.exists():
            columns = config.data.text_columns
            with self.progress.working("training a tokenizer"):
                rows = load_splits(config.data, columns).splits["train"]
                texts = chain.from_iterable(rows[column] for column in columns)
                tokenizer = models.train_tokenizer(texts, config.train_tokenizer, models.row_limit(config)[0])
            with atomic_folder(folder) as temporary:
                tokenizer.save_pretrained(temporary)
        self.process.wait_for_everyone()
        return models.load_tokenizer(TrainingRunConfig(tokenizer=str(folder)))

    def use_metric(self, exact: PreTrainedModel) -> None:
        """Make the metric of the run, which compares embeddings with those of the exact model."""
        self.metric = self.kind.metric(self.data, exact)

    def label_with_embeddings(self, expected: Tensor) -> None:
        """Give the held-out rows the embeddings of the exact model as labels, by which the best step is chosen."""
        data = self.data
        data.train = data.train.add_column("labels", [0.0] * len(data.train))  # at each step the teacher's, instead
        first = 0
        for name, rows in data.validation.items():
            part = expected[first : first + len(rows)]
            data.validation[name] = rows.add_column("labels", part.tolist())
            first += len(rows)

    def measure(self, stage: str, model: PreTrainedModel) -> dict[str, Any]:
        """Measure a model once, and store what the metric says of it."""
        return self.once(stage, lambda: self.evaluate(stage, model))

    def evaluate(self, stage: str, model: PreTrainedModel) -> dict[str, Any]:
        """Return what the metric says of a model, the same for all processes, and log it as that of a stage."""
        self.prepare_folder()
        model.to(self.process.device)
        with self.progress.working(f"measuring: {stage.replace('_', ' ')}"):
            values: dict[str, Any] = broadcast_object_list([self.metric(model)])[0]
        StageLog(stage, self.log_file).write_measured(values)
        self.progress.log(f"{stage.replace('_', ' ')}: {format_metrics(values)}")
        return values

    def measure_recall(self, name: str, model: PreTrainedModel, *, length: int) -> dict[str, Any]:
        """Measure once what a model recalls of prompts of so many tokens."""

        def measure() -> dict[str, Any]:
            task = self.kind.recall_task
            metric = RecallMetric(self.data.tokenizer, [length], [task], trials=RECALL_TRIALS, seed=self.config.seed)
            with self.progress.working(f"measuring what {name} recalls"):
                model.to(self.process.device)
                return {**metric(model), "task": task, "length": length}

        return self.once(f"recall, {name}", measure)

    def time(self, teacher: PreTrainedModel, student: PreTrainedModel, length: int) -> dict[str, dict[str, Any]]:
        """Time one forward pass (batch 1) of teacher and student, side by side, in the precision of the run."""
        tokens = [int(token) for token in cast(Any, self.data.train)[0]["input_ids"]]
        timed = {"teacher": teacher, "student": student}
        for model in timed.values():
            model.to(self.process.device).eval()
        with self.mixed_precision():
            return measure_passes(timed, tokens, length, baseline="teacher", seconds=TIMING_SECONDS)

    def mixed_precision(self) -> torch.autocast:
        """Return the context in which the run trains."""
        precision = torch.bfloat16 if self.config.bf16 else torch.float16
        return torch.autocast(self.process.device.type, precision, enabled=self.config.bf16 or self.config.fp16)

    def long_rows(self, student: PreTrainedModel) -> Any:
        """Return the training rows that the mechanism does not attend to exactly: the others say nothing of it."""
        rows: Any = self.data.train
        limit = exact_length(student)
        if not limit:
            return rows
        return rows.select([row for row, length in enumerate(row_lengths(rows)) if length > limit])

    def calibrate(self, student: PreTrainedModel) -> Calibration | None:
        """Fit the start of a mechanism, in place, to the first of the rows that say something of it."""
        rows = self.long_rows(student)
        if not len(rows):
            return None
        batches = leading_batches((self.data.collator([row]) for row in rows), CALIBRATION_TOKENS)
        length = 0 if self.budget is None else self.budget.length
        # A budget's length counts where it is beyond those that a calibration has in mind by itself.
        longest = length if length > CALIBRATION_LENGTH else None
        return calibrate(student.to(self.process.device), batches, max_length=longest)

    def train(self, section: str, model: nn.Module, label: str = "", **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Run a stage of gradient steps, from its last checkpoint (in `checkpoints/LABEL`) if the run resumes.

        The section of the options says how to train, and is also the label of the stage where it has no other one.
        Further arguments of the trainer replace those of the data. Returns the model with all of its weights, those of
        the best step, and what `stage_progress` tells.
        """
        self.prepare_folder()
        label, data = label or section, self.data
        if self.is_main_process:
            weights = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
            trained = sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
            # The checkpoints, one more while the next is written, the best one and the result.
            needed = (SAVED_CHECKPOINTS + 1) * (weights + 8 * trained) + 3 * weights
            remedy = "Free some space, or choose another folder."
            check_disk_space(self.folder, needed, remedy)
        if self.config.gradient_checkpointing:
            base: Any = model
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        arguments = self._stage_arguments(section, data, label)
        callbacks: list[TrainerCallback] = [
            InterruptionCallback(RESUME),
            StageLog(label, self.log_file, self.progress, save_steps=self.config.save_steps),
        ]
        if arguments.load_best_model_at_end and (patience := getattr(self.config, section).patience) is not None:
            callbacks.append(EarlyStoppingCallback(patience))
        with quiet_transformers():
            options = {**data.trainer_arguments(), "train_dataset": data.train, "callbacks": callbacks, **kwargs}
            trainer = TRAINERS[section](model, args=arguments, **options)
            trainer.remove_callback(PrinterCallback)
            folder = Path(str(arguments.output_dir))
            resume = get_last_checkpoint(folder) if self.config.resume and folder.is_dir() else None
            if resume is not None:
                self.progress.log(f"{label}: resumes from {Path(resume).name}")
            trainer.train(resume_from_checkpoint=resume)
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        return trainer.complete_model(), stage_progress(trainer, data)

    def transfer(self, model: PreTrainedModel, rows: Any, validation: Any) -> tuple[Any, dict[str, Any]]:
        """Run the attention transfer, from its checkpoint if the run resumes. Returns what `train` does."""
        self.prepare_folder()
        config, section = self.config, self.config.transfer
        folder = self.folder / "checkpoints" / "transfer"
        accelerator = self._accelerator(folder)
        skeleton = meta_copy(model) if shards_models(accelerator) else None
        batch = 2 * section.per_device_train_batch_size
        checkpoint = folder / "state.safetensors"
        if not config.resume and self.is_main_process:
            checkpoint.unlink(missing_ok=True)
        self.process.wait_for_everyone()
        if checkpoint.is_file():
            self.progress.log(f"transfer: resumes from {checkpoint.name}")
        try:
            result = transfer_attention(
                model,
                self._loader(accelerator, rows, section.per_device_train_batch_size, shuffle=True),
                max_steps=section.max_steps,
                learning_rate=section.learning_rate,
                loss=section.loss,
                validation=list(self._loader(accelerator, validation, batch)),
                eval_steps=section.eval_steps,
                patience=section.patience,
                gradient_accumulation_steps=section.gradient_accumulation_steps,
                max_grad_norm=section.max_grad_norm,
                checkpoint=checkpoint,
                save_steps=config.save_steps,
                accelerator=accelerator,
                log=self._transfer_log(accelerator),
            )
        except InterruptedRunError as error:
            raise InterruptedRunError(error.where, RESUME, error.number) from None
        finally:
            for tracker in accelerator.trackers:  # Accelerator.end_training would end the process group, too.
                tracker.finish()
        return model if skeleton is None else fill_copy(skeleton, model), {
            "step": result.steps,
            "seconds": result.seconds,
            "tokens": result.tokens,
            "best_step": result.best_step,
            "evaluations": [[step, {"loss": loss}] for step, loss in result.evaluations],
        }

    def _transfer_log(self, accelerator: Accelerator) -> Callable[[dict[str, float]], None]:
        """Return what logs a step or an evaluation of the attention transfer."""
        section, begun = self.config.transfer, False
        log = StageLog("transfer", self.log_file, self.progress, steps=section.max_steps)

        def write(values: dict[str, float]) -> None:
            nonlocal begun
            step = int(values.pop("step"))
            if not begun:
                log.begin(step - 1)
            begun = True
            if "eval_loss" in values or step % section.logging_steps == 0 or step in (1, section.max_steps):
                log.write(step, values)
                accelerator.log(values, step=step)

        return write

    def _accelerator(self, folder: Path) -> Accelerator:
        """Return the accelerator of the attention transfer, with its trackers."""
        half = "fp16" if self.config.fp16 else None
        precision = "bf16" if self.config.bf16 else half
        trackers = [name for name in self.trackers if name in LOGGER_TYPE_TO_CLASS] or None
        accelerator = Accelerator(
            cpu=self.use_cpu, mixed_precision=precision, log_with=trackers, project_dir=str(folder)
        )
        check_sharding(accelerator)
        accelerator.init_trackers("runs")
        return accelerator

    def _loader(self, accelerator: Accelerator, rows: Any, batch_size: int, shuffle: bool = False) -> Any:
        """Return a loader with this process's share of the batches of some rows."""
        config, data = self.config, self.data
        lengths = row_lengths(rows)
        step = batch_size * config.transfer.gradient_accumulation_steps * self.process.num_processes
        loader: Any = DataLoader(
            rows.select_columns(input_columns(rows, self.kind)),
            batch_size=batch_size,
            sampler=EpochSampler(len(rows), config.seed, lengths, step) if shuffle else None,
            collate_fn=SeededCollator(data.collator, config.seed),
        )
        return accelerator.prepare_data_loader(loader)

    def _stage_arguments(self, section: str, data: TaskData | None = None, label: str = "") -> FinetuningConfig:
        """Return the training arguments of a stage; without data, to check them, all but the metric."""
        options, config_class = getattr(self.config, section), TRAINERS[section].config_class
        names = {entry.name for entry in fields(config_class)}
        chosen = {name: value for name, value in vars(options).items() if name in names}
        values = {
            **self._common_arguments(self.folder / "checkpoints" / (label or section)),
            **{name: value for name, value in chosen.items() if value is not None},
            "eval_strategy": "steps" if options.eval_steps else "no",
            "eval_steps": options.eval_steps or None,
            "save_strategy": "no",
            "save_total_limit": SAVED_CHECKPOINTS,
        }
        if data is not None and options.eval_steps:
            values.update(
                save_strategy="best",
                load_best_model_at_end=True,
                metric_for_best_model=data.metric,
                greater_is_better=data.greater_is_better,
            )
        for argument in options.arguments:
            if argument not in names:
                problem = f"TrainingArguments has no field {argument!r}.{near_matches(argument, names)}"
                raise ValueError(f"arguments: {problem}")
            if argument in values or hasattr(self.config, argument):
                raise ValueError(
                    f"arguments: {argument!r} is an option of its own, or set by this command. Leave it out."
                )
        return config_class(**{"logging_steps": 10, "logging_first_step": True, **values, **options.arguments})

    def _common_arguments(self, folder: Path) -> dict[str, Any]:
        config = self.config
        section = config.train if self.tool == "finetune" else config.distill
        batch = 2 * section.per_device_train_batch_size
        return {
            "output_dir": str(folder),
            "seed": config.seed,
            "use_cpu": self.use_cpu,
            "bf16": config.bf16,
            "fp16": config.fp16,
            "per_device_eval_batch_size": batch,
            "dataloader_pin_memory": self.process.device.type != "cpu",
            "train_sampling_strategy": "group_by_length",
            "report_to": list(self.trackers),
            "include_num_input_tokens_seen": "non_padding",
            "label_names": ["labels"],
            "disable_tqdm": not self.progress.console.is_terminal,
        }

    def save(self, target: Path, model: PreTrainedModel, card: str | None = None) -> None:
        """Write a checkpoint with its tokenizer and card, atomically, from the main process."""
        self.prepare_folder()
        if self.is_main_process:
            with atomic_folder(target) as temporary, quiet_transformers():
                model.save_pretrained(temporary)
                self.data.tokenizer.save_pretrained(temporary)
                if self.data.task_type == "embedding":
                    copy_companions(str(self.config.model), temporary, self.config.revision)
                if card is not None:
                    (temporary / "README.md").write_text(card, encoding="utf-8")
        self.process.wait_for_everyone()


def stage_progress(trainer: FinetuningTrainer, data: TaskData) -> dict[str, Any]:
    """Return what a stage did: `step`, `seconds`, `tokens`, `best_step`, and `evaluations` as (step, metrics)."""
    state = trainer.state
    evaluations: dict[int, dict[str, float]] = {}
    for entry in state.log_history:
        values = {name: value for name, value in entry.items() if name.startswith("eval_")}
        if values:
            evaluations.setdefault(int(entry["step"]), {}).update(data.own_metrics(values))
    return {
        "step": state.global_step,
        "seconds": state.log_history[-1].get("train_runtime"),
        "tokens": state.num_input_tokens_seen,
        "best_step": state.best_global_step,
        "evaluations": [[step, metrics] for step, metrics in evaluations.items()],
    }


def installed_trackers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the trackers that are installed; an unknown name is a ValueError."""
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            trackers = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ValueError(f"report_to: Transformers has no tracker {name!r}. It has {trackers}.")
    available = get_available_reporting_integrations()
    return tuple(name for name in names if name in available)
