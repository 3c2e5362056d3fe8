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
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

FORMAT_VERSION = 1

#: The usual name of the file in the folder of a report.
NAME = "measurements.jsonl"

CSV_COLUMNS = (
    *("id", "at", "run", "model", "mechanism", "state", "seed", "measure", "length", "batch", "dtype"),
    *("device", "threads"),
    *("field", "value"),
)


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def plain(value: Any) -> Any:
    """What JSON can hold: tuples as lists, infinities and NaN as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(held) for held in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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
        return plain(asdict(self))

    @property
    def id(self) -> str:
        """16 hexadecimal digits that stand for the key."""
        return key_id(self.to_dict())


def key_id(key: Mapping[str, Any]) -> str:
    """The beginning of the SHA-256 of a key's canonical JSON."""
    text = json.dumps(plain(key), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def place_of(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The parts `device` and `versions` of a key, from what `report.environment` says of this machine."""
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

    again: measure anew what is held already (once in this run); both values are kept, the newer one is shown.

    Raises:
        ValueError: a damaged line, or one of another format version; file and line are named. What a killed process
            left of its last line is no damage: it is dropped when the next line is written.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path | None, *, again: bool = False) -> None:
        self.path = path
        self.again = again
        self.runs: dict[str, Run] = {}
        self._held: dict[str, list[Measurement]] = {}
        self._run: Run | None = None
        self._whole = 0  # bytes of whole lines
        self._torn = False
        if path is not None and path.exists():
            self._read(path)

    # ---------------------------------------------------------------------------------------------- reading

    def __contains__(self, key: Key) -> bool:
        return key.id in self._held

    def __iter__(self) -> Iterator[Measurement]:
        """All measurements, key by key, the oldest of each first."""
        for found in self._held.values():
            yield from found

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def history(self, key: Key) -> list[Measurement]:
        """All that was measured under a key, the oldest first."""
        return list(self._held.get(key.id, ()))

    def newest(self, key: Key) -> Measurement | None:
        """The measurement to show, or None."""
        found = self._held.get(key.id)
        return found[-1] if found else None

    def known(self, key: Key) -> Measurement | None:
        """What need not be measured in this run: the newest, unless everything is to be measured `again`."""
        found = self.newest(key)
        if found is None or (self.again and (self._run is None or found.run != self._run.run)):
            return None
        return found

    # ---------------------------------------------------------------------------------------------- writing

    def begin(self, tool: str, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> Run:
        """A new run, which the measurements that follow belong to; it is written with the first of them."""
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self._run = Run(name, now(), tool, plain(settings), plain(environment))
        return self._run

    def add(
        self, key: Key, value: Mapping[str, Any], *, group: str | None = None, seconds: float | None = None
    ) -> Measurement:
        """Write a value down. Raises a RuntimeError where no run was begun."""
        if self._run is None:
            raise RuntimeError("Call begin() first: a measurement belongs to a run.")
        made = Measurement(key.id, key.to_dict(), plain(value), now(), self._run.run, group, seconds)
        if self._run.run not in self.runs:
            self._write([{"kind": "run", **asdict(self._run)}])
            self.runs[self._run.run] = self._run
        self._write([{"kind": "measurement", **asdict(made)}])
        self._held.setdefault(made.id, []).append(made)
        return made

    def measured(self, key: Key, measure: Callable[[], Mapping[str, Any]]) -> Measurement:
        """What is known under a key, or else what `measure` finds, written down at once."""
        found = self.known(key)
        if found is not None:
            return found
        began = time.perf_counter()
        value = measure()
        return self.add(key, value, seconds=time.perf_counter() - began)

    def merge(self, other: Store) -> int:
        """Take in the runs and measurements of another store; returns how many measurements were new here."""
        lines: list[dict[str, Any]] = []
        seen = {(held.id, held.run, held.at) for held in self}
        fresh = [held for held in other if (held.id, held.run, held.at) not in seen]
        for name in dict.fromkeys(held.run for held in fresh):
            if name not in self.runs:
                self.runs[name] = other.runs[name]
                lines.append({"kind": "run", **asdict(other.runs[name])})
        self._write([*lines, *({"kind": "measurement", **asdict(held)} for held in fresh)])
        for held in fresh:
            self._held.setdefault(held.id, []).append(held)
            self._held[held.id].sort(key=lambda one: one.at)
        return len(fresh)

    def _write(self, lines: Sequence[dict[str, Any]]) -> None:
        if self.path is None or not lines:
            return
        texts = [json.dumps({"format": FORMAT_VERSION, **line}, ensure_ascii=False, allow_nan=False) for line in lines]
        content = "".join(f"{text}\n" for text in texts).encode()
        with self.path.open("ab") as file, _alone(file):
            if self._torn:
                file.truncate(self._whole)
                self._torn = False
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    # ---------------------------------------------------------------------------------------------- the file

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole, newline, rest = content.rpartition(b"\n")
        self._whole, self._torn = len(whole) + len(newline), bool(rest)
        for number, line in enumerate(whole.split(b"\n") if newline else [], start=1):
            where = f"{str(path)!r}, line {number}"
            try:
                self._take(_checked(line, where), where)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{where}: the line is damaged ({error!r}). Take it out, or repair it.") from error
        for held in self._held.values():
            held.sort(key=lambda one: one.at)  # files may have been joined by hand

    def _take(self, line: dict[str, Any], where: str) -> None:
        if line["kind"] == "run":
            self.runs[line["run"]] = Run(**{name: line[name] for name in Run.__dataclass_fields__})
            return
        held = Measurement(**{name: line[name] for name in Measurement.__dataclass_fields__})
        if key_id(held.key) != held.id:
            raise ValueError(f"{where}: the key was changed: its id is {key_id(held.key)}, the line says {held.id}.")
        if held.run not in self.runs:
            raise ValueError(f"{where}: the run {held.run!r} is not in the file above it. Repair the file.")
        self._held.setdefault(held.id, []).append(held)


def _checked(line: bytes, where: str) -> dict[str, Any]:
    try:
        held = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON ({error}). Take the line out, or repair it.") from error
    if not isinstance(held, dict) or "format" not in held:
        raise ValueError(f"{where}: no measurement. Take the line out, or give another folder.")
    if held["format"] != FORMAT_VERSION:
        raise ValueError(
            f"{where}: format {held['format']!r}; this version of hf-linear-attn reads format {FORMAT_VERSION}. Give "
            "another folder, or use the version that wrote it."
        )
    if held.get("kind") not in ("run", "measurement"):
        raise ValueError(f"{where}: unknown kind {held.get('kind')!r}. Take the line out, or repair it.")
    return held


@contextmanager
def _alone(file: BinaryIO) -> Iterator[None]:
    """While the file is locked for other processes that add to it; nothing where there are no such locks."""
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
    for held in measurements:
        mechanism, measure, device = (held.key[name] for name in ("mechanism", "measure", "device"))
        seed = mechanism.get("training", mechanism.get("options") or {}).get("seed")
        start = [held.id, held.at, held.run, held.key["model"]["name"], mechanism["name"], mechanism.get("state"), seed]
        start += [measure["what"], measure.get("length", measure.get("context"))]
        start += [measure.get("batch"), device.get("dtype", measure.get("dtype"))]
        start += [device.get("device"), device.get("threads")]
        for name, value in numbers(held.value):
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
    for key, held in inner:
        yield from numbers(held, f"{name}.{key}" if name else str(key))
