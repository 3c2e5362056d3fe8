"""What an evaluation concludes from its numbers: verdicts, shares, and where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pandas
import pytest

from hf_linear_attn.measure.quality import PERPLEXITY, Score
from hf_linear_attn.study import report
from hf_linear_attn.study.results import Evaluation
from hf_linear_attn.study.study import Conditions, Records

ACCURACY = Score("task", "score", "sst2 accuracy", task="sst2")
CONVERTED, CONTROL = "window (converted)", "softmax (tuned)"


def evaluation(
    score: Score,
    values: Mapping[str, float],
    *,
    speedups: Mapping[int, float] | None = None,
    longest: int = 512,
    spread: tuple[float, float] | None = None,
    **more: Mapping[str, float],
) -> Evaluation:
    """An evaluation with these scores by row; `more` are further metrics of the same measurement, by row."""
    records = Records()
    records.start_run("a test", {}, {})
    states = {name: name for name in ("exact", "without attention")} | {CONVERTED: "converted", CONTROL: "tuned"}
    for label, value in values.items():
        rows = [{"metric": score.metric, "value": value}, {"metric": "longest_input", "value": longest}]
        rows += [{"metric": name, "value": part[label]} for name, part in more.items() if label in part]
        conditions = Conditions("model", "", label, score.measurement, states.get(label, "untrained"), task=score.task)
        records.add(conditions, rows, label=label)
    for length, speedup in (speedups or {512: 2.0}).items():
        for label in values:
            time = {"metric": "seconds", "value": 1.0, "p20": 1.0, "p80": 1.0, "speedup": speedup}
            time |= dict(zip(("speedup_p20", "speedup_p80"), spread or (speedup, speedup), strict=True))
            conditions = Conditions("model", "", label, "forward", length=length, batch_size=1)
            records.add(conditions, [{**time, "speedup": 1.0} if label == "exact" else time], label=label)
    info = {
        "scores": [asdict(score)],
        "settings": {"length": 512, "dtype": "float32"},
        "model": {"dtype": "float32"},
        "notes": [],
    }
    return Evaluation(records.to_frame(), info, records)


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


@pytest.mark.parametrize(("error", "sentence"), [(None, "perplexity: no conclusion"), (3.0, "perplexity +2.0%")])
def test_the_floor_is_compared_with_the_exact_model_in_pairs(error: float | None, sentence: str) -> None:
    """Each score has a large error by itself, because texts differ; the difference has a small one."""
    result = evaluation(PERPLEXITY, {"exact": 100.0, "window": 102.0, "without attention": 130.0})
    table = result.table
    table.loc[table["metric"] == "perplexity", "stderr"] = 15.0
    if error is not None:
        row = table[(table["label"] == "without attention") & (table["metric"] == "perplexity")]
        result.table = pandas.concat([table, row.assign(metric="difference", value=30.0, stderr=error)])
    assert sentence in result.conclusions()[0].sentence


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


def test_a_seed_whose_score_is_no_number_is_not_left_out_in_silence() -> None:
    result = evaluation(PERPLEXITY, {"exact": 10.0, "elu": 11.0, "without attention": 20.0})
    assert result.warnings() == []
    diverged = evaluation(PERPLEXITY, {"elu": float("nan")}).table
    result = Evaluation(pandas.concat([result.table, diverged], ignore_index=True), result.info)
    assert result.summary().loc["elu", "perplexity"] == "11.00"
    assert result.warnings() == ["elu: perplexity is no number in 1 of 2 runs; the others are shown."]


def test_the_exact_model_comes_first_and_then_the_floor() -> None:
    result = evaluation(PERPLEXITY, {"exact": 10.0, "elu": 30.0, "window": 10.1, "without attention": 20.0})
    elu, window = result.conclusions()
    assert "perplexity: worse than without attention" in elu.sentence
    assert "perplexity +1.0%." in window.sentence
    assert result.summary()["perplexity change"].to_dict()["elu"] == "+200.0%"
    assert (elu.worthwhile, window.worthwhile) == (False, True)
    assert result.warnings() == []


def test_a_classifier_at_the_majority_baseline_supports_no_conclusion() -> None:
    values = {"exact": 0.52, "elu": 0.66, "without attention": 0.40}
    result = evaluation(ACCURACY, values, most_frequent_answer={"exact": 0.52})
    assert "sst2 accuracy: no conclusion" in result.conclusions()[0].sentence
    assert "always giving the same answer (0.520)" in result.warnings()[0]
    better = evaluation(ACCURACY, {**values, "exact": 0.70}, most_frequent_answer={"exact": 0.52})
    assert "keeps 94.3% of sst2 accuracy" in better.conclusions()[0].sentence


@pytest.mark.parametrize(("score", "expected"), [(0.0, "0.0%"), (-0.1, "-20.0%")])
def test_a_correlation_that_is_lost_is_not_better_than_exact(score: float, expected: str) -> None:
    """Matthews' coefficient and Spearman's are 0 for answers by chance, and may be negative."""
    result = evaluation(ACCURACY, {"exact": 0.5, "elu": score, "without attention": 0.0})
    comparison = result.compare("elu", ACCURACY)
    assert comparison is not None
    assert (comparison.better, comparison.kept) == (False, expected)
    assert "better" not in result.conclusions()[0].sentence
    assert result.conclusions()[0].worthwhile is False
    result.info["scores"] = [asdict(ACCURACY)] * 2
    assert result.mean_share("elu") == pytest.approx(score / 0.5)


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


def test_a_better_score_with_largely_different_outputs_is_chance() -> None:
    values = {"exact": 163.0, "window": 146.0, "without attention": 250.0}
    divergences = {"exact": 0.0, "window": 0.9, "without attention": 1.0}
    result = evaluation(PERPLEXITY, values, divergence=divergences)
    sentence = result.conclusions()[0].sentence
    assert "perplexity: better than exact, which is chance: its outputs differ largely" in sentence
    assert result.conclusions()[0].worthwhile is None


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


def test_outputs_that_training_moved_are_no_chance() -> None:
    values = {"exact": 0.70, CONVERTED: 0.80, "without attention": 0.50}
    divergences = {"exact": 0.0, CONVERTED: 0.9, "without attention": 1.0}
    assert "chance" not in evaluation(ACCURACY, values, divergence=divergences).conclusions()[0].sentence


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


def test_a_conversion_with_exact_layers_is_in_the_map_of_errors() -> None:
    result = evaluation(PERPLEXITY, {"exact": 10.0, "elu": 12.0, CONVERTED: 11.0, "without attention": 20.0})
    records = result.records
    assert records is not None
    for label, state, layers in (("elu", "untrained", (0, 1)), (CONVERTED, "converted", (1,))):
        errors = [{"metric": "output_error", "value": 0.5, "layer": layer, "head": 0} for layer in layers]
        records.add(Conditions("model", "", label, "fidelity", state), errors, label=label)
    figure = report.draw_fidelity(Evaluation(records.to_frame(), result.info, records))
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["elu", CONVERTED]
    assert axes.images[0].get_array().mask.tolist() == [[False, False], [True, False]]


def test_plots_show_how_much_a_speed_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table calls such a speed not measurable."""
    figures: dict[str, Any] = {}
    monkeypatch.setattr(report, "png", lambda figure: figures.setdefault(len(figures), figure) and b"")
    result = evaluation(PERPLEXITY, {"exact": 10.0, "elu": 10.0, "without attention": 20.0}, spread=(0.8, 2.5))
    result.info["model"] |= {"attention": "sdpa"}
    report.draw_plots(result)
    against_speed, time = figures.values()
    lines = [(line.get_color(), list(line.get_xdata())) for line in against_speed.axes[0].lines]
    assert (report.COLORS[0], [0.8, 2.5]) in lines
    bands = [band.get_datalim(axes.transData) for axes in time.axes[1:] for band in axes.collections]
    assert any((band.y0, band.y1) == pytest.approx((0.8, 2.5)) for band in bands)


def test_lengths_beyond_the_positions_are_marked_with_the_line_that_says_so() -> None:
    scores = {"exact": 10.0, "elu": 11.0, "without attention": 20.0}
    result = evaluation(PERPLEXITY, scores, speedups={128: 1.5, 512: 2.0})
    result.info["model"]["positions"] = 256
    result.info["notes"] = ["† Beyond the model's 256 positions they continue; no quality was measured there."]
    assert "forward at 512 †" in result.summary()
    assert [result.length_title(length) for length in (128, 256, 512)] == ["128", "256", "512 †"]
    assert result.positions_note() == result.info["notes"][0]
    assert result.info["notes"][0] in result.warnings()
    assert result.summary().loc["elu", ["faster from", "forward at 512 †"]].tolist() == ["≤ 128", "2.00×"]


def test_the_summary_fits_a_page() -> None:
    """1,160 pixels: a digit of the page's font is 8 pixels wide, and a cell has 18 pixels of padding."""
    scores = [PERPLEXITY, Score("recall", "recall", "recall", digits=2), Score("sts", "spearmanr", "STS-B Spearman")]
    result = evaluation(PERPLEXITY, {"exact": 10.123, "hedgehog (converted)": 11.456, "without attention": 20.0})
    result.info["scores"] = [asdict(score) for score in scores]
    for score in scores[1:]:
        result.table = pandas.concat(
            [result.table, evaluation(score, {"exact": 0.9, "hedgehog (converted)": 0.85}).table]
        )
    rows = [result.summary()]
    extra = {"forward+backward at 8,192 †": "not measurable", "decoding at 8,192 †": "12.34×"}
    extra |= {"memory at 8,192 †": "123 MB", "cache at 8,192 †": "123 MB"}
    frame = rows[0].assign(**extra).reset_index()
    widths = [max(max(map(len, frame[column])), *(len(word) for word in column.split())) * 8 + 18 for column in frame]
    assert sum(widths) <= 1160, dict(zip(frame, widths, strict=True))
