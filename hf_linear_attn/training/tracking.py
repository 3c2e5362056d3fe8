"""What a run tells: a JSON line for every report, accelerate's trackers, and a progress bar."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

#: Seconds between two lines of progress where there is no terminal to draw a bar on.
QUIET_SECONDS = 30.0


class JsonLinesTracker(GeneralTracker):
    """`log.jsonl`: one object a report, with its step and stage. A resumed run drops what it is about to repeat."""

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, path: Path, *, resume: bool) -> None:
        super().__init__(_blank=True)
        self.path = path
        self._whole = False
        if not resume:
            path.unlink(missing_ok=True)

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The settings have a file of their own."""

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append one line."""
        self._mend()
        line = json.dumps({"step": step, **values}, ensure_ascii=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _mend(self) -> None:
        """Cut off, once, the line in which a killed process stopped: the next one would be written behind it."""
        if self._whole:
            return
        self._whole = True
        held = self.path.read_bytes() if self.path.exists() else b""
        end = held.rfind(b"\n") + 1
        if end < len(held):
            os.truncate(self.path, end)

    def rewind(self, stage: str, step: int) -> None:
        """Forget what was reported of a stage after `step`."""
        if not self.path.exists():
            return
        self._mend()
        kept = []
        # Not splitlines: the text of a line may hold separators such as U+2028.
        for line in self.path.read_text(encoding="utf-8").split("\n")[:-1]:
            try:
                held = json.loads(line)
            except json.JSONDecodeError:
                continue
            if not isinstance(held, dict):
                continue
            if held.get("stage") != stage or (held.get("step") or 0) <= step:
                kept.append(line)
        aside = self.path.with_name(f".{self.path.name}.part")
        aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(aside, self.path)


class Reporter:
    """Progress on the main process: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, accelerator: Accelerator, console: Console | None = None) -> None:
        self.accelerator = accelerator
        self.console = console or Console(stderr=True)
        self.active = accelerator.is_main_process
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._title = ""
        self._total = 0
        self._last = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.active:
            console = self._bar.console if self._bar is not None else self.console
            console.print(escape(text), highlight=False, soft_wrap=True)

    def start(self, title: str, total: int, done: int = 0) -> None:
        """A stage of `total` steps begins."""
        self._title, self._total, self._last = title, total, time.monotonic()
        if self.active and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", style="dim"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(escape(title), total=total, completed=done, note="")

    def update(self, step: int, note: str) -> None:
        """Where the stage is."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, note=escape(note))
        elif self.active and time.monotonic() - self._last >= QUIET_SECONDS:
            self._last = time.monotonic()
            self.say(f"{self._title}: step {step} of {self._total}, {note}")

    def stop(self) -> None:
        """The stage is over, or broken off."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def installed_trackers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the trackers that accelerate finds installed.

    Raises:
        ValueError: a name that accelerate does not know.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = sorted(str(name) for name in LOGGER_TYPE_TO_CLASS)
    for name in names:
        if name not in known:
            raise ValueError(f"run.trackers: accelerate knows no tracker {name!r}. Known: {', '.join(known)}.")
    available = {str(getattr(name, "value", name)) for name in get_available_trackers()}
    return tuple(name for name in names if name in available)


def short(values: Mapping[str, float]) -> str:
    """Metrics in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
