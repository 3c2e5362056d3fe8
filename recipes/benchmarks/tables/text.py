"""What all tables are made of: the rows of a results file, a grid of cells, and numbers as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pandas as pd

from hf_linear_attn.study.tables import EMPTY, to_markdown
from hf_linear_attn.utils.formatting import fixed

from ...result_files import read_json

#: A name as code.
CODE = "`{}`".format


@dataclass(frozen=True)
class Results:
    """A file of recipes/results: its settings, the machine, and its rows. Nested values have dotted columns."""

    settings: dict[str, Any]
    machine: str
    rows: pd.DataFrame

    @classmethod
    def read(cls, path: str | Path) -> Self:
        data = read_json(path)
        return cls(data["settings"], machine_of(data["environment"]), pd.json_normalize(data["rows"]))

    def captioned(self, table: pd.DataFrame, text_columns: int = 1) -> str:
        """Return a table of these rows below the machine."""
        return f"{self.machine}.\n\n{to_markdown(table, text_columns=text_columns)}"


def machine_of(environment: dict[str, Any]) -> str:
    """Return processor, threads, torch version, and the load average at the start, where it is known."""
    hardware, versions = environment["hardware"], environment["versions"]
    name = hardware["cpu"] if hardware["device"] == "cpu" else hardware["device"]
    load = hardware["load_average_at_start"]
    text = f"{name}, threads: {hardware['threads']}, torch {versions['torch']}"
    return text if load is None else f"{text}, load at the start {load:.1f}"


def grid(cells: pd.Series, rows: pd.DataFrame, down: Sequence[str], across: str, title: str = "{:,}") -> pd.DataFrame:
    """Return a table of cells with the values of some columns of their rows down, and those of one across, in order."""
    table = cells.set_axis(pd.MultiIndex.from_frame(rows[[*down, across]])).unstack(sort=False)
    return table.rename(columns=title.format).rename_axis(columns=None).reset_index()


def times(value: float) -> str:
    """`0.043`, `0.43`, `4.3`, `43`, `4,300`: two significant digits."""
    if value >= 99.5:
        return f"{float(f'{value:.2g}'):,.0f}"
    digits = sum(value < limit for limit in (0.0995, 0.995, 9.95))
    return f"{value:.{digits}f}"


def mean(values: Sequence[float] | pd.Series, digits: int, scale: float = 1.0) -> str:
    """Return the mean, and behind it the standard deviation of several values (several seeds)."""
    series = scale * pd.Series(values, dtype=float).dropna()
    if series.empty:
        return EMPTY
    text = fixed(float(series.mean()), digits)
    return text if len(series) == 1 else f"{text} ± {fixed(float(series.std()), digits)}"
