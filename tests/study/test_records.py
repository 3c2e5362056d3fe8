"""Records: conditions, resumption, merging, the tidy table, and files that are damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hf_linear_attn.study.study import RECORDS_VERSION, Conditions, Records, Study


def conditions(length: int = 64, attention: str = "elu", **changes: Any) -> Conditions:
    parts: dict[str, Any] = {
        "model": "tiny",
        "fingerprint": "ab",
        "attention": attention,
        "measurement": "forward",
        "length": length,
        "options": {"num_features": 4},
        "device": {"device": "cpu", "cpu": "a CPU", "threads": 1},
        "versions": {"torch": "2"},
    }
    return Conditions(**{**parts, **changes})


def started(path: Path | None) -> Records:
    records = Records(path)
    records.start_run("a test", {"steps": 3}, {"hardware": {"cpu": "a CPU"}})
    return records


def test_ids_depend_on_every_part_and_on_no_order() -> None:
    first = conditions()
    options = {"num_features": 4, "seed": 0}
    assert first.id == conditions().id
    assert conditions(options=options).id == conditions(options=dict(reversed(options.items()))).id
    others = [
        conditions(65),
        conditions(attention="favor+"),
        conditions(fingerprint="cd"),
        conditions(state="untrained"),
        conditions(seed=0),
        conditions(settings={"steps": 1}),
        conditions(device={"device": "cuda"}),
        conditions(versions={"torch": "3"}),
    ]
    assert len({first.id, *(other.id for other in others)}) == 9


def test_each_record_is_on_disk_at_once_and_not_measured_twice(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    records = started(path)
    assert not path.exists()
    calls: list[int] = []

    def function() -> dict[str, Any]:
        calls.append(1)
        return {"median": 0.5, "diverged": float("nan")}

    record = Study(records=records).measure(conditions(), function)
    assert (record.numbers["median"], record.numbers["diverged"]) == (0.5, None)
    assert len(path.read_text().splitlines()) == 2
    Study(records=records).measure(conditions(), function)
    again = started(path)
    record = Study(records=again).measure(conditions(), function)
    assert len(calls) == len(again) == 1
    assert record == next(iter(records))
    assert again.runs[record.run].settings == {"steps": 3}
    assert again.latest(conditions(65)) is None


def test_of_two_records_the_newer_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for median in (1.0, 2.0):
        started(path).add(conditions(), {"median": median})
    assert [record.numbers["median"] for record in Records(path)] == [1.0, 2.0]
    assert Records(path).latest(conditions()).numbers["median"] == 2.0


def test_an_incomplete_last_line_is_ignored_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    records = started(path)
    records.add(conditions(1), {"a": 1})
    records.add(conditions(2), {"a": 2})
    complete = path.read_bytes()
    for cut in (1, 40, len(complete.splitlines(keepends=True)[-1]) - 1):
        path.write_bytes(complete[:-cut])
        records = started(path)
        assert [record.numbers["a"] for record in records] == [1]
        records.add(conditions(3), {"a": 3})
        assert [record.numbers["a"] for record in Records(path)] == [1, 3]


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first, second = started(path), started(path)
    for length in range(5):
        first.add(conditions(length), {"by": 1})
        second.add(conditions(length), {"by": 2})
    records = Records(path)
    assert (len(records), len(records.runs)) == (10, 2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: [lines[0], "{not json", *lines[1:]], "line 2 is not a JSON object"),
        (lambda lines: ["", *lines], "line 1 is not a JSON object"),
        (lambda lines: ["[1]", *lines], "line 1 is not a JSON object"),
        (lambda lines: ["{}", *lines], "line 1 has format version None"),
        (lambda lines: [*lines, '{"format_version": 99}'], "line 4 has format version 99; hf-linear-attn reads"),
        (lambda lines: [*lines, '{"format_version": 2, "kind": "song"}'], "line 4 is damaged.*song"),
        (lambda lines: [*lines, '{"format_version": 2, "kind": "run"}'], "line 4 is damaged"),
    ],
)
def test_damage_is_reported_with_file_and_line(tmp_path: Path, change: Any, complaint: str) -> None:
    path = tmp_path / "m.jsonl"
    records = started(path)
    records.add(conditions(1), {"a": 1})
    records.add(conditions(2), {"a": 2})
    lines = change(path.read_text().splitlines())
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"m\.jsonl', {complaint}"):
        Records(path)


def test_in_memory_and_without_a_run() -> None:
    records = Records()
    with pytest.raises(RuntimeError, match="start_run"):
        records.add(conditions(), {})
    records = started(None)
    records.add(conditions(), {"a": 1})
    assert records.latest(conditions()) is not None


def test_format_is_pinned(tmp_path: Path) -> None:
    """A change of the file's form needs another number."""
    path = tmp_path / "m.jsonl"
    started(path).add(conditions(), {"a": 1})
    run, record = map(json.loads, path.read_text().splitlines())
    assert RECORDS_VERSION == 2
    assert set(run) == {"format_version", "kind", "run", "time", "tool", "settings", "environment"}
    assert set(record) == {
        *("format_version", "kind", "id", "conditions", "values", "time", "run", "label", "seconds"),
    }


@pytest.mark.skipif(os.name == "nt", reason="file modes")
def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    records = started(tmp_path / "file" / "m.jsonl")
    with pytest.raises(OSError, match="file"):
        records.add(conditions(), {"a": 1})
    assert len(records) == 0
