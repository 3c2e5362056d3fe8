"""A plan as files: `plan.json`, `plan-report.json`, `curve.png`, `report.html`; and on the screen."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...mechanisms.softmax import EXACT
from ..report import page_templates, write_aside
from ..screen import readable
from .budget import KINDS, UNITS
from .picture import CAPTION, NAME, draw_curve
from .words import sentences, shown_divergence, table

PLAN = "plan.json"
PAGE = "report.html"


def plan_of(report: dict[str, Any]) -> dict[str, Any]:
    """The plan as `patch_model`, `patch --plan` and recipes take it: the chosen layers, the others exact."""
    mechanism = {"attention": report["mechanism"]["name"], **report["mechanism"]["options"]}
    return {"default": EXACT, **{str(layer): mechanism for layer in report["choice"]["layers"]}}


def write_files(report: dict[str, Any], folder: Path) -> None:
    """Write the plan, the picture and the page, each aside and then renamed."""
    picture = draw_curve(report)
    contents = {
        PLAN: (json.dumps(plan_of(report), indent=1, ensure_ascii=False) + "\n").encode(),
        NAME: picture,
        PAGE: render(report, picture).encode(),
    }
    for name, content in contents.items():
        write_aside(folder / name, content)


def render(report: dict[str, Any], picture: bytes) -> str:
    """The page; the picture is embedded."""
    titles, rows = table(report)
    most = max((row["divergence"] or 0.0 for row in report["layers"]), default=0.0)
    return (
        page_templates()
        .get_template("plan.html")
        .render(
            report=report,
            sentences=sentences(report),
            titles=titles,
            rows=[[cell.removesuffix(" *") for cell in row] for row in rows],  # the page marks the plan in its own way
            kind=KINDS[report["model"]["kind"]],
            unit=UNITS[report["choice"]["unit"]],
            most=most or 1.0,
            picture=base64.b64encode(picture).decode(),
            caption=CAPTION,
            divergence=shown_divergence,
            plan=json.dumps(plan_of(report), indent=1, ensure_ascii=False),
        )
    )


def show(console: Console, report: dict[str, Any], folder: Path) -> None:
    """The table, what it says, and where the rest is."""
    titles, rows = table(report)
    shown = Table(
        box=SIMPLE_HEAD,
        title=readable(console, escape(f"{report['model']['name']}: from exact to {report['mechanism']['name']}")),
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for place, title in enumerate(titles):
        cells = [readable(console, row[place]) for row in rows]
        shown.add_column(
            title, justify="left" if place == 0 else "right", width=max(map(len, [*title.split(), *cells]))
        )
    for point, row in zip(report["curve"], rows, strict=True):
        chosen = point["count"] == report["choice"]["count"]
        shown.add_row(*(readable(console, escape(cell)) for cell in row), style="bold" if chosen else "")
    console.print()
    console.print(shown)
    for line in sentences(report):
        console.print(readable(console, f"• {escape(line)}"), highlight=False)
    console.print()
    console.print(
        readable(console, f"Plan: [bold]{escape(str(folder / PLAN))}[/], with {PAGE}, {NAME} and plan-report.json"),
        highlight=False,
        soft_wrap=True,
    )
