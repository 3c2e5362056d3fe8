"""Metrics of the Hub or of a folder: their names, their values beside the package's own, their errors."""

from __future__ import annotations

import pytest

pytest.importorskip("evaluate", reason="metrics need the package evaluate")

from hf_linear_attn.evaluation.metrics import combine
from hf_linear_attn.evaluation.metrics.foreign import ForeignName, parse

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
def folder(tmp_path):
    made = tmp_path / "missed"
    made.mkdir()
    (made / "missed.py").write_text(MODULE)
    return made


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hub:accuracy", ("accuracy", None, None)),
        ("hub:glue:mrpc#f1", ("glue", "mrpc", "f1")),
        ("hub:me/mine#k", ("me/mine", None, "k")),
    ],
)
def test_names(name, parts):
    assert parse(name) == ForeignName(*parts)


@pytest.mark.parametrize("name", ["hub:", "hub:#f1", "hub:glue:", "hub:glue#"])
def test_a_name_of_another_form(name):
    with pytest.raises(ValueError, match="hub:PATH"):
        parse(name)


def test_a_module_of_a_folder_beside_our_own(folder):
    name = f"hub:{folder}#missed"
    metric = combine([name, "accuracy"])
    metric.add_batch(predictions=[1, 0, 1], references=[1, 1, 1])
    metric.add_batch(predictions=[0], references=[0])
    assert metric.compute() == {name: 1.0, "accuracy": 0.75}
    metric.add_batch(predictions=[0], references=[0])  # filled again
    assert metric.compute() == {name: 0.0, "accuracy": 1.0}


@pytest.mark.parametrize("suffix", ["", "#wrong"])
def test_several_values_need_a_key(folder, suffix):
    metric = combine([f"hub:{folder}{suffix}"])
    metric.add_batch(predictions=[1], references=[1])
    with pytest.raises(ValueError, match="gives missed, hit: add #KEY"):
        metric.compute()


def test_a_module_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match=r"cannot be loaded .*Connect to the Hub"):
        combine([f"hub:{tmp_path}/nothing"])
