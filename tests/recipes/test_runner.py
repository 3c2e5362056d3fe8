"""The runner of the benchmarks: cells, resumption, the comparison of two runs, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.benchmarks.__main__ import BENCHMARKS, benchmark_of, main, parser_of
from recipes.benchmarks.runner import Cell, Cells, compare, run_benchmark
from recipes.result_files import ROOT

SEEN: list[int] = []


def squares(numbers: tuple[int, ...] = (1, 2, 3), fails_at: int | None = None) -> Cells:
    """Squares, up to the first one beyond 4."""
    for number in numbers:

        def measure(number: int = number) -> list[dict[str, Any]]:
            if number == fails_at:
                raise KeyboardInterrupt
            SEEN.append(number)
            return [{"square": number**2}]

        rows = yield Cell({"number": number}, measure)
        if rows[0]["square"] > 4:
            return


@pytest.fixture(autouse=True)
def unseen() -> None:
    SEEN.clear()


def test_rows_have_the_facts_of_their_cell_and_are_sent_back(tmp_path: Path) -> None:
    results = run_benchmark("squares", squares, {"numbers": (1, 3, 4)}, tmp_path / "out")
    assert results["rows"] == [{"number": 1, "square": 1}, {"number": 3, "square": 9}]
    assert json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8")) == results
    assert results["settings"] == {"numbers": [1, 3, 4]}
    assert {"versions", "hardware"} == set(results["environment"])


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_benchmark("squares", squares, {"fails_at": 2}, out)
    assert SEEN == [1]
    with pytest.raises(ValueError, match="--resume"):
        run_benchmark("squares", squares, {}, out)
    results = run_benchmark("squares", squares, {}, out, resume=True)
    assert SEEN == [1, 2, 3]
    assert [row["square"] for row in results["rows"]] == [1, 4, 9]


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thing").write_text("{}")
    with pytest.raises(ValueError, match="not a result of this command"):
        run_benchmark("squares", squares, {}, tmp_path)


# --------------------------------------------------------------------------------------------------------------------
# Comparison


def row(median: float, spread: float = 0.01, rounds: int = 9, lower: bool = True, name: str = "x") -> dict[str, Any]:
    value = {"median": median, "p20": median * (1 - spread), "p80": median * (1 + spread), "rounds": rounds}
    return {"attention": name, "over_limit" if lower else "speedup": value, "seconds": {"median": 99 * median}}


@pytest.mark.parametrize(
    ("first", "second", "factor"),
    [
        (row(1.0), row(1.3), 1.3),
        (row(1.0), row(0.8), 0.8),
        (row(1.0, lower=False), row(0.8, lower=False), 1.25),
        (row(1.0), row(1.05), None),  # within the tolerance
        (row(1.0, spread=0.2), row(1.3, spread=0.2), None),  # within the noise
        (row(1.0, rounds=1), row(1.13), None),  # too few rounds to tell
        ({"attention": "x", "to_output": 1.0}, {"attention": "x", "to_output": 1.2}, 1.2),
    ],
)
def test_changes_beyond_the_noise(first: dict[str, Any], second: dict[str, Any], factor: float | None) -> None:
    changes = compare([first, row(2.0, name="y")], [second, row(2.0, name="y")], 0.1)
    assert [change.factor for change in changes] == ([] if factor is None else [pytest.approx(factor)])


def test_runs_with_nothing_in_common_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="no ratio in common"):
        compare([row(1.0)], [row(1.0, name="y")], 0.1)


# --------------------------------------------------------------------------------------------------------------------
# The command line

SMALL = ["--attention", "[elu]", "--backend", "[torch]", "--lengths", "[16, 24]", "--dtypes", "[float32]"]
SMALL += ["--directions", "[causal]", "--passes", "[forward]", "--peers", "false", "--seconds", "0.001"]
SMALL += ["--heads", "2", "--head_dim", "8"]


def test_a_run_is_compared_with_an_earlier_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["attention", *SMALL, "--output", str(out)]) == 0
    assert "| causal | float32 | forward | 16 | elu | torch |" in capsys.readouterr().out
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    again = ["attention", *SMALL, "--output", str(out), "--resume", "--compare", str(out / "results.json")]
    assert main(again) == 0
    assert "Nothing changed" in capsys.readouterr().out
    for name in ("median", "p20", "p80"):
        results["rows"][1]["over_limit"][name] /= 100
    (tmp_path / "before.json").write_text(json.dumps(results), encoding="utf-8")
    assert main([*again[:-1], str(tmp_path / "before.json")]) == 1
    assert "% worse" in capsys.readouterr().out


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        parser_of(name).parse_args(["--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert str(benchmark_of(name).__doc__).splitlines()[0] in shown
    assert "--resume" in shown


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_in_the_table_of_the_recipes(name: str) -> None:
    assert f"`{name}`" in (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "[eluu]"], "Did you mean 'elu'"),
        (["--attention", "[softmax]"], "Leave it out"),
        (["--backend", "[natve]"], "Did you mean 'native'"),
        (["--compare", "nowhere.json"], "nowhere.json"),
    ],
)
def test_errors_name_the_value(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attention", *SMALL, *arguments, "--output", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert not (tmp_path / "out" / "records.jsonl").exists()


def test_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["speed"]) == 2
    assert "there is no benchmark 'speed'" in (shown := capsys.readouterr().err)
    assert "attention" in shown
