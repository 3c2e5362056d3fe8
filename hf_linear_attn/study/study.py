"""A study: measurements and trained parameters that are made once, in a folder or in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from ..utils.environment import environment
from ..utils.files import atomic_write, check_output, open_output
from ..utils.progress import Progress
from .records import LEARNED_FOLDER, RECORDS_FILE, RESULTS, Conditions, Record, Records, Values

Learned = Mapping[str, Tensor]
"""Trained parameters by their names."""


@dataclass
class Study:
    """What has been measured and trained for one purpose, and the progress of what is still missing.

    A stopped study goes on when the same conditions are asked for again: what is known is looked up.

        with open_study(folder, "my study", settings, resume=True) as study:
            for conditions, function in measurements:
                record = study.measure(conditions, function)

    Attributes:
        folder: Where everything is stored as soon as it is known. None: in memory.
        records: The records, those of earlier runs too.
        progress: Told what is being done.
        writes: Whether trained parameters are written to the folder: by the first of several processes only.
    """

    folder: Path | None = None
    records: Records = field(default_factory=Records)
    progress: Progress = field(default_factory=Progress)
    writes: bool = True
    _learned: dict[str, Learned] = field(default_factory=dict, repr=False)

    def measure(self, conditions: Conditions, function: Callable[[], Values], *, label: str = "") -> Record:
        """Return the record of the conditions: the known one, or that of the values which `function` returns.

        Args:
            conditions: Everything that the values depend on.
            function: Measures, where nothing is known.
            label: The row of a table that the record belongs to.
        """
        record = self.records.known(conditions, label)
        if record is not None:
            return record
        start = time.perf_counter()
        values = function()
        return self.records.add(conditions, values, label=label, seconds=time.perf_counter() - start)

    def learned(
        self, conditions: Conditions, train: Callable[[], tuple[Values, Learned]], *, label: str = ""
    ) -> Learned:
        """Return the trained parameters of the conditions: the stored ones, or else what `train` returns.

        Args:
            conditions: Everything that the training depends on.
            train: Trains, and returns the values of its record and the parameters.
            label: The row of a table that the record belongs to.
        """
        path = self.folder and self.folder / LEARNED_FOLDER / f"{conditions.id}.safetensors"
        known = self.records.known(conditions, label) is not None
        if known and conditions.id in self._learned:
            return self._learned[conditions.id]
        if known and path is not None and path.is_file():
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
    """Context manager: the study in a folder.

    Args:
        folder: A new folder, or that of an earlier study. A new one is removed if the block raises before anything is
            stored. None: in memory.
        tool: What makes the study, for the records.
        settings: What it was asked for, for the records.
        device: The torch device that it runs on, for the records.
        resume: Whether an earlier study in the folder goes on.
        overwrite: Whether it is replaced.
        progress: Told what is being done.

    Raises:
        ValueError: The folder holds something else, or an earlier study without `resume` or `overwrite`.
        OSError: The folder cannot be written to.
    """
    progress = progress or Progress()
    check_study(folder, resume=resume, overwrite=overwrite)
    path = None if folder is None else Path(folder)
    with nullcontext() if path is None else open_output(path, RESULTS, overwrite=overwrite):
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
