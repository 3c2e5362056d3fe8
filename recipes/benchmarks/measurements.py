"""Measurements on disk, each one as soon as it is known: a file that runs add to, and that nothing is taken out of.

The file holds JSON lines of two kinds. A `run` says what was asked for, and on which machine; a `measurement` belongs
to a run and has a key: everything that its value depends on. What is measured again under the same key is a further
line with its own time stamp; the newest is the one that is shown. A run that was killed is taken up by asking for the
same keys again: those that the file holds are not measured.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from hf_linear_attn.utils.environment import json_safe, utc_now

FORMAT_VERSION = 1

#: The usual name of the file in the folder of a report.
NAME = "measurements.jsonl"

CSV_COLUMNS = (
    *("id", "at", "run", "model", "mechanism", "state", "seed", "measure", "length", "batch", "dtype"),
    *("device", "threads"),
    *("field", "value"),
)


@dataclass(frozen=True)
class Key:
    """What a value depends on; two measurements are of the same thing if their keys are equal.

    Attributes:
        model: `name`, and `fingerprint` of its weights (or the shapes, where there is no model).
        mechanism: `name`, `options`, and what became of it (seed, steps of training, a checkpoint's fingerprint).
        measure: `what` is measured, at which length, on which data, with which settings.
        device: `device`, `cpu`, `threads`.
        versions: of the packages that compute.
    """

    model: Mapping[str, Any]
    mechanism: Mapping[str, Any]
    measure: Mapping[str, Any]
    device: Mapping[str, Any]
    versions: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, needed in (("model", "name"), ("mechanism", "name"), ("measure", "what")):
            if not isinstance(getattr(self, name), Mapping) or needed not in getattr(self, name):
                raise ValueError(f"The {name} of a key must be a mapping with {needed!r}, got {getattr(self, name)!r}.")

    def to_dict(self) -> dict[str, Any]:
        return json_safe(asdict(self))

    @property
    def id(self) -> str:
        """16 hexadecimal digits that stand for the key."""
        return key_id(self.to_dict())


def key_id(key: Mapping[str, Any]) -> str:
    """The beginning of the SHA-256 of a key's canonical JSON."""
    text = json.dumps(json_safe(key), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def machine_key(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts `device` and `versions` of a key, from the result of `utils.environment.environment`."""
    hardware = environment["hardware"]
    device = {name: hardware[name] for name in ("device", "cpu", "threads")}
    return {"device": device, "versions": dict(environment["versions"])}


@dataclass(frozen=True)
class Measurement:
    """One value. group: the same for what was timed in turns, side by side. seconds: how long it took to measure."""

    id: str
    key: dict[str, Any]
    value: dict[str, Any]
    at: str
    run: str
    group: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Run:
    """What a run was asked for, on which machine, with which versions."""

    run: str
    at: str
    tool: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)


class Store:
    """All measurements of a file; with `path=None` in memory only.

    again: measure anew what the file holds already (once in this run); both values are saved, the newer one is shown.

    Raises:
        ValueError: a damaged line, or one of another format version; file and line are named. What a killed process
            left of its last line is no damage: it is dropped when the next line is written.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path | None, *, again: bool = False) -> None:
        self.path = path
        self.again = again
        self.runs: dict[str, Run] = {}
        self._measurements: dict[str, list[Measurement]] = {}
        self._run: Run | None = None
        self._complete_bytes = 0  # length of the complete lines, in bytes
        self._has_incomplete_line = False
        if path is not None and path.exists():
            self._read(path)

    # ---------------------------------------------------------------------------------------------- reading

    def __contains__(self, key: Key) -> bool:
        return key.id in self._measurements

    def __iter__(self) -> Iterator[Measurement]:
        """All measurements, key by key, the oldest of each first."""
        for measurements in self._measurements.values():
            yield from measurements

    def __len__(self) -> int:
        return sum(map(len, self._measurements.values()))

    def history(self, key: Key) -> list[Measurement]:
        """All that was measured under a key, the oldest first."""
        return list(self._measurements.get(key.id, ()))

    def newest(self, key: Key) -> Measurement | None:
        """The measurement to show, or None."""
        measurements = self._measurements.get(key.id)
        return measurements[-1] if measurements else None

    def known(self, key: Key) -> Measurement | None:
        """What need not be measured in this run: the newest, unless everything is to be measured `again`."""
        measurement = self.newest(key)
        if measurement is None or (self.again and (self._run is None or measurement.run != self._run.run)):
            return None
        return measurement

    # ---------------------------------------------------------------------------------------------- writing

    def begin(self, tool: str, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> Run:
        """A new run, which the measurements that follow belong to; it is written with the first of them."""
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self._run = Run(name, utc_now(), tool, json_safe(settings), json_safe(environment))
        return self._run

    def add(
        self, key: Key, value: Mapping[str, Any], *, group: str | None = None, seconds: float | None = None
    ) -> Measurement:
        """Write a value down. Raises a RuntimeError where no run was begun."""
        if self._run is None:
            raise RuntimeError("Call begin() first: a measurement belongs to a run.")
        measurement = Measurement(key.id, key.to_dict(), json_safe(value), utc_now(), self._run.run, group, seconds)
        if self._run.run not in self.runs:
            self._write([{"kind": "run", **asdict(self._run)}])
            self.runs[self._run.run] = self._run
        self._write([{"kind": "measurement", **asdict(measurement)}])
        self._measurements.setdefault(measurement.id, []).append(measurement)
        return measurement

    def measured(self, key: Key, measure: Callable[[], Mapping[str, Any]]) -> Measurement:
        """What is known under a key, or else what `measure` finds, written down at once."""
        measurement = self.known(key)
        if measurement is not None:
            return measurement
        began = time.perf_counter()
        value = measure()
        return self.add(key, value, seconds=time.perf_counter() - began)

    def merge(self, other: Store) -> int:
        """Take in the runs and measurements of another store; returns how many measurements were new here."""
        lines: list[dict[str, Any]] = []
        seen = {(measurement.id, measurement.run, measurement.at) for measurement in self}
        new = [measurement for measurement in other if (measurement.id, measurement.run, measurement.at) not in seen]
        for name in dict.fromkeys(measurement.run for measurement in new):
            if name not in self.runs:
                self.runs[name] = other.runs[name]
                lines.append({"kind": "run", **asdict(other.runs[name])})
        self._write([*lines, *({"kind": "measurement", **asdict(measurement)} for measurement in new)])
        for measurement in new:
            self._measurements.setdefault(measurement.id, []).append(measurement)
            self._measurements[measurement.id].sort(key=lambda one: one.at)
        return len(new)

    def _write(self, lines: Sequence[dict[str, Any]]) -> None:
        if self.path is None or not lines:
            return
        texts = [json.dumps({"format": FORMAT_VERSION, **line}, ensure_ascii=False, allow_nan=False) for line in lines]
        content = "".join(f"{text}\n" for text in texts).encode()
        with self.path.open("ab") as file, _file_lock(file):
            if self._has_incomplete_line:
                file.truncate(self._complete_bytes)
                self._has_incomplete_line = False
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    # ---------------------------------------------------------------------------------------------- the file

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole, newline, rest = content.rpartition(b"\n")
        self._complete_bytes, self._has_incomplete_line = len(whole) + len(newline), bool(rest)
        for number, line in enumerate(whole.split(b"\n") if newline else [], start=1):
            where = f"{str(path)!r}, line {number}"
            try:
                self._add_record(_checked(line, where), where)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{where}: the line is damaged ({error!r}). Take it out, or repair it.") from error
        for measurements in self._measurements.values():
            measurements.sort(key=lambda one: one.at)  # files may have been joined by hand

    def _add_record(self, line: dict[str, Any], where: str) -> None:
        if line["kind"] == "run":
            self.runs[line["run"]] = Run(**{name: line[name] for name in Run.__dataclass_fields__})
            return
        measurement = Measurement(**{name: line[name] for name in Measurement.__dataclass_fields__})
        if key_id(measurement.key) != measurement.id:
            raise ValueError(
                f"{where}: the key was changed: its id is {key_id(measurement.key)}, the line says {measurement.id}."
            )
        if measurement.run not in self.runs:
            raise ValueError(f"{where}: the run {measurement.run!r} is not in the file above it. Repair the file.")
        self._measurements.setdefault(measurement.id, []).append(measurement)


def _checked(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON ({error}). Take the line out, or repair it.") from error
    if not isinstance(record, dict) or "format" not in record:
        raise ValueError(f"{where}: no measurement. Take the line out, or give another folder.")
    if record["format"] != FORMAT_VERSION:
        raise ValueError(
            f"{where}: format {record['format']!r}; this version of hf-linear-attn reads format {FORMAT_VERSION}. Give "
            "another folder, or use the version that wrote it."
        )
    if record.get("kind") not in ("run", "measurement"):
        raise ValueError(f"{where}: unknown kind {record.get('kind')!r}. Take the line out, or repair it.")
    return record


@contextmanager
def _file_lock(file: BinaryIO) -> Iterator[None]:
    """Hold an exclusive lock on the file; without effect where the system has no such locks (Windows)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


# --------------------------------------------------------------------------------------------------------------------
# As a table


def write_csv(measurements: Iterable[Measurement]) -> bytes:
    """One row for each number: what was measured, and the field of the value (`layers.0.kl.3`); the whole key is in the
    JSON lines, under the id."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for measurement in measurements:
        mechanism, measure, device = (measurement.key[name] for name in ("mechanism", "measure", "device"))
        seed = mechanism.get("training", mechanism.get("options") or {}).get("seed")
        start = [
            measurement.id,
            measurement.at,
            measurement.run,
            measurement.key["model"]["name"],
            mechanism["name"],
            mechanism.get("state"),
            seed,
        ]
        start += [measure["what"], measure.get("length", measure.get("context"))]
        start += [measure.get("batch"), device.get("dtype", measure.get("dtype"))]
        start += [device.get("device"), device.get("threads")]
        for name, value in numbers(measurement.value):
            writer.writerow([*start, name, value])
    return buffer.getvalue().encode()


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float | int | bool]]:
    """All numbers in nested data, with their path."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, (list, tuple)):
        inner = enumerate(value)
    elif isinstance(value, (int, float)):
        yield name, value
    for key, item in inner:
        yield from numbers(item, f"{name}.{key}" if name else str(key))
