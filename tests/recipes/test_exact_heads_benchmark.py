"""The benchmark of ways to choose exact heads: its rows, and ablation from its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import hf_linear_attn as hla
from hf_linear_attn.checkpoints import read_tokenizer
from hf_linear_attn.data.recall_prompts import PromptMaker
from hf_linear_attn.mechanisms.window import CLOSED_MIX
from recipes.benchmarks.exact_heads import ablation, answer_gain, gated_heads, joint_gates, next_logits, probes
from tests.recipes.benchmark_runs import rows_of
from tests.tiny_models import save_checkpoint

LENGTH, WINDOW = 200, 16


@pytest.fixture
def decoder(tmp_path: Path) -> tuple[Any, PromptMaker]:
    save_checkpoint(tmp_path / "decoder", "llama", max_position_embeddings=512)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "decoder").eval()
    for parameter in model.parameters():
        parameter.data *= 2
    tokenizer = read_tokenizer(str(tmp_path / "decoder"), None, remedy="")
    return model, PromptMaker(tokenizer, model.config.vocab_size)


@pytest.mark.slow
@torch.no_grad()
def test_ablation_is_the_loss_without_the_head(decoder: Any) -> None:
    model, maker = decoder
    table = ablation(gated_heads(model, WINDOW), maker, LENGTH, 2)
    source = probes(maker, LENGTH, "ablation")
    prompts = [next(source) for _ in range(2)]

    def loss(tested: Any) -> float:
        logits = [tested(ids).logits[0, -len(answer) :] for ids, answer in prompts]
        return (
            sum(
                float(cross_entropy(own, torch.tensor(answer)))
                for own, (_, answer) in zip(logits, prompts, strict=True)
            )
            / 2
        )

    heads = list(range(model.config.num_key_value_heads))
    windows = {"attention": "window", "window_size": WINDOW, "mix_init": CLOSED_MIX}
    for row in table.itertuples():
        exact = {str(layer): "softmax" for layer in range(model.config.num_hidden_layers) if layer != row.layer}
        exact[str(row.layer)] = {"exact_heads": [head for head in heads if head != row.head]} if heads[1:] else windows
        patched = hla.patch_model(load_copy(model), {"default": windows, **exact})
        assert row.score == pytest.approx(loss(patched) - loss(model), abs=2e-5)
    assert table["score"].abs().max() > 1e-4


def load_copy(model: Any) -> Any:
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    return copy


@pytest.mark.slow
def test_answer_gains_are_the_derivative_of_the_loss(decoder: Any) -> None:
    model, maker = decoder
    gated = gated_heads(model, WINDOW)
    table = answer_gain(gated, maker, LENGTH, 1)  # one prompt, gates of 0.5
    ids, answer = next(probes(maker, LENGTH, "gain"))

    @torch.no_grad()
    def loss(layer: int, head: int, change: float) -> float:
        gated.gates = {index: torch.full((number,), 0.5) for index, number in gated.counts.items()}
        gated.gates[layer][head] += change
        with gated.mixed():
            return float(cross_entropy(next_logits(gated, ids, len(answer)), torch.tensor(answer)))

    for row in table.itertuples():
        slope = (loss(row.layer, row.head, 2e-3) - loss(row.layer, row.head, -2e-3)) / 4e-3
        assert row.score == pytest.approx(-slope, rel=0.01, abs=0.01)
    assert table["score"].abs().max() > 1e-2


@pytest.mark.slow
def test_gates_fall_where_nothing_holds_them(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, maker = decoder
    monkeypatch.setattr("recipes.benchmarks.exact_heads.GATE_PENALTY", 1e4)
    gated = gated_heads(model, WINDOW)
    table = joint_gates(gated, maker, LENGTH, 40)
    assert len(table) == model.config.num_hidden_layers * model.config.num_key_value_heads
    assert table["score"].max() < 0.2  # the penalty alone takes all of them to 0
    gated.gates = {}
    with torch.no_grad(), gated.mixed():
        ids, answer = next(probes(maker, LENGTH, "gates"))
        assert torch.allclose(next_logits(gated, ids, len(answer)), model(ids).logits[0, -len(answer) :], atol=1e-5)


@pytest.mark.slow
def test_a_row_for_each_way_and_share(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "decoder", "llama", max_position_embeddings=512)
    (tmp_path / "text.txt").write_text("\n\n".join([" ".join(["alpha", "beta", "gamma"] * 200)] * 3))
    options: dict[str, Any] = {"model": str(tmp_path / "decoder"), "dataset": str(tmp_path / "text.txt")}
    options |= {"text": options["dataset"], "shares": (0.5,), "seeds": (0,), "trials": 1, "rows": 1}
    small = {"window": WINDOW, "length": LENGTH, "probe_length": LENGTH, "prompts": 1, "steps": 2}
    rows = rows_of("exact-heads", tmp_path / "out", **options, **small)
    ranked = {row["way"] for row in rows if row["share"] is None}
    assert ranked == {"attention", "gain", "both", "answer gain", "ablation", "gates"}
    measured = [row for row in rows if row["share"] is not None]
    assert len(measured) == 1 + len(ranked) + 2  # exact; each way; one head in each layer and as many anywhere
    assert all(len(row["scores"]) == 4 and row["loss"] > 0 for row in measured)
    assert str(tmp_path) not in str(rows)
