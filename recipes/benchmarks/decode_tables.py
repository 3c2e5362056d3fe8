"""Tables of decoding."""

from __future__ import annotations

from typing import Any

from .decode import GROWING, PREALLOCATED, STEP
from .generate import CACHED, GENERATE, total_seconds
from .shapes import DECODERS, IMAGE_TOKENS
from .tables import EMPTY, Row, Table, grid, kinds, optional_bytes, seconds, times


def decode_tables(report: dict[str, Any]) -> list[Table]:
    rows = report["sections"]["decode"]
    steps = [row for row in rows if row["what"] == STEP]
    models = [row for row in rows if row["what"] == GENERATE]
    tables: list[Table] = []
    for kind, group in kinds(steps, "shape", "dtype", "batch").items():
        tables += _steps(f"{kind[1]}, batch {kind[2]} ({kind[0]})", group)
    for kind, group in kinds(models, "model", "batch").items():
        tables += _models(f"{kind[0]}, batch {kind[1]}, float32", group)
        if any(decoder.headline and decoder.name == kind[0] for decoder in DECODERS):
            tables.append(_image(f"{kind[0]}, batch {kind[1]}", group))
    return tables


def _steps(setting: str, rows: list[Row]) -> list[Table]:
    caption = f"After so many tokens. {GROWING}: as `generate` has it by default; {PREALLOCATED}: written in place."
    with_floor = [row for row in rows if "over_floor" in row]
    tables = [
        grid(f"One attention step: {setting}", rows, "context", _time, caption=caption, section="decode"),
        grid(
            f"Speedup over the {GROWING}: {setting}",
            [row for row in rows if "speedup" in row and row["name"] != GROWING],
            "context",
            lambda row: times(row["speedup"]["median"]),
            section="decode",
        ),
        grid(
            f"Speedup over the {PREALLOCATED}: {setting}",
            [row for row in rows if "over_preallocated" in row and row["name"] not in (GROWING, PREALLOCATED)],
            "context",
            lambda row: times(row["over_preallocated"]["median"]),
            section="decode",
        ),
        grid(
            f"Time of a step over the state's own floor: {setting}",
            with_floor,
            "context",
            lambda row: times(row["over_floor"]["median"]),
            caption="Floor: adding φ(k) vᵀ to the state in place, and reading it by φ(q), in float32.",
            section="decode",
        ),
        grid(
            f"Bytes of state and cache: {setting}",
            [row for row in rows if row["name"] != PREALLOCATED],
            "context",
            lambda row: optional_bytes(row["bytes"]),
            section="decode",
        ),
    ]
    return [table for table in tables if table.rows]


def _time(row: Row) -> str:
    return seconds(row["seconds"]["median"])


def _models(setting: str, rows: list[Row]) -> list[Table]:
    return [
        grid(
            f"One token of the whole model: {setting}",
            rows,
            "context",
            _time,
            section="decode",
            last=("longest / shortest", lambda group: _growth(group)),
        ),
        grid(
            f"Speedup over `{CACHED}`: {setting}",
            [row for row in rows if row["name"] != CACHED],
            "context",
            lambda row: times(row["speedup"]["median"]),
            section="decode",
        ),
        grid(
            f"Time of a token over the model without attention: {setting}",
            [row for row in rows if "over_rest" in row],
            "context",
            lambda row: times(row["over_rest"]["median"]),
            section="decode",
        ),
        grid(
            f"Bytes of the cache: {setting}",
            rows,
            "context",
            lambda row: optional_bytes(row["bytes"]),
            section="decode",
        ),
    ]


def _growth(rows: list[Row]) -> str:
    if len(rows) < 2:
        return EMPTY
    return times(rows[-1]["seconds"]["median"] / rows[0]["seconds"]["median"])


def _image(setting: str, rows: list[Row]) -> Table:
    """All tokens of an image, from the times of one at several places."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    reach = max(row["context"] for row in rows)
    totals = {
        name: total_seconds(
            [row["context"] for row in group], [row["seconds"]["median"] for row in group], IMAGE_TOKENS
        )
        for name, group in by_name.items()
        if group[-1]["context"] == reach
    }
    fastest = min((total for name, total in totals.items() if _linear(by_name[name])), default=None)
    lines = [
        [name, seconds(total), EMPTY if fastest is None else times(total / fastest)] for name, total in totals.items()
    ]
    return Table(
        f"Generating {IMAGE_TOKENS:,} tokens: {setting}",
        ("", "time", "over the fastest recurrent one"),
        lines,
        "Added up from the measured times of one token at several contexts, linear between them.",
        "decode",
    )


def _linear(rows: list[Row]) -> bool:
    return "state" in rows[0]["mechanism"]
