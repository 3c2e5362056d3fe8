"""Metrics: the values of scikit-learn and SciPy, in parts, offline, apart from each other, and at the edges."""

from __future__ import annotations

import gc
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

from hf_linear_attn.data.tasks import TASKS, get_task
from hf_linear_attn.evaluation.metrics import METRICS, combine, load_metric, task_metrics

CLASSES = ("accuracy", "f1", "matthews_correlation")
SCORES = ("pearson", "spearmanr", "mse")

TRUE_VALUES = {
    "accuracy": sklearn_metrics.accuracy_score,
    "f1": sklearn_metrics.f1_score,
    "matthews_correlation": sklearn_metrics.matthews_corrcoef,
    "pearson": lambda references, predictions: stats.pearsonr(predictions, references).statistic,
    "spearmanr": lambda references, predictions: stats.spearmanr(predictions, references).statistic,
    "mse": sklearn_metrics.mean_squared_error,
}


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def sample(name: str, rows: int = 101) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    if METRICS.get(name).of_scores:
        references = generator.integers(0, 26, rows) / 5  # with ties, as in STS-B
        return (references + generator.normal(size=rows)).astype(np.float32), references
    references = generator.integers(0, 2, rows)
    return np.where(generator.random(rows) < 0.3, 1 - references, references), references


def test_every_metric_is_tested():
    assert sorted(name for name, _ in METRICS) == sorted(TRUE_VALUES) == sorted(CLASSES + SCORES)
    assert [name for name, entry in METRICS if not entry.higher_is_better] == ["mse"]


@pytest.mark.parametrize("name", sorted(TRUE_VALUES))
def test_values(name):
    predictions, references = sample(name)
    metric = load_metric(name)
    expected = pytest.approx(float(TRUE_VALUES[name](references, predictions)), rel=1e-6)
    assert metric.compute(predictions=predictions, references=references) == {name: expected}
    assert metric.name == name
    assert metric.description
    for start, end in ((0, 1), (1, 40), (40, 101)):
        metric.add_batch(
            predictions=torch.tensor(predictions[start:end]), references=torch.tensor(references[start:end])
        )
    assert metric.compute() == {name: expected}


@pytest.mark.parametrize("names", [CLASSES, SCORES, ("accuracy",), ("accuracy", "mse")])
def test_combined(names):
    predictions, references = sample(names[0])
    metric = combine(names)
    for _ in range(2):  # filled again after compute()
        for start, end in ((0, 64), (64, 67), (67, 101)):
            metric.add_batch(predictions=predictions[start:end], references=references[start:end])
        found = metric.compute()
        assert list(found) == list(names)
        for name, value in found.items():
            assert value == pytest.approx(float(TRUE_VALUES[name](references, predictions)), rel=1e-6)
            assert type(value) is float


def test_several_classes():
    references, predictions = [0, 1, 2, 2, 1], [0, 2, 2, 2, 1]
    found = combine(["accuracy", "matthews_correlation"]).compute(predictions=predictions, references=references)
    assert found["accuracy"] == 0.8
    assert found["matthews_correlation"] == pytest.approx(sklearn_metrics.matthews_corrcoef(references, predictions))
    with pytest.raises(ValueError, match="f1 is of the classes 0 and 1; found 2"):
        load_metric("f1").compute(predictions=predictions, references=references)


@pytest.mark.parametrize("name", sorted(name for name, _ in TASKS))
def test_metrics_of_tasks(name):
    task = get_task(name)
    found = task_metrics(name).compute(predictions=[0, 1, 1], references=[0, 1, 1])
    assert tuple(found) == task.metrics
    assert all(value == pytest.approx(1.0) for value in found.values())
    assert task_metrics(task).compute(predictions=[1], references=[1]).keys() == found.keys()


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
    found = combine(CLASSES).compute(predictions=predictions, references=references)
    assert tuple(found.values()) == pytest.approx(expected)


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
    found = combine(SCORES).compute(predictions=predictions, references=references)
    assert tuple(found.values()) == pytest.approx((math.nan, math.nan, mse), nan_ok=True)


def test_nearly_constant_scores_are_no_flood_of_warnings():
    predictions = 1e8 + np.array([0.0, 1e-7, 2e-7])
    found = load_metric("pearson").compute(predictions=predictions, references=[0.0, 1.0, 2.0])["pearson"]
    assert math.isnan(found) or abs(found) <= 1.0


def test_two_of_a_kind_do_not_share_rows():
    first, second = load_metric("accuracy"), load_metric("accuracy")
    first.add_batch(predictions=[1, 1], references=[1, 1])
    second.add_batch(predictions=[0, 0], references=[1, 1])
    assert (first.compute()["accuracy"], second.compute()["accuracy"]) == (1.0, 0.0)
    assert first.experiment_id != second.experiment_id


def test_the_temporary_folder_goes_with_the_metric():
    metric = load_metric("accuracy")
    folder = Path(metric.data_dir)
    metric.add_batch(predictions=[1], references=[1])
    assert folder.is_dir()
    metric.compute()
    del metric
    gc.collect()  # modules of evaluate hold references to themselves
    assert not folder.exists()


SCRIPT = """
import socket, sys
def refuse(*args, **options):
    raise AssertionError("a metric asked for the network")
socket.socket.connect = refuse
from hf_linear_attn.evaluation.metrics import task_metrics
metric = task_metrics("mrpc")
for part in ([int(sys.argv[1])] * 3, [1]):
    metric.add_batch(predictions=part, references=[1] * len(part))
print(metric.compute()["accuracy"])
"""


def test_processes_are_apart_and_need_no_home_and_no_network(tmp_path):
    """Two processes at a time, whose home is a file so that nothing can be written below it."""
    home = tmp_path / "home"
    home.write_text("no folder")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    settings = {**kept, "HOME": str(home), "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
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
    found = [(process.communicate(timeout=240), process.returncode) for process in running]
    assert [code for _, code in found] == [0, 0], found
    assert [out.strip() for (out, _), _ in found] == ["0.25", "1.0"]


def test_what_is_no_metric_is_told():
    with pytest.raises(ValueError, match=r"Unknown metric 'acuracy'. Did you mean 'accuracy'"):
        load_metric("acuracy")
    with pytest.raises(TypeError, match="as a list of names, got 'accuracy'"):
        combine("accuracy")
    for names in ([], ["f1", "f1"]):
        with pytest.raises(ValueError, match="one or more different names"):
            combine(names)


@pytest.mark.parametrize("missing", ["evaluate", "sklearn", "datasets"])
def test_the_remedy_for_a_missing_package_is_told(missing, monkeypatch):
    for name in ("classification", "regression"):
        monkeypatch.delitem(sys.modules, f"hf_linear_attn.evaluation.metrics.{name}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'hf-linear-attn\[train\]'"):
        load_metric("accuracy")


def test_importing_is_light():
    script = (
        "import sys, hf_linear_attn.evaluation.metrics, hf_linear_attn.data.tasks, hf_linear_attn.data.sources\n"
        "import hf_linear_attn.data.encode\n"
        "heavy = {'datasets', 'evaluate', 'sklearn', 'scipy', 'pandas', 'torch', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = str(Path(__file__).parents[2])
    found = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
