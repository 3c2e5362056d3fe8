"""The plots of a report, drawn from its data. PNG files, legible at the width of a phone."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .formats import fixed, format_bytes, format_seconds
from .speed import FREE
from .verdicts import default_mechanism, final, is_trivial

#: Okabe and Ito's palette, which stays distinct to colour-blind readers; markers and hatches tell lines and bars apart
#: in print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
BASELINE_COLOR = "#000000"
FREE_COLOR = "#767676"
BEFORE, AFTER = "#B5B5B5", "#0072B2"

#: Inches; at 10 points on 5.6 inches, text is about 9 pixels high on a screen of 390 pixels.
WIDTH = 5.6
DPI = 160

HINT = "The demo needs matplotlib and jinja2: pip install 'hf-linear-attn[demo]'"


def draw_plots(report: dict[str, Any]) -> dict[str, bytes]:
    """File name -> PNG, in the order in which they are shown."""
    drawings: dict[str, Callable[[dict[str, Any]], Any]] = {"fidelity.png": _fidelity}
    if report["decode"]:
        drawings["perplexity.png"] = _perplexity
    else:
        drawings["sentences.png"] = _sentences
    if _transferred(report):
        drawings["transfer.png"] = _transfer
    if heat_map_of(report):
        drawings["heatmap.png"] = _heat_map
    if report["speed"]["model"]["lengths"]:
        drawings.update({"time.png": _model_time, "speedup.png": _speedup})
    if report["speed"]["layer"]["lengths"]:
        drawings["layer.png"] = _layer_time
    if report["decode"]:
        drawings.update({"decode.png": _decode_time, "cache.png": _cache})
    with plot_style():
        return {name: png(draw(report)) for name, draw in drawings.items()}


def heat_map_of(report: dict[str, Any]) -> dict[str, Any] | None:
    """The mechanism whose layers and heads are shown: the default of the model's kind, or the first that
    learned, or the first with a KL to show."""
    preferred = default_mechanism(report)
    known = [held for held in report["mechanisms"] if held["untrained"]["kl"] is not None and not is_trivial(held)]
    chosen = (
        [held for held in known if held["name"] == preferred] or [held for held in known if held["trained"]] or known
    )
    return chosen[0] if chosen else None


@contextmanager
def plot_style() -> Iterator[None]:
    """Context manager: the look of every plot of a report."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(HINT) from error
    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#666666",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#E3E3E3",
        "grid.linewidth": 0.7,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "figure.facecolor": "white",
        "svg.hashsalt": "hf-linear-attn",
    }
    with matplotlib.rc_context(settings):
        yield


def figure_of(height: float, columns: int = 1, rows: int = 1, **settings: Any) -> tuple[Any, Any]:
    """A figure of the common width (height in inches) and its axes, as from `subplots`."""
    # A figure of its own, not pyplot's: no window system, nothing global left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **settings)


def png(figure: Any) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _looks(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Colour and marker of a row: the same in every plot of a report."""
    if name == report["speed"]["baseline"]:
        return {"color": BASELINE_COLOR, "marker": "X", "linewidth": 2.2}
    if name == FREE:
        return {"color": FREE_COLOR, "marker": "", "linestyle": (0, (4, 3)), "linewidth": 1.6}
    index = [held["name"] for held in report["mechanisms"]].index(name)
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)], "linewidth": 1.5}


def _label(report: dict[str, Any], name: str) -> str:
    if name == report["speed"]["baseline"]:
        return f"{name} (exact)"
    return "no attention at all" if name == FREE else name


# --------------------------------------------------------------------------------------------------------------------
# Axes


def _length_axis(axes: Any, lengths: Sequence[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [_short(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel(title)


def _short(length: int) -> str:
    """512, 1k, 2k, …"""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _plain_log_axis(axis: Any, limits: tuple[float, float], unit: Callable[[float], str]) -> None:
    """Ticks at 1, 2, 5 times a power of ten (or powers alone on a long axis), written out."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = limits
    decades = math.log10(high / low)
    steps = (1, 2, 5) if decades < 2.2 else (1, 3) if decades < 3.2 else (1,)
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    ticks = [step * 10.0**power for power in range(first, last) for step in steps]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: unit(value)))


def _legend_below(figure: Any, axes: Any, columns: int = 3, more: Sequence[Any] = ()) -> None:
    handles = [*axes.get_legend_handles_labels()[0], *more]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=2.4, columnspacing=1.4)


# --------------------------------------------------------------------------------------------------------------------
# Speed


def _model_time(report: dict[str, Any]) -> Any:
    return _times(report, report["speed"]["model"], "Whole model, one forward pass, batch 1")


def _layer_time(report: dict[str, Any]) -> Any:
    return _times(report, report["speed"]["layer"], "One layer's attention alone, batch 1")


def _times(report: dict[str, Any], table: dict[str, Any], title: str) -> Any:
    """Median with a band from p20 to p80; rings mark the crossovers."""
    figure, axes = figure_of(4.3)
    values = []
    for name, rows in table["rows"].items():
        looks = _looks(report, name)
        medians = [row["median"] for row in rows]
        values += medians
        axes.plot(table["lengths"], medians, label=_label(report, name), markersize=5, **looks)
        low, high = [row["p20"] for row in rows], [row["p80"] for row in rows]
        axes.fill_between(table["lengths"], low, high, color=looks["color"], alpha=0.15, linewidth=0)
    baseline = table["rows"][report["speed"]["baseline"]]
    for name, crossing in table["crossover"].items():
        if crossing["relation"] == "at":
            height = _interpolate(table["lengths"], [row["median"] for row in baseline], crossing["length"])
            ring = {"s": 110, "facecolors": "none", "linewidths": 1.8, "zorder": 5}
            axes.scatter([crossing["length"]], [height], edgecolors=_looks(report, name)["color"], **ring)
    axes.set_yscale("log")
    limits = (min(values) * 0.8, max(values) * 1.25)
    axes.set_ylim(*limits)
    _plain_log_axis(axes.yaxis, limits, format_seconds)
    _length_axis(axes, table["lengths"], "tokens (a ring: from here on faster than the exact form)")
    axes.set_title(title)
    _legend_below(figure, axes)
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
    axes.plot(table["lengths"], table["ceiling"], label="ceiling: no attention at all", **_looks(report, FREE))
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
            table["lengths"], middle, yerr=spread, label=name, markersize=5, elinewidth=0.9, **_looks(report, name)
        )
    axes.set_yscale("log")
    limits = (min(values) * 0.85, max(values) * 1.2)
    axes.set_ylim(*limits)
    _plain_log_axis(axes.yaxis, limits, lambda value: f"{value:g}×")
    _length_axis(axes, table["lengths"], "tokens")
    axes.set_title(f"Whole model: times as fast as {baseline} (above 1 is faster)")
    _legend_below(figure, axes)
    return figure


# --------------------------------------------------------------------------------------------------------------------
# Quality


def _fidelity(report: dict[str, Any]) -> Any:
    figure, (left, right) = figure_of(0.62 * len(report["mechanisms"]) + 1.6, 2, sharey=True)
    _before_after(left, report, lambda quality: quality["kl"], 2, missing="no distribution")
    _before_after(right, report, lambda quality: quality["output_error"], 2)
    left.set_title("KL of the weights (nats)")
    right.set_title("Error of the output")
    _legend_below(figure, right, 2, _bar_handles())
    return figure


def _perplexity(report: dict[str, Any]) -> Any:
    figure, axes = figure_of(0.62 * len(report["mechanisms"]) + 1.7)
    _before_after(axes, report, lambda quality: quality["perplexity"]["perplexity"], 2)
    exact = report["exact"]["perplexity"]["perplexity"]
    off = report["control"]["perplexity"]["perplexity"]
    axes.axvline(exact, color=BASELINE_COLOR, linewidth=1.6, label=f"exact attention ({exact:.2f})")
    axes.axvline(off, color=FREE_COLOR, linewidth=1.6, linestyle=(0, (4, 3)), label=f"attention off ({off:.2f})")
    axes.set_xlim(0, max(axes.get_xlim()[1], off * 1.08))
    axes.set_title("Perplexity on held-out text (lower is better)")
    _legend_below(figure, axes, 2, _bar_handles())
    return figure


def _sentences(report: dict[str, Any]) -> Any:
    figure, axes = figure_of(0.62 * len(report["mechanisms"]) + 1.7)
    _before_after(axes, report, lambda quality: quality["sentences"]["cosine"], 3)
    unrelated, off = report["exact"]["unrelated_cosine"], report["control"]["sentences"]["cosine"]
    axes.axvline(off, color=FREE_COLOR, linewidth=1.6, linestyle=(0, (4, 3)), label=f"attention off ({off:.2f})")
    axes.axvline(
        unrelated,
        color=COLORS[1],
        linewidth=1.6,
        linestyle=(0, (1, 1.5)),
        label=f"unrelated passages ({unrelated:.2f})",
    )
    axes.set_xlim(min(0.0, off, unrelated), 1.18)
    axes.set_title("Sentence embeddings: cosine with the exact ones")
    _legend_below(figure, axes, 2, _bar_handles())
    return figure


def _before_after(
    axes: Any, report: dict[str, Any], pick: Callable[[dict[str, Any]], float | None], digits: int, missing: str = ""
) -> None:
    """Two bars a mechanism: untrained, and after transfer (one where nothing is learned)."""
    names = [held["name"] for held in report["mechanisms"]]
    qualities = [held[key] for held in report["mechanisms"] for key in ("untrained", "trained") if held[key]]
    top = max([pick(quality) or 0.0 for quality in qualities]) or 1.0
    for index, held in enumerate(report["mechanisms"]):
        pairs = [(0.2, held["untrained"], BEFORE), (-0.2, held["trained"], AFTER)]
        if held["trained"] is None:
            pairs = [(0.0, held["untrained"], BEFORE)]
        for shift, quality, color in pairs:
            value = pick(quality)
            if value is None:
                axes.text(top * 0.02, -index, missing, va="center", fontsize=8.5, color="#666666")
                break
            axes.barh(
                -index + shift, value, height=0.36, color=color, hatch="//" if color == BEFORE else "", ec="white"
            )
            axes.text(value + top * 0.02, -index + shift, fixed(value, digits), va="center", fontsize=8.5)
    axes.set_yticks([-index for index in range(len(names))], names)
    axes.set_xlim(0, top * 1.22)
    axes.grid(axis="y", visible=False)


def _bar_handles() -> list[Any]:
    from matplotlib.patches import Patch

    untrained = Patch(facecolor=BEFORE, hatch="//", edgecolor="white", label="untrained patch")
    return [untrained, Patch(facecolor=AFTER, label="after transfer")]


def _transferred(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The mechanisms with a loss to show: one that is exact from the start has none."""
    return [held for held in report["mechanisms"] if held["transfer"] and not is_trivial(held)]


def _transfer(report: dict[str, Any]) -> Any:
    figure, axes = figure_of(3.5)
    values = []
    for held in _transferred(report):
        losses = held["transfer"]["losses"]
        looks = _looks(report, held["name"])
        axes.plot(range(1, len(losses) + 1), losses, color=looks["color"], linewidth=1.2, alpha=0.8)
        steps, scores = zip(*held["transfer"]["held_out"], strict=True)
        axes.plot(steps, scores, linestyle="none", markersize=6, label=held["name"], **{**looks, "linewidth": 0})
        values += [*losses, *scores]
    positive = [value for value in values if value > 0]
    if positive and max(positive) / min(positive) > 20:
        axes.set_yscale("log")
        _plain_log_axis(axes.yaxis, (min(positive), max(positive)), lambda value: f"{value:g}")
    axes.set_xlabel("step (lines: training batch; markers: validation)")
    axes.set_title("Attention transfer: loss a layer")
    _legend_below(figure, axes)
    return figure


def _heat_map(report: dict[str, Any]) -> Any:
    held = heat_map_of(report)
    assert held is not None
    panels = [("untrained", held["untrained"])]
    if held["trained"]:
        panels.append(("after transfer", final(held)))
    grids = [[layer["kl"] for layer in quality["layers"]] for _, quality in panels]
    top = max(value for grid in grids for row in grid for value in row)
    rows, heads = len(grids[0]), len(grids[0][0])
    figure, all_axes = figure_of(min(max(0.32 * rows + 1.5, 2.6), 7.0), len(panels), sharey=True, squeeze=False)
    for axes, (title, _), grid in zip(all_axes[0], panels, grids, strict=True):
        image = axes.imshow(grid, cmap="cividis", vmin=0, vmax=top, aspect="auto")
        axes.set_title(f"{held['name']}, {title}")
        axes.set_xlabel("head")
        axes.grid(visible=False)
        every = max(1, heads // 6)
        axes.set_xticks(range(0, heads, every))
        axes.set_yticks(
            range(0, rows, max(1, rows // 12)),
            [held["untrained"]["layers"][i]["index"] for i in range(0, rows, max(1, rows // 12))],
        )
    all_axes[0][0].set_ylabel("layer")
    figure.colorbar(image, ax=list(all_axes[0]), label="KL (nats)", fraction=0.05)
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
        axes.plot(decode["contexts"], held, label=_label(report, name), markersize=5, **_looks(report, name))
    axes.set_yscale("log")
    limits = (min(values) * 0.8, max(values) * 1.25)
    axes.set_ylim(*limits)
    _plain_log_axis(axes.yaxis, limits, unit)
    _length_axis(axes, decode["contexts"], "tokens of context before it")
    axes.set_title(title)
    _legend_below(figure, axes)
    return figure
