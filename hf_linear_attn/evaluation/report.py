"""The report as files: `report.json` (every number), `report.html` (one self-contained page), plots as PNG, a CSV."""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..version import __version__
from .advice import final
from .drawing import HINT, Drawing
from .formats import fixed, format_bytes, format_flops, format_rate, format_seconds
from .measurements import Store, write_csv
from .plots import draw_plots
from .plots_quality import heat_map_of
from .pointers import joined, resolve
from .scores import axes_of, scores_of, task_scores
from .speed import FREE
from .summary import crossover_words, summarise_report
from .verdicts import best

FORMAT_VERSION = 2
TOOL = "hf-linear-attn demo"

#: What writes reports of this form.
TOOLS = (TOOL, "hf-linear-attn evaluate")

#: Every plot that a report may have, with what stands below it.
PLOTS = {
    "pareto.png": "Each mechanism by what it is worth and how fast it is. Hollow: as patched, filled: after attention "
    "transfer or conversion. What lies on the grey steps is beaten by nothing else here.",
    "task.png": "The task's main metric on its validation data, beside the exact model and the same model with its "
    "attention off.",
    "perplexity.png": "Perplexity on held-out text, against the exact model and the same model with its attention off.",
    "sts.png": "How well the cosine of mean-pooled embeddings ranks pairs of sentences by their similarity.",
    "sentences.png": "Cosine of mean-pooled embeddings of held-out passages with those of the exact model. Longer is "
    "better; unrelated passages and the model with its attention off give the scale.",
    "positions.png": "Mean loss over each eighth of the window: what happens late in it and beyond the trained length.",
    "fidelity.png": "How near each layer comes to exact attention, mean over layers and heads, on held-out text. "
    "Shorter bars are better.",
    "heatmap.png": "Where a mechanism differs from exact attention: KL of the weights by layer and head.",
    "errors.png": "Relative error of the attention outputs by layer and head, each mechanism as it ended; 1 is as "
    "wrong as zeros.",
    "transfer.png": "The loss that attention transfer brings down, mean over layers. Mechanisms are trained on "
    "different losses: compare a line with its own start only.",
    "time.png": "Time of one forward pass of the whole model. Bands: 20th to 80th percentile.",
    "speedup.png": "The same as a ratio. The dashed line is what even a free attention would give.",
    "memory.png": "What one forward pass needs at its peak beyond weights and inputs, in the same setup as the times.",
    "training.png": "Time of one forward and backward pass, with gradients of all weights.",
    "throughput.png": "Tokens a second with several sequences at once, as far as memory and time allowed. Higher is "
    "better.",
    "prefill.png": "Time to read a prompt and build the cache or the states, before the first new token.",
    "layer.png": "The attention of one layer by itself: without projections, feed-forward layers, embeddings.",
    "decode.png": "Time of one new token after a context, the whole model.",
    "cache.png": "What the cache of one stream holds after a context, all layers.",
}

#: Every name that a report may write. Nothing else in its folder is touched.
CSV = "measurements.csv"

#: Plots that a report has one of for each further score: the end of their name is the score's.
REPEATED = re.compile(r"(pareto|task)-[\w.-]+\.png")
FILES = ("report.json", "report.html", CSV, *PLOTS)


def environment(device: Any) -> dict[str, Any]:
    """Versions and hardware, as the report states them."""
    import torch
    import transformers

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "versions": {
            "hf_linear_attn": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "hardware": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cpu": _cpu_name(),
            "logical_cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average_at_start": load,
            "platform": f"{platform.system()} {platform.machine()}",
        },
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


# --------------------------------------------------------------------------------------------------------------------
# The page


def render_page(report: dict[str, Any], plots: Mapping[str, Drawing]) -> str:
    """The page. Every number on it is read from `report`, and says where; plots stand in it; nothing is loaded."""
    templates = page_templates()
    return templates.get_template("report.html").render(
        report=report,
        summary=summarise_report(report),
        scores=scores_of(report),
        best=best(report),
        final=final,
        heat=heat_map_of(report),
        free=FREE,
        figures=plots,
        captions={name: PLOTS.get(name) or PLOTS[f"{name.partition('-')[0]}.png"] for name in plots},
        axes=axes_of(report),
        tasks=task_scores(report),
        num=partial(_number, report, templates.filters),
        cell=_cell,
    )


def _number(report: dict[str, Any], filters: Mapping[str, Any], shown: str, *parts: object) -> Any:
    """The value at this place of the report, shown by a filter, with the pointer to it. A part may be several, in a
    tuple."""
    source = joined(*(one for part in parts for one in (part if isinstance(part, tuple) else (part,))))
    return _data(filters[shown](resolve(report, source)), source)


def _cell(text: str) -> Any:
    source = getattr(text, "source", None)
    return text if source is None else _data(text, source)


def _data(text: str, source: str) -> Any:
    from markupsafe import Markup

    return Markup('<span data-source="{0}" title="report.json {0}">{1}</span>').format(source, text)


def page_templates() -> Any:
    """The jinja environment of the package's pages."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(HINT) from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_linear_attn", "evaluation/templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        seconds=format_seconds,
        bytes=format_bytes,
        crossover=crossover_words,
        count=lambda value: f"{value:,}",
        fixed=lambda value, digits=2: "–" if value is None else fixed(value, digits),
        fixed3=lambda value: "–" if value is None else fixed(value, 3),
        times=lambda value: f"{value:.2f}×",
        nats=lambda value: f"{value:+.3f} nats",
        flops=format_flops,
        rate=format_rate,
        several=lambda value, noun: f"{value:,} {noun}" + ("" if value == 1 else "s"),
        share=lambda value: "–" if value is None else f"{value:.1%}",
        percent=lambda value: "–" if value is None else f"{value:.0%}",
    )
    return environment


# --------------------------------------------------------------------------------------------------------------------
# Files


def check_folder(path: str) -> Path:
    """Make sure that the folder can be written, before hours of work go into it.

    Raises:
        OSError: it is a file, or cannot be made or written.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"The output {str(path)!r} is a file. Give a folder with --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"The output folder {str(path)!r} cannot be written ({error.strerror or error}). Give another with --out."
        ) from error
    return folder


def write_report(report: dict[str, Any], folder: Path, store: Store | None = None) -> list[str]:
    """Write `report.json`, `report.html`, the plots and (of a store) `measurements.csv`, each aside and then renamed;
    returns the names written.

    All of it is made before anything is written. Plots of an earlier report in the folder that this one does not have
    are removed; other files are left alone.
    """
    plots = draw_plots(report)
    page = render_page(report, plots)
    data = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    contents: dict[str, bytes] = {name: held.png for name, held in plots.items()}
    contents.update({"report.json": data.encode(), "report.html": page.encode()})
    if store is not None:
        contents[CSV] = write_csv(store)
    stale = [name for name in _earlier_plots(folder) if name not in contents]
    for name, content in contents.items():
        write_aside(folder / name, content)
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    return sorted(contents)


def _earlier_plots(folder: Path) -> list[str]:
    """The plots of an earlier report in this folder, if its `report.json` is ours."""
    try:
        earlier = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(earlier, dict) or earlier.get("tool") not in TOOLS:
        return []
    again = [path.name for path in folder.glob("*.png") if REPEATED.fullmatch(path.name)]
    return [name for name in PLOTS if (folder / name).is_file()] + again


def write_aside(path: Path, content: bytes) -> None:
    """Write a file aside and rename it: no reader ever sees a part of it."""
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(aside, 0o666 & ~umask)  # mkstemp makes it private
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
