"""Measurements on disk: each one as soon as it is known, so that a run can be stopped and taken up again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..measurements import plain
from ..report import write_aside

NAME = "plan-report.json"
TOOL = "hf-linear-attn plan"
FORMAT_VERSION = 1

#: Sections that hold measurements by a key.
SECTIONS = ("exact", "measured", "timed", "verified")


class Record:
    """The report of a run while it grows.

    identity: what the measurements depend on. A folder whose measurements have the same identity is taken up; with
    another one it is refused, or begun anew with `restart`. The budget is no part of it: another budget uses what was
    measured before.

    Raises:
        ValueError: the folder holds a report of other settings (they are named), or a file that is none.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path = folder / NAME
        self.data: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "tool": TOOL,
            "identity": plain(identity),
            "transfer": None,
            **{section: {} for section in SECTIONS},
        }
        self.resumed = False
        if not restart and self.path.exists():
            self._take_up(_read(self.path))

    def _take_up(self, held: dict[str, Any]) -> None:
        mine, earlier = self.data["identity"], held["identity"]
        changed = sorted(name for name in {*mine, *earlier} if mine.get(name) != earlier.get(name))
        if changed:
            told = "; ".join(f"{name}: {_short(earlier.get(name))}, now {_short(mine.get(name))}" for name in changed)
            raise ValueError(
                f"The folder {str(self.path.parent)!r} holds measurements of other settings ({told}). Give another "
                "folder with --out, or pass --restart to begin anew."
            )
        for section in ("transfer", *SECTIONS):
            self.data[section] = held[section]
        self.resumed = any(self.data[section] for section in SECTIONS)

    def measured(self, section: str, key: str, measure: Callable[[], Any]) -> Any:
        """What is known under a key, or else what `measure` finds, written down at once."""
        held = self.data[section]
        if key not in held:
            held[key] = plain(measure())
            self.save()
        return held[key]

    def forget(self) -> None:
        """Drop every measurement."""
        for section in SECTIONS:
            self.data[section] = {}
        self.data["transfer"] = None

    def save(self) -> None:
        text = json.dumps(plain(self.data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_aside(self.path, text.encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error}). Remove it, or give another --out.") from error
    wanted = {"identity", "transfer", *SECTIONS}
    if not isinstance(held, dict) or held.get("tool") != TOOL or not wanted <= set(held):
        raise ValueError(f"{str(path)!r} is no report of `{TOOL}`. Give another folder with --out.")
    if held.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{str(path)!r} has format {held.get('format_version')!r}; this version writes {FORMAT_VERSION}. Give "
            "another folder with --out, or pass --restart to begin anew."
        )
    return held


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
