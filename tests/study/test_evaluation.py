"""What an evaluation concludes from its numbers: verdicts, shares, and where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from hf_linear_attn.measure.metric import Score
from hf_linear_attn.study import report
from hf_linear_attn.study.evaluation import Evaluation, Measured

PERPLEXITY = Score("language_model", "perplexity", "perplexity", greater_is_better=False, digits=2)
ACCURACY = Score("task", "accuracy", "sst2 accuracy")
CONVERTED, CONTROL = "window (converted)", "softmax (tuned)"


def evaluation(
    score: Score,
    values: Mapping[str, float],
    *,
    speedups: Mapping[int, float] | None = None,
    longest: int = 512,
    spread: tuple[float, float] | None = None,
    stderr: float | None = None,
) -> Evaluation:
    """An evaluation with these scores by row."""
    states = {name: name for name in ("exact", "without attention")} | {CONVERTED: "converted", CONTROL: "tuned"}
    measured = []
    for label, value in values.items():
        numbers: dict[str, Any] = {score.metric: value, "longest_input": longest}
        numbers |= {} if stderr is None else {f"{score.metric}_stderr": stderr}
        measured.append(Measured(label, label, states.get(label, "untrained"), score.measurement, numbers))
    for length, speedup in (speedups or {512: 2.0}).items():
        for label in values:
            low, high = spread or (speedup, speedup)
            times = {"seconds": 1.0, "p20": 1.0, "p80": 1.0, "speedup": speedup}
            times |= {"speedup_p20": low, "speedup_p80": high}
            if label == "exact":
                times |= dict.fromkeys(("speedup", "speedup_p20", "speedup_p80"), 1.0)
            measured.append(Measured(label, label, "", "forward", times, length=length, batch_size=1))
    return Evaluation(
        model={"dtype": "float32", "attention": "sdpa"},
        data={},
        settings={"data": {"max_length": 512}, "speed": {"dtype": "float32"}},
        environment={},
        backend="torch",
        scores=(score,),
        measured=tuple(measured),
    )


def test_no_conclusion_where_the_exact_model_is_no_better_than_without_attention() -> None:
    result = evaluation(PERPLEXITY, {"exact": 124.06, "window": 124.10, "elu": 120.0, "without attention": 123.0})
    sentences = [one.sentence for one in result.conclusions()]
    assert sentences == [
        "2.0× faster at 512 tokens, perplexity: no conclusion.",
        "2.0× faster at 512 tokens, perplexity: no conclusion.",
    ]
    assert [one.worthwhile for one in result.conclusions()] == [None, None]
    assert result.warnings() == [
        "perplexity: these data cannot measure attention: the exact model (124.06) is not clearly better than without "
        "attention (123.00). No conclusion is drawn."
    ]
    assert "perplexity change" not in result.summary()


def test_a_converted_model_is_concluded_on_by_its_control() -> None:
    """The exact model has a head that was never trained for the task, and the control was trained."""
    scores = {"exact": 0.51, CONTROL: 0.90, CONVERTED: 0.88, "window": 0.52, "without attention": 0.50}
    result = evaluation(ACCURACY, scores)
    sentences = {one.label: one.sentence for one in result.conclusions()}
    assert "no conclusion" not in sentences[CONVERTED]
    assert "no conclusion" in sentences["window"]
    (line,) = result.warnings()
    assert "the exact model (0.510) is not clearly better" in line
    for label in ("exact", "window"):
        del scores[label]
    assert evaluation(ACCURACY, {"exact": 0.51, **scores}).warnings() == []
    scores[CONTROL] = 0.505
    (line,) = evaluation(ACCURACY, {"exact": 0.51, **scores}).warnings()
    assert "the control (0.505) is not clearly better" in line


def test_the_exact_model_comes_first_and_then_the_floor() -> None:
    result = evaluation(PERPLEXITY, {"exact": 10.0, "elu": 30.0, "window": 10.1, "without attention": 20.0})
    elu, window = result.conclusions()
    assert "perplexity: worse than without attention" in elu.sentence
    assert "perplexity +1.0%." in window.sentence
    assert result.summary()["perplexity change"].to_dict()["elu"] == "+200.0%"
    assert (elu.worthwhile, window.worthwhile) == (False, True)
    assert result.warnings() == []


@pytest.mark.parametrize(("score", "expected"), [(0.0, "0.0%"), (-0.1, "-20.0%")])
def test_a_correlation_that_is_lost_is_not_better_than_exact(score: float, expected: str) -> None:
    """Matthews' coefficient and Spearman's are 0 for answers by chance, and may be negative."""
    result = evaluation(ACCURACY, {"exact": 0.5, "elu": score, "without attention": 0.0})
    comparison = result.compare("elu", ACCURACY)
    assert comparison is not None
    assert (comparison.better, comparison.retained) == (False, expected)
    assert "better" not in result.conclusions()[0].sentence
    assert result.conclusions()[0].worthwhile is False


@pytest.mark.slow
def test_a_converted_checkpoint_is_compared_with_an_equally_trained_model() -> None:
    values = {"exact": 0.70, CONTROL: 0.84, CONVERTED: 0.80, "without attention": 0.50}
    result = evaluation(ACCURACY, values)
    assert "keeps 95.2% of sst2 accuracy" in result.conclusions()[0].sentence
    assert result.summary()["sst2 accuracy kept"][CONVERTED] == "95.2%"
    del values[CONTROL]
    result = evaluation(ACCURACY, values)
    sentence = result.conclusions()[0].sentence
    assert "sst2 accuracy: better than exact" in sentence
    assert result.summary()["sst2 accuracy kept"][CONVERTED] == "better than exact"
    assert "%" not in sentence


@pytest.mark.parametrize(
    ("speedups", "text"),
    [({128: 0.5, 512: 0.9}, "> 512"), ({128: 1.5, 512: 2.0}, "≤ 128"), ({128: 0.5, 512: 2.0}, "~ 260")],
)
def test_nothing_is_said_about_lengths_that_were_not_measured(speedups: dict[int, float], text: str) -> None:
    result = evaluation(PERPLEXITY, {"exact": 10.0, "elu": 11.0, "without attention": 20.0}, speedups=speedups)
    assert result.summary()["faster from"]["elu"] == text


def test_inputs_are_as_long_as_they_were_and_not_as_they_might_have_been() -> None:
    result = evaluation(ACCURACY, {"exact": 0.9, "elu": 0.9, "without attention": 0.5}, longest=60)
    assert result.warnings() == ["Quality was measured on inputs of at most 60 tokens."]
    assert result.conclusions()[0].worthwhile is None


def test_it_prints_as_a_short_table() -> None:
    result = evaluation(PERPLEXITY, {"exact": 10.0, "elu": 11.0, "without attention": 20.0})
    lines = repr(result).splitlines()
    assert lines[0].split()[0] == "perplexity"
    assert [line.split()[0] for line in lines[2:]] == ["exact", "elu", "without", "elu:"]
    assert "+10.0%" in lines[3]


@pytest.mark.slow
def test_a_speed_that_varies_more_than_it_differs_is_not_stated() -> None:
    result = evaluation(PERPLEXITY, {"exact": 10.0, "elu": 10.0, "without attention": 20.0}, spread=(0.8, 2.5))
    assert result.summary()["forward at 512"]["elu"] == "not measurable"
    assert "faster from" not in result.summary()
    conclusion = result.conclusions()[0]
    assert conclusion.sentence.startswith("its speed is not measurable on this machine now at 512 tokens")
    assert conclusion.worthwhile is None
    sure = evaluation(PERPLEXITY, {"exact": 10.0, "elu": 10.0, "without attention": 20.0}, spread=(1.8, 2.5))
    assert sure.summary()["forward at 512"]["elu"] == "2.00×"


def test_plots_show_how_much_a_speed_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table calls such a speed not measurable."""
    figures: dict[str, Any] = {}
    monkeypatch.setattr(report, "png", lambda figure: figures.setdefault(len(figures), figure) and b"")
    result = evaluation(PERPLEXITY, {"exact": 10.0, "elu": 10.0, "without attention": 20.0}, spread=(0.8, 2.5))
    report.draw_plots(result)
    against_speed, time = figures.values()
    lines = [(line.get_color(), list(line.get_xdata())) for line in against_speed.axes[0].lines]
    assert (report.COLORS[0], [0.8, 2.5]) in lines
    bands = [band.get_datalim(axes.transData) for axes in time.axes[1:] for band in axes.collections]
    assert any((band.y0, band.y1) == pytest.approx((0.8, 2.5)) for band in bands)


@pytest.mark.parametrize(("error", "sentence"), [(3.0, "perplexity +2.0%"), (15.0, "perplexity: no conclusion")])
def test_the_floor_must_be_three_standard_errors_away(error: float, sentence: str) -> None:
    """The difference of 30 has the error of both scores, 1.4 times that of each."""
    result = evaluation(PERPLEXITY, {"exact": 100.0, "window": 102.0, "without attention": 130.0}, stderr=error)
    assert sentence in result.conclusions()[0].sentence


def test_a_seed_whose_score_is_no_number_is_not_left_out_in_silence() -> None:
    result = evaluation(PERPLEXITY, {"exact": 10.0, "elu": 11.0, "without attention": 20.0})
    assert result.warnings() == []
    diverged = Measured("elu", "elu", "untrained", PERPLEXITY.measurement, {"perplexity": None})
    result = replace(result, measured=(*result.measured, diverged))
    assert result.summary().loc["elu", "perplexity"] == "11.00"
    assert result.warnings() == ["elu: perplexity is no number in 1 of 2 runs; the others are shown."]


def test_a_classifier_at_the_majority_baseline_supports_no_conclusion() -> None:
    values, score = {"exact": 0.52, "elu": 0.66, "without attention": 0.40}, replace(ACCURACY, constant_answer=0.52)
    result = evaluation(score, values)
    assert "sst2 accuracy: no conclusion" in result.conclusions()[0].sentence
    assert "always giving the same answer (0.520)" in result.warnings()[0]
    better = evaluation(score, {**values, "exact": 0.70})
    assert "keeps 94.3% of sst2 accuracy" in better.conclusions()[0].sentence


def test_lengths_beyond_the_positions_are_marked_with_the_line_that_says_so() -> None:
    scores = {"exact": 10.0, "elu": 11.0, "without attention": 20.0}
    note = "† Beyond the model's 256 positions they continue; no quality was measured there."
    result = evaluation(PERPLEXITY, scores, speedups={128: 1.5, 512: 2.0})
    result = replace(result, model={**result.model, "positions": 256}, notes=(note,))
    assert "forward at 512 †" in result.summary()
    assert [result.length_title(length) for length in (128, 256, 512)] == ["128", "256", "512 †"]
    assert result.positions_note() == note
    assert note in result.warnings()
    assert result.summary().loc["elu", ["faster from", "forward at 512 †"]].tolist() == ["≤ 128", "2.00×"]
