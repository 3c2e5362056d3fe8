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

#: Columns of the table that exist even where no value has them.
COLUMNS = (
    *("id", "time", "run", "group", "label", "model", "attention", "state", "seed"),
    *("measurement", "task", "length", "batch_size", "dtype", "device", "threads", "metric", "value", "unit"),
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
    """One measurement.

    Attributes:
        id: Identifies the conditions.
        conditions: As a dict.
        values: See `Values`.
        time: When it was made, UTC.
        run: The run that made it.
        label: The row of the summary that it belongs to.
        group: The same for what was timed side by side.
        seconds: How long the measurement took.
    """

    id: str
    conditions: dict[str, Any]
    values: list[dict[str, Any]]
    time: str
    run: str
    label: str = ""
    group: str | None = None
    seconds: float | None = None

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
        self._file = None if path is None else JsonLinesFile(path)
        if self._file is not None:
            self._read(self._file)

    def __contains__(self, conditions: Conditions) -> bool:
        return conditions.id in self._records

    def __iter__(self) -> Iterator[Record]:
        """Yield all records, those of the same conditions together, the oldest first."""
        for records in self._records.values():
            yield from records

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def history(self, conditions: Conditions) -> list[Record]:
        """Return all records of the conditions, the oldest first."""
        return list(self._records.get(conditions.id, ()))

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

    # ---------------------------------------------------------------------------------------------- writing

    def start_run(self, tool: str, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> Run:
        """Start the run that the following records belong to. Its line is written with the first of them."""
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self._run = Run(name, utc_now(), tool, json_safe(settings), json_safe(environment))
        return self._run

    def add(
        self,
        conditions: Conditions,
        values: Values | Mapping[str, Any],
        *,
        label: str = "",
        group: str | None = None,
        seconds: float | None = None,
    ) -> Record:
        """Write a measurement to the file.

        Args:
            conditions: What the values depend on.
            values: Rows with `metric` and `value`, or a mapping metric -> value.

        Raises:
            RuntimeError: No run was started.
        """
        if self._run is None:
            raise RuntimeError("Call start_run() first: a record belongs to a run.")
        rows = (
            [{"metric": name, "value": value} for name, value in values.items()]
            if isinstance(values, Mapping)
            else values
        )
        record = Record(
            conditions.id, conditions.to_dict(), json_safe(list(rows)), utc_now(), self._run.run, label, group, seconds
        )
        if self._run.run not in self.runs:
            self._append([_line("run", self._run)])
            self.runs[self._run.run] = self._run
        self._append([_line("record", record)])
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

    def merge(self, other: Records) -> int:
        """Copy the runs and records of another file that this one does not hold; return how many records were new."""
        known = {(record.id, record.run, record.time) for record in self}
        new = [record for record in other if (record.id, record.run, record.time) not in known]
        lines = []
        for name in dict.fromkeys(record.run for record in new):
            if name not in self.runs:
                self.runs[name] = other.runs[name]
                lines.append(_line("run", other.runs[name]))
        self._append([*lines, *(_line("record", record) for record in new)])
        for record in new:
            self._records.setdefault(record.id, []).append(record)
            self._records[record.id].sort(key=lambda one: one.time)
        return len(new)

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        if self._file is not None and lines:
            self._file.append(*lines)

    # ---------------------------------------------------------------------------------------------- reading

    def _read(self, file: JsonLinesFile) -> None:
        for number, line in enumerate(file.read(), start=1):
            location = f"{str(file.path)!r}, line {number}"
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
        if conditions_id(record.conditions) != record.id:
            expected = conditions_id(record.conditions)
            raise ValueError(f"{location}: the conditions were changed: their id is {expected}, not {record.id}.")
        if record.run not in self.runs:
            raise ValueError(f"{location}: the run {record.run!r} is not in the file above it. Repair the file.")
        self._records.setdefault(record.id, []).append(record)

    # ---------------------------------------------------------------------------------------------- as a table

    def to_frame(self, *, all_repeats: bool = False) -> pandas.DataFrame:
        """Return a tidy table: one row per value, with its conditions.

        Args:
            all_repeats: Whether to include what was measured again later. By default only the newest record of each
                conditions counts.
        """
        import pandas

        records = list(self) if all_repeats else [records[-1] for records in self._records.values()]
        rows = [row for record in records for row in _rows(record)]
        frame = pandas.DataFrame(rows)
        extra = [name for name in frame.columns if name not in COLUMNS]
        return frame.reindex(columns=[*COLUMNS, *extra])


def _rows(record: Record) -> Iterator[dict[str, Any]]:
    conditions = record.conditions
    common = {"id": record.id, "time": record.time, "run": record.run, "group": record.group, "label": record.label}
    common.update({name: conditions[name] for name in ("model", "attention", "state", "seed", "measurement", "task")})
    common.update({name: conditions[name] for name in ("length", "batch_size")})
    common.update({name: conditions["device"].get(name) for name in ("dtype", "device", "threads")})
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
