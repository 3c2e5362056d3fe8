"""The result of a layer search as a plot and as an HTML page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

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
    """Return a PNG of damage and speed by the number of converted layers."""
    import matplotlib

    budget, lengths, counts = result.budget, list(result.curve[0]["speedup"]), [row["count"] for row in result.curve]
    limit: dict[str, Any] = {"color": "black", "linestyle": "--", "label": f"budget: {budget.text}"}
    with matplotlib.rc_context(STYLE):
        figure, (damage, *speed) = new_figure(5.6 if lengths else 3.6, 2 if lengths else 1, sharex=True, squeeze=False)
        panels = [damage[0], *(row[0] for row in speed)]
        top, bottom = panels[0], panels[-1]
        top.set_title(f"{model_name}: what converting layers costs")
        top.set_ylabel(f"loss of quality, {'% ' if result.unit.name == 'perplexity' else ''}{result.unit.name}")
        top.plot(
            counts, [row["damage"] for row in result.curve], color=BLUE, marker="o", label="on the data of the choice"
        )
        if budget.unit is not None:
            top.axhline(budget.limit, **limit)
            if 0 < budget.limit < max(row["damage"] or 0.0 for row in result.curve) / 12:
                # Without this scale the budget would lie on the axis.
                top.set_yscale("symlog", linthresh=2 * budget.limit, linscale=1.5)
                top.yaxis.set_major_formatter("{x:g}")
        for row, label, looks in (
            (result.chosen, "chosen", {"marker": "o", "markersize": 14, "markerfacecolor": "none"}),
            (result.verified, "verified on other data", {"marker": "X", "markersize": 8}),
        ):
            top.plot([result.chosen["count"]], [row["damage"]], color=ORANGE, linestyle="none", label=label, **looks)
        if lengths:
            bottom.axhline(1.0, color="#767676", linewidth=1)
            bottom.set_ylabel(f"times as fast as {result.baseline}")
        for index, length in enumerate(lengths):
            look = {"color": LENGTH_COLORS[index % len(LENGTH_COLORS)], "marker": "s^Dv"[index % 4]}
            bottom.plot(
                counts, [row["speedup"][length] for row in result.curve], label=f"{int(length):,} tokens", **look
            )
        if budget.length is not None:
            bottom.axhline(budget.limit, **limit)
        for axes in panels:
            axes.legend()
        bottom.xaxis.get_major_locator().set_params(integer=True)
        bottom.set_xlabel(f"layers converted to {result.attention} (of {result.num_layers})")
        return png(figure)


def render_page(result: LayerSearchResult, facts: Mapping[str, Any], plot: bytes) -> str:
    """Return the report as one HTML page. `facts` are what `plan-report.json` has beside the result."""
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
