"""A study: measurements and trained parameters that are made once, in a folder or in memory.

Its records are a file of JSON lines of two kinds. A `run` line says what a run was asked for and on which machine; a
`record` line is one measurement: its conditions (everything that its values depend on) and its values. Each is on disk
as soon as it is known, and nothing is ever removed: of several records of the same conditions the newest counts. An
interrupted run continues by asking for the same conditions again.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from ..config import DEFAULT_ATTENTION
from ..feature_maps.base import AttentionShape
from ..registry import ATTENTIONS
from ..utils.environment import environment, json_safe, utc_now
from ..utils.files import atomic_write, check_output, open_output, remove_partial_files
from ..utils.json_lines import JsonLinesFile
from ..utils.options import to_dict
from ..utils.progress import Progress

RECORDS_VERSION = 2

#: In the folder of a result: the records, and the learned parameters, which an interrupted run does not train again.
RECORDS_FILE, LEARNED_FOLDER = "records.jsonl", "learned"

#: A folder with one of these holds a study.
RESULTS = (RECORDS_FILE, LEARNED_FOLDER)

MeasuredValues = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""What a measurement returns: a mapping metric -> value, or rows with `metric`, `value` and perhaps other columns."""


@dataclass(frozen=True)
class Conditions:
    """Everything that a measurement depends on: equal conditions mean the same measurement.

    A stage of a run sets `model`, `measurement`, `seed`, `settings` and, for times, `device`, and no others.
    """

    model: str = ""  # its name; of a run, the option
    fingerprint: str = ""  # a hash of its weights
    attention: str = ""  # the mechanism: a registered name, `softmax`, or `none`; empty for times, of all variants
    measurement: str = ""  # what is measured, such as `task` or `forward`, or the stage of a run, such as `teacher`
    state: str = ""  # what was done to the mechanism (`variants.STATES`); empty for times, which do not depend on it
    seed: int | None = None  # of random features and of the order of training rows; of a run, the option
    task: str = ""  # of recall, in recipes
    length: int | None = None  # tokens of each timed sequence
    batch_size: int | None = None  # timed sequences in one call
    options: Mapping[str, Any] = field(default_factory=dict)  # of the mechanism; of times, by the label of each variant
    #: Rows, steps, a checkpoint's fingerprint; of times, `seconds` and `flops`; of a run, all options that matter.
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)  # `device`, `cpu`, `threads`, `dtype`, `backend`
    versions: Mapping[str, Any] = field(default_factory=dict)  # of the packages that compute

    def to_dict(self) -> dict[str, Any]:
        """Return the conditions in a form that JSON can hold."""
        return json_safe(asdict(self))

    @property
    def id(self) -> str:
        """16 hexadecimal digits that identify the conditions: the beginning of the SHA-256 of their canonical JSON."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
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
    seconds: float | None = None  # how long the measurement took

    @property
    def numbers(self) -> dict[str, Any]:
        """The values by their metric."""
        return {row["metric"]: row["value"] for row in self.values}


@dataclass(frozen=True)
class Run:
    """What a run was asked for, on which machine, with which versions."""

    run: str
    time: str
    tool: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)


RECORD_CLASSES: dict[str, type[Run | Record]] = {"run": Run, "record": Record}


class Records:
    """All records of a file.

    Args:
        path: The file; None keeps the records in memory only.

    Raises:
        ValueError: A line is damaged or has another format version. An incomplete last line, which a killed process
            leaves, is ignored and later overwritten.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
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

    def start_run(self, tool: str, settings: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Start the run that the following records belong to. Its line is written with the first of them."""
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self._run = Run(name, utc_now(), tool, json_safe(settings), json_safe(environment))

    def add(
        self, conditions: Conditions, values: MeasuredValues, *, label: str = "", seconds: float | None = None
    ) -> Record:
        """Write a measurement to the file.

        Raises:
            RuntimeError: No run was started.
        """
        if self._run is None:
            raise RuntimeError("Call start_run() first: a record belongs to a run.")
        if isinstance(values, Mapping):
            values = [{"metric": name, "value": value} for name, value in values.items()]
        run, rows = self._run.run, json_safe(list(values))
        record = Record(conditions.id, conditions.to_dict(), rows, utc_now(), run, label, seconds)
        if self.path is not None:
            lines = [] if run in self.runs else [_line(self._run)]
            JsonLinesFile(self.path).append(*lines, _line(record))
        self.runs[run] = self._run
        self._records.setdefault(record.id, []).append(record)
        return record

    def _read(self, path: Path) -> None:
        for number, line in enumerate(JsonLinesFile(path).read(), start=1):
            location = f"{str(path)!r}, line {number}"
            version = line.get("format_version")
            if version != RECORDS_VERSION:
                problem = f"has format version {version!r}; hf-linear-attn reads version {RECORDS_VERSION}"
                remedy = "Choose another folder, or use the release that wrote it."
                raise ValueError(f"{location} {problem}. {remedy}")
            try:
                kind = RECORD_CLASSES[line["kind"]]
                item = kind(**{field.name: line[field.name] for field in fields(kind)})
            except (KeyError, TypeError) as error:
                raise ValueError(f"{location} is damaged ({error!r}). Remove or repair the line.") from error
            if isinstance(item, Run):
                self.runs[item.run] = item
            else:
                self._records.setdefault(item.id, []).append(item)
        for records in self._records.values():
            records.sort(key=lambda record: record.time)  # files may have been concatenated by hand


def _line(item: Run | Record) -> dict[str, Any]:
    return {"format_version": RECORDS_VERSION, "kind": type(item).__name__.lower(), **asdict(item)}


Learned = Mapping[str, Tensor]
"""Trained parameters by their names."""


@dataclass
class Study:
    """What has been measured and trained for one purpose, and the progress of what is still missing.

    A stopped study goes on when the same conditions are asked for again: what is known is looked up.

        with open_study(folder, "my study", settings, resume=True) as study:
            for conditions, function in measurements:
                record = study.measure(conditions, function)

    """

    folder: Path | None = None  # where everything is stored as soon as it is known; None: in memory
    records: Records = field(default_factory=Records)  # those of earlier runs too
    progress: Progress = field(default_factory=Progress)  # told what is being done
    writes: bool = True  # whether trained parameters are stored: by the first of several processes only
    _learned: dict[str, Learned] = field(default_factory=dict, repr=False)

    def measure(self, conditions: Conditions, function: Callable[[], MeasuredValues], *, label: str = "") -> Record:
        """Return the record of the conditions: the known one, or that of the values which `function` returns.

        The label is the row of a table that the record belongs to.
        """
        record = self.records.latest(conditions)
        if record is not None:
            return record
        start = time.perf_counter()
        values = function()
        return self.records.add(conditions, values, label=label, seconds=time.perf_counter() - start)

    def learned(
        self, conditions: Conditions, train: Callable[[], tuple[MeasuredValues, Learned]], *, label: str = ""
    ) -> Learned:
        """Return the trained parameters of the conditions: the stored ones, or else those that `train` returns.

        `train` returns the values of its record, too.
        """
        path = self.folder and self.folder / LEARNED_FOLDER / f"{conditions.id}.safetensors"
        is_recorded = self.records.latest(conditions) is not None
        if is_recorded and conditions.id in self._learned:
            return self._learned[conditions.id]
        if is_recorded and path is not None and path.is_file():
            return load_file(path)
        values, parameters = train()
        parameters = {name: tensor.detach().cpu().contiguous() for name, tensor in parameters.items()}
        if path is not None and self.writes:  # first: a record without them would claim what is not there
            atomic_write(path, save(parameters))
        elif path is None:
            self._learned[conditions.id] = parameters
        self.records.add(conditions, values, label=label)
        return parameters


def check_study(folder: str | Path | None, *, resume: bool = False, overwrite: bool = False) -> None:
    """Raise an error, without writing, where a folder cannot hold a study (see `utils.files.check_output`)."""
    if folder is not None:
        check_output(folder, RESULTS, overwrite=overwrite, resume=resume)


@contextmanager
def open_study(
    folder: str | Path | None,
    tool: str,
    settings: Mapping[str, Any],
    *,
    device: Any = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Iterator[Study]:
    """Context manager: the study in a folder, or in memory (None).

    A new folder is removed if the block raises before anything is stored. An earlier study in it goes on with `resume`
    and is replaced with `overwrite`; errors are those of `check_study`. The records say which tool made them, with
    which settings and on which torch device.
    """
    progress = progress or Progress()
    check_study(folder, resume=resume, overwrite=overwrite)
    path = None if folder is None else Path(folder)
    with nullcontext() if path is None else open_output(path, RESULTS, overwrite=overwrite):
        for partial in () if path is None else (path, path / LEARNED_FOLDER):
            remove_partial_files(partial)
        study = Study(path, Records(path and path / RECORDS_FILE), progress)
        if len(study.records):
            study.progress.log(f"{len(study.records)} records of earlier runs are used where they fit.")
        study.records.start_run(tool, settings, environment(device))
        try:
            yield study
        except BaseException:
            if path is not None and len(study.records):
                stored = f"{len(study.records)} records are in {path / RECORDS_FILE}"
                study.progress.log(f"{stored}. To continue: the same command with --resume.")
            raise


def defaults_of(values: Any) -> dict[str, Any]:
    """Return the default options behind results: of the default mechanism, and of those that the results name.

    Each as it is in an encoder and in a decoder of heads of 64 numbers and 512 tokens, where the mechanism serves it.
    Results hold them, so that it shows where their defaults are no longer the package's.
    """
    names = set(re.findall(r"[\w+-]+", json.dumps(json_safe(values))))
    defaults: dict[str, Any] = {}
    for name, entry in sorted(ATTENTIONS):
        if name != DEFAULT_ATTENTION and name not in names:
            continue
        directions = {"encoder": entry.bidirectional, "decoder": entry.causal}
        defaults[name] = {
            kind: json_safe(to_dict(_built(entry, kind == "decoder").options))
            for kind, is_served in directions.items()
            if is_served
        }
    return defaults


def _built(entry: Any, causal: bool) -> Any:
    return entry.factory(AttentionShape(2, 2, 64, 64, max_length=512, causal=causal), entry.options())
