"""Files of results, and the one way in which they become Markdown."""

import gzip
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "recipes" / "results"
EMPTY = "–"


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON file, or one that gzip has compressed, by its path or its name in recipes/results."""
    content = (RESULTS / path).read_bytes()
    return json.loads(gzip.decompress(content) if str(path).endswith(".gz") else content)


def to_markdown(table: pd.DataFrame, *, text_columns: int | None = 1) -> str:
    """Return a Markdown table.

    Args:
        table: The cells. Missing ones are shown as a dash.
        text_columns: How many columns are aligned left, the others right (None: all are).
    """
    left = len(table.columns) if text_columns is None else text_columns
    align = ["left"] * left + ["right"] * (len(table.columns) - left)
    cells = table.astype(object).fillna(EMPTY).map(lambda cell: str(cell).replace("|", "/"))
    markdown = cells.to_markdown(index=False, disable_numparse=True, colalign=align)
    return re.sub(r"-{3,}", "---", re.sub(r" {2,}", " ", markdown))  # as short as they are without padding


def commit() -> str:
    """Return the short name of the commit that the working tree is at."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "no commit"
