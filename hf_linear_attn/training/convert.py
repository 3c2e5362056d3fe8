"""Fine-tuning, and conversion from a fine-tuned model to a linear one, from settings to a measured checkpoint."""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, fields
from typing import Any, cast

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from ..config import LinearAttentionConfig
from ..evaluation.measurements import plain
from ..evaluation.report import environment
from ..evaluation.speed import shared_copy
from ..integration.attention import SUBMODULE, exact_attention
from ..mechanisms.base import LinearAttention
from ..patching import is_patched, patch_model, patch_report
from ..registry import ATTENTIONS
from .card import exactness, model_card, results_table
from .loop import Progress
from .models import load_model, load_tokenizer, train_tokenizer
from .objectives import DistillObjective, TaskObjective
from .options import ConvertSettings, DistillSettings, FinetuneSettings, ModelSettings
from .problems import Problem, build_problem, own_data
from .runs import Run
from .saving import whole_folder, without_shared, write_json
from .settings import as_mapping
from .sharding import autocast
from .transfer import transfer_attention

#: Training inputs that are looked at for how many go beyond what the mechanism attends to exactly.
LOOKED_AT = 1000

#: Share of them below which a run says that its data train little of the mechanism.
SHARE_BEYOND = 0.05

#: Batches of training data that attention transfer does not train on, to choose its best step.
TRANSFER_HELD_OUT = 2


def finetune(settings: FinetuneSettings, *, console: Console | None = None) -> dict[str, Any]:
    """Train a model, exact or patched, on a task's own loss. The result is in `run.output`: `model/`, `results.json`.

    Raises:
        ValueError, OSError, ImportError: settings, data or folders that cannot be served; before any training.
        InterruptedRunError: SIGINT or SIGTERM, after a checkpoint.
    """
    run = Run(settings, train=settings.train, console=console)
    try:
        problem = _problem(run, settings)
        run.seed()
        loaded = load_model(settings.model, problem)
        model = loaded.model
        if settings.run.control and (is_patched(model) or settings.model.attention or settings.model.plan):
            raise ValueError("run.control is the exact model: leave model.attention and model.plan out (null).")
        if not is_patched(model):
            _patch(model, settings.model, settings.run.seed)
        facts = _facts(run, model, problem)
        _say_if_exact(run, facts)
        if "trained" not in run.state:
            progress, trained = run.stage("train", model, TaskObjective(problem), problem, settings.train)
            model = cast(PreTrainedModel, trained)
            run.record("train", asdict(progress))
            found = _best(progress) or problem.evaluate(model, run.accelerator, run.evaluation_batch())
            run.save(run.folder / "model", model, problem, model_card(settings, facts, {**run.state, "trained": found}))
            run.record("trained", found)
        return _finish(run, facts)
    finally:
        run.close()


def convert(settings: ConvertSettings, *, console: Console | None = None) -> dict[str, Any]:
    """Convert a fine-tuned model: (teacher) -> attention transfer -> distillation. The result is in `run.output`.

    `model/` is the converted checkpoint with its card, `results.json` holds every number: the teacher's metrics, those
    of the patched model as it is, after attention transfer and after distillation, and its speed beside the teacher's.

    Raises:
        ValueError, OSError, ImportError: settings, data or folders that cannot be served; before any training.
        InterruptedRunError: SIGINT or SIGTERM, after a checkpoint.
    """
    run = Run(settings, train=settings.distill, console=console)
    try:
        problem = _problem(run, settings)
        teacher = _teacher(run, settings, problem)
        run.metrics("teacher", teacher, problem)
        student = copy.deepcopy(teacher)
        if not settings.run.control:
            run.seed()
            _patch(student, settings.model, settings.run.seed)
        facts = _facts(run, student, problem)
        if not settings.run.control:
            _say_if_exact(run, facts)
            run.metrics("patched", student, problem)
            _transfer(run, settings, student, problem)
        student = _distill(run, settings, teacher, student, problem)
        if settings.run.speed_lengths and "speed" not in run.state:
            run.record("speed", _speed(run, teacher, student, problem))
        run.save(run.folder / "model", student, problem, model_card(settings, facts, run.state))
        return _finish(run, facts)
    finally:
        run.close()


# --------------------------------------------------------------------------------------------------------------------
# Stages


def _problem(run: Run, settings: FinetuneSettings | ConvertSettings) -> Problem:
    tokenizer = _tokenizer(run, settings)
    with run.accelerator.main_process_first():
        return build_problem(settings.kind, tokenizer, settings.data, settings.run.seed)


def _tokenizer(run: Run, settings: FinetuneSettings | ConvertSettings) -> Any:
    """The model's tokenizer, or one that is trained on the training text first and kept in the run's folder."""
    size = settings.model.train_tokenizer
    if size is None:
        return load_tokenizer(settings.model)
    folder = run.folder / "tokenizer"
    if run.accelerator.is_main_process and not folder.exists():
        column = settings.data.text[0]
        rows = own_data(settings.data, settings.run.seed, (column,))["train"]
        trained = train_tokenizer(iter(rows[column]), size, settings.data.max_length)
        with whole_folder(folder) as aside:
            trained.save_pretrained(aside)
    run.accelerator.wait_for_everyone()
    return load_tokenizer(ModelSettings(tokenizer=str(folder)))


def _patch(model: PreTrainedModel, settings: ModelSettings, seed: int) -> None:
    """Patch by name, by plan, or not at all; random features are drawn by the run's seed unless they have their own."""
    if settings.plan is not None and (settings.layers is not None or settings.options):
        raise ValueError("model.plan says what every layer gets. Leave model.layers and model.options out.")
    if settings.plan is not None:
        config = LinearAttentionConfig.from_file(settings.plan)
    elif settings.attention is not None:
        options = dict(settings.options)
        entry = ATTENTIONS.get(settings.attention)
        if any(option.name == "seed" for option in fields(entry.options)):
            options.setdefault("seed", seed)
        config = LinearAttentionConfig.parse(settings.attention, settings.layers, options)
    else:
        return
    if settings.max_length is not None:
        # The positions are as long already; what is left are mechanisms that are built for a largest length.
        config = config.with_default("max_length", settings.max_length)
    patch_model(model, config)


def _teacher(run: Run, settings: ConvertSettings, problem: Problem) -> PreTrainedModel:
    """The exact model that is converted, fine-tuned first if the settings say so."""
    tuned = run.folder / "teacher"
    if "teacher stage" in run.state:
        return load_model(ModelSettings(source=str(tuned)), problem).model
    run.seed()
    loaded = load_model(settings.model, problem)
    if is_patched(loaded.model):
        raise ValueError(f"{settings.model.source!r} is patched already. Give the exact model that it was made from.")
    if not settings.run.control:
        # What cannot be patched is told before anything is trained.
        _patch(shared_copy(loaded.model), settings.model, settings.run.seed)
    wanted = settings.teacher.steps or settings.teacher.epochs
    if not wanted:
        if loaded.fresh:
            raise ValueError(
                f"{settings.model.source!r} has no head for this task ({loaded.fresh[0]} is missing): it is not "
                "fine-tuned. Give a fine-tuned model, or fine-tune it first with teacher.epochs 3."
            )
        return loaded.model
    progress, trained = run.stage("teacher", loaded.model, TaskObjective(problem), problem, settings.teacher)
    model = cast(PreTrainedModel, trained)
    run.save(tuned, model, problem)
    run.record("teacher stage", asdict(progress))
    return model


def _transfer(run: Run, settings: ConvertSettings, student: PreTrainedModel, problem: Problem) -> None:
    """Stage 1; its result is kept beside the checkpoints, so that a resumed run does not repeat it."""
    transfer, accelerator = settings.transfer, run.accelerator
    if not transfer.steps or not patch_report(student).parameters:
        return
    path = run.folder / "checkpoints" / "transfer" / "learned.safetensors"
    learned = {name: tensor for name, tensor in student.named_parameters() if f".{SUBMODULE}." in f".{name}"}
    if "transfer" in run.state:
        with torch.no_grad():
            for name, tensor in load_file(str(path)).items():
                learned[name].copy_(tensor)
        run.metrics("transferred", student, problem)
        return
    rows: Any = problem.train
    kept = min(TRANSFER_HELD_OUT * transfer.batch_size, len(rows) // 5)
    stream = run.stream(problem, rows.select(range(len(rows) - kept)), transfer.batch_size)
    held_out = []
    if kept:
        held = rows.select(range(len(rows) - kept, len(rows)))
        generator = torch.Generator().manual_seed(settings.run.seed)
        for start in range(0, kept, transfer.batch_size):
            part = [held[index] for index in range(start, min(start + transfer.batch_size, kept))]
            held_out.append(problem.collate(part, generator))
    student.to(accelerator.device)
    torch.manual_seed(settings.run.seed)
    run.reporter.start("transfer", transfer.steps)
    try:
        done = transfer_attention(
            student,
            stream.read(0),
            steps=transfer.steps,
            lr=transfer.lr,
            loss=transfer.loss,
            held_out=held_out or None,
            evaluate_every=transfer.evaluate_every,
            patience=transfer.patience,
            progress=lambda step, steps, loss: run.reporter.update(step, f"loss {loss:.4f}"),
        )
    finally:
        run.reporter.stop()
    if accelerator.is_main_process:
        with whole_folder(path.parent) as aside:
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in learned.items()}, str(aside / path.name)
            )
    run.record("transfer", asdict(done))
    for step, loss in enumerate(done.losses, start=1):
        if step % 10 == 0 or step == 1:
            accelerator.log({"stage": "transfer", "train/loss": loss}, step=step)
    run.metrics("transferred", student, problem)


def _distill(
    run: Run, settings: ConvertSettings, teacher: PreTrainedModel, student: PreTrainedModel, problem: Problem
) -> PreTrainedModel:
    """Stages 2 and 3. Returns the student with the best step's weights, adapters merged."""
    distill = settings.distill
    if not (distill.steps or distill.epochs):
        return student
    done = run.folder / "checkpoints" / "distilled"
    if "distilled" in run.state:
        student.load_state_dict(load_file(str(done / "model.safetensors")), strict=False)
        return student.eval()
    trained: nn.Module = student
    if distill.lora_rank:
        trained = add_adapters(student, distill)
        guide: Any = AdapterTeacher(trained)
    else:
        guide = teacher.to(run.accelerator.device).eval().requires_grad_(False)
    objective = DistillObjective(problem, guide, distill)
    progress, found = run.stage("distill", trained, objective, problem, distill)
    kept: Any = found
    student = kept.merge_and_unload() if distill.lora_rank else kept
    if run.accelerator.is_main_process:
        with whole_folder(done) as aside:
            save_file(without_shared(student.state_dict()), str(aside / "model.safetensors"))
    run.record("distill", asdict(progress))
    run.record("distilled", _best(progress) or run.metrics("distilled", student, problem))
    return student.eval()


def add_adapters(model: PreTrainedModel, settings: DistillSettings) -> nn.Module:
    """LoRA on every linear layer outside of the head and the mechanisms; their learned parts stay trainable."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("distill.lora_rank needs peft: pip install 'hf-linear-attn[train]'") from error
    from transformers.pytorch_utils import Conv1D

    targets = settings.lora_targets or tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and f".{SUBMODULE}." not in f".{name}."
        and name.startswith(model.base_model_prefix)
    )
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha or 2 * settings.lora_rank,
        target_modules=list(targets),
    )
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if f".{SUBMODULE}." in name:
            parameter.requires_grad_(True)
    return adapted


class AdapterTeacher:
    """The teacher within a LoRA student: the same weights with adapters off and exact attention on. No second copy."""

    def __init__(self, student: Any) -> None:
        self.student = student

    def __call__(self, **inputs: Any) -> Any:
        student = self.student
        training = student.training
        student.eval()
        try:
            with student.disable_adapter(), exact_attention(student):
                return student(**inputs)
        finally:
            student.train(training)


def _speed(run: Run, teacher: PreTrainedModel, student: PreTrainedModel, problem: Problem) -> dict[str, Any]:
    """One forward pass of teacher and student, side by side."""
    from ..evaluation.speed import can_go_beyond, model_speed
    from ..evaluation.speed_study import speed_dict
    from ..integration.discovery import longest_input

    limit = longest_input(teacher)
    lengths = [
        length
        for length in run.run_settings.speed_lengths
        if limit is None or length <= limit or can_go_beyond(teacher)
    ]
    tokens = [int(token) for token in problem.train[0]["input_ids"]]
    device = run.accelerator.device
    models = {"teacher": teacher.to(device).eval(), "student": student.to(device).eval()}
    try:
        with autocast(run.accelerator):  # both in the precision of the run
            table = model_speed(
                models, tokens, lengths, baseline="teacher", budget=2.0, announce=lambda done, note: None
            )
    except ValueError as error:
        # A mechanism that is built for a largest length (Linformer) cannot be timed beyond it.
        return {"skipped": str(error)}
    return speed_dict(table)


# --------------------------------------------------------------------------------------------------------------------
# The result


def _best(progress: Progress) -> dict[str, float]:
    """Metrics of the step that was kept."""
    kept = progress.best_step if progress.best_step is not None else progress.step
    return next((metrics for step, metrics in progress.evaluations if step == kept), {})


def _beyond_exact(model: PreTrainedModel, problem: Problem) -> dict[str, int] | None:
    """How many training inputs are longer than what all layers attend to exactly (None: one does so at no length)."""
    exact = min((held.exact_length for held in model.modules() if isinstance(held, LinearAttention)), default=0)
    if not exact:
        return None
    rows: Any = problem.train
    some = rows.select(range(min(LOOKED_AT, len(rows))))
    longer = sum(len(ids) > exact for ids in some["input_ids"])
    return {"exact_length": exact, "inputs": len(some), "longer": longer}


def _say_if_exact(run: Run, facts: dict[str, Any]) -> None:
    found = facts["beyond_exact"]
    if found is None or not facts["learned_parameters"] or found["longer"] >= SHARE_BEYOND * found["inputs"]:
        return
    run.reporter.say(
        f"{exactness(found)} So these data train little of the mechanism. Give longer inputs, or narrow what is exact "
        "(window_size or block_size in model.options), or expect an untrained mechanism on longer inputs."
    )


def _facts(run: Run, model: PreTrainedModel, problem: Problem) -> dict[str, Any]:
    patched = is_patched(model)
    report = patch_report(model) if patched else None
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "learned_parameters": report.parameters if report else 0,
        "layers": [asdict(layer) for layer in report.layers] if report else [],
        "beyond_exact": _beyond_exact(model, problem),
        "data": problem.facts,
        "goal": asdict(problem.goal),
        "processes": run.accelerator.num_processes,
        "environment": environment(run.accelerator.device),
    }


def _finish(run: Run, facts: dict[str, Any]) -> dict[str, Any]:
    """`results.json`, the table on the screen, and the upload."""
    results = {
        "format_version": 1,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": as_mapping(run.settings),
        **facts,
        "stages": run.state,
    }
    if run.accelerator.is_main_process:
        write_json(run.folder / "results.json", plain(results))
        for line in results_table(facts, run.state):
            run.reporter.say(line)
        run.reporter.say(f"Result: {run.folder / 'model'}")
    run.accelerator.wait_for_everyone()
    run.push(run.folder / "model")
    return results
