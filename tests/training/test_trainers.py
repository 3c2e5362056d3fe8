"""The trainers: their losses, evaluations, checkpoints and errors, in one process."""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForMaskedLM, EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import hf_linear_attn as hla
from hf_linear_attn.study.run_folder import StageLog
from hf_linear_attn.training.distillation import (
    DistillationConfig,
    DistillationTrainer,
    FinetuningConfig,
    FinetuningTrainer,
)
from hf_linear_attn.training.losses import row_losses
from hf_linear_attn.training.resumable import EpochSampler, InterruptedRunError, SeededCollator
from hf_linear_attn.training.transfer import AttentionTransferLoss
from tests.subprocesses import run_python
from tests.tiny_models import tiny_model
from tests.training.tiny_data import (
    Rows,
    assert_same_weights,
    classifier,
    collate,
    collate_masked,
    config,
    logged,
    weights,
)
from tests.training.tiny_runs import Killed, kill


def make_trainer(kind: str, folder: Path, **changes: Any) -> Any:
    """A trainer of each kind on a model with dropout; 30 rows, so that six steps end in the middle of an epoch."""
    options: dict[str, Any] = {"train_dataset": Rows(30), "data_collator": collate, **changes.pop("trainer", {})}
    if kind == "finetune":
        changes = {"learning_rate": 1e-3, "train_sampling_strategy": "group_by_length", **changes}
        arguments = config(folder, **changes)
        return FinetuningTrainer(classifier(dropout=0.1), arguments, **options)
    if kind == "masked":
        torch.manual_seed(1)
        model = tiny_model("bert", AutoModelForMaskedLM, hidden_dropout_prob=0.1)
        options["data_collator"] = collate_masked
        return FinetuningTrainer(model, config(folder, learning_rate=1e-3, **changes), **options)
    teacher = classifier(dropout=0.1)
    student: Any = hla.patch_model(copy.deepcopy(teacher), "hedgehog")
    if kind == "adapters":
        student = adapted(student)
    changes = {"learning_rate": 1e-3, "disable_dropout": False, **changes}
    arguments = config(folder, DistillationConfig, **changes)
    return DistillationTrainer(student, None if kind == "adapters" else teacher, arguments, **options)


def adapted(model: Any) -> Any:
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["query", "value"]))
    for name, parameter in model.named_parameters():
        if ".linear_attention." in name:
            parameter.requires_grad_(True)
    return model


class At(TrainerCallback):
    """Calls a function at the end of a step."""

    def __init__(self, step: int, function: Any) -> None:
        self.step = step
        self.function = function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.function()


# --------------------------------------------------------------------------------------------------------------------
# Resumption

KINDS = ["finetune", "masked", "distill", "adapters"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    undisturbed = make_trainer(kind, tmp_path / "undisturbed", save_steps=3)
    undisturbed.train()
    expected = weights(undisturbed.model)
    interrupted = make_trainer(kind, tmp_path / "killed", save_steps=3, trainer={"callbacks": [At(5, kill)]})
    with pytest.raises(Killed):
        interrupted.train()
    resumed = make_trainer(kind, tmp_path / "killed", save_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(resumed.model, expected)
    assert logged(resumed) == logged(undisturbed)
    assert resumed.state.global_step == 6


def test_a_resumed_run_counts_the_evaluations_before_it(tmp_path: Path) -> None:
    """Scores fall from step to step: the third evaluation is the second without a better one."""
    scores = itertools.count(0, -1)
    options = {"eval_dataset": Rows(4), "compute_metrics": lambda prediction: {"score": next(scores)}}
    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    changes |= {"metric_for_best_model": "score", "greater_is_better": True}

    def make(*callbacks: Any) -> Any:
        trainer = {**options, "callbacks": [EarlyStoppingCallback(2), *callbacks]}
        return make_trainer("finetune", tmp_path, **changes, trainer=trainer)

    with pytest.raises(Killed):
        make(At(3, kill)).train()
    resumed = make()
    resumed.train(resume_from_checkpoint=True)
    assert (resumed.state.global_step, resumed.state.best_global_step) == (3, 1)


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
import torch
from tests.training.test_trainers import At, make_trainer
torch.set_num_threads(int(sys.argv[2]))  # sums in another number of threads have other bits
kill = At(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
make_trainer("distill", Path(sys.argv[1]), save_steps=3, trainer={"callbacks": [kill]}).train()
"""


@pytest.mark.slow
def test_a_process_that_was_killed_is_resumed_with_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL, as by the operating system when memory runs out."""
    undisturbed = make_trainer("distill", tmp_path / "undisturbed", save_steps=3)
    undisturbed.train()
    killed = run_python("-c", KILLED_RUN, tmp_path / "killed", torch.get_num_threads())
    assert killed.returncode == -signal.SIGKILL
    resumed = make_trainer("distill", tmp_path / "killed", save_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(resumed.model, weights(undisturbed.model))


@pytest.mark.parametrize("kind", ["finetune", "distill"])
@pytest.mark.parametrize("moment", ["_save_optimizer_and_scheduler", "_save_rng_state"])
def test_killed_while_saving(kind: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint before stays, and is the one that the resumed run takes."""
    trainer = make_trainer(kind, tmp_path, save_steps=2)
    with monkeypatch.context() as patched:
        trainer.add_callback(At(4, lambda: patched.setattr(Trainer, moment, kill)))
        with pytest.raises(Killed):
            trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = make_trainer(kind, tmp_path, save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert {path.name for path in tmp_path.iterdir()} >= {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["finetune", "distill"])
def test_signals_save_a_checkpoint(number: signal.Signals, kind: str, tmp_path: Path) -> None:
    handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    previous = signal.signal(number, handler)  # a job in the background is started with SIGINT ignored
    trainer = make_trainer(kind, tmp_path, save_strategy="best", eval_strategy="steps", metric_for_best_model="loss",
                           eval_steps=1, trainer={"eval_dataset": Rows(9, 1)})  # fmt: skip
    trainer.add_callback(At(3, lambda: os.kill(os.getpid(), number)))
    with pytest.raises(
        InterruptedRunError, match=r"after step 3 of 6.*checkpoint-3.*resume_from_checkpoint=True"
    ) as error:
        trainer.train()
    assert error.value.code == 128 + number
    assert signal.signal(number, previous) is handler
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").is_file()


def test_another_number_of_processes_cannot_resume(tmp_path: Path) -> None:
    make_trainer("finetune", tmp_path, save_steps=3).train()
    checkpoint = tmp_path / "checkpoint-6"
    for process in (0, 1):
        (checkpoint / f"rng_state_{process}.pth").write_bytes((checkpoint / "rng_state.pth").read_bytes())
    with pytest.raises(ValueError, match=r"written by 2 process\(es\), and this run has 1"):
        make_trainer("finetune", tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_holds_the_arguments_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the hidden folder that it is written to; and it is pushed once it has its name."""
    pushed: list[tuple[str, bool]] = []
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, **kwargs: None)
    monkeypatch.setattr(
        Trainer,
        "_push_from_checkpoint",
        lambda self, folder: pushed.append((folder, (Path(folder) / "trainer_state.json").is_file())),
    )
    trainer = make_trainer("finetune", tmp_path, save_steps=2, max_steps=2, push_to_hub=True)
    trainer.train()
    arguments = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert (Path(arguments.output_dir), arguments.push_to_hub) == (tmp_path, True)
    assert pushed == [(str(tmp_path / "checkpoint-2"), True)]


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        make_trainer("finetune", tmp_path).train(resume_from_checkpoint=True)


def test_the_best_step_is_loaded_and_survives_a_move(tmp_path: Path) -> None:
    scores = iter([0.2, 0.7, 0.7, 0.4, 0.1])
    states: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        states.append(weights(trainer.model))
        return {"score": next(scores)}

    changes: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "score",
        "greater_is_better": True, "load_best_model_at_end": True, "save_total_limit": 2,
    }  # fmt: skip
    options = {"eval_dataset": Rows(9, 1), "compute_metrics": metrics}
    first = {**options, "callbacks": [At(4, kill), StageLog("finetune", tmp_path / "log.jsonl", save_steps=3)]}
    trainer = make_trainer("finetune", tmp_path / "old", max_steps=5, **changes, trainer=first)
    with pytest.raises(Killed):
        trainer.train()
    assert {path.name for path in (tmp_path / "old").iterdir()} == {"checkpoint-2", "checkpoint-3"}
    (tmp_path / "old").rename(tmp_path / "new")
    trainer = make_trainer("finetune", tmp_path / "new", max_steps=5, **changes, trainer=options)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_global_step == 2
    assert_same_weights(trainer.model, states[1])


# --------------------------------------------------------------------------------------------------------------------
# Fine-tuning


@pytest.mark.parametrize("targets", ["class", "score", "tokens"])
def test_accumulated_batches_are_one_large_batch(targets: str, tmp_path: Path) -> None:
    """Rows of a language model have different numbers of targets."""
    losses, norms = {}, {}
    for batch, accumulation in ((8, 1), (2, 4)):
        if targets == "tokens":
            torch.manual_seed(0)
            model = tiny_model("gpt2")
        else:
            model = classifier(num_labels=1 if targets == "score" else 2)
        arguments = config(
            tmp_path / str(batch),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
            save_strategy="no",
        )
        trainer = FinetuningTrainer(model, arguments, train_dataset=Rows(32, targets=targets), data_collator=collate)
        trainer.train()
        losses[batch], norms[batch] = logged(trainer), logged(trainer, "grad_norm")
    assert losses[2] == pytest.approx(losses[8], rel=1e-4)
    assert norms[2] == pytest.approx(norms[8], rel=1e-3)


@pytest.mark.parametrize("targets", ["class", "tokens"])
def test_the_loss_of_an_evaluation_is_a_mean_over_targets(targets: str, tmp_path: Path) -> None:
    model = tiny_model("gpt2") if targets == "tokens" else classifier()
    rows = Rows(11, targets=targets)
    trainer = FinetuningTrainer(
        model, config(tmp_path, per_device_eval_batch_size=4), eval_dataset=rows, data_collator=collate
    )
    total = count = 0.0
    model.requires_grad_(False)
    for row in rows.rows:
        batch = collate([row])
        logits = model(batch["input_ids"]).logits.double().log_softmax(-1)[0]
        labels = batch["labels"].tolist()
        if targets == "class":
            total, count = total - float(logits[labels[0]]), count + 1
        else:
            total -= sum(float(logits[index - 1, labels[0][index]]) for index in range(1, len(labels[0])))
            count += len(labels[0]) - 1
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["eval_loss_stderr"] > 0
    assert "eval_loss_stderr" not in trainer.evaluate(Rows(1, targets=targets))


def test_validation_data_without_targets_are_an_error(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}]
    trainer = FinetuningTrainer(tiny_model("gpt2"), config(tmp_path), eval_dataset=rows, data_collator=collate)
    with pytest.raises(ValueError, match="no token to predict"):
        trainer.evaluate()


def test_masked_tokens_are_the_same_in_every_evaluation(tmp_path: Path) -> None:
    trainer = make_trainer("masked", tmp_path, trainer={"eval_dataset": Rows(9, 1)})
    torch.manual_seed(7)
    first = trainer.evaluate()["eval_loss"]
    torch.manual_seed(8)
    assert trainer.evaluate()["eval_loss"] == first


@pytest.mark.parametrize("kind", ["finetune", "distill"])
def test_a_loss_that_is_not_finite_is_an_error(kind: str, tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"became (nan|inf) at step \d. Lower the learning rate \(now "):
        make_trainer(kind, tmp_path, learning_rate=1e30, lr_scheduler_type="constant").train()


def test_learned_parts_have_a_rate_of_their_own(tmp_path: Path) -> None:
    model = hla.patch_model(classifier(), "hedgehog")
    trainer = FinetuningTrainer(model, config(tmp_path, learning_rate=1e-3, learned_lr=1e-2, weight_decay=0.1))
    trainer.create_optimizer()
    groups = {(group["lr"], group["weight_decay"]): group["params"] for group in trainer.optimizer.param_groups}
    assert groups.keys() == {(1e-3, 0.1), (1e-3, 0.0), (1e-2, 0.0)}
    learned = {id(value) for name, value in model.named_parameters() if ".linear_attention." in name}
    assert {id(value) for value in groups[1e-2, 0.0]} == learned
    assert all(value.dim() >= 2 for value in groups[1e-3, 0.1])
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        FinetuningTrainer(model, config(tmp_path)).create_optimizer()


@pytest.mark.parametrize("kind", ["finetune", "distill"])
def test_the_model_is_not_left_in_mixed_precision(kind: str, tmp_path: Path) -> None:
    trainer = make_trainer(kind, tmp_path, bf16=True, max_steps=2)
    trainer.train()
    with torch.no_grad():
        assert trainer.model(torch.ones(1, 5, dtype=torch.long)).logits.dtype == torch.float32
    assert "forward" not in vars(trainer.model) or not hasattr(trainer.model.forward, "__wrapped__")


# --------------------------------------------------------------------------------------------------------------------
# Distillation


@pytest.mark.slow
def test_dropout_of_the_student_is_off(tmp_path: Path) -> None:
    """The default: the same losses as of a model that has none; also where activations are recomputed."""
    losses = []
    for name, dropout, changes in (("none", 0.0, {}), ("off", 0.1, {}), ("on", 0.1, {"disable_dropout": False}),
                                   ("recomputed", 0.1, {"activation_checkpointing": True})):  # fmt: skip
        teacher = classifier(dropout=dropout)
        student = hla.patch_model(copy.deepcopy(teacher), "hedgehog")
        arguments = config(tmp_path / name, DistillationConfig, max_steps=3, save_strategy="no", **changes)
        trainer = DistillationTrainer(student, teacher, arguments, train_dataset=Rows(30), data_collator=collate)
        trainer.train()
        losses.append(logged(trainer))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[3] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] != pytest.approx(losses[0], rel=1e-3)


def test_noise_in_embeddings_is_no_dropout(tmp_path: Path) -> None:
    losses = []
    for alpha in (None, 50.0):
        trainer = make_trainer("distill", tmp_path, disable_dropout=True, max_steps=1, neftune_noise_alpha=alpha)
        trainer.train()
        losses.append(logged(trainer, "loss")[0])
    assert losses[0] != losses[1]


def test_dropout_inside_of_layers_is_off_where_activations_are_recomputed(tmp_path: Path) -> None:
    """OPT drops activations in its layers by themselves, not in modules of their own."""
    losses = []
    for dropout in (0.0, 0.5):
        torch.manual_seed(1)
        teacher = tiny_model("opt", dropout=dropout)
        student = hla.patch_model(copy.deepcopy(teacher), "hedgehog")
        arguments = config(tmp_path, DistillationConfig, max_steps=2, save_strategy="no", activation_checkpointing=True)
        data: dict[str, Any] = {"train_dataset": Rows(16, targets="tokens"), "data_collator": collate}
        trainer = DistillationTrainer(student, teacher, arguments, **data)
        trainer.train()
        losses.append(logged(trainer))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("recomputed", [False, True])
def test_features_are_drawn_anew_without_dropout(recomputed: bool, tmp_path: Path) -> None:
    teacher = classifier(dropout=0.1)
    student = hla.patch_model(copy.deepcopy(teacher), "favor+", redraw_every=2)
    weights_before = {name: value for name, value in weights(student).items() if name.endswith("feature_map.weight")}
    changes = {"max_steps": 3, "save_strategy": "no", "activation_checkpointing": recomputed}
    arguments = config(tmp_path, DistillationConfig, **changes)
    DistillationTrainer(student, teacher, arguments, train_dataset=Rows(30), data_collator=collate).train()
    passes = [int(value) for name, value in student.named_buffers() if name.endswith("passes")]
    assert passes == [3] * len(weights_before) != []
    assert not any(torch.equal(weights(student)[name], value) for name, value in weights_before.items())


def test_the_teacher_is_restored(tmp_path: Path) -> None:
    """While it is a teacher it is frozen and without dropout; afterwards it can be trained on."""
    teacher = classifier(dropout=0.1).train()
    teacher.get_input_embeddings().requires_grad_(False)
    required = {name: value.requires_grad for name, value in teacher.named_parameters()}
    meanwhile: list[bool] = []

    def look() -> None:
        meanwhile.append(teacher.training or any(value.requires_grad for value in teacher.parameters()))

    student = hla.patch_model(copy.deepcopy(teacher), "hedgehog")
    arguments = config(tmp_path, DistillationConfig, max_steps=2, save_strategy="no")
    options: dict[str, Any] = {"train_dataset": Rows(30), "data_collator": collate, "callbacks": [At(1, look)]}
    DistillationTrainer(student, teacher, arguments, **options).train()
    assert meanwhile == [False]
    assert teacher.training
    assert {name: value.requires_grad for name, value in teacher.named_parameters()} == required
    options["callbacks"] = [At(1, kill)]
    with pytest.raises(Killed):
        DistillationTrainer(student, teacher, arguments, **options).train()
    assert {name: value.requires_grad for name, value in teacher.named_parameters()} == required


def test_a_student_needs_a_teacher(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no teacher\. Pass teacher_model, or a model with PEFT adapters"):
        DistillationTrainer(hla.patch_model(classifier(), "hedgehog"), None, config(tmp_path, DistillationConfig))


@pytest.mark.parametrize("own", ["bias", "weight", "none"])
def test_a_teacher_within_adapters_does_not_change(own: str, tmp_path: Path) -> None:
    """Biases and weights of the base model stay as they were trained where the adapters are off."""
    options: dict[str, Any] = {"bias": "all"} if own == "bias" else {"modules_to_save": ["classifier"]}
    patched: Any = hla.patch_model(classifier(), "hedgehog")
    student: Any = get_peft_model(patched, LoraConfig(r=2, target_modules=["query", "value"], **options))
    if own == "weight":
        student.get_base_model().bert.embeddings.word_embeddings.weight.requires_grad_(True)
    arguments = config(tmp_path, DistillationConfig, learning_rate=1e-2, max_steps=2)
    trainer = DistillationTrainer(student, None, arguments, train_dataset=Rows(8), data_collator=collate)
    inputs = {name: value for name, value in collate(Rows(4).rows).items() if name != "labels"}
    before = trainer.teacher_outputs(inputs, False).logits
    if own == "none":
        trainer.train()
        assert torch.equal(trainer.teacher_outputs(inputs, False).logits, before)
    else:
        with pytest.raises(ValueError, match=rf"would change the teacher.*{own}.* no adapters"):
            trainer.train()


# --------------------------------------------------------------------------------------------------------------------
# Configs, callbacks, batches


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (FinetuningConfig, {"learned_lr": 0.0}, "learned_lr: must be a finite number above 0, got 0.0"),
        (DistillationConfig, {"temperature": 0.0}, "temperature: must be a finite number above 0"),
        (DistillationConfig, {"hidden_weight": -1.0}, "hidden_weight: must be a finite number of at least 0, got -1.0"),
        (DistillationConfig, {"hidden_weight": 0, "logits_weight": 0, "task_weight": 0}, "no loss to minimise"),
    ],
)
def test_bad_configs(cls: Any, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, cls, **changes)


def test_a_trainer_wants_its_config(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must be a FinetuningConfig, got a TrainingArguments"):
        FinetuningTrainer(classifier(), TrainingArguments(str(tmp_path), use_cpu=True))


@pytest.mark.slow
def test_the_log_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    callbacks = [StageLog("distill", log), At(5, kill)]
    with pytest.raises(Killed):
        make_trainer("distill", tmp_path / "out", save_steps=3, trainer={"callbacks": callbacks}).train()
    with log.open("a") as file:
        file.write('{"step": 5, "sta')  # the line in which a process was killed
    resumed = make_trainer("distill", tmp_path / "out", trainer={"callbacks": callbacks[:1]})
    resumed.train(resume_from_checkpoint=True)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert all(row["stage"] == "distill" for row in rows)
    assert {"loss", "task_loss", "logits_loss", "hidden_loss"} <= rows[0].keys()
    parts = rows[0]
    assert parts["loss"] == pytest.approx(parts["task_loss"] + parts["logits_loss"] + parts["hidden_loss"], rel=1e-5)


def test_orders_depend_on_seed_and_epoch() -> None:
    sampler = EpochSampler(20, seed=3)
    orders = []
    for epoch in (0, 1, 0):
        sampler.epoch = epoch
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == list(range(20)) == sorted(orders[1])


def test_steps_of_similar_length_are_in_random_order() -> None:
    lengths = [index % 50 for index in range(402)]
    grouped = list(EpochSampler(402, seed=3, lengths=lengths, batch_size=4))
    assert sorted(grouped) == list(range(402))
    steps = [[lengths[row] for row in grouped[start : start + 4]] for start in range(0, 400, 4)]
    assert max(max(step) - min(step) for step in steps) <= 8
    rises = sum(first[0] < second[0] for first, second in itertools.pairwise(steps))
    assert 30 < rises < 70


def test_random_collators_leave_the_generators_by_itself() -> None:
    rows = Rows(4, targets="tokens").rows
    collator = SeededCollator(collate_masked, seed=1)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = collator(rows)["input_ids"]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(collator(rows)["input_ids"], first)
    collator.set_epoch(1)
    assert not torch.equal(collator(rows)["input_ids"], first)


def test_row_losses_are_the_summed_cross_entropy() -> None:
    logits, labels = torch.randn(3, 6, 7), torch.randint(0, 7, (3, 6))
    labels[0, 2:], labels[2, 4:] = -100, -100
    losses, counts = row_losses(logits, labels, shift=True)
    assert counts.tolist() == [1, 5, 3]
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1), reduction="none"
    )
    torch.testing.assert_close(losses, expected.reshape(3, 5).sum(1))


def test_a_model_is_complete_after_training(tmp_path: Path) -> None:
    trainer = make_trainer("finetune", tmp_path, max_steps=1, save_strategy="no")
    trainer.train()
    assert trainer.complete_model() is trainer.model
    loss = AttentionTransferLoss(hla.patch_model(trainer.model, "hedgehog"))(collate(Rows(3).rows))
    assert torch.isfinite(loss).all()
