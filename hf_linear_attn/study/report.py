"""An evaluation as one page: the summary first, then plots and tables, and at the end how it was measured."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..measure.speed import DECODING, FORMATS, FORWARD, NOT_MEASURABLE, PREFILL, TRAINING
from ..utils.extras import require_packages
from ..utils.files import atomic_write
from ..utils.formatting import format_bytes, format_seconds
from ..utils.timing import is_measurable
from .prepare import inputs_text
from .variants import EXACT_LABEL, WITHOUT_ATTENTION

if TYPE_CHECKING:
    from .results import Evaluation

PAGE, MARKDOWN = "report.html", "report.md"

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

#: Cells of a map whose 95 % interval is wider than this are hatched.
WIDE = 0.5

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
    "fidelity": "Relative error of the attention outputs by layer, mean over heads; 1 is as wrong as zeros.",
    "recall": "Score by task, depth (0: the beginning) and length in tokens (see measure_recall); hatched where the "
    "95 % interval is wider than half of the scale.",
    "decoding": "Time of one new token after a context (left), and the bytes of its cache (right).",
}

#: Plots by length, with their panels: title, measurement, metric, column and unit.
CURVES: dict[str, list[tuple[str, str, str, str, Callable[[float], str]]]] = {
    "time": [
        ("Time", FORWARD, "seconds", "value", format_seconds),
        ("Times as fast as exact", FORWARD, "seconds", "speedup", "{:g}×".format),
    ],
    "memory": [("Peak memory of one forward pass, batch 1", FORWARD, "peak_memory", "value", format_bytes)],
    "decoding": [
        ("Time of a new token", DECODING, "seconds", "value", format_seconds),
        ("Cache of one sequence", DECODING, "cache_bytes", "value", format_bytes),
    ],
}


def write_report(evaluation: Evaluation, folder: Path) -> Path:
    """Write `report.html`, `report.md` and the plots; return the path of the page, which loads nothing.

    Everything is made before anything is written. Plots of an earlier report that this one does not have are removed.

    Raises:
        ImportError: A package of the extra `demo` is missing.
    """
    require_packages("matplotlib", "jinja2", "tabulate", extra="demo", purpose="A report")
    plots = draw_plots(evaluation)
    page = page_template("report.html").render(
        evaluation=evaluation,
        info=evaluation.info,
        lead=lead(evaluation),
        plots={name: base64.b64encode(content).decode() for name, content in plots.items()},
        captions=CAPTIONS,
        tables=speed_tables(evaluation),
        method=method(evaluation),
        note=NOTE,
    )
    files = {MARKDOWN: render_markdown(evaluation), PAGE: page}
    files |= {f"{name}.png": content for name, content in plots.items()}
    for name, content in files.items():
        atomic_write(folder / name, content)
    for name in CAPTIONS.keys() - plots.keys():
        (folder / f"{name}.png").unlink(missing_ok=True)
    return folder / PAGE


def page_template(name: str) -> Any:
    """Return a template, with the filter `table` for data frames."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_linear_attn", "study/templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The name of the index stands in the corner: on its own it would take a second row of titles.
    templates.filters["table"] = lambda frame: frame.rename_axis(index=None, columns=frame.index.name).to_html(border=0)
    return templates.get_template(name)


def render_markdown(evaluation: Evaluation) -> str:
    """Return the summary, the conclusions, the tables and how it was measured as Markdown."""
    frames = {"Quality": evaluation.quality_table(), **speed_tables(evaluation)}
    tables = [f"## {title}\n\n{frame.to_markdown()}" for title, frame in frames.items()]
    parts = [
        f"# Linear attention in {evaluation.info['model']['name']}",
        lead(evaluation),
        *(f"**{title}**\n\n{frame.to_markdown()}" for title, frame in evaluation.examples().items()),
        evaluation.summary().to_markdown(),
        "\n".join(f"- {one.label}: {one.sentence}" for one in evaluation.conclusions()),
        *evaluation.warnings(),
        *tables,
        evaluation.positions_note(),
        "## How it was measured",
        NOTE,
        "\n".join(f"- {name}: {text}" for name, text in method(evaluation).items()),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def lead(evaluation: Evaluation) -> str:
    """Return the first sentence: the model, the machine, the time."""
    model, hardware = evaluation.info["model"], evaluation.info["environment"]["hardware"]
    created = evaluation.info["created"].replace("T", " at ").replace("Z", " UTC")
    quick = ", in the quick setting" if evaluation.info["quick"] else ""
    size = f"{model['layers']} layers of {model['heads']} heads, {model['parameters']:,} parameters"
    machine = f"{hardware['device']} ({hardware['cpu']}, threads: {hardware['threads']})"
    return f"{model['class']}, {size}. Measured on {created} on {machine}{quick}."


def speed_tables(evaluation: Evaluation) -> dict[str, pd.DataFrame]:
    """Return a table for each measurement: values by length as text, times with their speedup."""
    rows = evaluation.table[evaluation.table["measurement"].isin(list(TITLES))]
    rows = rows[(rows["batch_size"] > 1) == (rows["metric"] == "tokens_per_second")].dropna(subset="value")
    compared = rows["speedup"].notna() & (rows["label"] != EXACT_LABEL)
    known = [is_measurable(row.speedup_p20, row.speedup_p80) for row in rows.itertuples()]
    speedups = rows["speedup"].map(" ({:.2f}×)".format).where(known, f" ({NOT_MEASURABLE})").where(compared, "")
    rows = rows.assign(text=[FORMATS[row.metric](row.value) for row in rows.itertuples()] + speedups)
    tables = {}
    for (measurement, metric, size), part in rows.groupby(["measurement", "metric", "batch_size"], sort=False):
        frame = part.pivot_table("text", "label", "length", aggfunc="last").reindex(evaluation.labels).dropna(how="all")
        frame.columns = [evaluation.length_title(int(length)) for length in frame.columns]
        frame = frame.rename_axis(index="tokens").fillna("–")
        tables[f"{TITLES[measurement]}: {metric.replace('_', ' ')}, batch {size:.0f}"] = frame
    return tables


def method(evaluation: Evaluation) -> dict[str, str]:
    """Return how it was measured: what the inputs were, the settings, the machine, the versions."""
    info = evaluation.info
    data, settings, hardware = info["data"], info["settings"], info["environment"]["hardware"]
    lines = {"data": f"{data['source']}; {inputs_text(data['held_out'])}"}
    for entry in info["tasks"]:
        source = f"{entry['source']}, model {entry['model']}"
        lines[f"data of {entry['task']}"] = f"{source}; {inputs_text(entry['held_out'])}"
    if "sentence_pairs" in data:
        lines["sentence pairs"] = data["sentence_pairs"]
    tokens = evaluation.value("perplexity", "tokens", label=EXACT_LABEL)
    if tokens is not None:
        windows = f"windows of at most {evaluation.longest_quality_input():,}, {settings['stride']:,} apart"
        lines["perplexity"] = f"{tokens:,.0f} predicted tokens in {windows}; each token is counted once"
    if settings["steps"]:
        steps = f"{settings['steps']} steps on {inputs_text(data['train'])}; seeds {settings['seeds']}"
        scope = "the mechanisms' own parameters only; hf-linear-attn convert can train all weights afterwards"
        lines["attention transfer"] = f"{steps}. It trains {scope}"
    lines["fidelity"] = f"{inputs_text(data['fidelity'])}; errors of the attention outputs on the exact model's inputs"
    lines |= {label: ", ".join(folders) for label, folders in info["checkpoints"].items()}
    rounds = f"median of interleaved rounds, {settings['seconds']:g} s per length, in {settings['dtype']}"
    lines["times"] = f"{rounds}, kernels: {info['backend']}; exact attention is {info['model']['attention']}"
    lines["machine"] = f"{hardware['cpu']}, threads: {hardware['threads']}, {hardware['platform']}"
    lines["versions"] = ", ".join(f"{name} {version}" for name, version in info["environment"]["versions"].items())
    lines["records"] = f"{len(info['records'])} measurements in records.jsonl, runs: {info['runs']}"
    lines["duration"] = f"{format_seconds(info['seconds'])} for the last run"
    return lines


def draw_plots(evaluation: Evaluation) -> dict[str, bytes]:
    """Return the plots that the evaluation has data for: name -> PNG file."""
    import matplotlib

    drawings: dict[str, Callable[[Evaluation], Any]] = {}
    if evaluation.lengths(FORWARD):
        drawings["quality_vs_speed"] = _quality_vs_speed
    if len(evaluation.select("fidelity", "output_error")):
        drawings["fidelity"] = draw_fidelity
    if len(evaluation.select("recall", "recall_at")):
        drawings["recall"] = _recall
    for name, panels in CURVES.items():
        if all(evaluation.select(panel[1], panel[2])["value"].notna().any() for panel in panels):
            drawings[name] = partial(_curves, panels=panels)
    with matplotlib.rc_context(STYLE):
        return {name: png(drawings[name](evaluation)) for name in CAPTIONS if name in drawings}


def new_figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return a figure of the common width (height in inches) and its axes."""
    # The figure is not pyplot's: it needs no window system and leaves nothing global behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def png(figure: Any) -> bytes:
    """Return the figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _quality_vs_speed(evaluation: Evaluation) -> Any:
    score, length = evaluation.scores[0], evaluation.length
    assert length is not None
    figure, axes = new_figure(4.3)
    means = []
    for label in evaluation.labels:
        points = [evaluation.quality(score, label, before=before) for before in (True, False)]
        known, speedup = [point.mean for point in points if point is not None], evaluation.speedup(label, length)
        if not known or speedup is None:
            continue
        style = {**_style(evaluation, label), "linestyle": "none", "markersize": 9}
        style["marker"] = style["marker"] or "x"
        axes.plot([speedup] * len(known), known, color=style["color"], linewidth=1.0, alpha=0.7)
        axes.plot(evaluation.spread(label, length), [known[-1]] * 2, color=style["color"], linewidth=1.0, alpha=0.7)
        axes.plot([speedup] * (len(known) - 1), known[:-1], **style, markerfacecolor="white")
        axes.plot([speedup], known[-1:], label=_name(evaluation, label), **style)
        means += known
    axes.axvline(1.0, color="#000000", linewidth=0.8)
    if not score.higher_is_better:
        if min(means) > 0 and max(means) / min(means) > 4:
            _logarithmic(axes, means, "{:g}".format)
        axes.invert_yaxis()
    axes.set_xlabel(f"times as fast as exact attention at {length:,} tokens")
    axes.set_title(f"{score.title} against speed")
    _legend(figure, axes)
    return figure


def draw_fidelity(evaluation: Evaluation) -> Any:
    """Draw the errors of the attention outputs by mechanism and layer."""
    rows = evaluation.select("fidelity", "output_error", before=False)
    table = (
        rows.pivot_table("value", "label", "layer").reindex(evaluation.mechanisms).dropna(how="all")
    )  # a layer may be exact
    figure, axes = new_figure(0.36 * len(table) + 1.6)
    highest = max(1.0, float(table.max().max()))
    image = axes.imshow(table, aspect="auto", cmap="viridis_r", vmin=0.0, vmax=highest)
    axes.set_yticks(range(len(table)), table.index)
    axes.set_xticks(range(len(table.columns)), table.columns.astype(int))
    axes.set_xlabel("layer")
    axes.grid(visible=False)
    axes.set_title("Error of the attention outputs")
    figure.colorbar(image, ax=axes)
    return figure


def _recall(evaluation: Evaluation) -> Any:
    """Draw a map for each row of the summary: tasks and depths by lengths."""
    scores = evaluation.select("recall", "recall_at", before=False)
    parts = sorted(scores.groupby("label"), key=lambda part: evaluation.labels.index(part[0]))
    columns = min(len(parts), 2)
    rows = -(-len(parts) // columns)
    tables = [part.pivot_table(["value", "stderr"], ["prompt", "depth"], "tokens", sort=False) for _, part in parts]
    height = rows * (0.17 * max(map(len, tables)) + 0.8)
    figure, grid = new_figure(height, rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes, (label, _), cells in zip(grid.flat, parts, tables, strict=False):
        table, errors = cells["value"], cells["stderr"]
        image = axes.imshow(table.astype(float), aspect="auto", cmap="viridis", vmin=0.0, vmax=1.0)
        for row, column in zip(*(2 * 1.96 * errors.astype(float) > WIDE).to_numpy().nonzero(), strict=True):
            axes.fill_between([column - 0.5, column + 0.5], row - 0.5, row + 0.5, color="none", hatch="///", ec="white")
        axes.set_yticks(range(len(table)), [f"{task}, {depth:g}" for task, depth in table.index], fontsize=7)
        axes.set_xticks(range(len(table.columns)), [f"{int(length):,}" for length in table.columns])
        axes.set_title(_name(evaluation, label))
        axes.grid(visible=False)
    for axes in grid.flat[len(parts) :]:
        axes.set_visible(False)
    figure.supxlabel("tokens")
    figure.colorbar(image, ax=list(grid.flat[: len(parts)]))
    return figure


def _curves(evaluation: Evaluation, panels: Sequence[Any]) -> Any:
    """Panels with a line per row of the summary by length, on logarithmic axes."""
    figure, grid = new_figure(4.1, columns=len(panels), squeeze=False)
    for axes, (title, measurement, metric, column, unit) in zip(grid[0], panels, strict=True):
        rows = evaluation.select(measurement, metric, batch_size=1)
        rows = rows[rows[column] > 0].sort_values("length")
        for label, part in rows.groupby("label", sort=False):
            style = _style(evaluation, label)
            if len(part) == 1:
                style = {**style, "marker": style["marker"] or "x"}  # no line would show it
            axes.plot(part["length"], part[column], label=_name(evaluation, label), markersize=5, **style)
            if metric == "seconds":
                low, high = ("speedup_p20", "speedup_p80") if column == "speedup" else ("p20", "p80")
                axes.fill_between(part["length"], part[low], part[high], color=style["color"], alpha=0.15, lw=0)
        axes.set_xscale("log", base=2)
        lengths = sorted(rows["length"].astype(int).unique())
        ticks = lengths[:: -max(1, math.ceil(len(lengths) / 5))]
        axes.set_xticks(ticks, [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in ticks])
        axes.minorticks_off()
        axes.set_xlabel("tokens of context" if measurement == DECODING else "tokens")
        axes.set_title(title)
        _logarithmic(axes, list(rows[column]), unit)
    _legend(figure, grid[0, 0], 3)
    return figure


def _logarithmic(axes: Any, values: Sequence[float], unit: Callable[[float], str]) -> None:
    """A logarithmic y axis with ticks at 1, 2, 5 times a power of ten (at powers only on a long one), with units."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = min(values) * 0.8, max(values) * 1.25
    decades = math.log10(high / low)
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if decades < 0.7 else (1, 2, 5) if decades < 2.2 else (1,)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axes.yaxis.set_major_formatter(lambda value, _: unit(value))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _style(evaluation: Evaluation, label: str) -> dict[str, Any]:
    index = evaluation.labels.index(label) - 1
    own = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)], "linewidth": 1.5}
    return REFERENCES.get(label, own)


def _name(evaluation: Evaluation, label: str) -> str:
    return f"exact ({evaluation.info['model']['attention']})" if label == EXACT_LABEL else label


def _legend(figure: Any, axes: Any, columns: int = 2) -> None:
    handles = axes.get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=2.4, columnspacing=1.4)
