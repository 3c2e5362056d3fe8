"""An evaluation as one page: the summary first, then plots and tables, and at the end how it was measured."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..measure.speed import DECODING, FORMATS, FORWARD, NOT_MEASURABLE, PREFILL, TRAINING
from ..utils.extras import require_packages
from ..utils.files import atomic_write
from ..utils.formatting import format_bytes, format_seconds
from ..utils.timing import is_measurable
from .tables import Part, write_page
from .variants import EXACT_LABEL, WITHOUT_ATTENTION

if TYPE_CHECKING:
    from .evaluation import Evaluation

#: What the tables by length call measurements.
TITLES = {
    FORWARD: "One forward pass of the whole model",
    PREFILL: "Prefill: the prompt",
    TRAINING: "Forward and backward",
    DECODING: "One new token after a context",
}

NOTE = (
    "±: standard deviation over seeds or checkpoints; “a → b”: as patched → after attention transfer. Speeds are times "
    "as fast as the exact model in the same rounds (below 1: slower), whose row has times; “not measurable”: they "
    "vary more from round to round than they differ. “Without attention” each token "
    "attends to itself only: the floor of the quality and the ceiling of the speed. “Kept” and “change” compare with "
    "the exact model, or a converted checkpoint with the equally trained exact one where there is one, and are given "
    "only where the exact model is clearly better than the floor."
)


#: Okabe and Ito's palette, which colour-blind readers can tell apart; with seven markers no pair comes twice among 42.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "*")

#: The looks of the two rows that every evaluation has.
REFERENCES: dict[str, dict[str, Any]] = {
    EXACT_LABEL: {"color": "#000000", "marker": "X", "linewidth": 2.2},
    WITHOUT_ATTENTION: {"color": "#767676", "marker": "", "linestyle": (0, (4, 3)), "linewidth": 1.6},
}

#: Inches; at 10 points on 5.6 inches, text is about 9 pixels high on a screen of 390 pixels.
WIDTH, DPI = 5.6, 160

STYLE: Any = {
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 9),
}

CAPTIONS = {
    "quality_vs_speed": "Quality against speed at the length of interest. Hollow: as patched; filled: after attention "
    "transfer or conversion; lines across: 20th to 80th percentile of the speed. Up and right is better.",
    "time": "Time of one forward pass of the whole model, batch 1. Bands: 20th to 80th percentile.",
    "memory": "Peak memory of one forward pass beyond weights and inputs.",
    "decoding": "Time of one new token after a context (left), and the bytes of its cache (right).",
}

#: Plots by length, with their panels: title, measurement, number and unit.
CURVES: dict[str, list[tuple[str, str, str, Callable[[float], str]]]] = {
    "time": [
        ("Time", FORWARD, "seconds", format_seconds),
        ("Times as fast as exact", FORWARD, "speedup", "{:g}×".format),
    ],
    "memory": [("Peak memory of one forward pass, batch 1", FORWARD, "peak_memory", format_bytes)],
    "decoding": [
        ("Time of a new token", DECODING, "seconds", format_seconds),
        ("Cache of one sequence", DECODING, "cache_bytes", format_bytes),
    ],
}


def write_report(evaluation: Evaluation, folder: Path) -> Path:
    """Write `report.html`, `report.md` and the plots; return the path of the page, which loads its plots only.

    Plots of an earlier report that this one does not have are removed.

    Raises:
        ImportError: A package of the extra `demo` is missing.
    """
    require_packages("matplotlib", "jinja2", extra="demo", purpose="A report")
    plots = draw_plots(evaluation)
    at = f" at {evaluation.length:,} tokens" if evaluation.length is not None else ""
    sentences = [f"{conclusion.label}: {conclusion.sentence}" for conclusion in evaluation.conclusions()]
    parts = [Part(title, table) for title, table in evaluation.example_tables().items()]
    parts += [
        Part("All mechanisms", evaluation.summary(), note=NOTE),
        Part(f"Is it worth it{at}?", sentences=[*sentences, *evaluation.warnings()]),
        *(Part(picture=f"{name}.png", note=CAPTIONS[name]) for name in plots),
        Part("Quality", evaluation.quality_table()),
        *(Part(title, table) for title, table in speed_tables(evaluation).items()),
    ]
    facts = pd.DataFrame({"": method(evaluation)}).rename_axis("How it was measured")
    parts.append(Part("How it was measured", facts, note=evaluation.positions_note()))
    for name, content in plots.items():
        atomic_write(folder / f"{name}.png", content)
    for name in CAPTIONS.keys() - plots.keys():
        (folder / f"{name}.png").unlink(missing_ok=True)
    return write_page(folder, f"Linear attention in {evaluation.model['name']}", lead(evaluation), parts)


def lead(evaluation: Evaluation) -> str:
    """Return the first sentence: the model, the machine, the time."""
    model, hardware = evaluation.model, evaluation.environment["hardware"]
    created = evaluation.created.replace("T", " at ").replace("Z", " UTC")
    quick = ", in the quick setting" if evaluation.settings["quick"] else ""
    size = f"{model['layers']} layers of {model['heads']} heads, {model['parameters']:,} parameters"
    machine = f"{hardware['device']} ({hardware['cpu']}, threads: {hardware['threads']})"
    return f"{model['class']}, {size}. Measured on {created} on {machine}{quick}."


def speed_tables(evaluation: Evaluation) -> dict[str, pd.DataFrame]:
    """Return a table for each measurement: values by length as text, times with their speedup."""
    sizes = sorted({entry.batch_size for entry in evaluation.measured if entry.batch_size is not None})
    metrics = ("seconds", "peak_memory", "cache_bytes", "flops", "tokens_per_second")
    tables = {}
    for (measurement, title), metric, size in product(TITLES.items(), metrics, sizes):
        if (size > 1) != (metric == "tokens_per_second"):
            continue
        table = _speed_table(evaluation, measurement, metric, size)
        if len(table):
            tables[f"{title}: {metric.replace('_', ' ')}, batch {size}"] = table
    return tables


def _speed_table(evaluation: Evaluation, measurement: str, metric: str, size: int) -> pd.DataFrame:
    rows: dict[str, dict[str, str]] = {}
    for label in evaluation.labels:
        for length, values in sorted(evaluation.times(measurement, label, size).items()):
            if values.get(metric) is None:
                continue
            text = FORMATS[metric](values[metric])
            if metric == "seconds" and label != EXACT_LABEL:
                is_known = is_measurable(values["speedup_p20"], values["speedup_p80"])
                text += f" ({values['speedup']:.2f}×)" if is_known else f" ({NOT_MEASURABLE})"
            rows.setdefault(label, {})[evaluation.length_title(length)] = text
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="tokens").fillna("–")


def method(evaluation: Evaluation) -> dict[str, str]:
    """Return how it was measured: what the inputs were, the settings, the machine, the versions."""
    data = evaluation.data
    settings = evaluation.settings
    environment = evaluation.environment
    hardware = environment["hardware"]
    held_out = f"{data['sequences']:,} held-out inputs of {data['tokens']:,} tokens (longest {data['longest']:,})"
    lines = {"data": f"{data['source']}: {data['rows']}; {held_out}"}
    if settings["steps"]:
        scope = "the mechanisms' own parameters only; hf-linear-attn convert can train all weights afterwards"
        seeds = ", ".join(map(str, settings["seeds"]))
        lines["attention transfer"] = f"{settings['steps']} steps; seeds {seeds}. It trains {scope}"
    lines["fidelity"] = "errors of the attention outputs on the exact model's inputs"
    lines |= {label: ", ".join(folders) for label, folders in evaluation.checkpoints.items()}
    rounds = f"median of interleaved rounds, {settings['seconds']:g} s per length, in {settings['speed']['dtype']}"
    exact = f"exact attention is {evaluation.model['attention']}"
    lines["times"] = f"{rounds}, kernels: {evaluation.backend}; {exact}"
    lines["machine"] = f"{hardware['cpu']}, threads: {hardware['threads']}, {hardware['platform']}"
    lines["versions"] = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines["duration"] = f"{format_seconds(evaluation.seconds)} for the last run"
    return lines


def draw_plots(evaluation: Evaluation) -> dict[str, bytes]:
    """Return the plots that the evaluation has data for: name -> PNG file."""
    import matplotlib

    drawings: dict[str, Callable[[Evaluation], Any]] = {}
    if evaluation.lengths(FORWARD):
        drawings["quality_vs_speed"] = _quality_vs_speed
    for name, panels in CURVES.items():
        first = [evaluation.times(measurement, EXACT_LABEL) for _, measurement, _, _ in panels]
        has_numbers = [
            any(values.get(panel[2]) is not None for values in times.values())
            for panel, times in zip(panels, first, strict=True)
        ]
        if all(has_numbers):
            drawings[name] = partial(_curves, panels=panels)
    with matplotlib.rc_context(STYLE):
        return {name: png(drawings[name](evaluation)) for name in CAPTIONS if name in drawings}


def new_figure(height: float, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return a figure of the common width (height in inches) and its axes."""
    # The figure is not pyplot's: it needs no window system and leaves nothing global behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(1, columns, **options)


def png(figure: Any) -> bytes:
    """Return the figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _quality_vs_speed(evaluation: Evaluation) -> Any:
    score, length = evaluation.scores[0], evaluation.length
    assert length is not None
    figure, axes = new_figure(4.3)
    means: list[float] = []
    for label in evaluation.labels:
        measured = [evaluation.quality(score, label, before=before) for before in (True, False)]
        points = [point.mean for point in measured if point is not None]
        times = evaluation.times(FORWARD, label)
        if not points or length not in times:
            continue
        style = {**_style(evaluation, label), "linestyle": "none", "markersize": 9}
        style["marker"] = style["marker"] or "x"
        speedup = times[length]["speedup"]
        spread = [times[length][name] for name in ("speedup_p20", "speedup_p80")]
        axes.plot([speedup] * len(points), points, color=style["color"], linewidth=1.0, alpha=0.7)
        axes.plot(spread, [points[-1]] * 2, color=style["color"], linewidth=1.0, alpha=0.7)
        axes.plot([speedup] * (len(points) - 1), points[:-1], **style, markerfacecolor="white")
        axes.plot([speedup], points[-1:], label=_name(evaluation, label), **style)
        means += points
    axes.axvline(1.0, color="#000000", linewidth=0.8)
    if not score.greater_is_better:
        if min(means) > 0 and max(means) / min(means) > 4:
            _logarithmic(axes, means, "{:g}".format)
        axes.invert_yaxis()
    axes.set_xlabel(f"times as fast as exact attention at {length:,} tokens")
    axes.set_title(f"{score.title} against speed")
    _legend(figure, axes)
    return figure


def _curves(evaluation: Evaluation, panels: Sequence[Any]) -> Any:
    """Panels with a line per row of the summary by length, on logarithmic axes."""
    figure, grid = new_figure(4.1, columns=len(panels), squeeze=False)
    for axes, (title, measurement, metric, unit) in zip(grid[0], panels, strict=True):
        drawn: list[float] = []
        for label in evaluation.labels:
            times = sorted(evaluation.times(measurement, label).items())
            times = [(length, values) for length, values in times if (values.get(metric) or 0) > 0]
            if not times:
                continue
            style = _style(evaluation, label)
            if len(times) == 1:
                style = {**style, "marker": style["marker"] or "x"}  # no line would show it
            lengths = [length for length, _ in times]
            numbers = [values[metric] for _, values in times]
            axes.plot(lengths, numbers, label=_name(evaluation, label), markersize=5, **style)
            if metric in ("seconds", "speedup"):
                prefix = "speedup_" if metric == "speedup" else ""
                low, high = ([values[f"{prefix}{name}"] for _, values in times] for name in ("p20", "p80"))
                axes.fill_between(lengths, low, high, color=style["color"], alpha=0.15, lw=0)
            drawn += numbers
        axes.set_xscale("log", base=2)
        lengths = evaluation.lengths(measurement)
        ticks = lengths[:: -max(1, math.ceil(len(lengths) / 5))]
        axes.set_xticks(ticks, [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in ticks])
        axes.minorticks_off()
        axes.set_xlabel("tokens of context" if measurement == DECODING else "tokens")
        axes.set_title(title)
        _logarithmic(axes, drawn, unit)
    _legend(figure, grid[0, 0], 3)
    return figure


def _logarithmic(axes: Any, values: Sequence[float], unit: Callable[[float], str]) -> None:
    """A logarithmic y axis with ticks at 1, 2, 5 times a power of ten (at powers only on a long one), with units."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = min(values) * 0.8, max(values) * 1.25
    decades = math.log10(high / low)
    steps: tuple[float, ...] = (1, 2, 5) if decades < 2.2 else (1,)
    if decades < 0.7:
        steps = (1, 1.5, 2, 3, 4, 5, 6, 8)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axes.yaxis.set_major_formatter(lambda value, _: unit(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _style(evaluation: Evaluation, label: str) -> dict[str, Any]:
    index = evaluation.labels.index(label) - 1
    style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)], "linewidth": 1.5}
    return REFERENCES.get(label, style)


def _name(evaluation: Evaluation, label: str) -> str:
    return f"exact ({evaluation.model['attention']})" if label == EXACT_LABEL else label


def _legend(figure: Any, axes: Any, columns: int = 2) -> None:
    handles = axes.get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=2.4, columnspacing=1.4)
