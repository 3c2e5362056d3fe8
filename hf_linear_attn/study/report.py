"""An evaluation as one page: the summary first, then plots and tables, and at the end how it was measured."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measure.speed import DECODING, FORMATS, FORWARD, NOT_MEASURABLE, PREFILL, TRAINING
from ..utils.extras import require_packages
from ..utils.files import atomic_write
from ..utils.formatting import format_seconds
from ..utils.timing import is_measurable
from .inputs import inputs_text
from .plots import CAPTIONS, draw_plots
from .variants import EXACT_LABEL

if TYPE_CHECKING:
    import pandas

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


def speed_tables(evaluation: Evaluation) -> dict[str, pandas.DataFrame]:
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
