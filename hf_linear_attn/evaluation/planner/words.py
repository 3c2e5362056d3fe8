"""A plan in words and as a table. Reads the report's data only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..formats import fixed
from .budget import KINDS, UNITS, Unit


def sentences(report: dict[str, Any]) -> list[str]:
    """What was found, the most important first."""
    found = [_headline(report), _speed(report), _layers(report), _all(report), _examples(report), *report["notes"]]
    return [text for text in found if text]


def _unit(report: dict[str, Any]) -> Unit:
    return UNITS[report["choice"]["unit"]]


def layer_list(layers: Sequence[int]) -> str:
    """`0, 2 and 5`."""
    words = [str(layer) for layer in layers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _plan(report: dict[str, Any]) -> str:
    choice = report["choice"]
    noun = "layer" if choice["count"] == 1 else "layers"
    share = f"{choice['count']} of {report['model']['layers']} layers"
    return f"{share} as {report['mechanism']['name']} ({noun} {layer_list(choice['layers'])})"


def _headline(report: dict[str, Any]) -> str:
    choice, unit = report["choice"], _unit(report)
    here, there = unit.show(choice["damage"]), unit.show(choice["verified"]["damage"])
    cost = f"{here} on the data of the choice, {there} on data that was not used for it"
    if report["budget"]["length"] is not None:
        length = str(report["budget"]["length"])
        fast, again = choice["speedup"][length], choice["verified"]["speedup"][length]
        if not choice["found"]:
            return (
                f"The budget {choice['budget']!r} cannot be reached: the fastest is {_plan(report)}, {fast:.2f}×. "
                f"plan.json holds it; it costs {cost}."
            )
        if not choice["met"]:
            return (
                f"The budget {choice['budget']!r} is not confirmed: {_plan(report)} gave {fast:.2f}× and, timed again, "
                f"{again:.2f}×. Ask for a little more speed, or let nothing else run beside."
            )
        return (
            f"The budget {choice['budget']!r} is met by {_plan(report)}: {fast:.2f}×, timed again {again:.2f}×; {cost}."
        )
    if not choice["found"]:
        return (
            f"Nothing on the way from exact to linear keeps to {choice['budget']!r}: the nearest is "
            f"{_plan(report)}, {cost}. plan.json holds it. More steps of transfer (--steps), another mechanism "
            "(--attention), or training all weights afterwards (`hf-linear-attn convert`) may help."
        )
    if not choice["met"]:
        return (
            f"The budget {choice['budget']!r} is not confirmed: {_plan(report)} keeps to it where it was chosen, and "
            f"not elsewhere ({cost}). Give a smaller budget, or more text."
        )
    return f"The budget {choice['budget']!r} is met by {_plan(report)}: {cost}."


def _speed(report: dict[str, Any]) -> str:
    speedup = report["choice"]["speedup"]
    if not speedup or (report["budget"]["length"] is not None and len(speedup) == 1):
        return ""
    parts = [
        f"{value:.2f}× as fast as {report['baseline']} at {int(length):,} tokens" for length, value in speedup.items()
    ]
    return f"The planned model is {', '.join(parts)} (one forward pass, batch 1)."


def _layers(report: dict[str, Any]) -> str:
    known = [row for row in report["layers"] if row["damage"] is not None]
    if len(known) < 2:
        return ""
    unit, kind = _unit(report), KINDS[report["model"]["kind"]]
    best, worst = (pick(known, key=lambda row: row["divergence"]) for pick in (min, max))
    return (
        f"Alone, layer {best['index']} does the least harm ({kind.divergence}: {shown_divergence(best['divergence'])}; "
        f"{unit.show(best['damage'])}), layer {worst['index']} the most ({shown_divergence(worst['divergence'])}; "
        f"{unit.show(worst['damage'])})."
    )


def _all(report: dict[str, Any]) -> str:
    last = report["curve"][-1]
    if last["count"] == report["choice"]["count"]:
        return ""
    speed = "".join(f", {value:.2f}× at {int(length):,} tokens" for length, value in last["speedup"].items())
    return f"All {last['count']} layers together: {_unit(report).show(last['damage'])}{speed}."


def _examples(report: dict[str, Any]) -> str:
    """How coarse a metric is."""
    rows = report["data"]["choice"].get("rows")
    if not rows:
        return ""
    return (
        f"The choice rests on {rows:,} examples, one of them {100 / rows:.2f} points: a difference of a few is chance."
    )


def shown_divergence(value: float | None) -> str:
    """Four decimals, or one significant digit of what they would hide."""
    if value is None:
        return "–"
    return format(value, ".0e") if 0 < abs(value) < 5e-5 else fixed(value, 4)


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Titles, and a row of cells for each point of the curve; the chosen one is marked with a star."""
    kind, unit = KINDS[report["model"]["kind"]], _unit(report)
    lengths = list(report["curve"][0]["speedup"])
    score = report["data"].get("metric", kind.title)
    titles = ["linear", "adds layer", kind.divergence, score, "damage"]
    titles += [f"speed at {int(length):,}" for length in lengths]
    rows = []
    for point in report["curve"]:
        mark = " *" if point["count"] == report["choice"]["count"] else ""
        rows.append(
            [
                f"{point['count']} of {report['model']['layers']}{mark}",
                "–" if point["added"] is None else str(point["added"]),
                shown_divergence(point["divergence"]),
                "–" if point["score"] is None else fixed(point["score"], kind.digits),
                "–" if point["count"] == 0 else unit.show(point["damage"]),
                *(f"{point['speedup'][length]:.2f}×" for length in lengths),
            ]
        )
    return titles, rows
