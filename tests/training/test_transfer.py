"""Attention transfer: what it trains, what it leaves, and that its blocks add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.integration.context import attention_modules
from hf_linear_attn.integration.exact import AttentionCall, observe_attention
from hf_linear_attn.training import losses
from hf_linear_attn.training.transfer import AttentionTransferLoss, transfer_attention
from tests.tiny_models import BERT, GPT2, LLAMA, VOCABULARY, Family

LENGTHS = (17, 9, 13)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.tensor([[1] * length + [0] * (max(LENGTHS) - length) for length in LENGTHS])
    return {"input_ids": ids * mask, "attention_mask": mask}


def model_of(attention: Any, family: Family) -> PreTrainedModel:
    options: dict[str, Any] = {"window_size": 4} if attention == "window" else {}
    return hla.patch_model(family.build(), attention, **options)


def gradients(model: PreTrainedModel) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Losses of the layers, and the gradients of the learned parts, of one step."""
    learned = [parameter for name, parameter in model.named_parameters() if ".linear_attention." in name]
    for parameter in learned:
        parameter.grad = None
    layer_losses = AttentionTransferLoss(model, "weights")(batch(), step=1)
    return layer_losses, [parameter.grad.clone() for parameter in learned if parameter.grad is not None]


CASES = [("hedgehog", BERT), ("hedgehog", GPT2), ("t2r", LLAMA), ("window", BERT), ("window", GPT2), ("gla", GPT2)]


@pytest.mark.parametrize(("name", "family"), CASES, ids=lambda case: str(case))
def test_blocks_add_up(name: str, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients do not depend on the size of the blocks in which they are computed."""
    model = model_of(name, family)
    unblocked, expected = gradients(model)
    sizes: list[int] = []
    original = AttentionCall.linear_weights

    def weights(call: AttentionCall) -> torch.Tensor:
        result = original(call)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(AttentionCall, "linear_weights", weights)
    for entries in (1, 300, 2000):
        monkeypatch.setattr(losses, "BLOCK_ENTRIES", entries)
        sizes.clear()
        layer_losses, actual = gradients(model)
        torch.testing.assert_close(layer_losses, unblocked, rtol=1e-5, atol=1e-6)
        assert len(actual) == len(expected)
        for own, target in zip(actual, expected, strict=True):
            torch.testing.assert_close(own, target, rtol=1e-4, atol=1e-6)
        separable = next(attention_modules(model)).linear_attention.separable_queries
        smallest = 4 * max(LENGTHS) * (1 if separable else max(LENGTHS))  # one row: a query, or all queries; 4 heads
        assert max(sizes) <= max(entries, smallest)


@pytest.mark.parametrize(
    ("attention", "family", "kind"),
    [
        ("hedgehog", GPT2, "weights"),
        ("window", LLAMA, "weights"),
        ("window", BERT, "weights"),
        ("gla", LLAMA, "outputs"),
        ({"default": "gla", "0": {"exact_heads": [0]}}, LLAMA, "outputs"),
        ("rfa", GPT2, "outputs"),
        ("rfa", BERT, "outputs"),
    ],
    ids=str,
)
def test_sampled_queries_are_unbiased(
    attention: Any, family: Family, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average over seeds is the loss of all queries, and so is that of the gradients."""
    model = model_of(attention, family)
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe_attention(model, calls.append):
        model(**batch())
    call = calls[0]
    parameters = list(call.mechanism.parameters())

    def loss_and_gradients(seed: int | None) -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss = losses.layer_loss(call, kind, backward=True, seed=seed)
        grads = [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
        return torch.cat([loss.reshape(1), *grads]).double()

    expected = loss_and_gradients(None)
    if kind == "outputs":
        assert float(losses.attention_outputs_loss(call).detach()) == pytest.approx(float(expected[0]), rel=1e-5)
    monkeypatch.setattr(losses, "SAMPLED_QUERIES", 6)
    monkeypatch.setattr(losses, "SHORT_ROW", 0)
    monkeypatch.setattr(losses, "RUN_LENGTH", 2)  # 9 runs, the last of them shorter; 3 are drawn
    drawn = torch.stack([loss_and_gradients(seed) for seed in range(200)])
    assert float(drawn[:, 0].std()) > 0
    error = (drawn.mean(0) - expected).abs()
    assert bool((error <= 5 * drawn.std(0) / len(drawn) ** 0.5 + 1e-6).all())
    assert torch.equal(loss_and_gradients(7), drawn[7])


@pytest.mark.parametrize(
    ("name", "family", "kind"),
    [
        ("hedgehog", GPT2, "weights"),
        ("window", GPT2, "outputs"),
        ("window", BERT, "weights"),
        ("gated-delta", GPT2, "outputs"),
    ],
    ids=str,
)
def test_the_default_loss_suits_the_mechanism(name: str, family: Family, kind: str) -> None:
    model, calls = model_of(name, family), []
    with torch.no_grad(), observe_attention(model, calls.append):
        model(**batch())
    default, expected = (losses.layer_loss(calls[0], loss, backward=False) for loss in ("auto", kind))
    assert torch.equal(default, expected)
    assert float(default) > 0


def test_long_rows_cost_no_more_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("hedgehog", GPT2)
    compared: list[int] = []
    original = AttentionCall.exact_weights

    def weights(call: AttentionCall) -> torch.Tensor:
        result = original(call)
        compared.append(result.shape[2])
        return result

    monkeypatch.setattr(AttentionCall, "exact_weights", weights)
    monkeypatch.setattr(losses, "SAMPLED_QUERIES", 8)
    monkeypatch.setattr(losses, "RUN_LENGTH", 4)
    monkeypatch.setattr(losses, "SHORT_ROW", 89)
    objective = AttentionTransferLoss(model)
    ids = torch.randint(1, VOCABULARY, (1, 90))
    first, again, other = (objective({"input_ids": ids}, step=step) for step in (1, 1, 2))
    assert compared == [4] * 2 * 2 * 3  # two runs, two layers, three steps
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    compared.clear()
    objective({"input_ids": ids[:, :89]}, step=1)
    assert compared == [4] * 2  # one run of a short row


def test_the_loss_is_the_mean_divergence() -> None:
    model = model_of("hedgehog", BERT)
    layer_losses, _ = gradients(model)
    expected = []

    def observe(call: AttentionCall) -> None:
        total, rows = 0.0, 0
        exact, linear = call.exact_weights().double(), call.linear_weights().double()
        for row, length in enumerate(LENGTHS):
            p, w = exact[row, :, :length, :length], linear[row, :, :length, :length]
            total += float((p * (p / w).log()).sum())
            rows += p.shape[0] * length
        expected.append(total / rows)

    with torch.no_grad(), observe_attention(model, observe):
        model(**batch())
    assert layer_losses.tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("name", "family"), [*CASES, ("linformer", BERT)], ids=lambda case: str(case))
def test_only_learned_parts_change_and_the_loss_falls(name: str, family: Family) -> None:
    model = model_of(name, family).train()
    model.get_input_embeddings().requires_grad_(False)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    required = {key: value.requires_grad for key, value in model.named_parameters()}
    done = transfer_attention(model, [batch()], steps=15)
    assert done.losses[-1] < done.losses[0]
    assert model.training
    assert {key: value.requires_grad for key, value in model.named_parameters()} == required
    assert all(value.grad is None for value in model.parameters())
    changed = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed
    assert all(".linear_attention." in key for key in changed)


def test_the_best_step_is_retained() -> None:
    model = model_of("hedgehog", BERT)
    done = transfer_attention(model, [batch()], steps=20, lr=3.0, validation=[batch(1)], evaluate_every=2)
    scores = dict(done.evaluations)
    assert done.best_step == min(scores, key=lambda step: scores[step])
    again = float(AttentionTransferLoss(model)(batch(1)).mean())
    assert again == pytest.approx(scores[done.best_step], rel=1e-5)


def test_an_unknown_loss_is_named() -> None:
    with pytest.raises(ValueError, match="loss must be one of"):
        transfer_attention(model_of("window", GPT2), [batch()], loss="mse")


def test_a_loss_that_is_no_number_puts_everything_back() -> None:
    model = model_of("hedgehog", BERT)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(FloatingPointError, match="Lower lr"):
        transfer_attention(model, [batch()], steps=30, lr=1e38)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_batches_that_are_attended_to_exactly_are_left_out() -> None:
    """In a batch of inputs within the window there is nothing to learn."""
    short = {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    done = transfer_attention(model_of("window", BERT), [short, batch()], steps=2, validation=[short])
    assert (len(done.losses), done.evaluations) == (2, [])
    assert min(done.losses) > 1e-3
    with pytest.warns(UserWarning, match=r"All inputs have at most \d tokens.*is skipped"):
        assert transfer_attention(model_of("window", BERT), [short], steps=2).steps == 0


@pytest.mark.parametrize(("name", "family"), [("window", GPT2), ("hedgehog", LLAMA), ("hedgehog", BERT)], ids=str)
def test_under_autocast_only_the_model_runs_in_half_precision(name: str, family: Family) -> None:
    model = model_of(name, family)
    with torch.no_grad():
        expected = AttentionTransferLoss(model)(batch())
        with torch.autocast("cpu", torch.bfloat16):
            own = AttentionTransferLoss(model)(batch())
    assert own.dtype == torch.float32
    assert torch.allclose(own, expected, rtol=0.05, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert transfer_attention(model, [batch()], steps=2).steps == 2
