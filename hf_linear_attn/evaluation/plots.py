"""The plots of a report, drawn from its data: SVG within the page, PNG beside it, legible at the width of a phone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .drawing import (
    BASELINE_COLOR,
    FREE_COLOR,
    Drawing,
    drawing,
    figure_of,
    label_of,
    legend_below,
    length_axis,
    looks_of,
    plain_log_axis,
    plot_style,
)
from .formats import format_bytes, format_rate, format_seconds
from .plots_quality import error_maps, fidelity, heat_map, heat_map_of, positions, score_bars, transfer, transferred
from .scores import Score, axes_of, scores_of
from .speed import FREE


def draw_plots(report: dict[str, Any]) -> dict[str, Drawing]:
    """File name -> figure, in the order in which they are shown."""
    drawings: dict[str, Callable[[dict[str, Any]], Any]] = {}
    if report.get("advice") and report["advice"]["points"]:
        first, *rest = axes_of(report)
        drawings["pareto.png"] = partial(_pareto, advice=report["advice"], score=first)
        for score, advice in zip(rest, report["advice"].get("others", ()), strict=False):  # old reports have none
            drawings[f"pareto-{score.name}.png"] = partial(_pareto, advice=advice, score=score)
    for score in scores_of(report):
        drawings[f"{score.name}.png"] = partial(score_bars, score=score)
    drawings["fidelity.png"] = fidelity
    if "perplexity" in report["exact"]:
        drawings["positions.png"] = positions
    if heat_map_of(report):
        drawings["heatmap.png"] = heat_map
    drawings["errors.png"] = error_maps
    if transferred(report):
        drawings["transfer.png"] = transfer
    drawings.update(_speed_drawings(report))
    with plot_style():
        return {name: drawing(draw(report), name.removesuffix(".png")) for name, draw in drawings.items()}


def _speed_drawings(report: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], Any]]:
    drawings: dict[str, Callable[[dict[str, Any]], Any]] = {}
    whole = report["speed"]["model"]
    if whole["lengths"]:
        drawings.update({"time.png": _model_time, "speedup.png": _speedup})
        if all(row.get("memory") for rows in whole["rows"].values() for row in rows):
            drawings["memory.png"] = _memory
    parts = {"training": _training_time, "throughput": _throughput, "prefill": _prefill_time}
    timed = [part for part in parts if report["speed"].get(part, {}).get("lengths")]
    drawings.update({f"{part}.png": parts[part] for part in timed})
    if report["speed"]["layer"]["lengths"]:
        drawings["layer.png"] = _layer_time
    if report["decode"]:
        drawings.update({"decode.png": _decode_time, "cache.png": _cache})
    return drawings


# --------------------------------------------------------------------------------------------------------------------
# Quality against speed


def _pareto(report: dict[str, Any], advice: dict[str, Any], score: Score) -> Any:
    """Up is better, right is faster; the front is drawn as steps."""
    points = advice["points"]
    figure, axes = figure_of(4.5)
    values = [point["score"] for point in points]
    if not score.higher and min(values) > 0 and max(values) / min(values) > 4:
        limits = (min(values) * 0.85, max(values) * 1.2)
        axes.set_yscale("log")
        axes.set_ylim(*limits)
        plain_log_axis(axes.yaxis, limits, lambda value: f"{value:g}")
    if not score.higher:
        axes.invert_yaxis()
    front = sorted((point["speedup"], point["score"]) for point in points if point["front"])
    if len(front) > 1:
        label = "Pareto front: nothing is both faster and better"
        axes.step(*zip(*front, strict=True), where="pre", color="#999999", linewidth=3, alpha=0.6, label=label)
    for point in points:
        _draw_point(axes, report, point, points)
    axes.axvline(1.0, color=BASELINE_COLOR, linewidth=0.8)
    ends = [point["speedup"] for point in points]
    if max(ends) / min(ends) > 3:
        limits = (min(ends) * 0.85, max(ends) * 1.2)
        axes.set_xscale("log")
        axes.set_xlim(*limits)
        plain_log_axis(axes.xaxis, limits, lambda value: f"{value:g}×")
    axes.set_xlabel(f"times as fast as {report['speed']['baseline']} at {report['advice']['length']:,} tokens")
    axes.set_title(f"{score.title} against speed (up and right is better)")
    legend_below(figure, axes, 2)
    return figure


def _draw_point(axes: Any, report: dict[str, Any], point: dict[str, Any], points: Sequence[dict[str, Any]]) -> None:
    """Filled where it ended, hollow where it began and was trained afterwards, with a line between the two."""
    place = ([point["speedup"]], [point["score"]])
    if point["state"] == "control":
        axes.axvline(point["speedup"], color=FREE_COLOR, linewidth=1.6, linestyle=(0, (4, 3)), label="ceiling")
        axes.plot(*place, marker="x", markersize=8, linestyle="none", color=FREE_COLOR, label="attention off")
        return
    looks = {**looks_of(report, point["name"]), "linestyle": "none", "markersize": 9}
    trained = [held for held in points if held["name"] == point["name"]]
    if point["state"] == "untrained" and len(trained) > 1:
        axes.plot(*place, **{**looks, "markersize": 7}, markerfacecolor="white")
        track = [held["score"] for held in trained]
        axes.plot([point["speedup"]] * 2, track, color=looks["color"], linewidth=1.0, alpha=0.7)
        return
    axes.plot(*place, label=label_of(report, point["name"]), **looks)


# --------------------------------------------------------------------------------------------------------------------
# Time and memory


def _model_time(report: dict[str, Any]) -> Any:
    return _times(report, report["speed"]["model"], "Whole model, one forward pass, batch 1")


def _training_time(report: dict[str, Any]) -> Any:
    return _times(report, report["speed"]["training"], "Whole model, forward and backward, batch 1")


def _prefill_time(report: dict[str, Any]) -> Any:
    return _times(report, report["speed"]["prefill"], "Prefill: the prompt, batch 1")


def _throughput(report: dict[str, Any]) -> Any:
    table = report["speed"]["throughput"]
    figure, axes = figure_of(4.3)
    values = []
    for name, rows in table["rows"].items():
        held = [row["tokens_per_second"] for row in rows]
        values += held
        axes.plot(table["lengths"], held, label=label_of(report, name), markersize=5, **looks_of(report, name))
    axes.set_yscale("log")
    limits = (min(values) * 0.8, max(values) * 1.25)
    axes.set_ylim(*limits)
    plain_log_axis(axes.yaxis, limits, format_rate)
    length_axis(axes, table["lengths"], "tokens of each sequence")
    axes.set_title(f"Tokens a second, {table['batch']} sequences at once")
    legend_below(figure, axes)
    return figure


def _memory(report: dict[str, Any]) -> Any:
    """Peak beyond what was held before the pass."""
    table = report["speed"]["model"]
    figure, axes = figure_of(4.3)
    values = []
    for name, rows in table["rows"].items():
        held = [row["memory"] for row in rows]
        values += held
        axes.plot(table["lengths"], held, label=label_of(report, name), markersize=5, **looks_of(report, name))
    axes.set_yscale("log")
    limits = (min(values) * 0.8, max(values) * 1.25)
    axes.set_ylim(*limits)
    plain_log_axis(axes.yaxis, limits, format_bytes)
    length_axis(axes, table["lengths"], "tokens")
    axes.set_title("Memory of one forward pass at its peak, batch 1")
    legend_below(figure, axes)
    return figure


def _layer_time(report: dict[str, Any]) -> Any:
    return _times(report, report["speed"]["layer"], "One layer's attention alone, batch 1")


def _times(report: dict[str, Any], table: dict[str, Any], title: str) -> Any:
    """Median with a band from p20 to p80; rings mark the crossovers."""
    figure, axes = figure_of(4.3)
    values = []
    for name, rows in table["rows"].items():
        looks = looks_of(report, name)
        medians = [row["median"] for row in rows]
        values += medians
        axes.plot(table["lengths"], medians, label=label_of(report, name), markersize=5, **looks)
        low, high = [row["p20"] for row in rows], [row["p80"] for row in rows]
        axes.fill_between(table["lengths"], low, high, color=looks["color"], alpha=0.15, linewidth=0)
    baseline = table["rows"][report["speed"]["baseline"]]
    for name, crossing in table["crossover"].items():
        if crossing["relation"] == "at":
            height = _interpolate(table["lengths"], [row["median"] for row in baseline], crossing["length"])
            ring = {"s": 110, "facecolors": "none", "linewidths": 1.8, "zorder": 5}
            axes.scatter([crossing["length"]], [height], edgecolors=looks_of(report, name)["color"], **ring)
    axes.set_yscale("log")
    limits = (min(values) * 0.8, max(values) * 1.25)
    axes.set_ylim(*limits)
    plain_log_axis(axes.yaxis, limits, format_seconds)
    length_axis(axes, table["lengths"], "tokens (a ring: from here on faster than the exact form)")
    axes.set_title(title)
    legend_below(figure, axes)
    return figure


def _interpolate(lengths: Sequence[int], values: Sequence[float], at: float) -> float:
    """On the straight line of the log-log plot."""
    for index in range(len(lengths) - 1):
        if lengths[index] <= at <= lengths[index + 1]:
            share = math.log(at / lengths[index]) / math.log(lengths[index + 1] / lengths[index])
            return values[index] * (values[index + 1] / values[index]) ** share
    return values[-1]


def _speedup(report: dict[str, Any]) -> Any:
    table, baseline = report["speed"]["model"], report["speed"]["baseline"]
    figure, axes = figure_of(4.3)
    axes.axhline(1.0, color=BASELINE_COLOR, linewidth=1.6, label=f"{baseline} (exact) = 1")
    axes.plot(table["lengths"], table["ceiling"], label="ceiling: no attention at all", **looks_of(report, FREE))
    values = [1.0, *table["ceiling"]]
    for name in table["crossover"]:
        rows = table["rows"][name]
        middle = [row["speedup"] for row in rows]
        spread = [
            [row["speedup"] - row["speedup_p20"] for row in rows],
            [row["speedup_p80"] - row["speedup"] for row in rows],
        ]
        values += middle
        axes.errorbar(
            table["lengths"], middle, yerr=spread, label=name, markersize=5, elinewidth=0.9, **looks_of(report, name)
        )
    axes.set_yscale("log")
    limits = (min(values) * 0.85, max(values) * 1.2)
    axes.set_ylim(*limits)
    plain_log_axis(axes.yaxis, limits, lambda value: f"{value:g}×")
    length_axis(axes, table["lengths"], "tokens")
    axes.set_title(f"Whole model: times as fast as {baseline} (above 1 is faster)")
    legend_below(figure, axes)
    return figure


# --------------------------------------------------------------------------------------------------------------------
# Decoding


def _decode_time(report: dict[str, Any]) -> Any:
    return _decode(report, "median", format_seconds, "Time of one new token, batch 1")


def _cache(report: dict[str, Any]) -> Any:
    return _decode(report, "cache_bytes", format_bytes, "Cache of one stream")


def _decode(report: dict[str, Any], key: str, unit: Callable[[float], str], title: str) -> Any:
    decode = report["decode"]
    figure, axes = figure_of(4.1)
    values = []
    for name, rows in decode["rows"].items():
        held = [row[key] for row in rows]
        values += held
        axes.plot(decode["contexts"], held, label=label_of(report, name), markersize=5, **looks_of(report, name))
    axes.set_yscale("log")
    limits = (min(values) * 0.8, max(values) * 1.25)
    axes.set_ylim(*limits)
    plain_log_axis(axes.yaxis, limits, unit)
    length_axis(axes, decode["contexts"], "tokens of context before it")
    axes.set_title(title)
    legend_below(figure, axes)
    return figure
