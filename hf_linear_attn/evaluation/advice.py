"""Is it worth it? Each mechanism at the user's own length: quality against speed, the Pareto front, a plain verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .averages import spread_of
from .formats import format_bytes
from .pointers import escaped
from .scores import Score, axes_of, kept, recovered, reference_value, task_scores
from .speed import FREE

#: Shares of the exact model's score that count as keeping it, and as losing a little.
KEEPS, LOSES_LITTLE = 0.98, 0.9

#: Quality was judged on inputs of less than this share of the user's length: it says little.
SHORTER = 0.5

#: Speedups that count as faster, and as no slower.
FASTER, AS_FAST = 1.1, 0.95


def final(mechanism: Mapping[str, Any]) -> dict[str, Any]:
    """The quality after transfer or conversion, or as patched where nothing is learned."""
    return mechanism["trained"] or mechanism["untrained"]


def advise(report: dict[str, Any]) -> dict[str, Any]:
    """The part `advice` of a report: length, points of quality against speed, and a verdict for each mechanism, by the
    headline; `others`: the same by every other score that counts; `recovered`: the mean over several tasks."""
    table = report["speed"]["model"]
    length = nearest_length(table["lengths"], report["settings"].get("length"))
    if length is None:
        return {"length": None, "points": [], "verdicts": []}
    place = table["lengths"].index(length)
    first, *rest = axes_of(report)
    others = [{"score": score.name, "title": score.title, **_judged_by(report, score, place)} for score in rest]
    found = {"length": length, **_judged_by(report, first, place), "others": others}
    return {**found, "recovered": _recovered(report)}


def _judged_by(report: dict[str, Any], score: Score, place: int) -> dict[str, Any]:
    """Points and verdicts by one score."""
    points = _points(report, place, score)
    for point, front in zip(points, pareto_front(points), strict=True):
        point["front"] = front
    verdicts = [_verdict(report, held, index, place, score) for index, held in enumerate(report["mechanisms"])]
    return {"points": points, "verdicts": verdicts}


def _recovered(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Of several tasks, for each mechanism: the share kept of each task's score, their mean, and its spread over seeds
    or checkpoints. Nothing where there is one task or none."""
    scores = task_scores(report)
    if len(scores) < 2:
        return []
    found = []
    for held in report["mechanisms"]:
        ended = [recovered(report, final(run)) for run in held.get("runs", ())]
        spread = None if None in ended else spread_of(ended) if ended else None
        shares = [kept(report, final(held), score) for score in scores]
        found.append({"name": held["name"], "shares": shares, "mean": recovered(report, final(held)), "spread": spread})
    return found


def nearest_length(lengths: Sequence[int], wanted: int | None) -> int | None:
    """The measured length that is nearest to the wanted one; without one the longest."""
    if not lengths:
        return None
    return lengths[-1] if wanted is None else min(lengths, key=lambda length: abs(length - wanted))


def _points(report: Mapping[str, Any], place: int, score: Score) -> list[dict[str, Any]]:
    """The exact model, each mechanism (untrained, and trained where it is), the model without attention."""
    table = report["speed"]["model"]

    def point(name: str, state: str, speedup: float, source: str, quality: Mapping[str, Any] | None) -> dict[str, Any]:
        path = "/".join((source, *score.path))
        return {"name": name, "state": state, "speedup": speedup, "score": score.of(quality), "source": path}

    found = [point(report["speed"]["baseline"], "exact", 1.0, "/exact", report["exact"])]
    for index, held in enumerate(report["mechanisms"]):
        speedup = table["rows"][held["name"]][place]["speedup"]
        for state in ("untrained", "trained"):
            if held[state]:
                found.append(point(held["name"], state, speedup, f"/mechanisms/{index}/{state}", held[state]))
    found.append(point(FREE, "control", table["ceiling"][place], "/control", report["control"]))
    known = [held for held in found if held["score"] is not None]
    for held in known:
        held["goodness"] = score.better(held["score"])
    return known


def pareto_front(points: Sequence[Mapping[str, Any]]) -> list[bool]:
    """For each point whether no other is at least as fast and as good, and better in one of them. The model without
    attention is a control, and takes no part."""

    def beaten(own: Mapping[str, Any]) -> bool:
        return any(
            other["speedup"] >= own["speedup"]
            and other["goodness"] >= own["goodness"]
            and (other["speedup"] > own["speedup"] or other["goodness"] > own["goodness"])
            for other in points
            if other["state"] != "control"
        )

    return [point["state"] != "control" and not beaten(point) for point in points]


# --------------------------------------------------------------------------------------------------------------------
# Words


def _verdict(report: dict[str, Any], held: Mapping[str, Any], index: int, place: int, score: Score) -> dict[str, Any]:
    """`call`: the answer in a few words; `good`: True, False, or None for "it depends"; `words`: why."""
    table = report["speed"]["model"]
    length = table["lengths"][place]
    row, base = table["rows"][held["name"]][place], table["rows"][report["speed"]["baseline"]][place]
    share, speedup = kept(report, final(held), score), row["speedup"]
    state = "trained" if held["trained"] else "untrained"
    worse_than_none = _worse_than_no_attention(report, held, score)
    call, good = _call(share, speedup, worse_than_none)
    words = [_speed_words(speedup, table["ceiling"][place], length, report["speed"]["baseline"])]
    if row.get("memory") and base.get("memory"):
        words.append(f"peak memory {row['memory'] / base['memory']:.2f}× ({format_bytes(row['memory'])})")
    words.append(_quality_words(report, held, share, score))
    if worse_than_none:
        words.append("worse than no attention at all")
    if good is False and speedup >= FASTER and held.get("origin") != "converted":
        words.append("training all weights may win it back (hf-linear-attn convert)")
    value = score.of(final(held))
    judged = (report["text"].get("judged") or {}).get(score.path[0]) or report["text"]["sequence_length"]
    if good is not False and judged < SHORTER * length:
        call, good = f"{call}, as far as shorter inputs show", None
        words.append(f"judged on inputs of up to {judged:,} tokens, which says little about {length:,}")
    if is_trivial(held):
        words.append("exact only because these inputs fit into its window or block")
    return {
        "name": held["name"],
        "call": call,
        "good": good,
        "words": f"{'; '.join(words)}.",
        "speedup": speedup,
        "kept": share,
        "score": value,
        "sources": {
            "speedup": f"/speed/model/rows/{escaped(held['name'])}/{place}/speedup",
            "score": None if value is None else f"/mechanisms/{index}/{state}/{'/'.join(score.path)}",
        },
    }


def _call(share: float | None, speedup: float, worse: bool) -> tuple[str, bool | None]:
    fast = speedup >= FASTER
    if share is None:
        return ("faster, quality unknown", None) if fast else ("not worth it here", False)
    if not fast:
        return ("no gain at this length", False) if speedup >= AS_FAST else ("slower at this length", False)
    if worse or share < LOSES_LITTLE:
        return "faster, but it loses too much as it is", False
    if share < KEEPS:
        return "faster, at a price", None
    return "worth it", True


def _speed_words(speedup: float, ceiling: float, length: int, baseline: str) -> str:
    return (
        f"at {length:,} tokens {speedup:.2f}× as fast as {baseline} (an attention that cost nothing would give "
        f"{ceiling:.2f}×)"
    )


def _quality_words(report: dict[str, Any], held: Mapping[str, Any], share: float | None, score: Score) -> str:
    value = score.show(score.of(final(held)))
    spread = (held.get("trained_spread" if held["trained"] else "untrained_spread") or {}).get(score.path[0], {})
    plus_minus = f" ± {spread[score.path[1]]:.{score.digits}f}" if score.path[1] in spread else ""
    other = score.show(reference_value(report, score))
    against = f"{score.title} {value}{plus_minus} against {other}"
    if share is None or not score.relative:
        return against
    how = f"{100 * share:.1f}% kept" if score.higher else f"{100 * (1 / share - 1):+.1f}%"
    return f"{against} ({how})"


def _worse_than_no_attention(report: dict[str, Any], held: Mapping[str, Any], score: Score) -> bool:
    own, off = score.of(final(held)), score.of(report["control"])
    return own is not None and off is not None and score.better(own) < score.better(off)


def is_trivial(held: Mapping[str, Any]) -> bool:
    """Whether a mechanism computes these inputs exactly from the start."""
    return (held["untrained"] or held["trained"])["output_error"] < 1e-3
