"""Exact heads: the probe's scores against eager attention, gains against numerical derivatives, and what is chosen."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForTokenClassification

import hf_linear_attn as hla
from hf_linear_attn.data.recall_prompts import PROMPT_FUNCTIONS, PromptMaker
from hf_linear_attn.data.text import text_rows
from hf_linear_attn.training.head_search import ExactHeads, find_exact_heads, find_retrieval_heads

from ..tiny_models import VOCABULARY, tiny_model
from ..tiny_text import tiny_tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_scores_are_the_weights_of_eager_attention(architecture: str) -> None:
    torch.manual_seed(0)
    model = tiny_model(architecture)
    result = find_retrieval_heads(model, tiny_tokenizer(), share=0.5, length=84, prompts=2, seed=7)
    groups = 2 if architecture == "llama" else 4
    eager = tiny_model(architecture, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    maker = PromptMaker(tiny_tokenizer(), VOCABULARY)
    expected = torch.zeros(2, 4)
    for number in range(2):
        (prompt,) = PROMPT_FUNCTIONS["niah_single_1"](maker, random.Random(f"7 {number}"), 84, [(number + 0.5) / 2])
        ((start,), (answer,)) = prompt.positions, prompt.references
        count = len(answer)
        with torch.no_grad():
            weights = eager(torch.tensor([prompt.ids + answer[:-1]]), output_attentions=True).attentions
        for layer, weight in enumerate(weights):
            fallen = weight[0, :, -count:, start : start + count].sum(-1).mean(-1)
            expected[layer] += fallen / 2
    best = expected.view(2, groups, -1).amax(-1)
    for row in result.table.itertuples():
        assert row.score == pytest.approx(float(best[row.layer, row.head]), rel=1e-4)
    assert result.table["score"].is_monotonic_decreasing
    assert result.table["chosen"].sum() == groups
    chosen = {(layer, group) for layer, numbers in result.heads.items() for group in numbers}
    assert chosen == set(result.table[result.table["chosen"]][["layer", "head"]].itertuples(index=False, name=None))
    assert not hla.is_patched(model)
    mixed = hla.patch_report(hla.patch_model(model, result.plan("elu"))).layers
    exact = {row.index: tuple(range(groups)) if row.attention == "softmax" else row.exact_heads for row in mixed}
    assert {index: heads for index, heads in exact.items() if heads} == result.heads
    stored = {"cache_dtype": "int8"}
    plan = result.with_share(0.9).plan({"attention": "window", **stored})
    assert {"attention": "softmax", **stored} in plan.values()


def test_retrieval_heads_are_those_of_an_exact_decoder() -> None:
    with pytest.raises(ValueError, match="is patched"):
        find_retrieval_heads(hla.patch_model(tiny_model("gpt2"), "elu"), tiny_tokenizer())
    with pytest.raises(NotImplementedError, match="predicts no next token"):
        find_retrieval_heads(tiny_model("bert"), tiny_tokenizer())
    with pytest.raises(ValueError, match="share must lie in 0 to 1"):
        find_retrieval_heads(tiny_model("gpt2"), tiny_tokenizer(), share=0.0)


# --------------------------------------------------------------------------------------------------------------------
# Gains


def batch_of(length: int = 24, padding: int = 5) -> dict[str, Tensor]:
    ids = torch.randint(5, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, length - padding :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def divergence_with_gate(model: Any, batch: dict[str, Tensor], layer: int, head: int, gate: float) -> float:
    """The divergence of a patched float64 model from the exact one, with one key-value head exact by a share."""
    modules = [module for module in model.modules() if hasattr(module, "linear_attention")]

    def mix(call: hla.AttentionCall) -> Tensor:
        gates = torch.zeros(call.query.shape[1], dtype=torch.float64)
        if call.module is modules[layer]:
            repeats = call.query.shape[1] // call.key.shape[1]
            gates[head * repeats : (head + 1) * repeats] = gate
        gates = gates[:, None, None]
        return gates * call.output + (1 - gates) * call.linear_output()

    real = batch["attention_mask"].bool()
    with torch.no_grad():
        with hla.exact_attention(model):
            exact = model(**batch)
        with hla.observe_attention(model, mix):
            patched = model(**batch)
        if "logits" in exact and model.can_generate() and "input_ids" in batch:  # the loss of the next tokens
            logs = patched.logits.log_softmax(-1)[:, :-1].gather(2, batch["input_ids"][:, 1:, None])[..., 0]
            return -float(logs[real[:, 1:]].mean())
        if "logits" in exact:
            p, q = exact.logits.log_softmax(-1), patched.logits.log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1)
            return float((kl if kl.dim() == 1 else kl[real]).mean())
        pooled = [
            torch.stack([row[mask].mean(0) for row, mask in zip(out.last_hidden_state, real, strict=True)])
            for out in (exact, patched)
        ]
        return float((1 - functional.cosine_similarity(*pooled, dim=-1)).mean())


@pytest.mark.parametrize(("architecture", "groups"), [("llama", 2), ("gpt2", 4), ("bert", 4)])
def test_gains_are_derivatives_of_the_divergence(architecture: str, groups: int) -> None:
    torch.manual_seed(0)
    model, batch = tiny_model(architecture).double(), batch_of()
    result = find_exact_heads(model, None, [batch], "window", share=0.5, window_size=4, mix_init=-3.0)
    assert len(result.table) == 2 * groups
    assert result.table["gain"].is_monotonic_decreasing
    patched = hla.patch_model(model, "window", window_size=4, mix_init=-3.0)
    hla.calibrate(patched, [batch])
    for row in result.table.itertuples():
        ends = [divergence_with_gate(patched, batch, row.layer, row.head, gate) for gate in (-3e-4, 3e-4)]
        # Norms of Llama and pooled embeddings are in float32, so that smaller steps give fewer digits.
        assert row.gain == pytest.approx((ends[0] - ends[1]) / 6e-4, rel=5e-3, abs=2e-4)


def test_a_decoder_with_embeddings_alone_diverges_from_the_exact_model() -> None:
    torch.manual_seed(0)
    model, ids = tiny_model("gpt2").double(), batch_of()
    batch = {**ids, "inputs_embeds": model.get_input_embeddings()(ids["input_ids"]).detach()}
    del batch["input_ids"]
    options: dict[str, Any] = {"window_size": 4, "mix_init": -3.0}
    result = find_exact_heads(model, None, [batch], "window", share=0.5, **options)
    probed = find_exact_heads(model, tiny_tokenizer(), [batch], "window", share=0.5, length=84, **options)
    assert {"score", "gain"} <= set(probed.table)
    patched = hla.patch_model(model, "window", **options)
    hla.calibrate(patched, [batch])
    for row in result.table.itertuples():
        ends = [divergence_with_gate(patched, batch, row.layer, row.head, gate) for gate in (-3e-4, 3e-4)]
        assert row.gain == pytest.approx((ends[0] - ends[1]) / 6e-4, rel=5e-3, abs=2e-4)


def test_the_seed_is_that_of_the_features_whose_gains_are_measured() -> None:
    searches = [find_exact_heads(tiny_model("bert"), None, [batch_of()], "favor+", seed=seed) for seed in (0, 1)]
    assert [search.plan()["default"]["seed"] for search in searches] == [0, 1]
    search = find_exact_heads(tiny_model("bert"), None, [batch_of()], "window", seed=2, feature_map="favor+")
    assert search.plan()["default"]["feature_map_options"] == {"seed": 2}
    assert not searches[0].table.equals(searches[1].table)


def test_gains_are_means_over_tokens_however_these_are_batched() -> None:
    """A row without a token to predict adds nothing, and makes no gain NaN."""
    model, whole = tiny_model("llama"), batch_of()
    rows = [{"input_ids": ids[mask.bool()][None]} for ids, mask in zip(*whole.values(), strict=True)]
    for batches in (rows, [*rows, {"input_ids": rows[0]["input_ids"][:, :1]}]):
        result = find_exact_heads(model, None, batches, "elu", share=0.5)
        expected = find_exact_heads(model, None, [whole], "elu", share=0.5)
        assert result.heads == expected.heads
        assert result.table["gain"].tolist() == pytest.approx(expected.table["gain"].tolist(), rel=1e-3)


def test_a_loss_that_says_nothing_of_heads_is_an_error() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="there is nothing to predict"):
        find_exact_heads(model, None, [{"input_ids": torch.ones(1, 1, dtype=torch.long)}], "elu")
    model.lm_head.weight.data[:] = float("nan")
    with pytest.raises(ValueError, match="the loss is not finite"):
        find_exact_heads(model, None, [batch_of()], "elu")


def best_gain(result: ExactHeads, start: int) -> tuple[int, int]:
    """The head of greatest gain among those that the probe ranks from `start` on."""
    table = result.table.sort_values("score", ascending=False, kind="stable")[start:]
    best = table.loc[table["gain"].idxmax()]
    return int(best["layer"]), int(best["head"])


def test_the_probe_chooses_first_and_text_the_others() -> None:
    torch.manual_seed(0)
    model = tiny_model("gpt2")
    probe = find_retrieval_heads(model, tiny_tokenizer(), share=0.5, length=84, seed=3).table
    options: dict[str, Any] = {"share": 0.5, "length": 84, "seed": 3, "window_size": 4}
    result = find_exact_heads(model, tiny_tokenizer(), [batch_of()], "window", **options)
    cells = list(result.table[["layer", "head"]].itertuples(index=False, name=None))
    assert cells[:3] == list(probe[["layer", "head"]].itertuples(index=False, name=None))[:3]
    assert result.table["gain"][3:].is_monotonic_decreasing
    assert result.table["chosen"].tolist() == [True] * 4 + [False] * 4
    assert {(layer, head) for layer, heads in result.heads.items() for head in heads} == set(cells[:4])
    assert result.plan()["default"] == {"attention": "window", "window_size": 4}
    less = result.with_share(0.25, retrieval_share=0.5)
    assert {(layer, head) for layer, heads in less.heads.items() for head in heads} == {cells[0], best_gain(result, 1)}
    assert result.with_share(0.5).plan() == result.plan()
    assert int(result.with_share(0.999).table["chosen"].sum()) == len(result.table) - 1
    assert result.with_share(0.0).plan() == {"default": result.plan()["default"]}
    with pytest.raises(ValueError, match=r"share must lie in 0 to 1, got 1.5"):
        result.with_share(1.5)
    without = find_exact_heads(model, None, [batch_of()], "window", share=0.5, window_size=4)
    assert "score" not in without.table


def test_a_decoder_that_labels_tokens_is_no_language_model() -> None:
    model = LlamaForTokenClassification(tiny_model("llama").config)
    assert find_exact_heads(model, None, [batch_of()], "window", window_size=4).table["gain"].abs().max() > 0


def test_the_model_is_unchanged() -> None:
    model = tiny_model("llama").train()
    next(model.parameters()).requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    find_exact_heads(model, None, [batch_of()], "hedgehog")
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert not hla.is_patched(model)


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_a_text_is_cut_into_rows(architecture: str) -> None:
    model, tokenizer = tiny_model(architecture), tiny_tokenizer()
    documents = ["alpha beta gamma delta " * 9, "the beta " * 20]
    rows = text_rows(tokenizer, documents, 32, causal=architecture == "gpt2")
    batches = [{"input_ids": torch.tensor([row])} for row in rows]
    options: dict[str, Any] = {"length": 32, "window_size": 4, "retrieval_share": 0.0}
    gains = [find_exact_heads(model, tokenizer, text, "window", **options).table for text in (documents, batches)]
    assert gains[0].equals(gains[1])


def test_rows_within_the_window_are_reported() -> None:
    with pytest.warns(UserWarning, match="All rows have at most 68 tokens, which the mechanism attends to exactly"):
        find_exact_heads(tiny_model("llama"), None, [batch_of()], "window")


def test_arguments_of_the_search_are_checked() -> None:
    model = tiny_model("gpt2")
    with pytest.raises(ValueError, match="no text to measure on"):
        find_exact_heads(model, None, [])
    with pytest.raises(TypeError, match=r"one batch.*\[batch\]"):
        find_exact_heads(model, None, batch_of())
    with pytest.raises(TypeError, match="needs the model's tokenizer"):
        find_exact_heads(model, None, "a text")
    with pytest.raises(ValueError, match="retrieval_share must lie in 0 to 1"):
        find_exact_heads(model, None, [batch_of()], retrieval_share=2.0)
    with pytest.raises(ValueError, match="is patched"):
        find_exact_heads(hla.patch_model(model, "elu"), None, [batch_of()])
