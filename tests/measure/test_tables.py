"""Results print as short tables, in a terminal and in a notebook."""

from __future__ import annotations

import pandas as pd
import pytest

from hf_linear_attn import ExactHeads, Fidelity, Recall
from hf_linear_attn.measure.fidelity import LayerFidelity


def test_fidelity() -> None:
    """Of a mechanism whose weights are no distribution there is no divergence."""
    first = LayerFidelity(0, "layers.0.attn", "elu", [0.25, 0.75], [0.1, 0.3])
    second = LayerFidelity(3, "layers.3.attn", "dpfp", None, [0.6, 0.6])
    result = Fidelity([first, second], final_cosine=0.9, tokens=1234)
    lines = [line.split() for line in repr(result).splitlines()]
    assert lines[0] == ["attention", "KL,", "nats", "output", "error"]
    assert lines[2:] == [
        ["0", "layers.0.attn", "elu", "0.500", "0.200"],
        ["3", "layers.3.attn", "dpfp", "–", "0.600"],
        ["mean", "0.500", "0.400"],
        ["cosine", "of", "the", "final", "hidden", "states:", "0.900,", "over", "1,234", "tokens"],
    ]
    assert "<td>0.500</td>" in result._repr_html_()
    assert result.output_error == pytest.approx(0.4)


def test_recall() -> None:
    rows = [("vt", 256, 1.0), ("vt", 256, 0.0), ("vt", 512, 1.0), ("mqar", 512, 0.0)]
    result = Recall(pd.DataFrame(rows, columns=["task", "length", "score"]))
    lines = repr(result).splitlines()
    assert lines[0] == "score by task and length, with its 95 % interval, of 1 prompts or more"
    assert lines[1].split() == ["length", "256", "512"]
    assert lines[3].split("  ")[-2:] == ["0.50 [0.09, 0.91]", "1.00 [0.21, 1.00]"]
    assert lines[4].split()[:2] == ["mqar", "–"]
    assert "<td>0.50 [0.09, 0.91]</td>" in result._repr_html_()


def test_exact_heads() -> None:
    table = pd.DataFrame({"layer": [1, 0, 1, 0], "head": [1, 0, 0, 1], "gain": [4.0, 3.0, 2.0, 1.0]})
    result = ExactHeads.first_rows(table, 2)
    lines = [line.split() for line in repr(result).splitlines()]
    assert lines[2:] == [["0", "0", "2"], ["1", "1", "2"]]
    assert "–" in repr(ExactHeads.first_rows(table, 1))
    assert "<th>exact heads</th>" in result._repr_html_()
