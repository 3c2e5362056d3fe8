"""The measurements of a plan, in the store that evaluations use too: a run can be stopped and taken up again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..measurements import NAME as STORE
from ..measurements import Key, Measurement, Store, plain
from ..report import write_aside

NAME = "plan-report.json"
TOOL = "hf-linear-attn plan"
FORMAT_VERSION = 1

#: Sections that hold measurements by a key.
SECTIONS = ("exact", "measured", "timed", "verified")
TRANSFER = "transfer"

DEVICE = ("device", "cpu", "threads")


class Record:
    """The report of a run while it grows (`data`), on the measurements of its folder.

    identity: what the measurements depend on. A folder whose measurements have the same identity is taken up; with
    another one it is refused, or begun anew with `restart` (what it held stays in the file). The budget is no part of
    it: another budget uses what was measured before.

    Raises:
        ValueError: the folder holds measurements of other settings (they are named), or a damaged file.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path = folder / NAME
        self._identity = plain(identity)
        self._store = Store(folder / STORE, again=restart)
        self.data: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "tool": TOOL,
            "identity": self._identity,
            TRANSFER: None,
            **{section: {} for section in SECTIONS},
        }
        if not restart:
            self._check()
            self._take_up()
        self.resumed = any(self.data[section] for section in SECTIONS)
        self._store.begin(TOOL, {"identity": self._identity}, {})

    def _check(self) -> None:
        runs = [run for run in self._store.runs.values() if run.tool == TOOL]
        if not runs:
            return
        mine, earlier = self._identity, runs[-1].settings["identity"]
        changed = sorted(name for name in {*mine, *earlier} if mine.get(name) != earlier.get(name))
        if changed:
            told = "; ".join(f"{name}: {_short(earlier.get(name))}, now {_short(mine.get(name))}" for name in changed)
            raise ValueError(
                f"The folder {str(self.path.parent)!r} holds measurements of other settings ({told}). Give another "
                "folder with --out, or pass --restart to begin anew."
            )

    def _take_up(self) -> None:
        for held in self._store:  # the oldest of each key first
            what, key = held.key["measure"]["what"], held.key["measure"].get("key", "")
            if held.id != self._key(what, key).id:
                continue
            if what == TRANSFER:
                self.data[TRANSFER] = held.value
            else:
                self.data[what][key] = held.value

    def _key(self, section: str, key: str) -> Key:
        held = self._identity
        known = {"model", "attention", "option", *DEVICE}
        versions = {name: value for name, value in held.items() if name.startswith("version of ")}
        settings = {name: value for name, value in held.items() if name not in known and name not in versions}
        return Key(
            {"name": "plan", "fingerprint": held.get("model")},
            {"name": held.get("attention", "plan"), "options": held.get("option")},
            {"what": section, "key": key, "settings": settings},
            {name: held.get(name) for name in DEVICE},
            versions,
        )

    def measured(self, section: str, key: str, measure: Callable[[], Any]) -> Any:
        """What is known under a key, or else what `measure` finds, written down at once."""
        held = self.data[section]
        if key not in held:
            held[key] = self._store.measured(self._key(section, key), measure).value
        return held[key]

    def transferred(self, result: Mapping[str, Any]) -> Measurement:
        """Keep what a transfer did."""
        kept = self._store.add(self._key(TRANSFER, ""), result)
        self.data[TRANSFER] = kept.value
        return kept

    def forget(self) -> None:
        """Measure everything anew: what was known does not hold any longer."""
        self._store.again = True
        for section in SECTIONS:
            self.data[section] = {}
        self.data[TRANSFER] = None

    def save(self) -> None:
        """Write the report."""
        text = json.dumps(plain(self.data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_aside(self.path, text.encode())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
