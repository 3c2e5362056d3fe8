"""The search for layers to convert: budgets, orders of layers, metrics, the choice, and its verification."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.measure import quality as quality_metrics
from hf_linear_attn.measure.quality import PERPLEXITY, Score, measure_perplexity, perplexity_measure
from hf_linear_attn.study.budgets import DAMAGE_UNITS, Budget
from hf_linear_attn.study.plan import LayerSearch
from hf_linear_attn.study.plan_result import PlanResult, draw_curve, format_divergence
from hf_linear_attn.study.study import Conditions, open_study
from hf_linear_attn.study.variants import Variant, with_learned_parts
from hf_linear_attn.training.head_search import ExactHeads
from hf_linear_attn.utils.models import shared_copy

from ..inputs import token_ids
from ..small import patched
from ..tiny_models import GPT2, LLAMA, tiny_model

# --------------------------------------------------------------------------------------------------------------------
# Budgets


@pytest.mark.parametrize(
    ("text", "unit", "limit", "length"),
    [
        ("1% perplexity", "perplexity", 1.0, 0),
        (" .5 % of Perplexity ", "perplexity", 0.5, 0),
        ("0.05 nats", "nats", 0.05, 0),
        ("0.5 points", "points", 0.5, 0),
        ("1pt", "points", 1.0, 0),
        ("0.02 cosine", "cosine", 0.02, 0),
        ("2x at 4096", None, 2.0, 4096),
        ("90% recall at 2k", "recall", 10.0, 2048),
        ("1.5× at 4,096 tokens", None, 1.5, 4096),
        ("3x@8k", None, 3.0, 8192),
        ("25% cache at 8k", None, 25.0, 8192),
    ],
)
def test_budgets_are_read(text: str, unit: str | None, limit: float, length: int | None) -> None:
    budget = Budget.parse(text)
    assert (budget.unit and budget.unit.name, budget.limit, budget.length) == (unit, limit, length)


@pytest.mark.parametrize("text", ["", "1%", "perplexity", "-1% perplexity", "2x", "fast", "1e3 nats", "2 at 4096"])
def test_other_text_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"'1% perplexity'.*'0\.5 points'.*'2x at 4096'"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("1x at 4096", "a speedup of more than 1x"), ("2x at 8", "a speedup"), ("25% cache at 0", "a share of the cache")],
)
def test_costs_out_of_range_are_refused(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is not {meant}.* at 16 tokens or more"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("text", "kind", "measurement"),
    [
        ("1% perplexity", "encoder", "sentence_embeddings"),
        ("0.5 points", "decoder", "perplexity"),
        ("0.1 cosine", "classifier", "task"),
        ("90% recall at 64", "classifier", "task"),
    ],
)
def test_a_budget_fits_the_kind_of_model(text: str, kind: str, measurement: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is for .*; this is .* Give a budget such as"):
        Budget.parse(text).unit_for(kind)
    assert Budget.parse("2x at 64").unit_for(kind).measurement == measurement
    if kind != "classifier":
        assert Budget.parse("90% recall at 64").unit_for(kind).name == "recall"


def test_damage() -> None:
    assert DAMAGE_UNITS["perplexity"].damage({"perplexity": 5.0}, {"perplexity": 5.1}) == pytest.approx(2.0)
    assert DAMAGE_UNITS["points"].damage({"score": 0.9}, {"score": 0.85}) == pytest.approx(5.0)
    assert DAMAGE_UNITS["points"].damage({"score": 0.9}, {"score": None}) is None
    assert DAMAGE_UNITS["points"].format(None) == "undefined"
    assert DAMAGE_UNITS["points"].format(0.4) == "-0.40 points"
    assert DAMAGE_UNITS["perplexity"].format(0.4) == "+0.40% perplexity"
    assert [format_divergence(number) for number in (None, -4e-9, 0.01234, 1.2e-5)] == [
        "–",
        "0.0000",
        "0.0123",
        "1e-05",
    ]
    assert all(Budget.parse(unit.example).unit is unit for unit in DAMAGE_UNITS.values())


# --------------------------------------------------------------------------------------------------------------------
# The metric of language models


def values_of(metric: Any, model: Any) -> dict[str, float]:
    return {row["metric"]: row["value"] for row in metric(model)}


def test_loss_is_that_of_perplexity_and_the_cache_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, linear = GPT2.build(), patched("elu", GPT2)
    documents = [row.tolist() for row in token_ids(5, 30)] + [[3, 4, 5]]
    settings = {"context": 16, "stride": 8, "batch_size": 3}
    metric = perplexity_measure(documents, exact=exact, **settings)
    values = values_of(metric, linear)
    reference = measure_perplexity(linear, documents, context=16, stride=8, batch_size=2)
    assert values["loss"] == pytest.approx(reference.loss, rel=1e-5)
    assert values["tokens"] == reference.tokens
    assert values["perplexity"] == pytest.approx(reference.perplexity, rel=1e-5)
    assert values_of(metric, linear) == values
    assert values_of(metric, exact)["divergence"] == pytest.approx(0.0, abs=1e-9)
    monkeypatch.setattr(quality_metrics, "MAX_CACHED_VALUES", 0)
    assert values_of(perplexity_measure(documents, exact=exact, **settings), linear) == values
    with pytest.raises(ValueError, match="longer text"):
        perplexity_measure([[1]], **settings)(exact)


def test_divergence_is_its_definition() -> None:
    exact, linear = GPT2.build(), patched("elu", GPT2)
    ids = token_ids(1, 12)
    metric = perplexity_measure([ids[0].tolist()], exact=exact, context=12, stride=6, batch_size=1)
    with torch.no_grad():
        p, q = (model(ids).logits[0, :-1].double().softmax(-1) for model in (exact, linear))
    expected = float((p * (p / q).log()).sum(-1).mean())
    assert values_of(metric, linear)["divergence"] == pytest.approx(expected, rel=1e-4)


# --------------------------------------------------------------------------------------------------------------------
# The search


class StubMetric:
    """A metric with a known loss for every choice of layers.

    Args:
        losses: Loss by the linear layers as text; `exact` and `none` for the reference models.
        divergences: The divergence, where it is not the loss above that of the exact model.
    """

    def __init__(self, losses: dict[str, float], divergences: dict[str, float] | None = None) -> None:
        self.losses, self.divergences = losses, divergences or {}
        self.calls = 0
        self.layers = ""

    def __call__(self, model: Any, on_batch: Any = None) -> list[dict[str, Any]]:
        self.calls += 1
        loss = self.losses[self.layers]
        divergence = self.divergences.get(self.layers, loss - self.losses["exact"])
        values = {"loss": loss, "perplexity": math.exp(loss), "divergence": divergence, "longest_input": 30}
        return [{"metric": name, "value": value} for name, value in values.items()]


class StubAccuracy(StubMetric):
    """Known accuracies, where always giving the same answer has 0.6."""

    def __call__(self, model: Any, on_batch: Any = None) -> list[dict[str, Any]]:
        accuracy = self.losses[self.layers]
        values = {"score": accuracy, "divergence": 1 - accuracy, "longest_input": 30, "most_frequent_answer": 0.6}
        return [{"metric": name, "value": value} for name, value in values.items()]


LOSSES = {"exact": 1.0, "none": 3.0, "0": 1.1, "1": 1.02, "2": 1.3, "0,1": 1.15, "0,1,2": 1.6, "1,2": 1.4}


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    torch.manual_seed(0)
    exact = tiny_model("gpt2", num_hidden_layers=3)
    return exact, hla.patch_model(shared_copy(exact), "elu")


def search_layers(exact: Any, linear: Any, choice: Any, verification: Any, *, budget: str, **more: Any) -> Any:
    """The result of a search, in memory unless a `folder` is given."""
    fingerprint, folder, heads = more.pop("fingerprint", ""), more.pop("folder", None), more.pop("heads", ())
    score = more.pop("score", PERPLEXITY)
    conditions = Conditions("gpt2", fingerprint, measurement=score.measurement)
    one: Any = SimpleNamespace(
        exact=SimpleNamespace(
            model=exact,
            kind="decoder" if score is PERPLEXITY else "classifier",
            conditions=lambda measurement, **parts: replace(conditions, measurement=measurement, **parts),
        ),
        inputs=SimpleNamespace(measurements=[(conditions, choice), (conditions, verification)], tokens=[0]),
        scores=[score],
        resolved=SimpleNamespace(seconds=more.pop("seconds", 2.0)),
        patched=linear,
        variant=Variant("elu", "elu", lambda: linear),
        timed=linear,
        lengths=more.pop("lengths", ()),
        positions_note="",
    )
    assert not more
    with open_study(folder, "test", {}, resume=True) as study:
        return LayerSearch(study, one, Budget.parse(budget), heads).run()


@pytest.fixture
def search(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that searches with stub metrics, which learn from the search what they measure."""

    def run(
        budget: str, losses: dict[str, float] = LOSSES, verification: dict[str, float] | None = None, **more: Any
    ) -> PlanResult:
        divergences = more.pop("divergences", None)
        metric = StubAccuracy if "score" in more else StubMetric
        metrics = metric(losses, divergences), metric(verification or losses, divergences)
        original = LayerSearch.values

        def values(self: Any, data: str, layers: str, load: Any) -> Any:
            self.measurements[data][1].layers = layers
            return original(self, data, layers, load)

        monkeypatch.setattr(LayerSearch, "values", values)
        result = search_layers(*models, *metrics, budget=budget, **more)
        run.calls = [metric.calls for metric in metrics]  # type: ignore[attr-defined]
        monkeypatch.setattr(LayerSearch, "values", original)
        return result

    return run


def test_the_most_layers_within_a_budget_of_quality(search: Any) -> None:
    result = search("0.2 nats")
    assert [row.layers for row in result.curve] == [[], [1], [0, 1], [0, 1, 2]]
    assert (result.layers, result.met, result.within_budget) == ([0, 1], True, True)
    assert result.verified.damage == pytest.approx(0.15)
    assert result.plan["default"] == "softmax"
    assert {name: entry["attention"] for name, entry in result.plan.items() if name != "default"} == {
        "0": "elu",
        "1": "elu",
    }
    assert "is met by 2 of 3 layers as elu (layers 0, 1)" in result.summary()[0]


def test_tables_and_json(search: Any) -> None:
    result = search("0.2 nats", lengths=(16,), seconds=0.001)
    assert list(result.table["converted"]) == [0, 1, 2, 3]
    assert list(result.table["chosen"]) == [False, False, True, False]
    assert result.table["speedup_at_16"][0] == 1.0
    assert [row.added for row in result.single_layers] == [0, 1, 2]
    assert PlanResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    table = result.formatted_table()
    assert list(table.columns) == ["adds layer", "KL, nats", "perplexity", "damage", "speed at 16"]
    assert list(table.index) == ["0 of 3", "1 of 3", "2 of 3 ★", "3 of 3"]
    assert table.loc["2 of 3 ★", "damage"] == "+0.1500 nats"


def test_a_budget_that_no_layer_keeps(search: Any) -> None:
    result = search("0.001 nats")
    assert (result.layers, result.met, result.within_budget) == ([1], False, False)
    assert "The budget '0.001 nats' cannot be reached: the nearest is 1 of 3 layers" in result.summary()[0]


def test_a_choice_that_other_data_do_not_confirm(search: Any) -> None:
    result = search("0.2 nats", verification={**LOSSES, "0,1": 2.0})
    assert (result.within_budget, result.met) == (True, False)
    assert "is not confirmed" in result.summary()[0]


@pytest.mark.slow
def test_a_metric_without_information_never_meets_a_budget(search: Any) -> None:
    result = search("1000 nats", {**LOSSES, "none": 0.9})
    assert (result.informative, result.met) == (False, False)
    assert result.summary()[0] == "The budget '1000 nats' cannot be measured on these data, so there is no plan."
    assert (
        "clearly better there (perplexity 2.72, without attention 2.46 on the data of the choice; "
        in result.summary()[1]
    )
    fast = search("1000x at 16", {**LOSSES, "none": 0.9}, seconds=0.001)
    assert any("says nothing about attention" in sentence for sentence in fast.summary())
    # Nothing is planned, and no row is marked; a budget of speed can be measured.
    assert (result.plan, result.exit_code) == (None, 3)
    assert not result.table["chosen"].any()
    assert not any("★" in name for name in result.formatted_table().index)
    assert "The score says nothing about attention" in result.summary()[1]
    assert fast.plan is not None
    assert fast.exit_code == 1
    # The floor must lie clearly on the other side, on the data of the verification too.
    assert not search("1000 nats", {**LOSSES, "none": 1.01}).met
    assert not search("1000 nats", verification={**LOSSES, "none": 0.9}).met


@pytest.mark.parametrize(("exact", "informative"), [(0.605, False), (0.7, True)])
def test_a_classifier_at_the_majority_baseline_meets_no_budget(search: Any, exact: float, informative: bool) -> None:
    """Without attention it is worse, but always giving the same answer is as good: 0.6."""
    accuracies = {**dict.fromkeys(LOSSES, exact), "none": 0.4}
    result = search("5 points", accuracies, score=Score("task", "score", "sst2 accuracy"))
    assert (result.informative, result.met, result.exit_code) == (informative, informative, 0 if informative else 3)
    expected = "sst2 accuracy 0.605, always giving the same answer 0.600 on the data of the choice"
    assert (expected in " ".join(result.summary())) is not informative


def test_a_mechanism_that_computes_exact_attention_is_named_with_the_length_of_the_inputs(search: Any) -> None:
    losses = {**dict.fromkeys(LOSSES, 1.0), "none": 3.0}
    sentences = search("0.2 nats", losses).summary()
    assert any("exact attention on these inputs of at most 30 tokens" in sentence for sentence in sentences)
    sentences = search("0.2 nats", lengths=(64,), seconds=0.001).summary()
    assert "Quality is that of inputs of at most 30 tokens; longer ones were only timed." in sentences


def test_a_speed_that_varies_more_than_it_differs_is_not_stated(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def passes(models: Any, *arguments: Any, **options: Any) -> Any:
        speedup = {"metric": "seconds", "value": 1.0, "speedup": 1.1, "speedup_p20": 0.8, "speedup_p80": 1.6}
        return {name: [speedup] for name in models}

    monkeypatch.setattr("hf_linear_attn.study.plan.measure_passes", passes)
    result = search("0.2 nats", lengths=(16,))
    assert set(result.formatted_table()["speed at 16"][1:]) == {"not measurable"}
    assert [row.unsure for row in result.curve] == [[], ["16"], ["16"], ["16"]]
    assert not any("is faster than" in sentence for sentence in result.summary())
    monkeypatch.setattr("hf_linear_attn.study.plan_result.png", lambda figure: figure)
    drawn: Any = draw_curve(result, "a model")
    assert [math.isnan(value) for value in drawn.axes[1].lines[1].get_ydata()] == [False, True, True, True]
    budget = search("1.05x at 16")
    assert (budget.within_budget, budget.met) == (True, False)
    assert "is not confirmed for 1 of 3 layers as elu (layers 1): not measurable, timed again" in budget.summary()[0]


def test_a_speed_that_is_measurable_is_chosen_before_one_that_is_not(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes(models: Any, *arguments: Any, **options: Any) -> Any:
        count = sum(layer.attention == "elu" for layer in hla.patch_report(models["linear"]).layers)
        speedup, low = {1: (2.1, 0.8), 2: (2.2, 2.0), 3: (2.4, 2.3)}[count]
        return {"linear": [{"metric": "seconds", "speedup": speedup, "speedup_p20": low, "speedup_p80": 3.0}]}

    monkeypatch.setattr("hf_linear_attn.study.plan.measure_passes", passes)
    result = search("2x at 16")
    assert (result.layers, result.met) == ([0, 1], True)


@pytest.mark.parametrize(
    ("speedups", "text"),
    [
        ({"64": 0.5, "512": 0.9}, "is faster than sdpa from > 512 tokens on."),
        ({"64": 0.5, "256": 2.0}, "is faster than sdpa from ~ 130 tokens on."),  # sqrt(64 · 256), two digits
        ({"64": 1.5, "256": 2.0}, "is faster than sdpa from ≤ 64 tokens on."),
    ],
)
def test_nothing_is_said_about_lengths_that_were_not_timed(search: Any, speedups: dict[str, float], text: str) -> None:
    result = search("0.2 nats")
    result.chosen.speedup.update(speedups)
    assert any(sentence.endswith(text) for sentence in result.summary())


def test_a_better_score_with_a_large_divergence_is_chance(search: Any) -> None:
    losses = {**LOSSES, "0,1,2": 0.5}
    result = search("0.2 nats", losses, divergences={"0,1,2": 1.5, "none": 2.0})
    assert result.curve[3].chance
    assert result.layers == [0, 1]
    assert any("that is chance" in sentence for sentence in result.summary())
    near = search("0.2 nats", losses, divergences={"0,1,2": 0.4, "none": 2.0})
    assert (near.curve[3].chance, near.layers) == (False, [0, 1, 2])
    # The same holds for the verification.
    verified = search("0.2 nats", LOSSES, {**LOSSES, "0,1": 0.5}, divergences={"0,1": 1.5, "none": 2.0})
    assert (verified.within_budget, verified.met) == (True, False)


def test_a_budget_of_speed_out_of_reach(search: Any) -> None:
    result = search("1000x at 32", seconds=0.001)
    assert list(result.chosen.speedup) == list(result.verified.speedup) == ["32"]
    assert not result.met
    assert "cannot be reached" in result.summary()[0]


def test_a_stopped_search_is_resumed(search: Any, tmp_path: Path) -> None:
    first = search("0.2 nats", folder=tmp_path)
    assert search.calls == [2 + 5, 3]  # three layers, two and three of them; the verification
    again = search("0.01 nats", folder=tmp_path)
    assert search.calls[0] == 0
    assert again.curve == first.curve
    search("0.2 nats", folder=tmp_path, fingerprint="other")
    assert search.calls[0] > 0


def test_a_budget_fits_the_metric(search: Any) -> None:
    with pytest.raises(ValueError, match="is for a classifier"):
        search("0.2 points")


def test_only_the_chosen_layers_are_linear(models: tuple[Any, Any]) -> None:
    """The measured models are those that the plan makes."""
    exact, linear = models
    documents = [row.tolist() for row in token_ids(4, 24)]
    metric = perplexity_measure(documents, exact=exact, context=16, stride=8, batch_size=4)
    result = search_layers(exact, linear, metric, metric, budget="100 nats")
    for row in result.curve[1:]:
        planned = hla.patch_model(shared_copy(exact), "elu", layers=row.layers)
        assert values_of(metric, planned)["divergence"] == row.divergence


# --------------------------------------------------------------------------------------------------------------------
# The search over heads


def head_choices(model: Any, *counts: int) -> list[ExactHeads]:
    cells = [(layer, head) for layer in (1, 0, 2) for head in (3, 0, 1, 2)]
    table = pd.DataFrame([{"layer": layer, "head": head, "gain": 1.0} for layer, head in cells])
    return [ExactHeads.first_rows(table, count) for count in counts]


def test_heads_within_a_budget_of_the_cache(models: tuple[Any, Any]) -> None:
    exact, linear = models
    metric = perplexity_measure(
        [row.tolist() for row in token_ids(4, 24)], exact=exact, context=16, stride=8, batch_size=4
    )
    heads = head_choices(exact, 6, 5, 0)
    result = search_layers(exact, linear, metric, metric, budget="90% cache at 64", heads=heads)
    assert [row.count for row in result.curve] == [0, 6, 7, 12]
    assert [row.layers for row in result.curve[1:]] == [[0, 2], [0, 2], [0, 1, 2]]  # all heads of layer 1 are exact
    assert result.curve[1].exact_heads == {"0": [0, 3]}
    for row in result.curve[1:]:
        model = hla.patch_model(shared_copy(exact), row.plan(result.mechanisms))
        assert values_of(metric, model)["divergence"] == row.divergence
    shares = [row.cache["64"] for row in result.curve]
    assert shares == sorted(shares, reverse=True)
    assert result.chosen == next(row for row in result.curve[1:] if row.cache["64"] <= 0.9)
    assert f"{result.chosen.cache['64']:.1%} of the cache; " in result.summary()[0]
    assert f"by {result.chosen.count} of 12 key-value heads as elu: " in result.summary()[0]
    assert PlanResult.from_dict(result.to_dict()).plan == result.plan
    assert not search_layers(exact, linear, metric, metric, budget="1% cache at 64", heads=heads).met


def test_a_layer_that_is_exact_in_int8_has_learned_nothing() -> None:
    """Its cache is the package's, and so is its mechanism, which has no parameters."""
    windows = {"attention": "window", "window_size": 8, "cache_dtype": "int8"}
    exact = LLAMA.build()
    linear = hla.patch_model(shared_copy(exact), {"default": windows})
    plan = {"default": windows, "0": {"attention": "softmax", "cache_dtype": "int8"}}
    model = with_learned_parts(exact, plan, linear)
    assert [layer.attention for layer in hla.patch_report(model).layers] == ["softmax", "window"]
