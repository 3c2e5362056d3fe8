"""What every plot of a report shares: palette, style, axes, and the two forms that a figure is kept in."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .speed import FREE

#: Okabe and Ito's palette, which stays distinct to colour-blind readers; markers and hatches tell lines and bars apart
#: in print. Seven markers on six colours: no pair comes twice among 42 rows.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "*")
BASELINE_COLOR = "#000000"
FREE_COLOR = "#767676"
BEFORE, AFTER = "#B5B5B5", "#0072B2"

#: Inches; at 10 points on 5.6 inches, text is about 9 pixels high on a screen of 390 pixels.
WIDTH = 5.6
DPI = 160

HINT = "Reports need matplotlib and jinja2: pip install 'hf-linear-attn[demo]'"


@dataclass(frozen=True)
class Drawing:
    """One figure: a PNG file, and SVG to stand within a page."""

    png: bytes
    svg: str


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
        "svg.fonttype": "none",
        "text.parse_math": False,
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


def drawing(figure: Any, name: str) -> Drawing:
    """Both forms of a figure. name: what its ids begin with, which must differ within a page."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    return Drawing(png(figure), _inline(buffer.getvalue(), re.sub(r"\W", "-", name)))


def _inline(text: str, prefix: str) -> str:
    """SVG as a part of an HTML page: no prologue, no namespaces, no size of its own, ids that no other figure has."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?)\sheight="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<image[^>]*?)\sid="[^"]*"', r"\1", text)  # named by their content, which may come twice
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'xlink:href="#', f'href="#{prefix}-', text)
    return re.sub(r"url\(#", f"url(#{prefix}-", text)


def looks_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Colour and marker of a row: the same in every plot of a report."""
    if name == report["speed"]["baseline"]:
        return {"color": BASELINE_COLOR, "marker": "X", "linewidth": 2.2}
    if name == FREE:
        return {"color": FREE_COLOR, "marker": "", "linestyle": (0, (4, 3)), "linewidth": 1.6}
    index = [held["name"] for held in report["mechanisms"]].index(name)
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)], "linewidth": 1.5}


def label_of(report: dict[str, Any], name: str) -> str:
    if name == report["speed"]["baseline"]:
        return f"{name} (exact)"
    return "no attention at all" if name == FREE else name


def length_axis(axes: Any, lengths: Sequence[int], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [_short(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel(title)


def _short(length: int) -> str:
    """512, 1k, 2k, …"""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def plain_log_axis(axis: Any, limits: tuple[float, float], unit: Callable[[float], str]) -> None:
    """Ticks at 1, 2, 5 times a power of ten (or powers alone on a long axis), written out."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = limits
    decades = math.log10(high / low)
    steps: tuple[float, ...] = (1, 2, 5) if decades < 2.2 else (1, 3) if decades < 3.2 else (1,)
    if decades < 0.7:
        steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    ticks = [step * 10.0**power for power in range(first, last) for step in steps]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: unit(value)))


def legend_below(figure: Any, axes: Any, columns: int = 3, more: Sequence[Any] = ()) -> None:
    handles = [*axes.get_legend_handles_labels()[0], *more]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=2.4, columnspacing=1.4)
