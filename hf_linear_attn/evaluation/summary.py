"""The one table that a report comes down to, for the terminal and for the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .formats import fixed, format_bytes, format_seconds
from .speed import FREE

#: The lengths that the table shows, where they were measured.
SHOWN = (512, 2048, 8192)


@dataclass(frozen=True)
class Column:
    """group: "" (always shown), "quality" or "speed"."""

    title: str
    group: str


@dataclass(frozen=True)
class Summary:
    """Columns, and rows of cells; `kinds[i]` is "exact", "mechanism" or "control"."""

    columns: list[Column]
    rows: list[list[str]]
    kinds: list[str]


def summarise_report(report: dict[str, Any]) -> Summary:
    """Mechanism, learned parameters, quality before and after, time against the baseline."""
    decoder = report["model"]["kind"] == "decoder"
    whole = report["speed"]["model"]
    places = shown_places(whole["lengths"])
    columns = [Column("mechanism", ""), Column("learned params", "quality"), Column("KL, nats", "quality")]
    columns += [Column("output error", "quality"), Column("token cosine", "quality")]
    columns.append(Column("perplexity" if decoder else "sentence cosine", "quality"))
    columns += [Column(f"speed at {whole['lengths'][place]:,}", "speed") for place in places]
    columns.append(Column("faster from", "speed"))
    if report["decode"]:
        last = report["decode"]["contexts"][-1]
        columns += [Column(f"decode at {last:,}", "speed"), Column(f"cache at {last:,}", "speed")]
    rows, kinds = [_exact_row(report, places)], ["exact"]
    for held in report["mechanisms"]:
        rows.append(_mechanism_row(report, held, places))
        kinds.append("mechanism")
    rows.append(_control_row(report, places))
    kinds.append("control")
    return Summary(columns, rows, kinds)


def shown_places(lengths: list[int]) -> list[int]:
    """Indices of the lengths to show, at most four: those of `SHOWN` that were measured, the shortest, the longest."""
    if not lengths:
        return []
    wanted = {0, len(lengths) - 1} | {lengths.index(length) for length in SHOWN if length in lengths}
    kept = sorted(wanted)
    return kept if len(kept) <= 4 else kept[-4:]


def change(before: float | None, after: float | None, digits: int) -> str:
    """`1.07→0.55`, one number where nothing was trained, a dash where it has no meaning."""
    if before is None:
        return "–"
    return fixed(before, digits) if after is None else f"{fixed(before, digits)}→{fixed(after, digits)}"


def score(report: dict[str, Any], quality: dict[str, Any] | None) -> float | None:
    """Perplexity of a decoder, cosine of sentence embeddings of an encoder."""
    if quality is None:
        return None
    if report["model"]["kind"] == "decoder":
        return quality["perplexity"]["perplexity"]
    return quality["sentences"]["cosine"]


def crossover_words(crossing: dict[str, Any]) -> str:
    """A crossover in a cell of the table."""
    if crossing["relation"] == "none":
        return "never"
    if crossing["relation"] == "at or under":
        return f"≤ {crossing['length']:,.0f}"
    return f"~ {int(float(format(crossing['length'], '.2g'))):,}"


def _digits(report: dict[str, Any]) -> int:
    return 2 if report["model"]["kind"] == "decoder" else 3


def _exact_row(report: dict[str, Any], places: list[int]) -> list[str]:
    baseline, whole = report["speed"]["baseline"], report["speed"]["model"]
    task = f"{score(report, report['exact']):.{_digits(report)}f}"
    row = [f"{baseline} (exact)", "–", "0", "0", "1", task]
    row += [format_seconds(whole["rows"][baseline][place]["median"]) for place in places] + ["–"]
    if report["decode"]:
        last = report["decode"]["rows"][baseline][-1]
        row += [format_seconds(last["median"]), format_bytes(last["cache_bytes"])]
    return row


def _mechanism_row(report: dict[str, Any], held: dict[str, Any], places: list[int]) -> list[str]:
    before, after, whole = held["untrained"], held["trained"], report["speed"]["model"]

    def pair(key: str, digits: int) -> str:
        return change(before[key], None if after is None else after[key], digits)

    row = [held["name"], f"{held['learned_parameters']:,}", pair("kl", 2), pair("output_error", 2)]
    row += [pair("final_cosine", 3), change(score(report, before), score(report, after), _digits(report))]
    row += [f"{whole['rows'][held['name']][place]['speedup']:.2f}×" for place in places]
    row.append(crossover_words(whole["crossover"][held["name"]]) if places else "–")
    if report["decode"]:
        last = report["decode"]["rows"][held["name"]][-1]
        row += [f"{last['speedup']:.2f}×", format_bytes(last["cache_bytes"])]
    return row


def _control_row(report: dict[str, Any], places: list[int]) -> list[str]:
    whole = report["speed"]["model"]
    row = [FREE, "–", "–", "–", "–", f"{score(report, report['control']):.{_digits(report)}f}"]
    row += [f"{whole['ceiling'][place]:.2f}×" for place in places] + ["ceiling" if places else "–"]
    return [*row, "–", "–"] if report["decode"] else row
