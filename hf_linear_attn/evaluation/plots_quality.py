"""Plots of quality, drawn from a report's data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import DEFAULT_ATTENTION
from .advice import final, is_trivial
from .drawing import (
    AFTER,
    BASELINE_COLOR,
    BEFORE,
    COLORS,
    FREE_COLOR,
    figure_of,
    label_of,
    legend_below,
    looks_of,
    plain_log_axis,
)
from .formats import fixed
from .scores import Score
from .speed import FREE


def heat_map_of(report: dict[str, Any]) -> dict[str, Any] | None:
    """The mechanism whose layers and heads are shown: the default, or the first that learned, or the first with a KL
    to show."""
    known = [held for held in report["mechanisms"] if final(held)["kl"] is not None and not is_trivial(held)]
    default = [held for held in known if held["name"] == DEFAULT_ATTENTION]
    chosen = default or [held for held in known if held["trained"]] or known
    return chosen[0] if chosen else None


def fidelity(report: dict[str, Any]) -> Any:
    """KL of the weights and error of the outputs, untrained and after transfer."""
    figure, (left, right) = figure_of(0.62 * len(report["mechanisms"]) + 1.6, 2, sharey=True)
    _before_after(left, report, lambda quality: quality["kl"], 2, missing="no distribution")
    _before_after(right, report, lambda quality: quality["output_error"], 2)
    left.set_title("KL of the weights (nats)")
    right.set_title("Error of the output")
    legend_below(figure, right, 2, _bar_handles())
    return figure


def score_bars(report: dict[str, Any], score: Score) -> Any:
    """One measure of the whole model, with lines for the exact model and for the one without attention."""
    figure, axes = figure_of(0.62 * len(report["mechanisms"]) + 1.7)
    _before_after(axes, report, score.of, score.digits)
    right = axes.get_xlim()[1]
    lines: list[tuple[str, float | None, str, Any]] = [
        ("attention off", score.of(report["control"]), FREE_COLOR, (0, (4, 3)))
    ]
    if score.relative:
        lines.insert(0, ("exact attention", score.of(report["exact"]), BASELINE_COLOR, "solid"))
        if report.get("reference"):
            own = score.of(report["reference"]["quality"])  # None where there is none for this score
            lines.insert(1, (report["reference"]["name"], own, COLORS[4], (0, (6, 2))))
    else:
        lines.append(("unrelated passages", report["exact"].get("unrelated_cosine"), COLORS[1], (0, (1, 1.5))))
    known = [(name, value, color, style) for name, value, color, style in lines if value is not None]
    for name, value, color, style in known:
        label = f"{name} ({score.show(value)})"
        axes.axvline(value, color=color, linewidth=1.6, linestyle=style, label=label)
    values = [value for _, value, _, _ in known]
    axes.set_xlim(min([0.0, *values]), max([right, *(value * 1.08 for value in values)]))
    axes.set_title(f"{score.title} ({'higher' if score.higher else 'lower'} is better)")
    legend_below(figure, axes, 2, _bar_handles())
    return figure


def _before_after(
    axes: Any, report: dict[str, Any], pick: Callable[[dict[str, Any]], float | None], digits: int, missing: str = "–"
) -> None:
    """Two bars a mechanism: untrained, and after transfer; one where there is only one of them."""
    names = [held["name"] for held in report["mechanisms"]]
    qualities = [held[key] for held in report["mechanisms"] for key in ("untrained", "trained") if held[key]]
    top = max([pick(quality) or 0.0 for quality in qualities]) or 1.0
    for index, held in enumerate(report["mechanisms"]):
        both = held["untrained"] is not None and held["trained"] is not None
        for state, color, shift in (("untrained", BEFORE, 0.2), ("trained", AFTER, -0.2)):
            if held[state] is None:
                continue
            value, place = pick(held[state]), -index + (shift if both else 0.0)
            if value is None:
                axes.text(top * 0.02, -index, missing, va="center", fontsize=8.5, color="#666666")
                break
            spread = _spread(held, state, pick)
            bar = {"height": 0.36, "color": color, "hatch": "//" if color == BEFORE else "", "ec": "white"}
            axes.barh(place, value, xerr=spread, ecolor="#444444", capsize=2, **bar)
            beside = max(value, 0.0) + (spread or 0.0) + top * 0.02
            halo = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.75}
            axes.text(beside, place, fixed(value, digits), va="center", fontsize=8.5, bbox=halo)
    axes.set_yticks([-index for index in range(len(names))], names)
    axes.set_xlim(0, top * 1.22)
    axes.grid(axis="y", visible=False)


def _spread(held: dict[str, Any], state: str, pick: Callable[[dict[str, Any]], float | None]) -> float | None:
    """Standard deviation over seeds, if there are several."""
    try:
        return pick(held[f"{state}_spread"]) or None
    except KeyError:
        return None


def _bar_handles() -> list[Any]:
    from matplotlib.patches import Patch

    untrained = Patch(facecolor=BEFORE, hatch="//", edgecolor="white", label="untrained patch")
    return [untrained, Patch(facecolor=AFTER, label="after transfer or conversion")]


def transferred(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The mechanisms with a loss to show: one that is exact from the start has none."""
    return [held for held in report["mechanisms"] if held["transfer"] and not is_trivial(held)]


def transfer(report: dict[str, Any]) -> Any:
    """Losses of the transfers (of the first seed)."""
    figure, axes = figure_of(3.5)
    values = []
    for held in transferred(report):
        losses = held["transfer"]["losses"]
        looks = looks_of(report, held["name"])
        axes.plot(range(1, len(losses) + 1), losses, color=looks["color"], linewidth=1.2, alpha=0.8)
        steps, scores = zip(*held["transfer"]["held_out"], strict=True)
        axes.plot(steps, scores, linestyle="none", markersize=6, label=held["name"], **{**looks, "linewidth": 0})
        values += [*losses, *scores]
    positive = [value for value in values if value > 0]
    if positive and max(positive) / min(positive) > 20:
        axes.set_yscale("log")
        plain_log_axis(axes.yaxis, (min(positive), max(positive)), lambda value: f"{value:g}")
    axes.set_xlabel("step (lines: training batch; markers: validation)")
    axes.set_title("Attention transfer: loss a layer")
    legend_below(figure, axes)
    return figure


def heat_map(report: dict[str, Any]) -> Any:
    """KL by layer and head of one mechanism, before and after."""
    held = heat_map_of(report)
    assert held is not None
    panels = [(title, held[key]) for key, title in (("untrained", "untrained"), ("trained", "trained")) if held[key]]
    grids = [[layer["kl"] for layer in quality["layers"]] for _, quality in panels]
    top = max(value for grid in grids for row in grid for value in row)
    figure, all_axes = figure_of(_map_height(len(grids[0])), len(panels), sharey=True, squeeze=False)
    layers = [layer["index"] for layer in panels[0][1]["layers"]]
    for axes, (title, _), grid in zip(all_axes[0], panels, grids, strict=True):
        image = _draw_map(axes, grid, layers, top)
        axes.set_title(f"{held['name']}, {title}" if len(held["name"]) < 14 else title)
    all_axes[0][0].set_ylabel("layer")
    figure.colorbar(image, ax=list(all_axes[0]), label="KL (nats)", fraction=0.05)
    return figure


def error_maps(report: dict[str, Any]) -> Any:
    """Error of the outputs by layer and head, of every mechanism as it ended."""
    columns = min(3, len(report["mechanisms"]))
    rows = -(-len(report["mechanisms"]) // columns)
    layers = max(len(final(held)["layers"]) for held in report["mechanisms"])
    height = min(0.4 + rows * max(0.55 * _map_height(layers), 1.5), 9.0)
    figure, grid = figure_of(height, columns, rows, squeeze=False)
    image = None
    for place, axes in enumerate(axes for row in grid for axes in row):
        if place >= len(report["mechanisms"]):
            axes.set_visible(False)
            continue
        held = report["mechanisms"][place]
        found = final(held)["layers"]
        image = _draw_map(axes, [layer["output_error"] for layer in found], [layer["index"] for layer in found], 1.0)
        axes.set_title(held["name"], fontsize=9)
    figure.colorbar(image, ax=grid.ravel().tolist(), label="error of the output", fraction=0.05, extend="max")
    figure.supxlabel("head", fontsize=9)
    figure.supylabel("layer", fontsize=9)
    return figure


def _map_height(rows: int) -> float:
    return min(max(0.32 * rows + 1.5, 2.6), 7.0)


def _draw_map(axes: Any, grid: list[list[float]], layers: list[int], top: float) -> Any:
    image = axes.imshow(grid, cmap="cividis", vmin=0, vmax=top, aspect="auto")
    axes.grid(visible=False)
    every, heads = max(1, len(layers) // 12), len(grid[0])
    axes.set_xticks(range(0, heads, max(1, heads // 6)))
    axes.set_yticks(range(0, len(layers), every), layers[::every])
    return image


def positions(report: dict[str, Any]) -> Any:
    """Loss a token by its position in the window: the exact model, each mechanism, attention off."""
    context = report["exact"]["perplexity"]["context"]
    rows = [(report["speed"]["baseline"], report["exact"]), (FREE, report["control"])]
    rows += [(held["name"], final(held)) for held in report["mechanisms"]]
    figure, axes = figure_of(3.9)
    for name, quality in rows:
        losses = quality["perplexity"]["by_position"]
        middles = [(index + 0.5) * context / len(losses) for index in range(len(losses))]
        known = [(place, loss) for place, loss in zip(middles, losses, strict=True) if loss is not None]
        if known:
            axes.plot(*zip(*known, strict=True), label=label_of(report, name), markersize=5, **looks_of(report, name))
    limit = report["model"]["positions"]
    if limit is not None and limit < context:
        axes.margins(y=0.12)
        axes.axvline(limit, color="#666666", linewidth=1.0, linestyle=(0, (2, 2)))
        axes.text(limit, axes.get_ylim()[1], " trained up to here", va="top", fontsize=8.5, color="#444444")
    axes.set_xlim(0, context)
    axes.set_xlabel("position in the window (tokens)")
    axes.set_title("Loss a token by position (nats; lower is better)")
    legend_below(figure, axes)
    return figure
