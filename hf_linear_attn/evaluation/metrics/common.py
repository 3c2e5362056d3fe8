"""What every metric module tells the package evaluate about itself."""

from __future__ import annotations

from typing import Any

HINT = "Task metrics need evaluate, scikit-learn and SciPy: pip install 'hf-linear-attn[train]'"

INPUTS = """
Args:
    predictions: one number a row.
    references: the true one of each row.
"""


def describe(name: str, kind: str, reference: str, url: str) -> Any:
    """The `evaluate.MetricInfo` of a registered metric whose inputs are of the Arrow type `kind`."""
    import datasets
    import evaluate

    from . import METRICS

    return evaluate.MetricInfo(
        description=METRICS.get(name).title,
        citation=reference,
        inputs_description=INPUTS,
        features=datasets.Features({"predictions": datasets.Value(kind), "references": datasets.Value(kind)}),
        reference_urls=[url],
    )
