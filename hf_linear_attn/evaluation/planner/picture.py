"""The curve as a picture: what converting layers costs, and what it brings."""

from __future__ import annotations

from typing import Any

from ..drawing import BASELINE_COLOR, COLORS, FREE_COLOR, MARKERS, figure_of, plot_style, png
from .budget import UNITS

NAME = "curve.png"
CAPTION = (
    "Above: damage against the number of layers converted, in the order found; each point is measured as a whole. "
    "Below: speed of the whole model against exact attention."
)


def draw_curve(report: dict[str, Any]) -> bytes:
    """PNG of two panels over the number of layers that are linear."""
    lengths = list(report["curve"][0]["speedup"])
    with plot_style():
        figure, panels = figure_of(5.6 if lengths else 3.6, rows=2 if lengths else 1, sharex=True, squeeze=False)
        _damage(panels[0][0], report)
        if lengths:
            _speed(panels[1][0], report, lengths)
        _layer_axis(panels[-1][0], report)
        figure.align_ylabels()
        return png(figure)


def _layer_axis(axes: Any, report: dict[str, Any]) -> None:
    last = report["curve"][-1]["count"]
    every = max(1, -(-last // 12))
    ticks = sorted({*range(0, last + 1, every), last} - ({last - 1} if every > 1 else set()))
    axes.set_xticks(ticks)
    axes.set_xlim(-0.3, last + 0.3)
    axes.set_xlabel(f"layers converted to {report['mechanism']['name']} (of {report['model']['layers']})")


def _damage(axes: Any, report: dict[str, Any]) -> None:
    choice, unit = report["choice"], UNITS[report["choice"]["unit"]]
    known = [(row["count"], row["damage"]) for row in report["curve"] if row["damage"] is not None]
    counts, values = zip(*known, strict=True)
    axes.plot(counts, values, color=COLORS[0], marker=MARKERS[0], markersize=5, label="on the data of the choice")
    budget = report["budget"]["amount"] if report["budget"]["length"] is None else None
    if budget is not None:
        axes.axhline(
            budget, color=BASELINE_COLOR, linestyle=(0, (4, 3)), linewidth=1.4, label=f"budget: {choice['budget']}"
        )
    if choice["damage"] is not None:
        axes.scatter(
            [choice["count"]],
            [choice["damage"]],
            s=170,
            facecolors="none",
            edgecolors=COLORS[1],
            linewidths=2,
            zorder=5,
            label="chosen" if choice["found"] else "nearest",
        )
    if choice["verified"]["damage"] is not None:
        axes.scatter(
            [choice["count"]],
            [choice["verified"]["damage"]],
            s=55,
            marker="X",
            color=COLORS[1],
            zorder=6,
            label="verified on other data",
        )
    small = budget or 0.0
    if small > 0 and max(values) > 12 * small:
        axes.set_yscale("symlog", linthresh=2 * small, linscale=1.5)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(unit.title)
    axes.set_title(f"{report['model']['name']}: what converting layers costs")
    axes.legend(loc="best", frameon=True, framealpha=0.9, edgecolor="none")


def _speed(axes: Any, report: dict[str, Any], lengths: list[str]) -> None:
    counts = [row["count"] for row in report["curve"]]
    axes.axhline(1.0, color=FREE_COLOR, linewidth=1)
    for place, length in enumerate(lengths):
        looks = {"color": COLORS[(place + 2) % len(COLORS)], "marker": MARKERS[(place + 1) % len(MARKERS)]}
        values = [row["speedup"][length] for row in report["curve"]]
        axes.plot(counts, values, markersize=5, label=f"{int(length):,} tokens", **looks)
    if report["budget"]["length"] is not None:
        label = f"budget: {report['choice']['budget']}"
        axes.axhline(
            report["budget"]["amount"], color=BASELINE_COLOR, linestyle=(0, (4, 3)), linewidth=1.4, label=label
        )
    axes.axvline(report["choice"]["count"], color=COLORS[1], linewidth=1.2, linestyle=":")
    axes.set_ylabel(f"times as fast as {report['baseline']}")
    axes.set_title("what it brings")
    axes.legend(loc="best", frameon=True, framealpha=0.9, edgecolor="none")
