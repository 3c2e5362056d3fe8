"""An evaluation as one page: the summary first, then plots and tables, and at the end how it was measured."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.extras import require_packages
from ..utils.files import atomic_write
from ..utils.formatting import fixed, format_bytes, format_flops, format_rate, format_seconds
from .evaluator import EXACT_LABEL
from .inputs import inputs_text
from .plots import CAPTIONS, draw_plots
from .speed import DECODING, FORWARD, LAYER, PREFILL, TRAINING, WITHOUT_ATTENTION

if TYPE_CHECKING:
    import pandas

    from .results import Evaluation

PAGE, MARKDOWN = "report.html", "report.md"

#: What is shown of each measurement by length: metric, column, format, title.
SPEED_TABLES = (
    (FORWARD, "Whole model, one forward pass, batch 1"),
    (PREFILL, "Prefill: the prompt, batch 1"),
    (TRAINING, "Whole model, forward and backward, batch 1"),
    (DECODING, "One new token after a context"),
    (LAYER, "The attention of one layer by itself, batch 1"),
)

NOTE = (
    "“a → b”: as patched → after attention transfer; ±: standard deviation over seeds or checkpoints. Speeds are times "
    "as fast as the exact model in the same run (1: equal; below 1: slower); the row of the exact model has times. The "
    "row “without attention” is the floor of the quality and the ceiling of the speed: each token attends to itself "
    "only. “Kept” is the share of the exact model's score; it is only given where the model without attention is "
    "clearly worse than the exact one, and “above exact” stands for more than 100 %."
)


def write_report(evaluation: Evaluation, folder: Path) -> Path:
    """Write `report.html`, `report.md` and the plots; return the path of the page.

    Everything is made before anything is written. Plots of an earlier report that this one does not have are removed.

    Raises:
        ImportError: A package of the extra `demo` is missing.
    """
    require_packages("matplotlib", "jinja2", "tabulate", extra="demo", purpose="A report")
    plots = draw_plots(evaluation)
    page, text = render_page(evaluation, plots), render_markdown(evaluation)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in plots.items():
        atomic_write(folder / f"{name}.png", content)
    atomic_write(folder / MARKDOWN, text)
    atomic_write(folder / PAGE, page)
    for name in CAPTIONS:
        if name not in plots:
            (folder / f"{name}.png").unlink(missing_ok=True)
    return folder / PAGE


def render_page(evaluation: Evaluation, plots: dict[str, bytes]) -> str:
    """Return the page. It loads nothing: plots and style are within it."""
    return page_template("report.html").render(
        evaluation=evaluation,
        info=evaluation.info,
        lead=lead(evaluation),
        plots={name: base64.b64encode(content).decode() for name, content in plots.items()},
        captions=CAPTIONS,
        tables=speed_tables(evaluation),
        method=method(evaluation),
        note=NOTE,
    )


def page_template(name: str) -> Any:
    """Return a template, with the filter `table` for data frames."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_linear_attn", "evaluation/templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["table"] = lambda frame: frame.to_html(border=0, justify="left", escape=True)
    return templates.get_template(name)


def render_markdown(evaluation: Evaluation) -> str:
    """Return the summary, the conclusions and how it was measured as Markdown."""
    parts = [f"# Linear attention in {evaluation.info['model']['name']}", lead(evaluation)]
    parts.append(evaluation.summary().to_markdown())
    parts.append("\n".join(f"- {one.label}: {one.sentence}" for one in evaluation.conclusions()))
    parts.append("\n".join(f"- {line}" for line in evaluation.warnings()))
    for title, frame in speed_tables(evaluation).items():
        parts += [f"## {title}", frame.to_markdown()]
    parts += [
        "## How it was measured",
        NOTE,
        "\n".join(f"- {name}: {text}" for name, text in method(evaluation).items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def lead(evaluation: Evaluation) -> str:
    """Return the first sentence: the model, the machine, the time."""
    model, hardware = evaluation.info["model"], evaluation.info["environment"]["hardware"]
    created = evaluation.info["created"].replace("T", " at ").replace("Z", " UTC")
    quick = ", in the quick setting" if evaluation.info["quick"] else ""
    return (
        f"{model['class']}, {_count(model['layers'], 'layer')} of {_count(model['heads'], 'head')}, "
        f"{model['parameters']:,} parameters. Measured on {created} on {hardware['device']} ({hardware['cpu']}, "
        f"{_count(hardware['threads'], 'thread')}){quick}."
    )


def speed_tables(evaluation: Evaluation) -> dict[str, pandas.DataFrame]:
    """Return a table for each measurement: seconds (or bytes) and speedups by length, as text."""
    tables = {}
    for measurement, title in SPEED_TABLES:
        if evaluation.lengths(measurement):
            tables[title] = _by_length(evaluation, measurement, "seconds", 1)
    size = evaluation.throughput_batch_size
    for measurement, title in ((FORWARD, "Throughput"), (TRAINING, "Training throughput"), (DECODING, "Decoding")):
        if size > 1 and evaluation.lengths(measurement, size):
            name = f"{title}: {size} sequences at once, tokens per second"
            tables[name] = _by_length(evaluation, measurement, "tokens_per_second", size)
    for measurement, metric, title in (
        (FORWARD, "peak_memory", "Peak memory of one forward pass"),
        (FORWARD, "flops", "Operations of one forward pass (matrix products)"),
        (DECODING, "cache_bytes", "Cache after a context"),
    ):
        if evaluation.select(measurement, metric)["value"].notna().any():
            tables[title] = _by_length(evaluation, measurement, metric, 1)
    return tables


FORMATS: dict[str, Any] = {
    "seconds": format_seconds,
    "tokens_per_second": format_rate,
    "peak_memory": format_bytes,
    "cache_bytes": format_bytes,
    "flops": format_flops,
}


def _by_length(evaluation: Evaluation, measurement: str, metric: str, batch_size: int) -> pandas.DataFrame:
    """Values of all rows by length; times with their speedup."""
    import pandas

    lengths = evaluation.lengths(measurement, batch_size)
    rows: dict[str, dict[str, str]] = {}
    for label in evaluation.labels:
        row = {}
        for length in lengths:
            columns: dict[str, Any] = {"label": label, "length": length, "batch_size": batch_size}
            number = evaluation.value(measurement, metric, **columns)
            if number is None:
                continue
            text = FORMATS[metric](number)
            if metric == "seconds" and label != EXACT_LABEL:
                speedup = evaluation.speedup(label, length, measurement, batch_size)
                text += "" if speedup is None else f" ({speedup:.2f}×)"
            row[f"{length:,}"] = text
        if row:
            rows[label] = row
    frame = pandas.DataFrame.from_dict(rows, orient="index").fillna("–")
    if measurement == FORWARD and metric == "seconds" and batch_size == 1:
        frame["faster from"] = [_crossover_text(evaluation, label) for label in frame.index]
    frame.index.name = "tokens"
    return frame


def _crossover_text(evaluation: Evaluation, label: str) -> str:
    if label in (EXACT_LABEL, WITHOUT_ATTENTION):
        return "–"
    change = evaluation.crossover(label)
    return "–" if change is None else str(change)


def method(evaluation: Evaluation) -> dict[str, str]:
    """Return how it was measured: what the inputs were, the settings, the machine, the versions."""
    info = evaluation.info
    data, settings, hardware = info["data"], info["settings"], info["environment"]["hardware"]
    lines = {"data": f"{data['source']}; {inputs_text(data['held_out'])}"}
    for entry in info["tasks"]:
        lines[f"data of {entry['task']}"] = (
            f"{entry['source']}, model {entry['model']}; {inputs_text(entry['held_out'])}"
        )
    if "sentence_pairs" in data:
        lines["sentence pairs"] = data["sentence_pairs"]
    windows = evaluation.value("perplexity", "tokens", label=EXACT_LABEL)
    if windows is not None:
        longest = evaluation.value("perplexity", "longest_input", label=EXACT_LABEL) or 0
        lines["perplexity"] = (
            f"{windows:,.0f} predicted tokens in windows of at most {longest:,.0f}, {settings['stride']:,} apart; each "
            "token is counted once"
        )
    if settings["steps"]:
        seeds = ", ".join(map(str, settings["seeds"]))
        lines["attention transfer"] = (
            f"{settings['steps']} steps on {inputs_text(data['train'])}; seeds {seeds}. It trains the mechanisms' own "
            "parameters only; training all weights afterwards (hf-linear-attn convert) is not part of these numbers"
        )
    lines["fidelity"] = f"{inputs_text(data['fidelity'])}; errors of the attention outputs on the exact model's inputs"
    for group in info["checkpoints"]:
        lines[group["label"]] = ", ".join(group["folders"])
    lines["times"] = (
        f"median of interleaved rounds, {settings['seconds']:g} s per length, in {settings['dtype']}, kernels: "
        f"{info['backend']}; exact attention is {info['model']['attention']}"
    )
    scores = [score for score in evaluation.scores if evaluation.quality(score, EXACT_LABEL)]
    noise = [f"{score.title} {_stderr_text(evaluation, score)}" for score in scores if _stderr_text(evaluation, score)]
    if noise:
        lines["standard errors of the exact model"] = ", ".join(noise)
    lines["machine"] = f"{hardware['cpu']}, {_count(hardware['threads'], 'thread')}, {hardware['platform']}"
    lines["versions"] = ", ".join(f"{name} {version}" for name, version in info["environment"]["versions"].items())
    lines["records"] = f"{len(info['records'])} measurements in records.jsonl, {_count(info['runs'], 'run')}"
    lines["duration"] = f"{format_seconds(info['seconds'])} for the last run"
    return lines


def _stderr_text(evaluation: Evaluation, score: Any) -> str:
    quality = evaluation.quality(score, EXACT_LABEL)
    return "" if quality is None or quality.stderr is None else f"± {fixed(quality.stderr, score.digits)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
