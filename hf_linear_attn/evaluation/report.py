"""An evaluation as one page: the summary first, then plots and tables, and at the end how it was measured."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.extras import require_packages
from ..utils.files import atomic_write
from ..utils.formatting import fixed, format_seconds
from .evaluator import EXACT_LABEL
from .inputs import inputs_text
from .plots import CAPTIONS, draw_plots
from .speed import DECODING, FORWARD, PREFILL, TRAINING

if TYPE_CHECKING:
    import pandas

    from .results import Evaluation

PAGE, MARKDOWN = "report.html", "report.md"

#: The tables by length: title, measurement, metric.
SPEED_TABLES = (
    ("Whole model, one forward pass, batch 1", FORWARD, "seconds"),
    ("Prefill: the prompt, batch 1", PREFILL, "seconds"),
    ("Whole model, forward and backward, batch 1", TRAINING, "seconds"),
    ("One new token after a context", DECODING, "seconds"),
    ("Throughput", FORWARD, "tokens_per_second"),
    ("Training throughput", TRAINING, "tokens_per_second"),
    ("Decoding", DECODING, "tokens_per_second"),
    ("Peak memory of one forward pass", FORWARD, "peak_memory"),
    ("Operations of one forward pass (matrix products)", FORWARD, "flops"),
    ("Cache after a context", DECODING, "cache_bytes"),
)

NOTE = (
    "“a → b”: as patched → after attention transfer; ±: standard deviation over seeds or checkpoints. Speeds are times "
    "as fast as the exact model in the same run (1: equal; below 1: slower); the row of the exact model has times. The "
    "row “without attention” is the floor of the quality and the ceiling of the speed: each token attends to itself "
    "only. “Kept” and “change” compare with the exact model, or for a converted checkpoint with the equally trained "
    "exact model where there is one. They are only given where the exact model is clearly better than the one without "
    "attention; a share of more than 100 % is called better."
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
    # The name of the index stands in the corner: on its own it would take a second row of titles.
    templates.filters["table"] = lambda frame: frame.rename_axis(index=None, columns=frame.index.name).to_html(border=0)
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
    """Return a table for each measurement: values by length as text, times with their speedup."""
    tables, size = {}, evaluation.throughput_batch_size
    for title, measurement, metric in SPEED_TABLES:
        batched = metric == "tokens_per_second"
        frame = _by_length(evaluation, measurement, metric, size if batched else 1)
        if len(frame) and not (batched and size == 1):
            tables[f"{title}: {size} sequences at once, tokens per second" if batched else title] = frame
    return tables


def _by_length(evaluation: Evaluation, measurement: str, metric: str, batch_size: int) -> pandas.DataFrame:
    import pandas

    rows: dict[str, dict[str, str]] = {}
    for label in evaluation.labels:
        for length in evaluation.lengths(measurement, batch_size):
            text = evaluation.text(label, measurement, metric, length, batch_size)
            speedup = evaluation.speedup(label, length, measurement) if metric == "seconds" else None
            text += "" if speedup is None or label == EXACT_LABEL else f" ({speedup:.2f}×)"
            if text != "–":
                rows.setdefault(label, {})[f"{length:,}"] = text
        if label in rows and (measurement, metric) == (FORWARD, "seconds"):
            rows[label]["faster from"] = evaluation.crossover_text(label)
    frame = pandas.DataFrame.from_dict(rows, orient="index").fillna("–")
    frame.index.name = "tokens"
    return frame


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
    exact = [(score, evaluation.quality(score, EXACT_LABEL)) for score in evaluation.scores]
    noise = [f"{score.title} ± {fixed(one.stderr, score.digits)}" for score, one in exact if one and one.stderr]
    if noise:
        lines["standard errors of the exact model"] = ", ".join(noise)
    lines["machine"] = f"{hardware['cpu']}, {_count(hardware['threads'], 'thread')}, {hardware['platform']}"
    lines["versions"] = ", ".join(f"{name} {version}" for name, version in info["environment"]["versions"].items())
    lines["records"] = f"{len(info['records'])} measurements in records.jsonl, {_count(info['runs'], 'run')}"
    lines["duration"] = f"{format_seconds(info['seconds'])} for the last run"
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
