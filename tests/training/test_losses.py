"""Losses of fine-tuning and distillation against their definitions in float64, written out row by row."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorWithFlattening,
    GPT2LMHeadModel,
    XLMConfig,
    XLMWithLMHeadModel,
)
from transformers.modeling_outputs import Seq2SeqLMOutput, SequenceClassifierOutput

import hf_linear_attn as hla
from hf_linear_attn.integration.exact import AttentionCall
from hf_linear_attn.mechanisms.softmax import softmax_attention
from hf_linear_attn.training import losses
from hf_linear_attn.training.distillation import (
    DistillationConfig,
    DistillationTrainer,
    FinetuningTrainer,
    without_dropout,
)
from hf_linear_attn.training.losses import (
    TARGETS,
    count_targets,
    hidden_loss,
    layer_loss,
    logits_loss,
    model_losses,
    row_losses,
    select_targets,
    task_loss,
)
from hf_linear_attn.utils.models import mean_pooling
from tests.comparing import assert_close
from tests.inputs import padded_batch, qkv, token_ids
from tests.integration.packed import flattened
from tests.small import mechanism, patched
from tests.tiny_models import BERT, DECODERS, GPT2, VOCABULARY, tiny_model
from tests.training.tiny_data import Rows, classifier, collate, config, logged

# --------------------------------------------------------------------------------------------------------------------
# Definitions


def log_softmax_of(row: list[float]) -> list[float]:
    shift = max(row)
    total = math.log(sum(math.exp(value - shift) for value in row)) + shift
    return [value - total for value in row]


def cross_entropy_of(rows: list[list[float]], labels: list[int]) -> float:
    return sum(-log_softmax_of(row)[label] for row, label in zip(rows, labels, strict=True))


def divergence_of(student: list[list[float]], teacher: list[list[float]], temperature: float) -> float:
    total = 0.0
    for row, target in zip(student, teacher, strict=True):
        log_q = log_softmax_of([value / temperature for value in row])
        log_p = log_softmax_of([value / temperature for value in target])
        total += sum(math.exp(p) * (p - q) for q, p in zip(log_q, log_p, strict=True))
    return temperature**2 * total


def hidden_of(student: Any, teacher: Any, mask: list[list[int]]) -> list[float]:
    """One error for each row of nested lists: layers x rows x tokens x width."""
    errors = []
    for index, row in enumerate(mask):
        layers = []
        for computed, target in zip(student[1:], teacher[1:], strict=True):
            difference = norm = 0.0
            for token, real in enumerate(row):
                if real:
                    pairs = zip(computed[index][token], target[index][token], strict=True)
                    difference += sum((x - y) ** 2 for x, y in pairs)
                    norm += sum(y**2 for y in target[index][token])
            layers.append(difference / norm)
        errors.append(sum(layers) / len(layers))
    return errors


def lists(tensor: torch.Tensor) -> Any:
    return tensor.detach().double().tolist()


def close(actual: torch.Tensor, expected: Any) -> None:
    expected = expected if isinstance(expected, list) else [expected]
    assert_close(actual.detach().reshape(-1), torch.tensor(expected, dtype=torch.float64))


# --------------------------------------------------------------------------------------------------------------------
# Terms


@pytest.mark.slow
def test_cross_entropy() -> None:
    logits, labels = torch.randn(5, 7) * 3, torch.tensor([0, 6, 3, 3, 1])
    close(task_loss(logits, labels), cross_entropy_of(lists(logits), labels.tolist()))
    assert task_loss(logits[:0], labels[:0]) == 0


def test_squared_error_of_scores() -> None:
    logits, labels = torch.randn(5, 1), torch.randn(5)
    expected = sum((row[0] - label) ** 2 for row, label in zip(lists(logits), lists(labels), strict=True))
    close(task_loss(logits, labels), expected)
    close(logits_loss(logits, labels[:, None], 3.0), expected)
    close(task_loss(logits[:1], labels[:1]), (logits[0, 0] - labels[0]).double().item() ** 2)


def test_binary_cross_entropy_of_several_labels() -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
    probability = logits.double().sigmoid()
    expected = -(labels * probability.log() + (1 - labels) * (1 - probability).log())
    close(task_loss(logits, labels), float(expected.mean(1).sum()))
    losses, counts = row_losses(logits, labels, shift=False)
    close(losses, lists(expected.mean(1)))
    assert counts.tolist() == [1] * 4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 10.0])
def test_divergence_of_outputs(temperature: float) -> None:
    student, teacher = torch.randn(4, 6) * 2, torch.randn(4, 6) * 2
    close(logits_loss(student, teacher, temperature), divergence_of(lists(student), lists(teacher), temperature))
    assert logits_loss(student, student, temperature) == pytest.approx(0, abs=1e-5)
    # A constant added to the outputs of a row changes nothing.
    shifted = logits_loss(student + torch.randn(4, 1), teacher, temperature)
    assert_close(shifted, logits_loss(student, teacher, temperature))


def test_the_temperature_leaves_the_size_of_gradients() -> None:
    """T² makes up for the 1/T² of the gradient of softened outputs (Hinton et al. 2015, section 2.1)."""
    teacher = torch.randn(4, 6) * 0.01
    sizes = []
    for temperature in (10.0, 100.0):
        student = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 0.01).requires_grad_()
        logits_loss(student, teacher, temperature).backward()
        sizes.append(student.grad.norm().item())
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states(dtype: torch.dtype) -> None:
    student = tuple(torch.randn(2, 4, 3).to(dtype) for _ in range(4))
    teacher = tuple(torch.randn(2, 4, 3).to(dtype) for _ in range(4))
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    states = [[lists(layer) for layer in layers] for layers in (student, teacher)]
    loss = hidden_loss(student, teacher, mask)
    assert loss.dtype == torch.float32
    assert loss.shape == (2,)
    close(loss, hidden_of(*states, mask.tolist()))
    close(hidden_loss(student, teacher, mask.bool()), hidden_of(*states, mask.tolist()))
    close(hidden_loss(student, teacher, None), hidden_of(*states, [[1] * 4] * 2))
    assert not hidden_loss(student, student, mask).any()
    # The embeddings, and whatever padding holds, do not count.
    changed = (student[0] + 1, *(layer.clone() for layer in student[1:]))
    changed[2][0, 3], changed[2][1, 0] = float("inf"), float("nan")
    assert_close(hidden_loss(changed, teacher, mask), loss)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        hidden_loss(student[:-1], teacher, mask)


@pytest.mark.parametrize("shift", [False, True])
def test_targets_of_tokens(shift: bool) -> None:
    logits, labels = torch.randn(2, 4, 5), torch.tensor([[1, -100, 2, 3], [4, 0, -100, -100]])
    rows, classes = select_targets(logits, labels, shift)
    positions = [(0, 1, 2), (0, 2, 3), (1, 0, 0)] if shift else [(0, 0, 1), (0, 2, 2), (0, 3, 3), (1, 0, 4), (1, 1, 0)]
    assert classes.tolist() == [label for *_, label in positions]
    assert torch.equal(rows, torch.stack([logits[row, token] for row, token, _ in positions]))
    assert count_targets(labels, shift).tolist() == ([2, 1] if shift else [3, 2])


# --------------------------------------------------------------------------------------------------------------------
# The loss of distillation over tiny models


def terms(student: Any, teacher: Any, batch: Any, folder: Path, **weights: float) -> Any:
    """The terms of the loss of a training batch, its value, and the trainer."""
    trainer = DistillationTrainer(student, teacher, config(folder, DistillationConfig, **weights))
    parts, factors, _ = trainer.loss_terms(student, dict(batch), batch["labels"])
    return parts, sum(factors[name] * part for name, part in parts.items()), trainer


def outputs(model: Any, batch: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)


def batch_of(targets: str) -> dict[str, torch.Tensor]:
    return collate(Rows(3, targets=targets).rows)


WEIGHTS = {"logits_weight": 0.7, "task_weight": 0.3, "hidden_weight": 1.9, "temperature": 3.0}


@pytest.mark.parametrize("targets", ["class", "score", "tokens"])
def test_distillation_is_its_definition(targets: str, tmp_path: Path) -> None:
    if targets == "tokens":
        student, teacher = GPT2.build(), GPT2.build()
    else:
        labels = 1 if targets == "score" else 3
        student, teacher = classifier(1, num_labels=labels), classifier(2, num_labels=labels)
    batch = batch_of(targets)
    parts, loss, _ = terms(student, teacher, batch, tmp_path, **WEIGHTS)
    out, target = outputs(student, batch), outputs(teacher, batch)
    shift = targets == "tokens"
    rows, classes = (lists(part) for part in select_targets(out.logits, batch["labels"], shift))
    target_rows = lists(select_targets(target.logits, batch["labels"], shift)[0])
    if targets == "score":
        expected = {
            "task": sum((row[0] - label) ** 2 for row, label in zip(rows, classes, strict=True)),
            "logits": sum((row[0] - other[0]) ** 2 for row, other in zip(rows, target_rows, strict=True)),
        }
    else:
        expected = {
            "task": cross_entropy_of(rows, [int(label) for label in classes]),
            "logits": divergence_of(rows, target_rows, 3.0),
        }
    states = [[lists(layer) for layer in model.hidden_states] for model in (out, target)]
    errors = hidden_of(*states, batch["attention_mask"].tolist())
    counts = [len(row["input_ids"]) - 1 if shift else 1 for row in Rows(3, targets=targets).rows]
    expected["hidden"] = sum(error * count for error, count in zip(errors, counts, strict=True))
    assert parts.keys() == expected.keys()
    for name, value in expected.items():
        close(parts[name], value)
    close(loss, 0.7 * expected["logits"] + 0.3 * expected["task"] + 1.9 * expected["hidden"])


def test_terms_of_weight_zero_are_not_computed(tmp_path: Path) -> None:
    student, teacher, batch = classifier(1), classifier(2), batch_of("class")
    calls: list[bool] = []
    forward = teacher.forward

    def record(*args: Any, output_hidden_states: bool = False, **kwargs: Any) -> Any:
        calls.append(output_hidden_states)
        return forward(*args, output_hidden_states=output_hidden_states, **kwargs)

    teacher.forward = record
    for name in ("logits", "task", "hidden"):
        calls.clear()
        weights = {f"{other}_weight": 2.0 * (other == name) for other in ("logits", "task", "hidden")}
        parts, loss, _ = terms(student, teacher, batch, tmp_path, **weights)
        assert parts.keys() == {name}
        close(loss, 2 * parts[name].double().item())
        assert calls == ([] if name == "task" else [name == "hidden"])  # a teacher that is not needed takes no time


def test_equal_models_have_nothing_to_learn_from_each_other(tmp_path: Path) -> None:
    teacher = classifier()
    parts, loss, _ = terms(copy.deepcopy(teacher), teacher, batch_of("class"), tmp_path, task_weight=0.0)
    assert loss.item() == pytest.approx(0, abs=1e-5)
    assert parts["hidden"] == 0


@pytest.mark.parametrize("family", [BERT, GPT2], ids=str)
def test_only_the_student_gets_gradients(family: Any, tmp_path: Path) -> None:
    teacher, student = family.build(), patched("hedgehog", family)
    terms(student, teacher, batch_of("tokens"), tmp_path)[1].backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in student.parameters())
    learned = [parameter for name, parameter in student.named_parameters() if "linear_attention" in name]
    assert learned
    assert all(parameter.grad.abs().sum() > 0 for parameter in learned)


def test_padding_changes_nothing(tmp_path: Path) -> None:
    student, teacher, batch = classifier(1), classifier(2), batch_of("class")
    longer = {
        name: tensor if name == "labels" else nn.functional.pad(tensor, (0, 5), value=0)
        for name, tensor in batch.items()
    }
    losses = [terms(student, teacher, each, tmp_path, **WEIGHTS)[1].detach() for each in (longer, batch)]
    assert_close(losses[0], losses[1])


@pytest.mark.parametrize("family", DECODERS, ids=str)
def test_packed_documents_are_apart_for_the_teacher_too(family: Any, tmp_path: Path) -> None:
    """It is exact, and with a cache Transformers takes positions that begin again for positions."""
    rows = [{"input_ids": ids, "labels": ids} for ids in (token_ids(1, size, seed=size)[0].tolist() for size in (5, 9))]
    teacher, student, losses = family.build(), patched("hedgehog", family), []
    for name, collator in (("padded", collate), ("packed", DataCollatorWithFlattening(return_tensors="pt"))):
        settings: dict[str, Any] = {"max_steps": 1, "save_strategy": "no", "hidden_weight": 0.0}
        arguments = config(tmp_path / name, DistillationConfig, **settings)
        options: dict[str, Any] = {"train_dataset": rows, "data_collator": collator}
        trainer = DistillationTrainer(copy.deepcopy(student), teacher, arguments, **options)
        trainer.train()
        assert teacher.config.use_cache
        losses += logged(trainer)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_packed_documents_of_an_encoder_need_a_teacher_that_separates_them(tmp_path: Path) -> None:
    batch = {**flattened(), "labels": flattened()["input_ids"]}
    with pytest.raises(NotImplementedError, match="BertForMaskedLM is exact and would run packed documents"):
        terms(patched("hedgehog", BERT), BERT.build(), batch, tmp_path)
    terms(patched("hedgehog", BERT), patched("window", BERT), batch, tmp_path)  # this one knows their boundaries


@pytest.mark.parametrize("padding", ["left", "right"])
def test_the_next_tokens_of_a_padded_batch_are_those_of_its_rows(padding: str) -> None:
    model, tokens = GPT2.build(), [token_ids(1, length, seed=length)[0] for length in (5, 9)]
    padded, single = padded_batch(tokens, padding), [{"input_ids": row[None]} for row in tokens]
    losses = [model_losses(model(**batch), batch, None) for batch in (padded, *single)]
    assert_close(losses[0], torch.cat(losses[1:]))


def test_distillation_of_an_encoder_decoder(tmp_path: Path) -> None:
    """Of the tokens with a label, by outputs alone: its hidden states are of two sequences."""
    sides = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    shape: dict[str, Any] = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "dropout": 0.0, **sides}
    teacher = BartForConditionalGeneration(BartConfig(init_std=0.3, vocab_size=VOCABULARY, **shape)).eval()
    student = hla.patch_model(copy.deepcopy(teacher), "elu")
    batch = padded_batch([token_ids(1, length, seed=length)[0] for length in (9, 5)], "right")
    batch["labels"] = token_ids(2, 7, seed=1)
    batch["labels"][0, 4:] = -100
    parts = terms(student, teacher, batch, tmp_path, hidden_weight=0.0, temperature=2.0)[0]
    real = batch["labels"] != -100
    with torch.no_grad():
        own, expected = (model(**batch).logits[real] for model in (student, teacher))
    close(parts["task"], functional.cross_entropy(own, batch["labels"][real], reduction="sum").item())
    close(parts["logits"], divergence_of(own.tolist(), expected.tolist(), 2.0))
    with pytest.raises(NotImplementedError, match="BartForConditionalGeneration has no hidden_states"):
        terms(student, teacher, batch, tmp_path, hidden_weight=1.0)


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression", "single_label_classification"])
def test_the_divergence_is_that_of_the_problem(problem: str) -> None:
    """Of several labels each is a coin of its own; several numbers have no distribution at all."""
    exact, own = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    coins = [torch.distributions.Bernoulli(logits=part) for part in (exact, own)]
    classes = [torch.distributions.Categorical(logits=part) for part in (exact, own)]
    expected = {
        "multi_label_classification": torch.distributions.kl_divergence(*coins).sum(-1),
        "regression": (exact - own).square().sum(-1),
        "single_label_classification": torch.distributions.kl_divergence(*classes),
    }
    outputs = [SequenceClassifierOutput(logits=part) for part in (own, exact)]
    assert_close(model_losses(outputs[0], {}, outputs[1], problem).double(), expected[problem])


def test_the_outputs_of_a_decoder_have_its_mask() -> None:
    mask, other = torch.tensor([[1, 1, 0]]), torch.tensor([[1, 0, 0]])
    outputs = [Seq2SeqLMOutput(logits=torch.randn(1, 3, 4)) for _ in range(2)]
    inputs = {"attention_mask": other, "decoder_input_ids": mask, "decoder_attention_mask": mask}
    assert len(model_losses(outputs[0], inputs, outputs[1])) == 2


@pytest.mark.parametrize("attention", ["window", "hedgehog", "exact"])
def test_a_carried_state_is_context_without_a_gradient(attention: str, tmp_path: Path) -> None:
    teacher, student = GPT2.build(), GPT2.build() if attention == "exact" else patched(attention, GPT2)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :5] = 0
    ids = torch.randint(4, 50, (3, 20), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    parts, loss, trainer = terms(student, teacher, batch, tmp_path, **WEIGHTS, carried_length=8)
    (counted,), count = trainer.get_batch_samples(iter([dict(batch)]), 1, torch.device("cpu"))
    assert int(count) == 3 * 11
    full = terms(student, teacher, counted, tmp_path, **WEIGHTS)[0]
    for name in ("task", "logits"):
        assert_close(parts[name], full[name])
    loss.backward()
    gradient = student.transformer.wpe.weight.grad.abs().sum(dim=1)
    assert not bool(gradient[:3].any())
    assert bool((gradient[8:20] > 0).all())


def test_a_carried_state_of_batches_with_other_inputs(tmp_path: Path) -> None:
    """Labels that are the tokens themselves, positions, and no mask."""
    ids = torch.randint(4, 50, (2, 20))
    batch = {"input_ids": ids, "labels": ids}
    student, teacher = patched("window", GPT2), GPT2.build()
    _, expected, trainer = terms(student, teacher, batch, tmp_path, carried_length=8)
    more = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(20).expand(2, -1)}
    assert_close(terms(student, teacher, batch | more, tmp_path, carried_length=8)[1], expected)
    trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    assert (ids >= 0).all()


def test_a_carried_state_in_half_precision_leaves_no_weight_without_a_gradient(tmp_path: Path) -> None:
    ids = torch.randint(4, 50, (2, 20))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    student = patched("window", GPT2)
    with torch.autocast("cpu", torch.bfloat16):
        loss = terms(student, GPT2.build(), batch, tmp_path, carried_length=8)[1]
    loss.backward()
    assert all(bool(parameter.grad.any()) for name, parameter in student.named_parameters() if name.endswith("weight"))


def test_a_state_that_cannot_be_carried_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="for causal language models, not BertForSequenceClassification"):
        terms(classifier(1), classifier(2), batch_of("class"), tmp_path, carried_length=2)
    with pytest.raises(ValueError, match=r"leaves no token to predict in rows of 8\. Lower it"):
        terms(patched("window", GPT2), GPT2.build(), batch_of("tokens"), tmp_path, carried_length=10)
    batch = batch_of("tokens")
    batch["labels"] = batch["labels"].clone()
    batch["labels"][:, 4:] = -100
    with pytest.raises(ValueError, match=r"leaves no token to predict in rows of 8\. Lower it"):
        terms(patched("window", GPT2), GPT2.build(), batch, tmp_path, carried_length=4)
    student = patched("window", GPT2).train()
    student.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="which gradient checkpointing excludes"):
        terms(student, GPT2.build(), batch_of("tokens"), tmp_path, carried_length=2)
    # A step without dropout leaves the model in evaluation mode, but not its layers.
    with without_dropout(student), pytest.raises(ValueError, match="which gradient checkpointing excludes"):
        terms(student, GPT2.build(), batch_of("tokens"), tmp_path, carried_length=2)
    with pytest.raises(ValueError, match="which gradient_checkpointing excludes"):
        config(tmp_path, DistillationConfig, carried_length=2, gradient_checkpointing=True)


def test_losses_of_rows_add_up(tmp_path: Path) -> None:
    """So that accumulation and processes give the gradient of the whole batch."""
    student, teacher, batch = classifier(1), classifier(2), batch_of("class")
    rows = [{name: tensor[at : at + 1] for name, tensor in batch.items()} for at in range(3)]
    parts = [terms(student, teacher, row, tmp_path, **WEIGHTS)[1].detach() for row in rows]
    assert_close(torch.stack(parts).sum(), terms(student, teacher, batch, tmp_path, **WEIGHTS)[1].detach())


def test_an_evaluation_has_the_loss_of_the_task_only(tmp_path: Path) -> None:
    student, teacher, batch = classifier(1), classifier(2), batch_of("class")
    _, _, trainer = terms(student, teacher, batch, tmp_path)
    with torch.no_grad():
        parts, factors, _ = trainer.loss_terms(student, dict(batch), batch["labels"])
    assert parts.keys() == {"task"}
    assert factors == {"task": 1.0}


def _keep(saved: list[Tensor], tensor: Tensor) -> Tensor:
    saved.append(tensor)
    return tensor


@pytest.mark.parametrize("kind", ["labels", "logits"])
def test_losses_of_many_targets_keep_little_for_gradients(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TARGETS * 2 + 7, 50, generator=generator, requires_grad=True)
    if kind == "labels":
        expected = torch.randint(50, (len(logits),), generator=generator)
        whole = torch.nn.functional.cross_entropy(logits, expected, reduction="sum")
        loss = partial(task_loss, logits, expected)
    else:
        expected = torch.randn(logits.shape, generator=generator)
        log_p, log_q = ((part / 2).log_softmax(-1) for part in (expected, logits))
        whole = 4 * (log_p.exp() * (log_p - log_q)).sum()
        loss = partial(logits_loss, logits, expected, 2.0)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(partial(_keep, saved), lambda tensor: tensor):
        value = loss()
    inputs = {tensor.untyped_storage().data_ptr() for tensor in (logits, expected)}
    assert not [tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in inputs]
    assert float(value.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
    (gradient,) = torch.autograd.grad(value, logits)
    (expected_gradient,) = torch.autograd.grad(whole, logits)
    assert torch.allclose(gradient, expected_gradient, atol=1e-5)


def test_queries_that_look_ahead_have_the_same_loss_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prefix a token sees later ones, which a block of queries must not lose."""
    allowed = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    allowed[..., :30, :30] = True
    query, key, value = qkv(40, batch=1)
    module = mechanism("hedgehog", causal=True)
    output = softmax_attention(query, key, value, allowed, 0.4)
    call = AttentionCall(nn.Module(), module, query, key, value, allowed, allowed, 0.4, True, output)
    whole = layer_loss(call, "weights", backward=False)
    monkeypatch.setattr(losses, "BLOCK_ENTRIES", 8 * 40)
    close(layer_loss(call, "weights", backward=False), float(whole))


# --------------------------------------------------------------------------------------------------------------------
# The loss of a step, against what the model computes by itself


def first_loss(model: Any, rows: Any, folder: Path, **changes: Any) -> float:
    trainer = FinetuningTrainer(
        model, config(folder, max_steps=1, **changes), train_dataset=rows, data_collator=collate
    )
    trainer.train()
    return float(logged(trainer)[0])


def own_loss(model: Any, batch: Any) -> float:
    with torch.no_grad():
        return float(model.eval()(**batch).loss)


def test_a_subclass_of_a_language_model_is_one(tmp_path: Path) -> None:
    class Mine(GPT2LMHeadModel):
        pass

    model: Any = tiny_model("gpt2", Mine)
    rows = Rows(8, targets="tokens")
    assert first_loss(model, rows, tmp_path, learning_rate=1e-9) == pytest.approx(own_loss(model, collate(rows.rows)))


@pytest.mark.parametrize("causal", [False, True])
def test_a_class_of_both_kinds_predicts_as_its_config_says(causal: bool, tmp_path: Path) -> None:
    """XLM's language model, which predicts the token in its place or the next one."""
    sizes = {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 1, "n_heads": 2, "dropout": 0.0}
    model: Any = XLMWithLMHeadModel(XLMConfig(causal=causal, attention_dropout=0.0, **sizes))
    rows = Rows(8, targets="tokens")
    batch = collate(rows.rows)
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    logits, labels = (logits[:, :-1], labels[:, 1:]) if causal else (logits, labels)
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert first_loss(model, rows, tmp_path, learning_rate=1e-9) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_several_labels_a_row(accumulated: int, tmp_path: Path) -> None:
    model, rows = classifier(num_labels=3, problem_type="multi_label_classification"), Rows(8)
    for number, row in enumerate(rows.rows):
        row["labels"] = [1.0, 0.0, float(number % 2)]
    expected = own_loss(model, {**collate(rows.rows), "labels": torch.tensor([row["labels"] for row in rows.rows])})
    steps = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 8 // accumulated}
    arguments = config(tmp_path, max_steps=1, learning_rate=1e-9, **steps)

    def floats(some: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {**collate([{**row, "labels": 0} for row in some]), "labels": torch.tensor([r["labels"] for r in some])}

    trainer = FinetuningTrainer(model, arguments, train_dataset=rows, data_collator=floats)
    trainer.train()
    assert logged(trainer)[0] == pytest.approx(expected, rel=1e-5)


def test_the_distillation_of_several_labels_a_row_takes_each_logit_as_a_distribution() -> None:
    student, teacher = torch.randn(2, 5, 3, dtype=torch.float64)
    for temperature in (1.0, 2.0):
        coins = [torch.distributions.Bernoulli(logits=logits / temperature) for logits in (teacher, student)]
        expected = temperature**2 * torch.distributions.kl_divergence(*coins).mean(-1).sum()
        loss = losses.logits_loss(student, teacher, temperature, several_labels=True)
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_batches_without_labels_have_the_loss_of_the_model(accumulated: int, tmp_path: Path) -> None:
    model, rows = tiny_model("bert", AutoModelForQuestionAnswering), Rows(8)

    def spans(some: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collate([{**row, "input_ids": row["input_ids"][:4]} for row in some])  # a loss over padded positions
        return {"start_positions": batch.pop("labels"), "end_positions": torch.full((len(some),), 2), **batch}

    with torch.no_grad():
        expected = float(model(**spans(rows.rows)).loss)
    steps = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 8 // accumulated}
    arguments = config(tmp_path, max_steps=1, learning_rate=1e-9, remove_unused_columns=False, **steps)
    trainer = FinetuningTrainer(model, arguments, train_dataset=rows, data_collator=spans)
    trainer.train()
    assert logged(trainer)[0] == pytest.approx(expected, rel=1e-5)


def test_rows_without_a_label_do_not_count(tmp_path: Path) -> None:
    rows = Rows(8)
    labelled = rows.rows[:6]
    for row in rows.rows[6:]:
        row["labels"] = -100
    model = classifier()
    expected = own_loss(model, collate(labelled))
    assert first_loss(model, rows, tmp_path, learning_rate=1e-9) == pytest.approx(expected, rel=1e-5)
    evaluation = FinetuningTrainer(model, config(tmp_path), eval_dataset=rows, data_collator=collate).evaluate()
    assert evaluation["eval_loss"] == pytest.approx(expected, rel=1e-5)
    student, teacher = torch.randn(2, 8, 2)
    labels = collate(rows.rows)["labels"]
    (own, _), (target, _) = (select_targets(logits, labels, shift=False) for logits in (student, teacher))
    close(logits_loss(own, target, 2.0), divergence_of(lists(student[:6]), lists(teacher[:6]), 2.0))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_embeddings_are_counted_by_rows_whatever_their_labels(accumulated: int, tmp_path: Path) -> None:
    teacher = tiny_model("bert")
    student = hla.patch_model(tiny_model("bert", initializer_range=0.1), "hedgehog")
    batch = collate(Rows(8).rows)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        pairs = [mean_pooling(one(**inputs).last_hidden_state, inputs["attention_mask"]) for one in (student, teacher)]
    expected = float((1 - torch.cosine_similarity(*pairs)).mean())
    changes: dict[str, Any] = {"gradient_accumulation_steps": accumulated}
    changes |= {"per_device_train_batch_size": 8 // accumulated}
    changes |= {"max_steps": 1, "learning_rate": 1e-9, "hidden_weight": 0.0, "remove_unused_columns": False}
    arguments = config(tmp_path, DistillationConfig, **changes)
    rows = Rows(8, targets="tokens")
    trainer = DistillationTrainer(student, teacher, arguments, train_dataset=rows, data_collator=collate)
    trainer.train()
    assert logged(trainer)[0] == pytest.approx(expected, rel=1e-4)


def test_routers_have_a_loss_of_their_own(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 1.0}
    model = tiny_model("mixtral", AutoModelForCausalLM, num_key_value_heads=2, **experts)
    rows = Rows(8, targets="tokens")
    batch = collate(rows.rows)
    own = model.eval()(**batch)
    assert float(own.aux_loss) > 0.5
    assert first_loss(model, rows, tmp_path, learning_rate=1e-9) == pytest.approx(float(own.loss), rel=1e-3)


@pytest.mark.slow
def test_averages_of_terms_between_evaluations(tmp_path: Path) -> None:
    """An evaluation between two lines of the log changes nothing in what these say."""
    rows: dict[str, Any] = {"train_dataset": Rows(8), "eval_dataset": Rows(4, seed=1), "data_collator": collate}
    settings = {"learning_rate": 1e-9, "logging_steps": 4, "max_steps": 8, "task_weight": 1.0, "hidden_weight": 0.0}
    logs = []
    for steps in (3, 8):
        student = hla.patch_model(classifier(1), "hedgehog")
        arguments = config(
            tmp_path / str(steps), DistillationConfig, eval_strategy="steps", eval_steps=steps, **settings
        )
        trainer = DistillationTrainer(student, classifier(2), arguments, **rows)
        trainer.train()
        logs.append((logged(trainer, "task_loss"), logged(trainer, "logits_loss")))
    assert logs[0] == logs[1]


def test_losses_that_are_not_computed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="label_smoothing_factor: FinetuningTrainer computes the loss"):
        FinetuningTrainer(classifier(), config(tmp_path, label_smoothing_factor=0.1))
    with pytest.raises(ValueError, match="compute_loss_func: FinetuningTrainer computes the loss"):
        FinetuningTrainer(classifier(), config(tmp_path), compute_loss_func=lambda *_: None)
    with pytest.raises(ValueError, match="with 3 labels: FinetuningTrainer fits one number a row"):
        FinetuningTrainer(classifier(num_labels=3, problem_type="regression"), config(tmp_path))
    with pytest.raises(ValueError, match="with 1 label: FinetuningTrainer takes one output for a score"):
        FinetuningTrainer(classifier(num_labels=1, problem_type="multi_label_classification"), config(tmp_path))
    trainer = DistillationTrainer(classifier(1), classifier(2), config(tmp_path, DistillationConfig))
    batch = batch_of("class")
    del batch["labels"]
    with pytest.raises(ValueError, match="The batch has no labels: DistillationTrainer needs them"):
        trainer.compute_loss(trainer.model, batch)
