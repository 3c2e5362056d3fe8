"""The generated tables of the README and of the documentation."""

from __future__ import annotations

import pandas as pd
import pytest

from hf_linear_attn.study.tables import to_markdown
from recipes.benchmarks import write_tables
from recipes.benchmarks.tables.text import times
from recipes.benchmarks.write_tables import FILES, MARK, TABLES, main, updated
from recipes.result_files import ROOT
from tests.subprocesses import run_python

PAGES = sorted(path for pattern in FILES for path in ROOT.glob(pattern))


def test_all_tables_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_the_module_is_a_command() -> None:
    assert "--check" in run_python("-m", "recipes.benchmarks.write_tables", "--help").stdout


def test_every_table_is_on_a_page() -> None:
    names = {match["name"] for path in PAGES for match in MARK.finditer(path.read_text(encoding="utf-8"))}
    assert names == set(TABLES)


def test_links_are_relative_to_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    write_tables.table.cache_clear()
    monkeypatch.setitem(TABLES, "plan", lambda: "![plot](recipes/results/plot.png) [paper](https://arxiv.org)")
    page = "before\n<!-- plan:begin -->\nold\n<!-- plan:end -->\nafter\n"
    assert "](recipes/results/plot.png)" in updated(page, "README.md")
    assert "](../recipes/results/plot.png)" in updated(page, "docs/planning.md")
    assert "](results/plot.png)" in updated(page, "recipes/README.md")
    assert updated(page, "README.md").endswith("<!-- plan:end -->\nafter\n")
    write_tables.table.cache_clear()


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- plan:begin -->\n", "needs its <!-- NAME:end -->"),
        ("<!-- nothing:begin -->\n<!-- nothing:end -->", "There is no table 'nothing'"),
    ],
)
def test_wrong_marks_are_refused(page: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        updated(page, "README.md")


def test_markdown() -> None:
    table = pd.DataFrame({"a": ["x|y", None], "b": ["1", "22"]})
    assert to_markdown(table) == "| a | b |\n|:---|---:|\n| x/y | 1 |\n| – | 22 |"
    assert to_markdown(table[:1], text_columns=None).splitlines()[1] == "|:---|:---|"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0432, "0.043"), (0.432, "0.43"), (4.32, "4.3"), (43.2, "43"), (99.7, "100"), (4321.0, "4,300")],
)
def test_two_digits(value: float, text: str) -> None:
    assert times(value) == text
