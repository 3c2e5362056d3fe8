"""The plots of an evaluation."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..utils.extras import require_packages
from ..utils.formatting import fixed, format_bytes, format_rate, format_seconds
from .evaluator import EXACT_LABEL
from .metrics import Score
from .speed import DECODING, FORWARD, WITHOUT_ATTENTION

if TYPE_CHECKING:
    from .results import Evaluation

#: Okabe and Ito's palette, which colour-blind readers can tell apart; with seven markers no pair comes twice among 42.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "*")
EXACT_COLOR, WITHOUT_COLOR, BEFORE_COLOR = "#000000", "#767676", "#B5B5B5"

#: Inches; at 10 points on 5.6 inches, text is about 9 pixels high on a screen of 390 pixels.
WIDTH = 5.6
DPI = 160

CAPTIONS = {
    "quality_vs_speed": "Quality against speed at the length of interest. Hollow: as patched; filled: after attention "
    "transfer or conversion. Up and right is better.",
    "quality": "Scores beside the exact model and the same model without attention. Bars: mean over seeds, with the "
    "standard deviation.",
    "time": "Time of one forward pass of the whole model, batch 1. Bands: 20th to 80th percentile.",
    "memory": "Peak memory of one forward pass beyond weights and inputs.",
    "fidelity": "Relative error of the attention outputs by layer, mean over heads; 1 is as wrong as zeros.",
    "decoding": "Time of one new token after a context (left), and the bytes of its cache (right).",
    "throughput": "Tokens per second with several sequences at once. Higher is better.",
}


def draw_plots(evaluation: Evaluation) -> dict[str, bytes]:
    """Return the plots that the evaluation has data for: name -> PNG file.

    Raises:
        ImportError: matplotlib is missing.
    """
    require_packages("matplotlib", extra="demo", purpose="A report")
    drawings: dict[str, Callable[[Evaluation], Any]] = {}
    timed = bool(evaluation.lengths(FORWARD))
    if timed:
        drawings["quality_vs_speed"] = _quality_vs_speed
    drawings["quality"] = _quality
    if timed:
        drawings["time"] = _time
        if evaluation.select(FORWARD, "peak_memory")["value"].notna().any():
            drawings["memory"] = _memory
    if len(evaluation.select("fidelity", "output_error")):
        drawings["fidelity"] = _fidelity
    if evaluation.lengths(DECODING):
        drawings["decoding"] = _decoding
    elif evaluation.throughput_batch_size > 1 and evaluation.lengths(FORWARD, evaluation.throughput_batch_size):
        drawings["throughput"] = _throughput
    with plot_style():
        return {name: png(draw(evaluation)) for name, draw in drawings.items()}


@contextmanager
def plot_style() -> Iterator[None]:
    """Context manager with the look of every plot."""
    import matplotlib

    style: Any = {
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
        "text.parse_math": False,
    }
    with matplotlib.rc_context(style):
        yield


def new_figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return a figure of the common width (height in inches) and its axes."""
    # The figure is not pyplot's: it needs no window system and leaves nothing global behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **options)


def png(figure: Any) -> bytes:
    """Return the figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


# --------------------------------------------------------------------------------------------------------------------
# Quality


def _quality_vs_speed(evaluation: Evaluation) -> Any:
    score, length = evaluation.scores[0], evaluation.length
    assert length is not None
    figure, axes = new_figure(4.3)
    points = []
    for label in evaluation.labels:
        after = evaluation.quality(score, label)
        speedup = 1.0 if label == EXACT_LABEL else evaluation.speedup(label, length)
        if after is None or speedup is None:
            continue
        style = {**_style(evaluation, label), "linestyle": "none", "markersize": 9}
        if label == WITHOUT_ATTENTION:
            style["marker"] = "x"
        before = evaluation.quality(score, label, before=True)
        if before is not None:
            axes.plot([speedup], [before.mean], **{**style, "markersize": 7}, markerfacecolor="white")
            axes.plot([speedup] * 2, [before.mean, after.mean], color=style["color"], linewidth=1.0, alpha=0.7)
            points.append(before.mean)
        axes.plot([speedup], [after.mean], label=_name(evaluation, label), **style)
        points.append(after.mean)
    axes.axvline(1.0, color=EXACT_COLOR, linewidth=0.8)
    if not score.higher_is_better:
        if min(points) > 0 and max(points) / min(points) > 4:
            axes.set_yscale("log")
            _label_ticks(axes.yaxis, points, lambda value: f"{value:g}")
        axes.invert_yaxis()
    axes.set_xlabel(f"times as fast as exact attention at {length:,} tokens")
    axes.set_title(f"{score.title} against speed")
    _legend(figure, axes)
    return figure


def _quality(evaluation: Evaluation) -> Any:
    """Bars of each score: as patched and after transfer, with lines for exact attention and for none."""
    scores = [score for score in evaluation.scores if evaluation.quality(score, EXACT_LABEL) is not None]
    labels = [label for label in evaluation.labels if label not in (EXACT_LABEL, WITHOUT_ATTENTION)]
    figure, grid = new_figure((0.55 * len(labels) + 1.4) * len(scores), rows=len(scores), squeeze=False)
    for axes, score in zip(grid[:, 0], scores, strict=True):
        _score_bars(evaluation, axes, score, labels)
    _legend(figure, grid[0, 0], 2)
    return figure


def _score_bars(evaluation: Evaluation, axes: Any, score: Score, labels: Sequence[str]) -> None:
    top = 0.0
    for index, label in enumerate(labels):
        before, after = evaluation.quality(score, label, before=True), evaluation.quality(score, label)
        for quality, color, shift in ((before, BEFORE_COLOR, 0.2), (after, COLORS[0], -0.2)):
            if quality is None:
                continue
            row = -index + (shift if before is not None else 0.0)
            axes.barh(row, quality.mean, height=0.36, color=color, xerr=quality.std, ecolor="#444444", capsize=2)
            end = max(quality.mean, 0.0) + (quality.std or 0.0)
            axes.text(end, row, f" {fixed(quality.mean, score.digits)}", va="center", fontsize=8.5)
            top = max(top, end)
    for label, style in ((EXACT_LABEL, "solid"), (WITHOUT_ATTENTION, (0, (4, 3)))):
        quality = evaluation.quality(score, label)
        if quality is not None:
            color = EXACT_COLOR if label == EXACT_LABEL else WITHOUT_COLOR
            axes.axvline(quality.mean, color=color, linestyle=style, linewidth=1.6, label=_name(evaluation, label))
            top = max(top, quality.mean)
    axes.set_yticks([-index for index in range(len(labels))], labels)
    axes.set_xlim(right=top * 1.18)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"{score.title} ({'higher' if score.higher_is_better else 'lower'} is better)")


def _fidelity(evaluation: Evaluation) -> Any:
    """A map of the output error: mechanisms by layers."""
    rows = evaluation.select("fidelity", "output_error")
    trained = set(rows.loc[rows["state"] != "untrained", "label"])
    rows = rows[rows["layer"].notna() & ((rows["state"] != "untrained") | ~rows["label"].isin(trained))]
    table = rows.pivot_table(index="label", columns="layer", values="value", aggfunc="mean", sort=False)
    table = table.reindex([label for label in evaluation.labels if label in table.index])
    figure, axes = new_figure(0.36 * len(table) + 1.6)
    image = axes.imshow(
        table.to_numpy(), aspect="auto", cmap="viridis_r", vmin=0.0, vmax=max(1.0, float(table.max().max()))
    )
    axes.set_yticks(range(len(table)), list(table.index))
    axes.set_xticks(range(len(table.columns)), [f"{int(layer)}" for layer in table.columns])
    axes.set_xlabel("layer")
    axes.grid(visible=False)
    axes.set_title("Error of the attention outputs")
    figure.colorbar(image, ax=axes)
    return figure


# --------------------------------------------------------------------------------------------------------------------
# Speed and memory


def _time(evaluation: Evaluation) -> Any:
    """Times and speedups by length."""
    figure, (left, right) = new_figure(4.1, columns=2)
    _lines(evaluation, left, FORWARD, "seconds", format_seconds, band=True)
    left.set_title("Time")
    _lines(evaluation, right, FORWARD, "seconds", lambda value: f"{value:g}×", column="speedup")
    right.set_title("Times as fast as exact")
    _legend(figure, left, 3)
    return figure


def _memory(evaluation: Evaluation) -> Any:
    figure, axes = new_figure(4.1)
    _lines(evaluation, axes, FORWARD, "peak_memory", format_bytes)
    axes.set_title("Peak memory of one forward pass, batch 1")
    _legend(figure, axes, 3)
    return figure


def _throughput(evaluation: Evaluation) -> Any:
    figure, axes = new_figure(4.1)
    size = evaluation.throughput_batch_size
    _lines(evaluation, axes, FORWARD, "tokens_per_second", format_rate, batch_size=size)
    axes.set_title(f"Tokens per second, {size} sequences at once")
    _legend(figure, axes, 3)
    return figure


def _decoding(evaluation: Evaluation) -> Any:
    figure, (left, right) = new_figure(4.1, columns=2)
    _lines(evaluation, left, DECODING, "seconds", format_seconds, band=True)
    left.set_title("Time of a new token")
    _lines(evaluation, right, DECODING, "cache_bytes", format_bytes)
    right.set_title("Cache of one sequence")
    for axes in (left, right):
        axes.set_xlabel("tokens of context")
    _legend(figure, left, 3)
    return figure


def _lines(
    evaluation: Evaluation,
    axes: Any,
    measurement: str,
    metric: str,
    unit: Callable[[float], str],
    *,
    column: str = "value",
    batch_size: int = 1,
    band: bool = False,
) -> None:
    """One line per row of the summary by length, on logarithmic axes."""
    rows = evaluation.select(measurement, metric, batch_size=batch_size)
    values: list[float] = []
    for label in evaluation.labels:
        part = rows[rows["label"] == label].dropna(subset=[column]).sort_values("length")
        part = part[part[column] > 0]
        if part.empty:
            continue
        style = _style(evaluation, label)
        lengths = part["length"].astype(int)
        axes.plot(lengths, part[column], label=_name(evaluation, label), markersize=5, **style)
        if band:
            axes.fill_between(lengths, part["p20"], part["p80"], color=style["color"], alpha=0.15, linewidth=0)
        values += part[column].tolist()
    axes.set_xscale("log", base=2)
    lengths = sorted({int(length) for length in rows["length"]})
    step = max(1, math.ceil(len(lengths) / 5))
    ticks = lengths[::-1][::step][::-1]
    axes.set_xticks(ticks, [_short(length) for length in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    if values:
        axes.set_yscale("log")
        _label_ticks(axes.yaxis, values, unit)


def _label_ticks(axis: Any, values: Sequence[float], unit: Callable[[float], str]) -> None:
    """Ticks at 1, 2, 5 times a power of ten (or at powers only on a long axis), written with their unit."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values) * 0.8, max(values) * 1.25
    axis.axes.set_ylim(low, high)
    decades = math.log10(high / low)
    steps: tuple[float, ...] = (1, 2, 5) if decades < 2.2 else (1, 3) if decades < 3.2 else (1,)
    if decades < 0.7:
        steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: unit(value)))


def _short(length: int) -> str:
    """A length as text: 512, 1k, 2k, …"""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _style(evaluation: Evaluation, label: str) -> dict[str, Any]:
    """Colour and marker of a row, the same in every plot."""
    if label == EXACT_LABEL:
        return {"color": EXACT_COLOR, "marker": "X", "linewidth": 2.2}
    if label == WITHOUT_ATTENTION:
        return {"color": WITHOUT_COLOR, "marker": "", "linestyle": (0, (4, 3)), "linewidth": 1.6}
    index = evaluation.labels.index(label) - 1
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)], "linewidth": 1.5}


def _name(evaluation: Evaluation, label: str) -> str:
    return f"exact ({evaluation.info['model']['attention']})" if label == EXACT_LABEL else label


def _legend(figure: Any, axes: Any, columns: int = 2) -> None:
    handles = axes.get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=2.4, columnspacing=1.4)
