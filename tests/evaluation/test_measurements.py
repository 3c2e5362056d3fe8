"""The store of measurements: keys, resumption, merging, and files that are damaged."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_linear_attn.evaluation.measurements import FORMAT_VERSION, Key, Store, key_id, numbers, place_of, write_csv
from hf_linear_attn.evaluation.report import environment


def key(length: int = 64, name: str = "elu", **changes: Any) -> Key:
    parts: dict[str, Any] = {
        "model": {"name": "tiny", "fingerprint": "ab"},
        "mechanism": {"name": name, "options": {"num_features": 4}},
        "measure": {"what": "forward", "length": length},
        "device": {"device": "cpu", "cpu": "a CPU", "threads": 1},
        "versions": {"torch": "2"},
    }
    return Key(**{**parts, **changes})


def begun(path: Path | None, **settings: Any) -> Store:
    store = Store(path, **settings)
    store.begin("a test", {"steps": 3}, {"hardware": {"cpu": "a CPU"}})
    return store


def test_ids_depend_on_every_part_and_on_no_order() -> None:
    first = key()
    assert first.id == key().id == key_id(dict(reversed(first.to_dict().items())))
    others = [
        key(65),
        key(name="favor+"),
        key(model={"name": "tiny", "fingerprint": "cd"}),
        key(device={"device": "cuda"}),
        key(versions={"torch": "3"}),
    ]
    assert len({first.id, *(other.id for other in others)}) == 6
    here = place_of(environment(torch.device("cpu")))
    assert set(here["device"]) == {"device", "cpu", "threads"}
    assert key(**here).id == key(**here).id != first.id
    with pytest.raises(ValueError, match="'what'"):
        key(measure={"length": 3})


def test_each_measurement_is_on_disk_at_once_and_not_made_twice(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    store = begun(path)
    assert not path.exists()
    made: list[int] = []

    def measure() -> dict[str, Any]:
        made.append(1)
        return {"median": 0.5, "many": (1, float("nan"))}

    assert store.measured(key(), measure).value == {"median": 0.5, "many": [1, None]}
    assert len(path.read_text().splitlines()) == 2
    store.measured(key(), measure)
    again = begun(path)
    found = again.measured(key(), measure)
    assert len(made) == len(again) == 1
    assert found == next(iter(store))
    assert again.runs[found.run].settings == {"steps": 3}
    assert key(65) not in again
    assert again.newest(key(65)) is None


def test_again_keeps_both_and_shows_the_newer(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    begun(path).add(key(), {"median": 1.0})
    store = begun(path, again=True)
    values = iter([2.0, 3.0])
    for _ in range(2):
        store.measured(key(), lambda: {"median": next(values)})
    assert [held.value["median"] for held in Store(path).history(key())] == [1.0, 2.0]
    newest = Store(path).newest(key())
    assert newest is not None
    assert newest.value == {"median": 2.0}


def test_what_a_killed_write_left_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    store = begun(path)
    store.add(key(1), {"a": 1})
    store.add(key(2), {"a": 2})
    whole = path.read_bytes()
    for cut in (1, 40, len(whole.splitlines(keepends=True)[-1]) - 1):
        path.write_bytes(whole[:-cut])
        held = begun(path)
        assert (key(1) in held, key(2) in held) == (True, False)
        held.add(key(3), {"a": 3})
        assert [one.value["a"] for one in Store(path)] == [1, 3]


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first, second = begun(path), begun(path)
    for length in range(5):
        first.add(key(length), {"by": 1})
        second.add(key(length), {"by": 2})
    held = Store(path)
    assert (len(held), len(held.runs)) == (10, 2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: [lines[0], "{not json", *lines[1:]], "line 2: no JSON"),
        (lambda lines: ["", *lines], "line 1: no JSON"),
        (lambda lines: ["[1]", *lines], "line 1: no measurement"),
        (lambda lines: [*lines, '{"format": 99}'], "line 4: format 99; this version"),
        (lambda lines: [*lines, '{"format": 1, "kind": "song"}'], "line 4: unknown kind 'song'"),
        (lambda lines: [*lines, '{"format": 1, "kind": "run"}'], "line 4: the line is damaged"),
        (lambda lines: [lines[0], lines[1].replace('"length": 1', '"length": 7')], "line 2: the key was changed"),
        (lambda lines: lines[1:], "line 1: the run .* is not in the file"),
    ],
)
def test_damage_is_named_by_file_and_line(tmp_path: Path, change: Any, complaint: str) -> None:
    path = tmp_path / "m.jsonl"
    store = begun(path)
    store.add(key(1), {"a": 1})
    store.add(key(2), {"a": 2})
    lines = change(path.read_text().splitlines())
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"m\.jsonl', {complaint}"):
        Store(path)


def test_merging(tmp_path: Path) -> None:
    here, there = begun(tmp_path / "a.jsonl"), begun(tmp_path / "b.jsonl")
    here.add(key(1), {"a": 1})
    there.add(key(1), {"a": 2})
    there.add(key(2), {"a": 3}, group="together", seconds=0.5)
    assert here.merge(there) == 2
    assert here.merge(there) == 0
    held = Store(tmp_path / "a.jsonl")
    assert (len(held), len(held.runs), len(held.history(key(1)))) == (3, 2, 2)
    assert held.newest(key(2)) == there.newest(key(2))


def test_in_memory_and_without_a_run() -> None:
    store = Store(None)
    with pytest.raises(RuntimeError, match="begin"):
        store.add(key(), {})
    store = begun(None)
    store.add(key(), {"a": 1})
    assert key() in store


def test_csv() -> None:
    store = begun(None)
    store.add(key(), {"median": 0.25, "layers": [{"kl": [1, None]}], "text": "no"})
    rows = list(csv.DictReader(io.StringIO(write_csv(store).decode())))
    assert [(row["field"], row["value"]) for row in rows] == [("median", "0.25"), ("layers.0.kl.0", "1")]
    assert rows[0]["id"] == key().id
    shown = {name: rows[0][name] for name in ("model", "mechanism", "measure", "length", "device", "threads", "seed")}
    assert list(shown.values()) == ["tiny", "elu", "forward", "64", "cpu", "1", ""]
    assert list(numbers(3)) == [("", 3)]


def test_format_is_pinned(tmp_path: Path) -> None:
    """A change of the file's form needs another number."""
    path = tmp_path / "m.jsonl"
    begun(path).add(key(), {"a": 1})
    run, measurement = map(json.loads, path.read_text().splitlines())
    assert FORMAT_VERSION == 1
    assert set(run) == {"format", "kind", "run", "at", "tool", "settings", "environment"}
    assert set(measurement) == {"format", "kind", "id", "key", "value", "at", "run", "group", "seconds"}


@pytest.mark.skipif(os.name == "nt", reason="file modes")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    store = begun(tmp_path / "missing" / "m.jsonl")
    with pytest.raises(OSError, match="missing"):
        store.add(key(), {"a": 1})
    assert key() not in store
