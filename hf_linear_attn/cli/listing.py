"""`hf-linear-attn list`."""

import json
import os
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

from ..utils.options import option
from .verb import Verb


@dataclass(frozen=True)
class ListConfig:
    """Options of `list`."""

    name: str | None = option(None, "show this mechanism with its options")
    json: bool = option(False, "print JSON")


def run(config: ListConfig) -> None:
    """Print all mechanisms as a table, or one of them with its options."""
    from .. import registry

    entries = registry.list_attentions()
    if config.name is not None:
        registry.ATTENTIONS.get(config.name)  # raises with near matches
        entries = {config.name: entries[config.name]}
    if config.json:
        sys.stdout.write(json.dumps(entries, indent=2, ensure_ascii=False) + "\n")
    elif config.name is not None:
        sys.stdout.write(describe(config.name, entries[config.name]))
    else:
        _print_table(entries)


def directions(entry: dict[str, Any]) -> str:
    """Return the directions of one entry of `list_attentions()` as a word."""
    if entry["causal"] and entry["bidirectional"]:
        return "both"
    return "causal" if entry["causal"] else "bidirectional"


def describe(name: str, entry: dict[str, Any]) -> str:
    """Return the description of one mechanism with its options."""
    facts = {
        "what": entry["description"],
        "when": entry["recommendation"],
        "directions": directions(entry),
        "learned": "yes" if entry["learned"] else "no",
        "state": entry["state"],
        "cost": entry["cost"],
        "paper": entry["paper"],
    }
    lines = [name, *(f"  {label:<11} {text}" for label, text in facts.items() if text)]
    lines.append("options:" if entry["options"] else "options: none")
    for option_name, details in entry["options"].items():
        lines.append(f"  {option_name} = {json.dumps(details['default'], ensure_ascii=False)}")
        lines += textwrap.wrap(details["help"], 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _print_table(entries: dict[str, dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    short = [Column(title, no_wrap=True) for title in ("name", "directions", "learned", "state")]
    table = Table(*short, "paper", "when to choose", box=SIMPLE_HEAD, pad_edge=False)
    for name, entry in entries.items():
        learned = "yes" if entry["learned"] else "no"
        table.add_row(name, directions(entry), learned, entry["state"], entry["paper"], entry["recommendation"])
    # rich assumes 80 columns where the output is a file or a pipe.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    Console(file=sys.stdout, width=width, highlight=False, markup=False).print(table)


VERB = Verb(
    "list the attention mechanisms, or one of them with its options",
    ListConfig,
    run,
    ("name",),
    "hf-linear-attn list\nhf-linear-attn list favor+",
)
