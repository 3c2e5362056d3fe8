"""The report as files: `report.json` (every number), `report.html` (one self-contained page), plots as PNG."""

from __future__ import annotations

import base64
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..version import __version__
from .formats import fixed, format_bytes, format_seconds
from .plots import HINT, draw_plots, heat_map_of
from .speed import FREE
from .summary import crossover_words, summarise_report
from .verdicts import best, final

FORMAT_VERSION = 1
TOOL = "hf-linear-attn demo"

#: Every name that a report may write. Nothing else in its folder is touched.
PLOTS = {
    "fidelity.png": "How near each layer comes to exact attention, mean over layers and heads, on held-out text. "
    "Shorter bars are better.",
    "perplexity.png": "Perplexity on held-out text, against the exact model and the same model with its attention off.",
    "sentences.png": "Cosine of mean-pooled embeddings of held-out passages with those of the exact model. Longer is "
    "better; unrelated passages and the model with its attention off give the scale.",
    "transfer.png": "The loss that attention transfer brings down, mean over layers. Mechanisms are trained on "
    "different losses: compare a line with its own start only.",
    "heatmap.png": "Where a mechanism differs from exact attention: KL of the weights by layer and head.",
    "time.png": "Time of one forward pass of the whole model. Bands: 20th to 80th percentile.",
    "speedup.png": "The same as a ratio. The dashed line is what even a free attention would give.",
    "layer.png": "The attention of one layer by itself: without projections, feed-forward layers, embeddings.",
    "decode.png": "Time of one new token after a context, the whole model.",
    "cache.png": "What the cache of one stream holds after a context, all layers.",
}
FILES = ("report.json", "report.html", *PLOTS)


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


def render_page(report: dict[str, Any], plots: Mapping[str, bytes]) -> str:
    """The page. Every number on it is read from `report`; plots are embedded; nothing is loaded from elsewhere."""
    images = {name: base64.b64encode(data).decode() for name, data in plots.items()}
    return (
        page_templates()
        .get_template("report.html")
        .render(
            report=report,
            summary=summarise_report(report),
            best=best(report),
            final=final,
            heat=heat_map_of(report),
            free=FREE,
            images=images,
            captions=PLOTS,
        )
    )


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
        several=lambda value, noun: f"{value:,} {noun}" + ("" if value == 1 else "s"),
        percent=lambda value: f"{value:.0%}",
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


def write_report(report: dict[str, Any], folder: Path) -> list[str]:
    """Write `report.json`, `report.html` and the plots, each aside and then renamed; returns the names written.

    All of it is made before anything is written. Plots of an earlier report in the folder that this one does not have
    are removed; other files are left alone.
    """
    plots = draw_plots(report)
    page = render_page(report, plots)
    data = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    contents = {**plots, "report.json": data.encode(), "report.html": page.encode()}
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
    if not isinstance(earlier, dict) or earlier.get("tool") != TOOL:
        return []
    return [name for name in PLOTS if (folder / name).is_file()]


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
