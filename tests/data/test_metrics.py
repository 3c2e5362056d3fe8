"""Task metrics: the values of scikit-learn and SciPy, in batches, offline and on degenerate inputs; `hub:` metrics."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sklearn_metrics

from hf_linear_attn.data.labels import Labels
from hf_linear_attn.data.metrics import (
    METRICS,
    check_metrics,
    compute_metrics,
    constant_answer_score,
    higher_is_better,
    load_metrics,
)
from hf_linear_attn.data.tasks import TASKS

CLASSES = ("accuracy", "f1", "matthews_correlation")
SCORES = ("pearson", "spearmanr", "mse")
SEVERAL = ("f1_micro", "f1_macro", "subset_accuracy")

TRUE_VALUES = {
    "accuracy": sklearn_metrics.accuracy_score,
    "f1": sklearn_metrics.f1_score,
    "matthews_correlation": sklearn_metrics.matthews_corrcoef,
    "pearson": lambda references, predictions: stats.pearsonr(predictions, references).statistic,
    "spearmanr": lambda references, predictions: stats.spearmanr(predictions, references).statistic,
    "mse": sklearn_metrics.mean_squared_error,
    "f1_micro": lambda references, predictions: sklearn_metrics.f1_score(references, predictions, average="micro"),
    "f1_macro": lambda references, predictions: sklearn_metrics.f1_score(references, predictions, average="macro"),
    "subset_accuracy": lambda references, predictions: (references == predictions).all(axis=1).mean(),
}


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def sample(name: str, rows: int = 101) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    if METRICS.get(name).problem == "multi_label_classification":
        return generator.integers(0, 2, (rows, 4)), generator.integers(0, 2, (rows, 4))
    if METRICS.get(name).problem == "regression":
        references = generator.integers(0, 26, rows) / 5  # with ties, as in STS-B
        return (references + generator.normal(size=rows)).astype(np.float32), references
    references = generator.integers(0, 2, rows)
    return np.where(generator.random(rows) < 0.3, 1 - references, references), references


def test_every_metric_is_tested():
    assert sorted(name for name, _ in METRICS) == sorted(TRUE_VALUES) == sorted(CLASSES + SCORES + SEVERAL)
    assert [name for name, entry in METRICS if not entry.higher_is_better] == ["mse"]


@pytest.mark.parametrize(
    "names", [*((name,) for name in sorted(TRUE_VALUES)), CLASSES, SCORES, SEVERAL, ("accuracy", "mse")]
)
def test_values(names):
    predictions, references = sample(names[0])
    expected = {name: pytest.approx(float(TRUE_VALUES[name](references, predictions)), rel=1e-6) for name in names}
    result = compute_metrics(names, predictions, references)
    assert result == expected
    assert list(result) == list(names)
    assert all(type(value) is float for value in result.values())
    assert compute_metrics(names, torch.tensor(predictions), references.tolist()) == expected


def test_several_classes():
    references, predictions = [0, 1, 2, 2, 1], [0, 2, 2, 2, 1]
    result = compute_metrics(["accuracy", "matthews_correlation"], predictions, references)
    assert result["accuracy"] == 0.8
    assert result["matthews_correlation"] == pytest.approx(sklearn_metrics.matthews_corrcoef(references, predictions))
    with pytest.raises(ValueError, match="f1 is defined for the classes 0 and 1; these rows have 2"):
        compute_metrics(["f1"], predictions, references)


@pytest.mark.parametrize("name", sorted(name for name, _ in TASKS))
def test_metrics_of_tasks(name):
    task = TASKS.get(name)
    result = compute_metrics(task.metrics, [0, 1, 1], [0, 1, 1])
    assert tuple(result) == task.metrics
    assert all(value == pytest.approx(1.0) for value in result.values())


@pytest.mark.parametrize(
    ("predictions", "references", "expected"),
    [
        ([0, 0, 0], [0, 0, 0], (1.0, 0.0, 0.0)),
        ([1, 1, 1], [1, 1, 1], (1.0, 1.0, 0.0)),
        ([0, 0, 0], [0, 1, 1], (1 / 3, 0.0, 0.0)),
        ([1], [0], (0.0, 0.0, 0.0)),
    ],
)
def test_one_class_only(predictions, references, expected):
    result = compute_metrics(CLASSES, predictions, references)
    assert tuple(result.values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("predictions", "references", "mse"),
    [
        ([1.0, 1.0, 1.0], [0.0, 1.0, 2.0], 2 / 3),
        ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0], 2 / 3),
        ([1.0], [3.0], 4.0),
        ([math.nan, 1.0, 2.0], [0.0, 1.0, 2.0], math.nan),
        ([math.inf, 1.0, 2.0], [0.0, 1.0, 2.0], math.nan),
    ],
)
def test_scores_without_a_correlation(predictions, references, mse):
    result = compute_metrics(SCORES, predictions, references)
    assert tuple(result.values()) == pytest.approx((math.nan, math.nan, mse), nan_ok=True)


def test_rows_whose_logits_are_nan_have_no_score():
    """The largest of them would be NaN, and that of class 0."""
    logits = torch.tensor([[0.1, 0.9], [math.nan, math.nan], [0.9, 0.1]])
    assert Labels("single_label_classification", ("a", "b")).answers(logits).tolist() == [1, -1, 0]
    for predictions, defined in (([1, 0, 0], True), ([1, -1, 0], False)):
        scores = compute_metrics(CLASSES, predictions, [1, 0, 0])
        assert [math.isfinite(score) for score in scores.values()] == [defined] * len(CLASSES)


def test_the_score_of_one_answer_to_all_rows():
    assert constant_answer_score("accuracy", [0, 1, 1, 2]) == 0.5
    assert constant_answer_score("matthews_correlation", [0, 1, 1]) == 0.0
    assert constant_answer_score("f1", [0, 0, 0, 1]) == pytest.approx(0.4)  # of class 1: precision 1/4, recall 1
    assert constant_answer_score("mse", [1.0, 2.0, 6.0]) == pytest.approx(14 / 3)  # the mean, 3
    assert constant_answer_score("pearson", [1.0, 2.0, 6.0]) == 0.0


def test_the_best_constant_answer_of_several_labels_is_found_among_all():
    references = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=np.float32)
    answers = [np.array(answer) for answer in itertools.product((0, 1), repeat=3)]
    for name, expected in TRUE_VALUES.items():
        if name in SEVERAL:
            every = [expected(references, np.tile(answer, (5, 1))) for answer in answers]
            assert constant_answer_score(name, references) == pytest.approx(max(every)), name


def test_metrics_are_for_their_labels():
    check_metrics(["accuracy", "mse"], "single_label_classification")  # classes are numbers, too
    with pytest.raises(
        ValueError, match=r"accuracy is for classes, and these labels are several labels a row. Use f1_mi"
    ):
        check_metrics(["accuracy"], "multi_label_classification")
    with pytest.raises(ValueError, match="f1_micro is for several labels a row, and these labels are classes"):
        check_metrics(["f1_micro"], "single_label_classification")
    with pytest.raises(
        ValueError, match=r"accuracy is for classes, and these labels are scores. Use pearson, spearmanr"
    ):
        check_metrics(["accuracy"], "regression")


def test_nearly_constant_scores_are_no_flood_of_warnings():
    predictions = 1e8 + np.array([0.0, 1e-7, 2e-7])
    result = compute_metrics(["pearson"], predictions, [0.0, 1.0, 2.0])["pearson"]
    assert math.isnan(result) or abs(result) <= 1.0


SCRIPT = """
import socket, sys
def refuse(*args, **options):
    raise AssertionError("a metric asked for the network")
socket.socket.connect = refuse
from hf_linear_attn.data.metrics import compute_metrics
print(compute_metrics(["accuracy"], [int(sys.argv[1])] * 3 + [1], [1] * 4)["accuracy"])
"""


@pytest.mark.slow
def test_processes_are_apart_and_need_no_home_and_no_network(tmp_path):
    """Two processes at a time, whose home is a file so that nothing can be written below it."""
    home = tmp_path / "home"
    home.write_text("no folder")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    settings = {**variables, "HOME": str(home), "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, value],
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for value in "01"
    ]
    result = [(process.communicate(timeout=240), process.returncode) for process in running]
    assert [code for _, code in result] == [0, 0], result
    assert [out.strip() for (out, _), _ in result] == ["0.25", "1.0"]


def test_what_is_no_metric_is_reported():
    with pytest.raises(ValueError, match=r"Unknown metric 'acuracy'. Did you mean 'accuracy'"):
        load_metrics(["acuracy"])
    with pytest.raises(TypeError, match="as a list of names, got 'accuracy'"):
        load_metrics("accuracy")
    for names in ([], ["f1", "f1"]):
        with pytest.raises(ValueError, match="one or more different names"):
            load_metrics(names)


@pytest.mark.parametrize(("missing", "name"), [("sklearn", "accuracy"), ("scipy", "accuracy"), ("evaluate", "hub:x")])
def test_a_missing_package_is_named_with_the_remedy(missing, name, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{missing}.*pip install 'hf-linear-attn\[train\]'"):
        load_metrics([name])


def test_importing_is_light():
    script = (
        "import sys\nfrom hf_linear_attn.data import files, labels, metrics, tasks, text\n"
        "heavy = {'datasets', 'evaluate', 'sklearn', 'scipy', 'pandas', 'torch', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = str(Path(__file__).parents[2])
    result = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --------------------------------------------------------------------------------------------------------------------
# Modules of the package evaluate

MODULE = """
import datasets
import evaluate


class Missed(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="wrong rows", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        wrong = sum(p != r for p, r in zip(predictions, references))
        return {"missed": wrong, "hit": len(predictions) - wrong}
"""


@pytest.fixture
def metric_folder(tmp_path):
    folder = tmp_path / "missed"
    folder.mkdir()
    (folder / "missed.py").write_text(MODULE)
    return folder


@pytest.mark.parametrize("name", ["hub:", "hub:#f1", "hub:glue:", "hub:glue#"])
def test_a_name_of_another_form(name):
    with pytest.raises(ValueError, match="hub:PATH"):
        load_metrics([name])


def test_whether_more_of_a_metric_is_better(metric_folder):
    names = "accuracy", "mse", "hub:accuracy", "hub:-mse"
    assert [higher_is_better(name) for name in names] == [True, False, True, False]
    name = f"hub:-{metric_folder}#missed"
    assert compute_metrics([name], [1, 0, 1, 0], [1, 1, 1, 0]) == {name: 1.0}


def test_a_module_of_a_folder_beside_our_own(metric_folder):
    name = f"hub:{metric_folder}#missed"
    assert compute_metrics([name, "accuracy"], [1, 0, 1, 0], [1, 1, 1, 0]) == {name: 1.0, "accuracy": 0.75}


@pytest.mark.parametrize("suffix", ["", "#wrong"])
def test_several_values_need_a_key(metric_folder, suffix):
    with pytest.raises(ValueError, match="gives missed, hit: add #KEY"):
        compute_metrics([f"hub:{metric_folder}{suffix}"], [1], [1])


def test_a_module_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match=r"cannot be loaded .*Connect to the Hub"):
        load_metrics([f"hub:{tmp_path}/nothing"])
