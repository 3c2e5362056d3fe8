"""A table of architectures that were examined anew keeps the rows of the others."""

import json

import pytest
import transformers

from tests.architectures.conftest import retained_rows, thinned, write_architectures, write_table
from tests.architectures.properties import WORKS, WRONG


def row(case, attention="elu", outcome=WORKS, detail="", architectures=()):
    checks = {"effect": "passed", "generate": "n/a: it does not"}
    return {
        "case": case,
        "attention": attention,
        "outcome": outcome,
        "detail": detail,
        "class_name": f"{case}Model",
        "layers": {"linear, causal": 2},
        "checks": checks,
        "architectures": list(architectures),
    }


def test_rows_of_other_cases_are_kept(tmp_path):
    path = tmp_path / "table.md"
    first = [row("mpt"), row("mpt", "hedgehog"), row("bloom", outcome="refused", detail="No interface.")]
    write_table([thinned(one) for one in first], path)
    again = [thinned(row("bloom")), thinned(row("bloom", "hedgehog"))]
    write_table(again + retained_rows(again, path.with_suffix(".json")), path)
    written = json.loads(path.with_suffix(".json").read_text())
    assert {(one["case"], tuple(one["attention"]), one["outcome"]) for one in written["results"]} == {
        ("bloom", ("elu", "hedgehog"), WORKS),
        ("mpt", ("elu", "hedgehog"), WORKS),
    }
    assert written["counts"]["elu"] == {WORKS: 2, "refused": 0, "cannot be built tiny": 0, WRONG: 0}
    assert path.read_text().count("| `mpt` |") == 1


def test_rows_of_another_version_are_not_kept(tmp_path):
    path = tmp_path / "table.md"
    write_table([thinned(row("mpt"))], path)
    table = json.loads(path.with_suffix(".json").read_text())
    table["environment"]["versions"]["transformers"] = "5.0.0"
    path.with_suffix(".json").write_text(json.dumps(table))
    assert retained_rows([], path.with_suffix(".json")) == []
    assert retained_rows([], tmp_path / "none.json") == []


@pytest.mark.parametrize("outcome", [WORKS, WRONG])
def test_names_that_were_not_seen_keep_their_versions(tmp_path, outcome):
    path = tmp_path / "architectures.json"
    path.write_text(json.dumps({"a A": [transformers.__version__], "b B": ["5.0.0", transformers.__version__]}))
    write_architectures([row("b", outcome=outcome, architectures=["b B", "c C"])], path)
    now = [transformers.__version__] if outcome == WORKS else []
    expected = {"a A": [transformers.__version__], "b B": ["5.0.0", *now], "c C": now}
    assert json.loads(path.read_text()) == {name: versions for name, versions in expected.items() if versions}
