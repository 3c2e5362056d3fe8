"""What the numbers of a report say, in plain words. Reads the report's data only."""

from __future__ import annotations

import math
from typing import Any

from ..config import DEFAULT_ATTENTION
from .advice import advise, final, is_trivial
from .formats import format_rate
from .measurements import plain
from .scores import recovered, reference_value, score_of, task_scores
from .speed import FREE

#: p80 / p20 of the baseline's times from which on the report warns.
NOISY = 1.5

#: Longest input for which the report says "short".
SHORT = 512


def conclude(report: dict[str, Any]) -> None:
    """Add what follows from the measurements: `advice` and `verdicts`."""
    report["advice"] = plain(advise(report))
    report["verdicts"] = verdicts(report)


def verdicts(report: dict[str, Any]) -> list[str]:
    """Sentences, the most important first."""
    found = [_best(report), _control(report), _harmful(report), _exact_here(report), *_transfers(report)]
    found += [_precision(report), *_speed(report), _short(report), _throughput(report), _decode(report), _noise(report)]
    return [text for text in found if text]


def task_score(report: dict[str, Any], quality: dict[str, Any]) -> float:
    """What mechanisms are ranked by, more is better: of several tasks the mean share that is kept, of a decoder minus
    its loss, else the headline of the scores."""
    mean = recovered(report, quality)
    if mean is not None and "perplexity" not in quality:
        return mean
    if "perplexity" in quality:
        return -quality["perplexity"]["loss"]
    value = score_of(report).of(quality)
    return -math.inf if value is None else value


def best(report: dict[str, Any]) -> dict[str, Any]:
    """The mechanism nearest to the exact model."""

    def rank(held: dict[str, Any]) -> tuple[float, bool]:
        return round(task_score(report, final(held)), 3), held["name"] == DEFAULT_ATTENTION

    return max(report["mechanisms"], key=rank)


def _quality_words(report: dict[str, Any], quality: dict[str, Any]) -> str:
    score = score_of(report)
    if score.relative:
        own, exact = score.show(score.of(quality)), score.show(reference_value(report, score))
        name = report["reference"]["name"] if report.get("reference") else "exact attention"
        mean = recovered(report, quality)
        average = "" if mean is None else f", {mean:.1%} kept on average of {len(task_scores(report))} tasks"
        return f"{score.title} {own} ({name}: {exact}){average}"
    sentences = quality["sentences"]
    return (
        f"sentence embeddings with cosine {sentences['cosine']:.3f} to the exact ones, and the same nearest neighbour "
        f"for {sentences['same_neighbour']:.0%} of the passages"
    )


def _best(report: dict[str, Any]) -> str:
    held = best(report)
    how = "converted before" if held.get("origin") == "converted" else "as patched"
    if held["transfer"]:
        how = f"after {held['transfer']['steps']} steps of attention transfer"
    return f"Nearest to the exact model: {held['name']}, {how}: {_quality_words(report, final(held))}."


def _control(report: dict[str, Any]) -> str:
    words = _quality_words(report, report["control"]).partition(" (")[0]
    return f"For scale, the same model with its attention switched off: {words}."


def _harmful(report: dict[str, Any]) -> str:
    """Mechanisms that are worse than no attention at all."""
    off = task_score(report, report["control"])
    worse = [held["name"] for held in report["mechanisms"] if task_score(report, final(held)) < off]
    if not worse:
        return ""
    return f"Worse than no attention at all, as converted so far: {_list(worse)}. Fine-tuning would have to follow."


def _exact_here(report: dict[str, Any]) -> str:
    """A window or a block that holds the whole input proves nothing."""
    names = [held["name"] for held in report["mechanisms"] if is_trivial(held)]
    if not names:
        return ""
    length = report["text"]["sequence_length"]
    return (
        f"{_list(names)} {'is' if len(names) == 1 else 'are'} exact here only because the sequences (up to {length:,} "
        "tokens) fit into the window or block, or nearly do. That says nothing about longer ones."
    )


def _transfers(report: dict[str, Any]) -> list[str]:
    """Where transfer did not help, or hurt: the tables show where it did."""
    found = []
    for held in report["mechanisms"]:
        if held["transfer"] is None or is_trivial(held):
            continue
        before, after = task_score(report, held["untrained"]), task_score(report, held["trained"])
        if after - before < 0.001:
            words = "made it worse" if after - before < -0.001 else "changed next to nothing"
            found.append(f"{held['name']}: {held['transfer']['steps']} steps of transfer {words} on held-out text.")
    return found


def _precision(report: dict[str, Any]) -> str:
    """Where times and quality are of different models."""
    timed, own = report["settings"].get("dtype"), report["model"]["dtype"]
    return f"Times are those of {timed}; quality was measured in {own}." if timed and timed != own else ""


def _speed(report: dict[str, Any]) -> list[str]:
    whole, baseline = report["speed"]["model"], report["speed"]["baseline"]
    lengths = whole["lengths"]
    if not lengths:
        return []
    crossings = whole["crossover"]
    always = [name for name, held in crossings.items() if held["relation"] == "at or under"]
    later = [
        f"{name} from about {_round(held['length']):,}" for name, held in crossings.items() if held["relation"] == "at"
    ]
    never = [name for name, held in crossings.items() if held["relation"] == "none"]
    parts = [f"{_list(always)} at every measured length ({lengths[0]:,} and more)"] if always else []
    parts += later
    found = [f"Whole model faster than {baseline}, in tokens: {', '.join(parts)}."] if parts else []
    if never:
        found.append(f"Not faster than {baseline} at {lengths[-1]:,} tokens, the longest measured: {_list(never)}.")
    rows = ", ".join(f"{name} {_times(whole['rows'][name][-1]['speedup'])}" for name in crossings)
    found.append(
        f"At {lengths[-1]:,} tokens: {rows}; an attention that cost nothing would give {_times(whole['ceiling'][-1])}."
    )
    return found


def _short(report: dict[str, Any]) -> str:
    """What a short input can gain: at the longest length where that is little."""
    whole, baseline = report["speed"]["model"], report["speed"]["baseline"]
    little = [i for i, length in enumerate(whole["lengths"]) if length <= SHORT and whole["ceiling"][i] < 1.5]
    if not little:
        return ""
    index = little[-1]
    length, share, ceiling = whole["lengths"][index], whole["attention_share"][index], whole["ceiling"][index]
    text = (
        f"Short inputs cannot gain: at {length:,} tokens attention is {share:.0%} of the model's time, and even one "
        f"that cost nothing would give {_times(ceiling)}."
    )
    losing = [name for name in whole["crossover"] if whole["rows"][name][index]["speedup"] < 1]
    if losing:
        text += f" Slower than {baseline} there: {_list(losing)}."
    return text


def _throughput(report: dict[str, Any]) -> str:
    """Several sequences at once, at the longest length that was timed so."""
    table, baseline = report["speed"].get("throughput"), report["speed"]["baseline"]
    if not table or not table["lengths"]:
        return ""
    rates = [
        f"{name} {format_rate(rows[-1]['tokens_per_second'])}"
        + ("" if name == baseline else f" ({_times(rows[-1]['speedup'])})")
        for name, rows in table["rows"].items()
        if name != FREE
    ]
    length = table["lengths"][-1]
    return f"Tokens a second with {table['batch']} sequences of {length:,} at once: {', '.join(rates)}."


def _decode(report: dict[str, Any]) -> str:
    decode = report["decode"]
    if not decode:
        return ""
    context, baseline = decode["contexts"][-1], decode["baseline"]
    exact = decode["rows"][baseline][-1]
    parts = []
    for name, rows in decode["rows"].items():
        if name != baseline:
            smaller = exact["cache_bytes"] / max(rows[-1]["cache_bytes"], 1)
            parts.append(f"{name} {_times(rows[-1]['speedup'])} with 1/{smaller:,.0f} of the cache")
    return f"A new token after {context:,}, speed against {baseline} and its growing cache: {', '.join(parts)}."


def _noise(report: dict[str, Any]) -> str:
    """A warning where the times are not to be relied on."""
    rows = report["speed"]["model"]["rows"].get(report["speed"]["baseline"], [])
    spread = max((row["p80"] / row["p20"] for row in rows), default=1.0)
    hardware = report["hardware"]
    load, processors = hardware["load_average_at_start"] or 0.0, hardware["logical_cpus"] or 1
    signs = []
    if spread > NOISY:
        signs.append(
            f"{report['speed']['baseline']} itself varied by a factor of {spread:.1f} (20th to 80th percentile)"
        )
    if load > 0.75 * processors:
        signs.append(f"{load:.1f} programs were already running on {processors} CPUs")
    if not signs:
        return ""
    return f"The times are noisy: {' and '.join(signs)}. Run again on a quiet machine before relying on them."


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _round(value: float) -> int:
    """Two significant digits: an interpolated length is no more exact than that."""
    return int(float(f"{value:.2g}"))
