"""Attention transfer: what it trains, what it leaves, and that its blocks add up."""

from __future__ import annotations

import copy
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, ViTConfig, ViTModel

import hf_linear_attn as hla
from hf_linear_attn.integration.context import attention_modules
from hf_linear_attn.integration.exact import AttentionCall, observe_attention
from hf_linear_attn.training import losses
from hf_linear_attn.training.resumable import EpochSampler, InterruptedRunError, SeededCollator
from hf_linear_attn.training.transfer import AttentionTransferLoss, TransferResult, transfer_attention
from tests.subprocesses import run_python
from tests.tiny_models import BERT, GPT2, LLAMA, VOCABULARY, Family, tiny_model
from tests.training.tiny_runs import Killed, kill

LENGTHS = (17, 9, 13)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.tensor([[1] * length + [0] * (max(LENGTHS) - length) for length in LENGTHS])
    return {"input_ids": ids * mask, "attention_mask": mask}


def model_of(attention: Any, family: Family) -> PreTrainedModel:
    options: dict[str, Any] = {"window_size": 4, "feature_map": "hedgehog"} if attention == "window" else {}
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
        for computed, target in zip(actual, expected, strict=True):
            torch.testing.assert_close(computed, target, rtol=1e-4, atol=1e-6)
        separable = next(attention_modules(model)).linear_attention.separable_queries
        smallest = 4 * max(LENGTHS) * (1 if separable else max(LENGTHS))  # one row: a query, or all queries; 4 heads
        assert max(sizes) <= max(entries, smallest)


@pytest.mark.slow
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
    done = transfer_attention(model, [batch()], max_steps=15)
    assert done.losses[-1] < done.losses[0]
    assert model.training
    assert {key: value.requires_grad for key, value in model.named_parameters()} == required
    assert all(value.grad is None for value in model.parameters())
    changed = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed
    assert all(".linear_attention." in key for key in changed)


def test_the_best_step_is_retained() -> None:
    model = model_of("hedgehog", BERT)
    done = transfer_attention(model, [batch()], max_steps=20, learning_rate=3.0, validation=[batch(1)], eval_steps=2)
    scores = dict(done.evaluations)
    assert done.best_step == min(scores, key=lambda step: scores[step])
    again = float(AttentionTransferLoss(model)(batch(1)).mean())
    assert again == pytest.approx(scores[done.best_step], rel=1e-5)


def test_an_unknown_loss_is_named() -> None:
    with pytest.raises(ValueError, match="loss: must be one of"):
        transfer_attention(model_of("window", GPT2), [batch()], loss="mse")


def test_a_loss_that_is_no_number_puts_everything_back() -> None:
    model = model_of("hedgehog", BERT)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(FloatingPointError, match="Lower learning_rate"):
        transfer_attention(model, [batch()], max_steps=30, learning_rate=1e38)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_a_decoder_beside_an_encoder_reads_what_it_learns_to_say() -> None:
    """Its rows may be longer than those of the encoder, and its inputs are made of labels as in its own training."""
    model = hla.patch_model(tiny_model("bart", AutoModelForSeq2SeqLM), "window", window_size=4)
    labels = torch.randint(3, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": labels[:, :3], "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}
    runs = [inputs, {"input_ids": labels[:, :3], "labels": labels}]
    first, second = (transfer_attention(copy.deepcopy(model), [one], max_steps=1).losses for one in runs)
    assert first == second != []


def test_validation_batches_count_by_their_tokens() -> None:
    """A last batch of one short row has no more weight than its tokens."""
    rows = [
        {name: value[row : row + 1, :length] for name, value in batch().items()} for row, length in enumerate(LENGTHS)
    ]
    model, scores = model_of("hedgehog", BERT), []
    for held_out in ([batch()], rows, [rows[0], {name: value[1:] for name, value in batch().items()}]):
        options: dict[str, Any] = {"max_steps": 1, "loss": "weights", "validation": held_out}
        scores.append(transfer_attention(copy.deepcopy(model), [batch(1)], **options).evaluations[0][1])
    assert scores[1:] == pytest.approx([scores[0]] * 2, rel=1e-5)


def test_a_validation_loss_that_is_no_number_is_an_error() -> None:
    """Nothing is less than NaN: the start would be the best step of any run."""
    model = model_of("hedgehog", BERT)
    spoiled = {"inputs_embeds": torch.full((1, 8, model.config.hidden_size), float("nan"))}
    with pytest.raises(FloatingPointError, match=r"became nan at step 0\. Look for NaN in validation"):
        transfer_attention(model, [batch()], max_steps=2, validation=[batch(1), spoiled])


def test_batches_that_can_be_read_once_only_are_an_error() -> None:
    """Calibration would take the first of them, and a resumed run others than an undisturbed one."""
    with pytest.raises(TypeError, match="batches is a generator, which can be read once only"):
        transfer_attention(model_of("hedgehog", BERT), (batch(seed) for seed in range(9)), max_steps=2)


def test_batches_that_are_attended_to_exactly_are_left_out() -> None:
    """In a batch of inputs within the window there is nothing to learn."""
    short = {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    done = transfer_attention(model_of("window", BERT), [short, batch()], max_steps=2, validation=[short])
    assert (len(done.losses), done.evaluations) == (2, [])
    assert min(done.losses) > 1e-3
    with pytest.warns(UserWarning, match=r"All inputs have at most \d tokens.*is skipped"):
        assert transfer_attention(model_of("window", BERT), [short], max_steps=2).steps == 0


@pytest.mark.parametrize(("name", "family"), [("window", GPT2), ("hedgehog", LLAMA), ("hedgehog", BERT)], ids=str)
def test_under_autocast_only_the_model_runs_in_half_precision(name: str, family: Family) -> None:
    model = model_of(name, family)
    with torch.no_grad():
        expected = AttentionTransferLoss(model)(batch())
        with torch.autocast("cpu", torch.bfloat16):
            actual = AttentionTransferLoss(model)(batch())
    assert actual.dtype == torch.float32
    assert torch.allclose(actual, expected, rtol=0.05, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert transfer_attention(model, [batch()], max_steps=2).steps == 2


# --------------------------------------------------------------------------------------------------------------------
# Arguments


def test_a_mechanism_without_learned_parts_has_no_steps() -> None:
    """So a loop over mechanisms needs no exception for it."""
    done = transfer_attention(model_of("elu", BERT), [batch()], max_steps=5, validation=[batch(1)])
    assert (done.steps, done.losses, done.evaluations) == (0, [], [])


@pytest.mark.parametrize("single", [batch(), batch()["input_ids"]], ids=["dict", "tensor"])
def test_a_single_batch_is_an_error(single: Any) -> None:
    model = model_of("hedgehog", BERT)
    with pytest.raises(TypeError, match=r"batches is one batch alone.*\[batch\]"):
        transfer_attention(model, single)
    with pytest.raises(TypeError, match="validation is one batch alone"):
        transfer_attention(model, [batch()], validation=single)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "^max_steps: must be a whole number"),
        ({"patience": 0}, "^patience: must be"),
        ({"gradient_accumulation_steps": 0}, "^gradient_accumulation_steps: must be"),
        ({"max_grad_norm": -1.0}, "^max_grad_norm: must be .* at least 0"),
        ({"max_grad_norm": None}, "^max_grad_norm: must be .* at least 0, got None"),
        ({"save_steps": -1}, "^save_steps: must be .* at least 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transfer_attention(model_of("hedgehog", BERT), [batch()], **options)


def test_the_result_is_a_short_table() -> None:
    done = TransferResult(3, 1200, 2.0, [0.5, 0.4, 0.25], [(0, 0.6), (2, 0.3), (3, 0.35)], 2)
    assert repr(done).splitlines() == [
        "attention transfer: 3 steps, 1,200 tokens, 2.0 s, 600 tokens/s",
        "training loss, first and last step  0.5 → 0.25",
        "validation loss, before and best    0.6 → 0.3 (step 2)",
    ]
    assert done._repr_html_().count("<tr>") == 2
    assert repr(TransferResult(0, 0, 0.0, [])) == "attention transfer: 0 steps, 0 tokens, 0.0 s"


def test_patience_ends_the_run_and_the_best_step_remains() -> None:
    model = model_of("hedgehog", BERT)
    options: dict[str, Any] = {"learning_rate": 3.0, "max_grad_norm": 0.0, "validation": [batch(1)], "eval_steps": 2}
    done = transfer_attention(model, [batch()], max_steps=60, patience=3, **options)
    assert done.steps < 60
    assert done.best_step is not None
    assert done.steps == done.best_step + 3 * 2
    scores = dict(done.evaluations)
    assert done.best_step == min(scores, key=lambda step: scores[step])
    assert float(AttentionTransferLoss(model)(batch(1)).mean()) == pytest.approx(scores[done.best_step], rel=1e-5)


def test_the_gradient_is_the_mean_over_accumulated_batches() -> None:
    model, norms = model_of("hedgehog", BERT), []
    for batches in ([batch()], [batch(), batch()]):
        rows: list[dict[str, float]] = []
        transfer_attention(
            copy.deepcopy(model), batches, max_steps=1, gradient_accumulation_steps=len(batches), log=rows.append
        )
        norms.append((rows[0]["loss"], rows[0]["grad_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_step_is_that_of_adamw() -> None:
    """Gradients of all batches, clipped per layer, at a tenth of the peak rate in the first step of twenty."""
    model = model_of("hedgehog", BERT)
    expected = copy.deepcopy(model)
    objective = AttentionTransferLoss(expected)
    for item in (batch(), batch(1)):
        objective(item, step=1)
    parameters = objective.parameters
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad /= 2
    torch.nn.utils.clip_grad_norm_(parameters, 0.01 * 2)  # two layers
    optimizer = torch.optim.AdamW(parameters, lr=0.1 / 2, weight_decay=0.0)
    optimizer.step()
    rows: list[dict[str, float]] = []
    after: list[torch.Tensor] = []

    def log(values: dict[str, float]) -> None:
        rows.append(values)
        after.extend(value.detach().clone() for value in AttentionTransferLoss(model).parameters)
        raise KeyboardInterrupt

    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.01, "learning_rate": 0.1}
    with pytest.raises(KeyboardInterrupt):
        transfer_attention(model, [batch(), batch(1)], max_steps=20, log=log, **options)
    assert rows[0]["learning_rate"] == pytest.approx(0.05)
    for own, parameter in zip(after, parameters, strict=True):
        torch.testing.assert_close(own, parameter.detach())


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints


def loader() -> DataLoader[Any]:
    """Five batches of random rows, in an order and with masked tokens that depend on the epoch."""
    rows = [{name: value[row] for name, value in batch(seed).items()} for seed in range(7) for row in range(2)]

    def collate(items: list[Any]) -> dict[str, torch.Tensor]:
        items = [{name: torch.as_tensor(value) for name, value in item.items()} for item in items]
        stacked = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        drawn = torch.rand(stacked["input_ids"].shape) < 0.3
        return {**stacked, "input_ids": stacked["input_ids"].masked_fill(drawn, 3)}

    return DataLoader(rows, batch_size=3, sampler=EpochSampler(len(rows), 1), collate_fn=SeededCollator(collate, 1))  # type: ignore[arg-type]


def train(model: PreTrainedModel, checkpoint: Path | None = None, stop: Any = None, **changes: Any) -> TransferResult:
    """12 steps: more than two epochs. `stop` is called at the end of step 8."""

    def progress(step: int, steps: int, loss: float) -> None:
        if step == 8 and stop is not None:
            stop()

    options: dict[str, Any] = {"max_steps": 12, "validation": [batch(50)], "eval_steps": 3, "save_steps": 7, **changes}
    return transfer_attention(model, loader(), checkpoint=checkpoint, progress=progress, **options)


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("lr", [None, 1.0], ids=["converges", "best-is-early"])
def test_a_resumed_run_ends_with_the_same_bits(lr: float | None, tmp_path: Path) -> None:
    model = model_of("hedgehog", BERT)
    undisturbed = copy.deepcopy(model)
    expected = train(undisturbed, learning_rate=lr)
    killed = copy.deepcopy(model)
    with pytest.raises(Killed):
        train(killed, tmp_path / "state.safetensors", kill, learning_rate=lr)
    resumed = copy.deepcopy(model)
    done = train(resumed, tmp_path / "state.safetensors", learning_rate=lr)
    assert (done.losses, done.evaluations) == (expected.losses, expected.evaluations)
    assert (done.steps, done.tokens, done.best_step) == (12, expected.tokens, expected.best_step)
    before = state(undisturbed)
    assert all(torch.equal(value, before[name]) for name, value in resumed.state_dict().items())
    # A run that has ended resumes to itself.
    again = copy.deepcopy(model)
    assert train(again, tmp_path / "state.safetensors", kill, learning_rate=lr).losses == expected.losses
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items())


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
import torch
from tests.tiny_models import BERT
from tests.training.test_transfer import model_of, train
torch.set_num_threads(int(sys.argv[2]))  # sums in another number of threads have other bits
torch.manual_seed(5)
train(model_of("hedgehog", BERT), Path(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.slow
def test_a_process_that_was_killed_is_resumed_with_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL, as by the operating system when memory runs out."""
    killed = run_python("-c", KILLED_RUN, tmp_path / "state.safetensors", torch.get_num_threads())
    assert killed.returncode == -signal.SIGKILL
    torch.manual_seed(5)
    model = model_of("hedgehog", BERT)
    undisturbed = copy.deepcopy(model)
    expected = train(undisturbed)
    assert train(model, tmp_path / "state.safetensors").losses == expected.losses
    before = state(undisturbed)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_killed_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint before stays whole."""
    model = model_of("hedgehog", BERT)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        train(
            copy.deepcopy(model),
            tmp_path / "state.safetensors",
            lambda: patched.setattr(os, "replace", lambda *paths: kill()),
            save_steps=4,
        )
    with safe_open(tmp_path / "state.safetensors", "pt") as file:
        assert json.loads(file.metadata()["state"])["step"] == 4
    assert train(model, tmp_path / "state.safetensors", save_steps=4).steps == 12


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    previous = signal.signal(number, handler)
    model = model_of("hedgehog", BERT)
    undisturbed = copy.deepcopy(model)
    expected = train(undisturbed)
    with pytest.raises(
        InterruptedRunError, match=r"after step 8 of 12.*state\.safetensors.*again with the same"
    ) as error:
        train(copy.deepcopy(model), tmp_path / "state.safetensors", lambda: os.kill(os.getpid(), number), save_steps=0)
    assert error.value.code == 128 + number
    assert signal.signal(number, previous) is handler
    assert train(model, tmp_path / "state.safetensors").losses == expected.losses


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    train(model_of("hedgehog", BERT), tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match=r"learning_rate was None, now 0\.5"):
        train(model_of("hedgehog", BERT), tmp_path / "state.safetensors", learning_rate=0.5)
    with pytest.raises(ValueError, match="shapes was"):
        train(hla.patch_model(BERT.build(), "hedgehog", layers=[0]), tmp_path / "state.safetensors")


@pytest.mark.parametrize("attention", ["hedgehog", "window"])
def test_images_have_tokens_that_only_the_model_knows(attention: str) -> None:
    """81 tokens of an image are beyond a window, and no batch has a column for them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = hla.patch_model(ViTModel(ViTConfig(**sizes, image_size=36, patch_size=4)), attention)
    result = transfer_attention(model, [{"pixel_values": torch.randn(2, 3, 36, 36)}], max_steps=2)
    assert (result.steps, result.tokens) == (2, 2 * 2 * 82)
