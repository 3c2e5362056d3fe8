"""Long inputs in words, for `update_readme.py`: the tables of `long_table.py` and `long_costs.py`, `stream_book.py`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

PIECES = "in pieces of"
#: Part -> its unit, the stratum that matters, and what is told of it.
PARTS = {
    "proteins": ("residues", "Proteins (DeepLoc 2.0 SwissProt; is there a segment in a membrane?)"),
    "reviews": ("tokens", "Film reviews (IMDB)"),
}


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def row_of(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def groups(rows: list[dict[str, Any]]) -> dict[tuple[str, int, int, bool], list[dict[str, Any]]]:
    """Rows that differ in their seed only, exact attention first."""
    names = dict.fromkeys(row["variant"] for row in rows)
    order = sorted(names, key=lambda name: (name != "softmax", "softmax" not in name))
    found: dict[tuple[str, int, int, bool], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (order.index(row["variant"]), row["pieces"], row["length"], row["steps"])):
        found.setdefault((row["variant"], row["length"], row["steps"], row["pieces"]), []).append(row)
    return found


def name_of(key: tuple[str, int, int, bool]) -> tuple[str, str]:
    variant, length, _, pieces = key
    return f"`{variant}`", f"{PIECES} {length:,}" if pieces else f"{length:,}"


def mean(rows: list[dict[str, Any]], stratum: str, metric: str) -> str:
    """Mean over seeds, with their spread; of one seed, of the Matthews correlation, with its bootstrap error."""
    values = [row["strata"][stratum][metric] for row in rows]
    if len(values) > 1:
        return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
    error = rows[0]["strata"][stratum].get(f"{metric}_error")
    return f"{values[0]:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def quality_table(held: dict[str, Any]) -> str:
    """One row a variant and length: metrics by stratum, and processor seconds of training and of scoring."""
    found = groups(held["rows"])
    first = held["rows"][0]
    strata = list(first["strata"])
    titles = ["attention", "cut to", "steps"]
    for stratum in strata:
        count = first["strata"][stratum]["rows"]
        titles += [f"MCC, {stratum} ({count:,})", f"AUC, {stratum}"]
    lines = [row_of([*titles, "training, s", "scoring, s"]), row_of(["---"] * 2 + ["---:"] * (len(titles)))]
    for key, rows in found.items():
        cells = [*name_of(key), str(key[2])]
        for stratum in strata:
            cells += [mean(rows, stratum, "mcc"), mean(rows, stratum, "auc")]
        seconds = statistics.mean(row["training"]["cpu_seconds"] for row in rows)
        scoring = statistics.mean(row["score_cpu_seconds"] for row in rows)
        lines.append(row_of([*cells, f"{seconds:.0f}", f"{scoring:.0f}"]))
    return "\n".join(lines)


def costs_table(held: dict[str, Any]) -> str:
    """One row a variant and length: seconds for 1,000 inputs, speed against exact attention, memory."""
    titles = ["attention", "cut to", "training, s", "faster", "inference, s", "faster", "memory added"]
    lines = [row_of(titles), row_of(["---"] * 2 + ["---:"] * 5)]
    for length, found in held["lengths"].items():
        for name, costs in found.items():
            cells = [f"`{name}`", f"{int(length):,}"]
            for kind in ("training", "inference"):
                cells += [f"{costs[kind]['seconds_per_1000']:.1f}", f"{costs[kind]['speedup']:.2f}×"]
            lines.append(row_of([*cells, megabytes(costs["peak_bytes"])]))
    return "\n".join(lines)


def megabytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:.0f} MB"


def longest_words(held: dict[str, Any], unit: str) -> str:
    """The longest input as a whole, in a sentence."""
    longest = held["longest"]
    seconds = [
        f"`{name}` {longest['inference'][name]:.1f} s and {longest['training'][name]:.1f} s "
        f"({megabytes(longest['peak_bytes'][name])})"
        for name in longest["inference"]
    ]
    return (
        f"The longest held-out one as a whole ({longest['tokens']:,} {unit} with the two marks): inference, forward "
        f"and backward together (added memory): {', '.join(seconds)}."
    )


def where(environment: dict[str, Any]) -> str:
    hardware, versions = environment["hardware"], environment["versions"]
    return f"{hardware['cpu']}, threads: {hardware['threads']}, torch {versions['torch']}"


def tables(folder: Path) -> str | None:
    """Both tables of each part; None where there is none."""
    parts = []
    for name, (unit, title) in PARTS.items():
        quality, costs = read(folder / f"{name}.json"), read(folder / f"{name}-costs.json")
        if quality is not None:
            seeds = sorted({row["seed"] for row in quality["rows"]})
            about = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
            lines = [f"**{title}**: quality ({where(quality['rows'][0]['environment'])}; {about}):", ""]
            parts.append("\n".join([*lines, quality_table(quality)]))
        if costs is not None:
            settings = costs["settings"]
            about = (
                f"**{title}**: processor seconds for 1,000 inputs, measured on {settings['inputs']} held-out ones "
                f"beyond {settings['beyond']:,} {unit} (mean: {settings['mean_tokens']:,.0f}), all in turns "
                f"({where(costs['environment'])}); memory that a forward and backward pass of one full length adds:"
            )
            parts.append("\n".join([about, "", costs_table(costs)]))
            if "longest" in costs:
                parts.append(longest_words(costs, unit))
    return "\n\n".join(parts) if parts else None


def headline(folder: Path, name: str = "proteins", strata: tuple[str, ...] = ("> 1,024", "> 2,048")) -> str | None:
    """Quality beside costs, one row a variant and length of a part; None where one of both is missing."""
    quality, costs = read(folder / f"{name}.json"), read(folder / f"{name}-costs.json")
    if quality is None or costs is None:
        return None
    counts = quality["rows"][0]["strata"]
    titles = ["attention", f"{PARTS[name][0]} seen", *(f"MCC, {key} ({counts[key]['rows']:,})" for key in strata)]
    titles += ["training, s", "inference, s", "memory added"]
    lines = [row_of(titles), row_of(["---"] * 2 + ["---:"] * (len(strata) + 3))]
    for key, rows in groups(quality["rows"]).items():
        cells = [*name_of(key), *(mean(rows, stratum, "mcc") for stratum in strata)]
        found = None if key[3] else costs["lengths"].get(str(key[1]), {}).get(key[0])
        if found is None:
            cells += ["–", "–", "–"]
        else:
            cells += [f"{found[kind]['seconds_per_1000']:.0f}" for kind in ("training", "inference")]
            cells.append(megabytes(found["peak_bytes"]))
        lines.append(row_of(cells))
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------------------
# Streams


def stream_results(path: Path) -> str:
    """Losses by position, and the memory of the longest run and of the one token by token."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    compared = [row for row in rows if row["settings"]["tokens"] and row["settings"]["chunk_length"] > 1]
    settings = compared[0]["settings"]
    ranges = [f"{held['from']:,} to {min(held['to'], settings['tokens']):,}" for held in compared[0]["ranges"]]
    lines = [
        f"{settings['model']} reads {settings['text']}, mechanisms after {settings['steps']} steps of attention "
        f"transfer on {settings['train_text']}. Loss a token, in nats, by position in the stream (a part of the text "
        "each: compare within a column), and bytes of all states:",
        "",
        row_of(["attention", "positions", *ranges, "states"]),
        row_of(["---", "---", *("---:" for _ in ranges), "---:"]),
    ]
    for row in compared:
        attention = "exact" if row["attention"] == ["softmax"] else ", ".join(f"`{name}`" for name in row["attention"])
        losses = [f"{held['loss']:.2f}" for held in row["ranges"]]
        held = max(line["state_bytes"] for line in row["lines"])
        lines.append(row_of([attention, row["settings"]["positions"], *losses, f"{held:,}"]))
    losses = {(row["settings"]["attention"], row["settings"]["positions"]): row["loss"] for row in compared}
    names = [name for name, positions in losses if positions == "wrap"]
    gains = [f"{losses[name, 'wrap'] - losses[name, 'restart']:+.2f} with `{name}`" for name in names]
    lines += ["", f"What keeping the state costs against dropping it, in nats a token: {', '.join(gains)}."]
    longest = max(rows, key=lambda row: row["tokens"])
    single = next(row for row in rows if row["settings"]["chunk_length"] == 1)
    lines += ["", f"- {stream_memory(longest)}", f"- {stream_memory(single)}"]
    return "\n".join(lines)


def stream_memory(row: dict[str, Any]) -> str:
    settings, growth, lines = row["settings"], row["growth"], row["lines"]
    size = "token by token" if settings["chunk_length"] == 1 else f"in pieces of {settings['chunk_length']}"
    whole = "the whole book" if settings["tokens"] is None else "a part of it"
    return (
        f"{whole.capitalize()}, `{row['attention'][0]}`, `{settings['positions']}`, {row['tokens']:,} tokens {size}: "
        f"states of {lines[-1]['state_bytes']:,} bytes throughout; resident memory "
        f"{lines[0]['resident_bytes'] / 2**20:.0f} MiB after {lines[0]['tokens']:,} tokens, "
        f"{growth['resident_bytes'] / 2**20:+.1f} MiB at the end."
    )
