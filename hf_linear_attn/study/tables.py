"""Tables and pages: data frames of text as Markdown and HTML, and one page of titled parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..utils.files import atomic_write

PAGE, MARKDOWN = "report.html", "report.md"


@dataclass(frozen=True)
class Part:
    """One part of a page: a title (empty: none), and a table, a picture with its caption, sentences, or a note."""

    title: str = ""
    table: pd.DataFrame | None = None
    picture: str = ""  # the name of a file beside the page
    sentences: Sequence[str] = ()
    note: str = ""


def to_markdown(frame: pd.DataFrame) -> str:
    """Return a table of text as Markdown, with its index."""
    return str(frame.to_markdown(disable_numparse=True))


def to_html(frame: pd.DataFrame) -> str:
    """Return a table of text as HTML; the name of the index stands in the corner."""
    # On its own it would take a second row of titles.
    return str(frame.rename_axis(index=None, columns=frame.index.name).to_html(border=0))


def write_page(folder: Path, title: str, lead: str, parts: Sequence[Part]) -> Path:
    """Write a page as `report.html` and `report.md` in a folder, beside its pictures; return the path of the first.

    The page loads nothing but its pictures.
    """
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_linear_attn", "study/templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["table"] = to_html
    page = templates.get_template("page.html").render(title=title, lead=lead, parts=parts)
    texts = [f"# {title}", lead]
    for part in parts:
        picture = f"![{part.note}]({part.picture})" if part.picture else ""
        texts += [f"## {part.title}"] if part.title else []
        texts += ["" if part.table is None else to_markdown(part.table), picture]
        texts += ["\n".join(f"- {sentence}" for sentence in part.sentences), "" if part.picture else part.note]
    atomic_write(folder / MARKDOWN, "\n\n".join(filter(None, texts)) + "\n")
    atomic_write(folder / PAGE, page)
    return folder / PAGE
