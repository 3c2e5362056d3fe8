"""The result of a layer search as a plot, as an HTML page, and on a terminal."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from ..utils.extras import require_packages
from .inputs import inputs_text
from .layer_search import LayerSearchResult, format_divergence
from .plots import COLORS, STYLE, new_figure, png
from .report import page_template

CAPTION = (
    "Above: damage by the number of converted layers; each point is measured as a whole. Below: speed of the whole "
    "model against exact attention."
)

BLUE, ORANGE, *LENGTH_COLORS = COLORS


def draw_curve(result: LayerSearchResult, model_name: str) -> bytes:
    """Return a PNG of damage and speed by the number of converted layers.

    Raises:
        ImportError: matplotlib is missing.
    """
    require_packages("matplotlib", extra="demo", purpose="A plan's report")
    import matplotlib

    lengths = list(result.curve[0]["speedup"])
    with matplotlib.rc_context(STYLE):
        figure, grid = new_figure(5.6 if lengths else 3.6, 2 if lengths else 1, sharex=True, squeeze=False)
        panels = grid[:, 0]
        _plot_damage(panels[0], result)
        panels[0].set_title(f"{model_name}: what converting layers costs")
        if lengths:
            _plot_speed(panels[1], result, lengths)
        for axes in panels:
            axes.legend()
        panels[-1].xaxis.get_major_locator().set_params(integer=True)
        panels[-1].set_xlabel(f"layers converted to {result.attention} (of {result.num_layers})")
        return png(figure)


def _plot_damage(axes: Any, result: LayerSearchResult) -> None:
    points = [(row["count"], row["damage"]) for row in result.curve if row["damage"] is not None]
    axes.plot(*zip(*points, strict=True), color=BLUE, marker="o", label="on the data of the choice")
    if result.budget.unit is not None:
        limit = result.budget.limit
        axes.axhline(limit, color="black", linestyle="--", label=f"budget: {result.budget.text}")
        if 0 < limit < max(value for _, value in points) / 12:
            # Without this scale the budget would lie on the axis.
            axes.set_yscale("symlog", linthresh=2 * limit, linscale=1.5)
            axes.yaxis.set_major_formatter("{x:g}")
    count = result.chosen["count"]
    for row, looks, label in (
        (result.chosen, {"s": 170, "facecolors": "none", "edgecolors": ORANGE, "linewidths": 2}, "chosen"),
        (result.verified, {"s": 55, "marker": "X", "color": ORANGE}, "verified on other data"),
    ):
        if row["damage"] is not None:
            axes.scatter([count], [row["damage"]], zorder=5, label=label, **looks)
    axes.set_ylabel(f"loss of quality, {'% ' if result.unit.name == 'perplexity' else ''}{result.unit.name}")


def _plot_speed(axes: Any, result: LayerSearchResult, lengths: list[str]) -> None:
    counts = [row["count"] for row in result.curve]
    axes.axhline(1.0, color="#767676", linewidth=1)
    for index, length in enumerate(lengths):
        color = LENGTH_COLORS[index % len(LENGTH_COLORS)]
        values = [row["speedup"][length] for row in result.curve]
        axes.plot(counts, values, color=color, marker="s^Dv"[index % 4], label=f"{int(length):,} tokens")
    if result.budget.length is not None:
        axes.axhline(result.budget.limit, color="black", linestyle="--", label=f"budget: {result.budget.text}")
    axes.axvline(result.chosen["count"], color=ORANGE, linewidth=1.2, linestyle=":")
    axes.set_ylabel(f"times as fast as {result.baseline}")


def render_page(result: LayerSearchResult, facts: Mapping[str, Any], plot: bytes) -> str:
    """Return the report as one HTML page.

    Args:
        result: The search's result.
        facts: `model`, `mechanism`, `data`, `transfer`, `settings`, `hardware`, `versions`, `created`, `seconds` and
            `resumed` of the run.
        plot: The PNG of `draw_curve`, which the page embeds.
    """
    import pandas as pd

    layers = [
        [f"{row['index']} {row['name']}", format_divergence(row["divergence"]), result.unit.format(row["damage"])]
        for row in result.single_layers
    ]
    return page_template("layer_search.html").render(
        result=result,
        layers=pd.DataFrame(layers, columns=["layer", result.score["divergence"], "damage"]).set_index("layer"),
        plot=base64.b64encode(plot).decode(),
        caption=CAPTION,
        inputs_text=inputs_text,
        plan=json.dumps(result.plan, indent=1, ensure_ascii=False),
        **facts,
    )
