"""The table of a committed `report.json` of the former form (demo-minilm, evaluate-*), until it is measured again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_linear_attn.utils.formatting import fixed, format_bytes, format_rate, format_seconds

from .options import FREE


@dataclass(frozen=True)
class Score:
    """One measure of quality in a report.

    Attributes:
        path: The two keys of its value in the report's `exact`, `control`, `trained` and so on.
        title: The title of its column.
        higher: Whether more is better.
        digits: The number of decimals shown.
        relative: Whether its share of the exact model's is of interest (of a cosine with the exact model it is not).
    """

    path: tuple[str, str]
    title: str
    higher: bool
    digits: int
    relative: bool = True

    def of(self, quality: Mapping[str, Any] | None) -> float | None:
        """Return the value, or None where it was not measured or is not defined."""
        if quality is None or self.path[0] not in quality:
            return None
        return quality[self.path[0]].get(self.path[1])

    def format(self, value: float | None) -> str:
        return "–" if value is None else fixed(value, self.digits)


PERPLEXITY = Score(("perplexity", "perplexity"), "perplexity", False, 2)
SENTENCES = Score(("sentences", "cosine"), "sentence cosine", True, 3, relative=False)
SIMILARITY = Score(("sts", "spearmanr"), "STS-B Spearman", True, 3)
TASK = Score(("task", "score"), "score", True, 3)


def task_scores(report: Mapping[str, Any]) -> list[Score]:
    """Return the scores of labelled tasks: that of the model itself, and those of tasks with a model of their own."""
    tasks = [(TASK.path[0], report["text"])] if "task" in report["exact"] else []
    tasks += [(f"{TASK.path[0]}:{task['task']}", task) for task in report.get("tasks", ())]
    return [
        Score((key, TASK.path[1]), f"{task['task']} {task['metrics'][0]}", True, TASK.digits) for key, task in tasks
    ]


def scores_of(report: Mapping[str, Any]) -> list[Score]:
    """Return the scores that were measured on the models of a report, the most important one first."""
    exact, tasks = report["exact"], task_scores(report)
    own = 1 if "task" in exact else 0
    general = [score for score in (PERPLEXITY, SIMILARITY) if score.path[0] in exact]
    last = [SENTENCES] if SENTENCES.path[0] in exact else []
    return [*tasks[:own], *general, *tasks[own:], *last]


def reference_value(report: Mapping[str, Any], score: Score) -> float | None:
    """Return what a score is compared with: the tuned exact model's where there is one, else the exact model's."""
    reference = report.get("reference")
    tuned = score.of(reference["quality"]) if reference else None
    return score.of(report["exact"]) if tuned is None else tuned


def retained_share(report: Mapping[str, Any], quality: Mapping[str, Any] | None, score: Score) -> float | None:
    """Return `own / reference` of a score, of perplexities `reference / own`. None where it is undefined."""
    own, reference = score.of(quality), reference_value(report, score)
    if own is None or reference is None or not own or not reference:
        return None
    return own / reference if score.higher else reference / own


def mean_retained_share(report: Mapping[str, Any], quality: Mapping[str, Any] | None) -> float | None:
    """Return the mean of `retained_share` over the labelled tasks. None for fewer than two, or if one is unknown."""
    shares = [retained_share(report, quality, score) for score in task_scores(report)]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if len(known) == len(shares) > 1 else None


#: The lengths that the table shows, where they were measured.
SHOWN_LENGTHS = (512, 2048, 8192)

#: Measures of a patched model that every model type has: key, title, decimals, the exact model's value.
FIDELITY = (
    ("kl", "KL, nats", 2, "0"),
    ("output_error", "output error", 2, "0"),
    ("final_cosine", "token cosine", 3, "1"),
)


@dataclass(frozen=True)
class ReportTable:
    """The titles of the columns, and rows of formatted cells."""

    titles: list[str]
    rows: list[list[str]]


def summarise_report(report: dict[str, Any]) -> ReportTable:
    """Return mechanism, learned parameters, quality before and after, time and memory against the baseline."""
    table = _TableBuilder(report)
    rows = [table.exact_row()]
    if report.get("reference"):
        rows.append(table.reference_row())
    rows += [table.mechanism_row(index) for index in range(len(report["mechanisms"]))]
    rows.append(table.control_row())
    return ReportTable(table.titles(), rows)


def shown_indices(lengths: list[int], own: int | None = None) -> list[int]:
    """Return the indices of the lengths to show, at most four.

    These are the user's `own` length, those of `SHOWN_LENGTHS` that were measured, the shortest and the longest.
    """
    if not lengths:
        return []
    candidates = {0, len(lengths) - 1} | {lengths.index(length) for length in SHOWN_LENGTHS if length in lengths}
    indices = sorted(candidates)[-4:]
    if own in lengths and lengths.index(own) not in indices:
        nearest = min(indices, key=lambda index: abs(lengths[index] - own))
        indices[indices.index(nearest)] = lengths.index(own)
    return sorted(indices)


def format_change(before: float | None, after: float | None, digits: int) -> str:
    """Return `1.07→0.55`, one number where nothing was trained, a dash where it has no meaning."""
    if before is None and after is None:
        return "–"
    if before is None or after is None:
        return fixed(after if before is None else before, digits)  # type: ignore[arg-type]
    return f"{fixed(before, digits)}→{fixed(after, digits)}"


def format_crossover(crossover: dict[str, Any]) -> str:
    """Return the length from which a mechanism is faster, as a cell of the table."""
    if crossover["relation"] == "none":
        return "never"
    if crossover["relation"] == "at or under":
        return f"≤ {crossover['length']:,.0f}"
    return f"~ {int(float(format(crossover['length'], '.2g'))):,}"


#: The format of a value in a row of times, by its key.
FORMATS: dict[str, Callable[[float], str]] = {
    "median": format_seconds,
    "memory": format_bytes,
    "speedup": lambda value: f"{value:.2f}×",
    "tokens_per_second": format_rate,
}


class _TableBuilder:
    """Builds the rows of one report: name, parameters, fidelity, scores, retained share, speeds, crossover, memory,
    throughput, prefill, decoding."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report
        self.model_speed = report["speed"]["model"]
        self.baseline = report["speed"]["baseline"]
        own = (report.get("advice") or {}).get("length")
        self.length_indices = shown_indices(self.model_speed["lengths"], own)
        self.scores = scores_of(report)
        self.has_shares = self.scores[0].relative and "advice" in report
        self.num_tasks = len(task_scores(report))
        memory = self._length_index("model", own)
        measured = memory is not None and self.model_speed["rows"][self.baseline][memory].get("memory")
        self.memory_index = memory if measured else None
        self.throughput_index = self._length_index("throughput", own)
        self.prefill_index = self._length_index("prefill", own)

    def _length_index(self, part: str, own: int | None) -> int | None:
        """Return the index of the user's own length in a part of the speeds, else the longest. None: not timed."""
        lengths = self.report["speed"].get(part, {}).get("lengths")
        if not lengths:
            return None
        return lengths.index(own) if own in lengths else len(lengths) - 1

    def titles(self) -> list[str]:
        speed = self.report["speed"]
        titles = ["mechanism", "learned params"]
        titles += [title for _, title, _, _ in FIDELITY]
        titles += [score.title for score in self.scores]
        if self.has_shares:
            titles.append("kept" if self.scores[0].higher else "change")
        if self.num_tasks > 1:
            titles.append(f"kept, mean of {self.num_tasks} tasks")
        titles += [f"speed at {self.model_speed['lengths'][index]:,}" for index in self.length_indices]
        titles.append("faster from")
        if self.memory_index is not None:
            titles.append(f"memory at {self.model_speed['lengths'][self.memory_index]:,}")
        if self.throughput_index is not None:
            timed = speed["throughput"]
            titles.append(f"tokens/s, {timed['batch']} at once, at {timed['lengths'][self.throughput_index]:,}")
        if self.prefill_index is not None:
            titles.append(f"prefill at {speed['prefill']['lengths'][self.prefill_index]:,}")
        if self.report["decode"]:
            last = self.report["decode"]["contexts"][-1]
            titles += [f"decode at {last:,}", f"cache at {last:,}"]
        return titles

    # ---------------------------------------------------------------------------------------------- rows

    def exact_row(self) -> list[str]:
        row = [f"{self.baseline} (exact)", "–", *(value for _, _, _, value in FIDELITY)]
        row += self._scores(self.report["exact"])
        shares = self._shares(self.report["exact"])
        row += shares if self.report.get("reference") else ["–" for _ in shares]
        row += [self._speed("model", self.baseline, index, "median") for index in self.length_indices] + ["–"]
        return [*row, *self._costs(self.baseline, "median"), *self._decode(self.baseline, "median")]

    def reference_row(self) -> list[str]:
        """Return the row of a tuned exact model: its quality; its speed is the exact model's."""
        reference = self.report["reference"]
        row = [reference["name"], *("–" for _ in range(1 + len(FIDELITY)))]
        row += self._scores(reference["quality"])
        row += self._shares(reference["quality"])
        return [*row, *("–" for _ in range(len(self.titles()) - len(row)))]

    def mechanism_row(self, index: int) -> list[str]:
        mechanism = self.report["mechanisms"][index]
        name, before, after = mechanism["name"], mechanism["untrained"], mechanism["trained"]
        row = [name, f"{mechanism['learned_parameters']:,}"]
        for key, _, digits, _ in FIDELITY:
            row.append(format_change(before and before[key], after and after[key], digits))
        spreads = mechanism.get("trained_spread" if after else "untrained_spread")
        for score in self.scores:
            spread = score.of(spreads)
            spread_text = "" if spread is None else f" ± {fixed(spread, score.digits)}"
            row.append(format_change(score.of(before), score.of(after), score.digits) + spread_text)
        row += self._shares(after or before, index)
        row += [self._speed("model", name, length_index, "speedup") for length_index in self.length_indices]
        row.append(format_crossover(self.model_speed["crossover"][name]) if self.length_indices else "–")
        return [*row, *self._costs(name, "speedup"), *self._decode(name, "speedup")]

    def control_row(self) -> list[str]:
        row = [FREE, *("–" for _ in range(1 + len(FIDELITY)))]
        row += self._scores(self.report["control"])
        row += self._shares(self.report["control"])
        row += [f"{self.model_speed['ceiling'][index]:.2f}×" for index in self.length_indices]
        row.append("ceiling" if self.length_indices else "–")
        row += self._costs(FREE, "speedup")
        return [*row, *("–" for _ in range(2 if self.report["decode"] else 0))]

    # ---------------------------------------------------------------------------------------------- cells

    def _scores(self, quality: dict[str, Any]) -> list[str]:
        return [score.format(score.of(quality)) for score in self.scores]

    def _shares(self, quality: dict[str, Any], mechanism: int | None = None) -> list[str]:
        """Return the share of the reference's score (of perplexities the change), and the mean of several tasks.

        Args:
            quality: The scores of one model.
            mechanism: The index of the mechanism in the report, whose spread over seeds is shown where it is known.
        """
        cells = []
        if self.has_shares:
            score = self.scores[0]
            share = retained_share(self.report, quality, score)
            cells.append("–" if share is None else f"{share:.1%}" if score.higher else f"{1 / share - 1:+.1%}")
        if self.num_tasks > 1:
            mean = mean_retained_share(self.report, quality)
            recovered = (self.report.get("advice") or {}).get("recovered")
            entry = recovered[mechanism] if recovered and mechanism is not None else None
            spread = entry and entry["spread"]
            cells.append("–" if mean is None else f"{mean:.1%}" + ("" if spread is None else f" ± {spread:.1%}"))
        return cells

    def _costs(self, name: str, prefill_key: str) -> list[str]:
        """Return memory, throughput and prefill, those that were measured."""
        costs = [
            ("model", self.memory_index, "memory"),
            ("throughput", self.throughput_index, "tokens_per_second"),
            ("prefill", self.prefill_index, prefill_key),
        ]
        return [self._speed(part, name, index, key) for part, index, key in costs if index is not None]

    def _speed(self, part: str, name: str, index: int, key: str) -> str:
        value = self.report["speed"][part]["rows"][name][index].get(key)
        return "–" if value is None else FORMATS[key](value)

    def _decode(self, name: str, key: str) -> list[str]:
        decode = self.report["decode"]
        if not decode:
            return []
        row = decode["rows"][name][len(decode["contexts"]) - 1]
        return [FORMATS[key](row[key]), format_bytes(row["cache_bytes"])]
