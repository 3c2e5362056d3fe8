"""What every section of the benchmark shares: settings, the store, the progress, what was left out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from hf_linear_attn.study.records import Conditions, Record, Records

from .options import BenchmarkOptions
from .workloads import mechanism_names

#: The row of exact attention.
BASELINE = "sdpa"


def values_of(record: Record) -> dict[str, Any]:
    """What was measured, by name, and the id of the record."""
    return {**{row["metric"]: row["value"] for row in record.values}, "measurement": record.id}


class Progress(Protocol):
    def start(self, task: str, total: int | None = None) -> None: ...
    def update(self, step: int | None = None, note: str = "") -> None: ...
    def say(self, line: str) -> None: ...


class Bench:
    """One run. `notes` say what was not measured, and why; each is said once."""

    def __init__(
        self,
        options: BenchmarkOptions,
        store: Records,
        progress: Progress,
        machine: Mapping[str, Any],
        device: torch.device,
        source: str | None = None,
    ) -> None:
        self.options, self.store, self.progress = options, store, progress
        self.machine, self.device, self.source = machine, device, source
        self.notes: dict[str, list[str]] = {}
        self._refused: dict[tuple[str, str, str], list[str]] = {}

    def note(self, section: str, text: str) -> None:
        texts = self.notes.setdefault(section, [])
        if text not in texts:
            texts.append(text)

    def refuse(self, section: str, backend: str, error: str, name: str) -> None:
        """A backend does not serve a mechanism; the same reason is told once, with all names."""
        reason = error.partition(": ")[2].removesuffix(" Use set_backend('auto').").rstrip(".") or error
        names = self._refused.setdefault((section, backend, reason), [])
        if name not in names:
            names.append(name)

    def all_notes(self) -> dict[str, list[str]]:
        """By section: what was left out, then which backend does not serve what."""
        notes = {section: list(texts) for section, texts in self.notes.items()}
        for (section, backend, reason), names in self._refused.items():
            text = f"backend {backend} does not serve {', '.join(names)}: {reason}"
            notes.setdefault(section, []).append(text)
        return notes

    def names(self, few: Sequence[str] | None = None) -> list[str]:
        """The mechanisms asked for; where none were, all, or those of a section that cannot take all."""
        chosen = self.options.chosen("attention")
        if self.options.attention is None and few is not None:
            chosen = few
        return mechanism_names(chosen)  # type: ignore[arg-type]

    def key(self, model: Mapping[str, Any], mechanism: Mapping[str, Any], measure: Mapping[str, Any]) -> Conditions:
        """All that a measurement depends on: the columns of the table, and everything else in `settings`."""
        return Conditions(
            model["name"],
            model.get("fingerprint", ""),
            mechanism["name"],
            measure["what"],
            seed=(mechanism.get("options") or {}).get("seed"),
            length=measure.get("length", measure.get("context")),
            batch_size=measure.get("batch"),
            settings={"model": model, "mechanism": mechanism, "measure": measure},
            **self.machine,
        )

    def rows(
        self,
        keys: Mapping[str, Conditions],
        measure: Callable[[list[str]], Mapping[str, Mapping[str, Any]]],
    ) -> dict[str, dict[str, Any]]:
        """What is known of each name, after measuring what is missing; `measure` gets the missing names and gives their
        values, and those of what it had to time beside them."""
        missing = [name for name, key in keys.items() if self.store.known(key) is None]
        if missing:
            group = secrets.token_hex(4)
            for name, value in measure(missing).items():
                if name in keys:
                    self.store.add(keys[name], value, group=group)
        rows: dict[str, dict[str, Any]] = {}
        for name, key in keys.items():
            record = self.store.latest(key)
            if record is not None:
                rows[name] = values_of(record)
        return rows
