"""Tidy records of measurements, on disk as soon as each one is known.

A JSON-lines file holds two kinds of lines. A `run` line says what a run was asked for and on which machine. A `record`
line is one measurement: its conditions (everything that its values depend on) and its values. Nothing is ever removed:
a repeated measurement is a further line, and the newest one counts. A run that was interrupted continues by asking for
the same conditions again, because those that the file holds are not measured again. `Records.to_frame` gives all values
as a tidy table: one row per value.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.environment import json_safe, utc_now
from ..utils.json_lines import JsonLinesFile

if TYPE_CHECKING:
    import pandas

FORMAT_VERSION = 2

#: The name of the file in the folder of an evaluation.
RECORDS_FILE = "records.jsonl"

#: Folder beside the records for the learned parameters: an interrupted run does not train them again.
LEARNED_FOLDER = "learned"

#: Columns of the table with the conditions of a value.
CONDITION_COLUMNS = (
    *("id", "time", "run", "group", "label", "model", "attention", "state", "seed"),
    *("measurement", "task", "length", "batch_size", "dtype", "device", "threads"),
)

#: Columns of the table that exist even where no value has them.
COLUMNS = (
    *(*CONDITION_COLUMNS, "metric", "value", "unit"),
    *("p20", "p80", "speedup", "speedup_p20", "speedup_p80", "rounds", "layer", "head", "step", "position"),
)

Values = Sequence[Mapping[str, Any]]
"""Each has `metric` and `value`, and may have `unit`, `p20`, `p80`, `layer` and other columns of the table."""


@dataclass(frozen=True)
class Conditions:
    """Everything that a measurement depends on: equal conditions mean the same measurement.

    Attributes:
        model: Its name.
        fingerprint: A hash of its weights.
        attention: The mechanism: a registered name, `softmax`, or `none` for a model without attention.
        measurement: What is measured, such as `perplexity` or `forward`.
        state: What was done to the mechanism: `exact`, `untrained`, `transferred`, `converted`, `tuned`. Empty where
            the values do not depend on it, as times.
        seed: The seed of random features and of the training.
        task: The labelled task, or an empty string.
        length: Tokens of each sequence, where it is one number.
        batch_size: Sequences in one call.
        options: The mechanism's options, or its layers.
        settings: Further settings: data, training, stride, a checkpoint's fingerprint.
        device: `device`, `cpu`, `threads`, `dtype`, `backend`.
        versions: Versions of the packages that compute.
    """

    model: str
    fingerprint: str
    attention: str
    measurement: str
    state: str = ""
    seed: int | None = None
    task: str = ""
    length: int | None = None
    batch_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the conditions in a form that JSON can hold."""
        return json_safe(asdict(self))

    @property
    def id(self) -> str:
        """16 hexadecimal digits that identify the conditions."""
        return conditions_id(self.to_dict())


def conditions_id(conditions: Mapping[str, Any]) -> str:
    """Return the beginning of the SHA-256 of the conditions' canonical JSON."""
    text = json.dumps(json_safe(conditions), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """One measurement."""

    id: str  # identifies the conditions
    conditions: dict[str, Any]
    values: list[dict[str, Any]]
    time: str  # when it was made, UTC
    run: str  # the run that made it
    label: str = ""  # the row of the summary that it belongs to
    group: str | None = None  # the same for what was timed side by side
    seconds: float | None = None  # how long the measurement took

    def value(self, metric: str, **columns: Any) -> float | None:
        """Return the value of a metric with these columns, or None if it was not measured or is not defined."""
        for row in self.values:
            if row["metric"] == metric and all(row.get(name) == value for name, value in columns.items()):
                return row["value"]
        return None


@dataclass(frozen=True)
class Run:
    """What a run was asked for, on which machine, with which versions."""

    run: str
    time: str
    tool: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)


class Records:
    """All records of a file.

    Args:
        path: The file; None keeps the records in memory only.
        remeasure: Whether `measure` repeats (once in this run) what the file holds already.

    Raises:
        ValueError: A line is damaged or has another format version; file and line are named. An incomplete last line,
            which a killed process leaves, is ignored and later overwritten.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path | None = None, *, remeasure: bool = False) -> None:
        self.path = path
        self.remeasure = remeasure
        self.runs: dict[str, Run] = {}
        self._records: dict[str, list[Record]] = {}
        self._run: Run | None = None
        if path is not None:
            self._read(path)

    def __iter__(self) -> Iterator[Record]:
        """Yield all records, those of the same conditions together, the oldest first."""
        for records in self._records.values():
            yield from records

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def latest(self, conditions: Conditions) -> Record | None:
        """Return the newest record of the conditions, or None."""
        records = self._records.get(conditions.id)
        return records[-1] if records else None

    def known(self, conditions: Conditions) -> Record | None:
        """Return the record that makes a measurement in this run unnecessary, or None."""
        record = self.latest(conditions)
        if record is None or (self.remeasure and (self._run is None or record.run != self._run.run)):
            return None
        return record

    def start_run(self, tool: str, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Start the run that the following records belong to. Its line is written with the first of them."""
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self._run = Run(name, utc_now(), tool, json_safe(settings), json_safe(environment))

    def add(
        self,
        conditions: Conditions,
        values: Values | Mapping[str, Any],
        *,
        label: str = "",
        group: str | None = None,
        seconds: float | None = None,
    ) -> Record:
        """Write a measurement to the file. Values are rows with `metric` and `value`, or a mapping metric -> value.

        Raises:
            RuntimeError: No run was started.
        """
        if self._run is None:
            raise RuntimeError("Call start_run() first: a record belongs to a run.")
        if isinstance(values, Mapping):
            values = [{"metric": name, "value": value} for name, value in values.items()]
        run, rows = self._run.run, json_safe(list(values))
        record = Record(conditions.id, conditions.to_dict(), rows, utc_now(), run, label, group, seconds)
        if self.path is not None:
            lines = [] if run in self.runs else [_line("run", self._run)]
            JsonLinesFile(self.path).append(*lines, _line("record", record))
        self.runs[run] = self._run
        self._records.setdefault(record.id, []).append(record)
        return record

    def measure(
        self, conditions: Conditions, function: Callable[[], Values | Mapping[str, Any]], *, label: str = ""
    ) -> Record:
        """Return what is known under the conditions, or else call `function` and write its values to the file."""
        record = self.known(conditions)
        if record is not None:
            return record
        start = time.perf_counter()
        values = function()
        return self.add(conditions, values, label=label, seconds=time.perf_counter() - start)

    def save(self, path: Path) -> None:
        """Write all runs and records to a file, in place of what it held."""
        path.unlink(missing_ok=True)
        runs = (_line("run", run) for run in self.runs.values())
        JsonLinesFile(path).append(*runs, *(_line("record", record) for record in self))

    def _read(self, path: Path) -> None:
        for number, line in enumerate(JsonLinesFile(path).read(), start=1):
            location = f"{str(path)!r}, line {number}"
            _check_line(line, location)
            try:
                self._read_line(line, location)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{location} is damaged ({error!r}). Remove or repair the line.") from error
        for records in self._records.values():
            records.sort(key=lambda record: record.time)  # files may have been concatenated by hand

    def _read_line(self, line: dict[str, Any], location: str) -> None:
        if line["kind"] == "run":
            self.runs[line["run"]] = Run(**{item.name: line[item.name] for item in fields(Run)})
            return
        record = Record(**{item.name: line[item.name] for item in fields(Record)})
        expected = conditions_id(record.conditions)
        if expected != record.id:
            raise ValueError(f"{location}: the conditions were changed: their id is {expected}, not {record.id}.")
        if record.run not in self.runs:
            raise ValueError(f"{location}: the run {record.run!r} is not in the file above it. Repair the file.")
        self._records.setdefault(record.id, []).append(record)

    def to_frame(self) -> pandas.DataFrame:
        """Return a tidy table: one row per value of the newest record of each conditions, with these conditions."""
        import pandas

        frame = pandas.DataFrame([row for records in self._records.values() for row in _rows(records[-1])])
        extra = [name for name in frame.columns if name not in COLUMNS]
        return frame.reindex(columns=[*COLUMNS, *extra])


def _rows(record: Record) -> Iterator[dict[str, Any]]:
    known = {**record.conditions, "device": None, **record.conditions["device"], **vars(record)}
    common = {name: known.get(name) for name in CONDITION_COLUMNS}
    for value in record.values:
        yield {**common, **value}


def _line(kind: str, item: Run | Record) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, "kind": kind, **asdict(item)}


def _check_line(line: Mapping[str, Any], location: str) -> None:
    version = line.get("format_version")
    if version is None:
        raise ValueError(f"{location} is no record of an evaluation. Remove the line, or choose another folder.")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{location} has format version {version!r}; this version of hf-linear-attn reads {FORMAT_VERSION}. Choose "
            "another folder, or use the version that wrote it."
        )
    if line.get("kind") not in ("run", "record"):
        raise ValueError(f"{location} has the unknown kind {line.get('kind')!r}. Remove or repair the line.")
