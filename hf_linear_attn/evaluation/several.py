"""Several tasks in one report: a fine-tuned model each, with the same mechanisms, beside the model of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .scores import task_key
from .subject import Group


def add_task(found: dict[str, Any], task: str, other: Mapping[str, Any]) -> None:
    """Put what `Study.judge` found for the model of a further task beside what was found for the model of the report.

    The score of a mechanism in that model becomes a part `task:NAME` of its quality; of several seeds or checkpoints
    one by one where both have as many.
    """
    for name in ("exact", "control"):
        _join(found[name], other[name], task)
    if other["reference"]:
        found["reference"] = found["reference"] or {"name": other["reference"]["name"], "quality": {}}
        _join(found["reference"]["quality"], other["reference"]["quality"], task)
    mine = {held["name"]: held for held in found["mechanisms"]}
    for held in other["mechanisms"]:
        own = mine[held["name"]]
        for state in ("untrained", "trained"):
            for name in (state, f"{state}_spread"):
                if held.get(name):
                    own[name] = own.get(name) or {}
                    _join(own[name], held[name], task)
        runs, theirs = own.get("runs", []), held.get("runs", [])
        for run, their in zip(runs, theirs, strict=True) if len(runs) == len(theirs) else ():
            for state in ("untrained", "trained"):
                if their.get(state):
                    _join(run[state], their[state], task)


def _join(quality: dict[str, Any], other: Mapping[str, Any], task: str) -> None:
    if "task" not in other:
        return
    quality[task_key(task)] = other["task"]
    measured = other.get("measurements", {}).get("task")  # a spread has none
    if measured is not None:
        quality.setdefault("measurements", {})[task_key(task)] = measured


def same_names(task: str, groups: Sequence[Group], known: Sequence[Group]) -> list[Group]:
    """A task's converted checkpoints under the names that those of MODEL with the same layers have.

    Raises:
        ValueError: MODEL has none with these layers.
    """
    names = {group.same: group.name for group in known}
    for group in groups:
        if group.same not in names:
            raise ValueError(
                f"{group.members[0].folder!r}, of the task {task!r}, has layers that no converted checkpoint of MODEL "
                "has; time is measured on MODEL. Give one converted in the same way: --converted FOLDER."
            )
    return [replace(group, name=names[group.same]) for group in groups]
