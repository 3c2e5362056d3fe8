"""Tables and pages: data frames of text as Markdown and HTML, and one page of titled parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..utils.files import atomic_write

PAGE, MARKDOWN = "report.html", "report.md"

#: What a cell without a value shows.
EMPTY = "–"


@dataclass(frozen=True)
class Part:
    """One part of a page: a title (empty: none), and a table, a picture with its caption, sentences, or a note."""

    title: str = ""
    table: pd.DataFrame | None = None
    picture: str = ""  # the name of a file beside the page
    sentences: Sequence[str] = ()
    note: str = ""


def to_markdown(table: pd.DataFrame, *, text_columns: int | None = 1) -> str:
    """Return a table as Markdown, without its index and without padding.

    Args:
        table: The cells. Missing ones are shown as a dash.
        text_columns: How many columns are aligned left, the others right (None: all are).
    """
    left = len(table.columns) if text_columns is None else text_columns
    alignment = [":---"] * left + ["---:"] * (len(table.columns) - left)
    cells = table.astype(object).fillna(EMPTY).map(lambda cell: str(cell).replace("|", "/"))
    rows = [[*map(str, table.columns)], *cells.to_numpy().tolist()]
    titles, *lines = [re.sub(" {2,}", " ", f"| {' | '.join(row)} |") for row in rows]
    return "\n".join([titles, f"|{'|'.join(alignment)}|", *lines])


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
        texts += ["" if part.table is None else to_markdown(part.table.reset_index(), text_columns=None), picture]
        texts += ["\n".join(f"- {sentence}" for sentence in part.sentences), "" if part.picture else part.note]
    atomic_write(folder / MARKDOWN, "\n\n".join(filter(None, texts)) + "\n")
    atomic_write(folder / PAGE, page)
    return folder / PAGE
