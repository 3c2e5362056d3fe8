"""The table of a committed `report.json` of the former form (demo-minilm, evaluate-*), until it is measured again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_linear_attn.utils.formatting import fixed, format_bytes, format_rate, format_seconds

from .options import FREE


class Sourced(str):
    """Text of a cell."""

    def __new__(cls, text: str, source: str | None = None) -> Sourced:
        return super().__new__(cls, text)


def joined(*parts: object) -> str:
    """A path in the report."""
    return "".join(f"/{part}" for part in parts)


@dataclass(frozen=True)
class Score:
    """Where it is in a quality (`path`), its name, whether more is better, and its decimals.

    relative: whether its share of the exact model's is of interest (of a cosine with the exact model it is not).
    """

    path: tuple[str, str]
    title: str
    higher: bool
    digits: int
    relative: bool = True

    def of(self, quality: Mapping[str, Any] | None) -> float | None:
        """The value, or None where it was not measured or is not defined."""
        if quality is None or self.path[0] not in quality:
            return None
        return quality[self.path[0]].get(self.path[1])

    @property
    def name(self) -> str:
        """As a part of file names."""
        return self.path[0].replace(":", "-")

    def show(self, value: float | None) -> str:
        return "–" if value is None else fixed(value, self.digits)

    def better(self, value: float) -> float:
        """The value with its sign turned where less is better."""
        return value if self.higher else -value


PERPLEXITY = Score(("perplexity", "perplexity"), "perplexity", False, 2)
SENTENCES = Score(("sentences", "cosine"), "sentence cosine", True, 3, relative=False)
SIMILARITY = Score(("sts", "spearmanr"), "STS-B Spearman", True, 3)
TASK = Score(("task", "score"), "score", True, 3)


def task_key(task: str) -> str:
    """The part of a quality that holds the metrics of a further task, which has a model of its own."""
    return f"{TASK.path[0]}:{task}"


def task_scores(report: Mapping[str, Any]) -> list[Score]:
    """The scores of labelled tasks: that of the model itself, and those of further ones."""
    held = [(TASK.path[0], report["text"])] if "task" in report["exact"] else []
    held += [(task_key(facts["task"]), facts) for facts in report.get("tasks", ())]
    return [
        Score((part, TASK.path[1]), f"{facts['task']} {facts['metrics'][0]}", True, TASK.digits) for part, facts in held
    ]


def scores_of(report: Mapping[str, Any]) -> list[Score]:
    """What was measured on the models of a report, the headline first."""
    exact, tasks = report["exact"], task_scores(report)
    own = 1 if "task" in exact else 0
    found = [score for score in (PERPLEXITY, SIMILARITY) if score.path[0] in exact]
    last = [SENTENCES] if SENTENCES.path[0] in exact else []
    return [*tasks[:own], *found, *tasks[own:], *last]


def axes_of(report: Mapping[str, Any]) -> list[Score]:
    """The scores that speed is set against, one verdict each: the headline, and every other that says what a model is
    worth. Agreement with the exact model is one of them only where the user gave a text for it."""
    first, *rest = scores_of(report)
    return [first, *(score for score in rest if score.relative or report["settings"].get("text"))]


def score_of(report: Mapping[str, Any]) -> Score:
    """The headline."""
    return scores_of(report)[0]


def reference_value(report: Mapping[str, Any], score: Score) -> float | None:
    """What a score is compared with: the tuned exact model's where there is one for it, else the exact model's."""
    reference = report.get("reference")
    tuned = score.of(reference["quality"]) if reference else None
    return score.of(report["exact"]) if tuned is None else tuned


def recovered(report: Mapping[str, Any], quality: Mapping[str, Any] | None) -> float | None:
    """The mean over the labelled tasks of the share that is kept. None: fewer than two tasks, or one is unknown."""
    shares = [kept(report, quality, score) for score in task_scores(report)]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if len(known) == len(shares) > 1 else None


def kept(report: Mapping[str, Any], quality: Mapping[str, Any] | None, score: Score | None = None) -> float | None:
    """The share of the reference's score (default: the headline) that is kept; of perplexities `reference / own`. None
    where undefined."""
    score = score or score_of(report)
    own, reference = score.of(quality), reference_value(report, score)
    if own is None or reference is None or not own or not reference:
        return None
    return own / reference if score.higher else reference / own


#: The lengths that the table shows, where they were measured.
SHOWN = (512, 2048, 8192)

#: Measures of a patched model that every kind has: key, title, decimals, the exact model's value.
FIDELITY = (
    ("kl", "KL, nats", 2, "0"),
    ("output_error", "output error", 2, "0"),
    ("final_cosine", "token cosine", 3, "1"),
)


@dataclass(frozen=True)
class Column:
    """group: "" (always shown), "quality" or "speed"."""

    title: str
    group: str


@dataclass(frozen=True)
class Summary:
    """Columns, and rows of cells that know where their values stand; `kinds[i]` is "exact", "mechanism" or
    "control"."""

    columns: list[Column]
    rows: list[list[Sourced]]
    kinds: list[str]


def summarise_report(report: dict[str, Any]) -> Summary:
    """Mechanism, learned parameters, quality before and after, time and memory against the baseline."""
    table = _Table(report)
    rows, kinds = [table.exact()], ["exact"]
    if report.get("reference"):
        rows.append(table.reference())
        kinds.append("exact")
    for index in range(len(report["mechanisms"])):
        rows.append(table.mechanism(index))
        kinds.append("mechanism")
    rows.append(table.control())
    kinds.append("control")
    return Summary(table.columns(), rows, kinds)


def shown_places(lengths: list[int], own: int | None = None) -> list[int]:
    """Indices of the lengths to show, at most four: the user's own, those of `SHOWN` that were measured, the shortest,
    the longest."""
    if not lengths:
        return []
    wanted = {0, len(lengths) - 1} | {lengths.index(length) for length in SHOWN if length in lengths}
    kept_places = sorted(wanted)[-4:]
    if own in lengths and lengths.index(own) not in kept_places:
        nearest = min(kept_places, key=lambda place: abs(lengths[place] - own))
        kept_places[kept_places.index(nearest)] = lengths.index(own)
    return sorted(kept_places)


def change(before: float | None, after: float | None, digits: int) -> str:
    """`1.07→0.55`, one number where nothing was trained, a dash where it has no meaning."""
    if before is None and after is None:
        return "–"
    if before is None or after is None:
        return fixed(after if before is None else before, digits)  # type: ignore[arg-type]
    return f"{fixed(before, digits)}→{fixed(after, digits)}"


def crossover_words(crossing: dict[str, Any]) -> str:
    """A crossover in a cell of the table."""
    if crossing["relation"] == "none":
        return "never"
    if crossing["relation"] == "at or under":
        return f"≤ {crossing['length']:,.0f}"
    return f"~ {int(float(format(crossing['length'], '.2g'))):,}"


#: How a value of a row of times is shown, by its name.
SHOW: dict[str, Callable[[float], str]] = {
    "median": format_seconds,
    "memory": format_bytes,
    "speedup": lambda value: f"{value:.2f}×",
    "tokens_per_second": format_rate,
}


class _Table:
    """Cells of one report: name, parameters, fidelity, scores, share kept, speeds, crossover, memory, throughput,
    prefill, decoding."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report
        self.whole = report["speed"]["model"]
        self.baseline = report["speed"]["baseline"]
        own = (report.get("advice") or {}).get("length")
        self.places = shown_places(self.whole["lengths"], own)
        self.scores = scores_of(report)
        self.shares = self.scores[0].relative and "advice" in report
        self.tasks = len(task_scores(report))
        memory = self._place("model", own)
        known = memory is not None and self.whole["rows"][self.baseline][memory].get("memory")
        self.memory = memory if known else None
        self.many, self.prompt = self._place("throughput", own), self._place("prefill", own)

    def _place(self, part: str, own: int | None) -> int | None:
        """Where a part of the speeds is shown: at the user's own length, or the longest. None: it was not timed."""
        lengths = self.report["speed"].get(part, {}).get("lengths")
        if not lengths:
            return None
        return lengths.index(own) if own in lengths else len(lengths) - 1

    def columns(self) -> list[Column]:
        found = [Column("mechanism", ""), Column("learned params", "quality")]
        found += [Column(title, "quality") for _, title, _, _ in FIDELITY]
        found += [Column(score.title, "quality") for score in self.scores]
        if self.shares:
            found.append(Column("kept" if self.scores[0].higher else "change", "quality"))
        if self.tasks > 1:
            found.append(Column(f"kept, mean of {self.tasks} tasks", "quality"))
        found += [Column(f"speed at {self.whole['lengths'][place]:,}", "speed") for place in self.places]
        found.append(Column("faster from", "speed"))
        if self.memory is not None:
            found.append(Column(f"memory at {self.whole['lengths'][self.memory]:,}", "speed"))
        if self.many is not None:
            table = self.report["speed"]["throughput"]
            found.append(Column(f"tokens/s, {table['batch']} at once, at {table['lengths'][self.many]:,}", "speed"))
        if self.prompt is not None:
            found.append(Column(f"prefill at {self.report['speed']['prefill']['lengths'][self.prompt]:,}", "speed"))
        if self.report["decode"]:
            last = self.report["decode"]["contexts"][-1]
            found += [Column(f"decode at {last:,}", "speed"), Column(f"cache at {last:,}", "speed")]
        return found

    # ---------------------------------------------------------------------------------------------- rows

    def exact(self) -> list[Sourced]:
        row = [Sourced(f"{self.baseline} (exact)"), Sourced("–"), *(Sourced(value) for _, _, _, value in FIDELITY)]
        row += [self._score(score, "exact", self.report["exact"]) for score in self.scores]
        shares = self._share(self.report["exact"])
        row += shares if self.report.get("reference") else [Sourced("–") for _ in shares]
        row += [self._row_cell("model", self.baseline, place, "median") for place in self.places] + [Sourced("–")]
        return [*row, *self._costs(self.baseline, "median"), *self._decode(self.baseline, "median")]

    def reference(self) -> list[Sourced]:
        """A tuned exact model: its quality; its speed is the exact model's."""
        held = self.report["reference"]
        row = [Sourced(held["name"]), *(Sourced("–") for _ in range(1 + len(FIDELITY)))]
        row += [self._score(score, "reference/quality", held["quality"]) for score in self.scores]
        row += self._share(held["quality"])
        return [*row, *(Sourced("–") for _ in range(len(self.columns()) - len(row)))]

    def mechanism(self, index: int) -> list[Sourced]:
        held = self.report["mechanisms"][index]
        state = "trained" if held["trained"] else "untrained"
        name, start = held["name"], ("mechanisms", index)
        row = [Sourced(name), Sourced(f"{held['learned_parameters']:,}", joined(*start, "learned_parameters"))]
        before, after = held["untrained"], held["trained"]
        for key, _, digits, _ in FIDELITY:
            text = change(before and before[key], after and after[key], digits)
            row.append(Sourced(text, None if text == "–" else joined(*start, state, key)))
        for score in self.scores:
            text = change(score.of(before), score.of(after), score.digits)
            spread = _spread_of(held, state, score)
            row.append(Sourced(text + spread, None if text == "–" else joined(*start, state, *score.path)))
        row += self._share(after or before, index)
        row += [self._row_cell("model", name, place, "speedup") for place in self.places]
        crossing = joined("speed", "model", "crossover", name, "length")
        row.append(Sourced(crossover_words(self.whole["crossover"][name]), crossing) if self.places else Sourced("–"))
        return [*row, *self._costs(name, "speedup"), *self._decode(name, "speedup")]

    def control(self) -> list[Sourced]:
        row = [Sourced(FREE), *(Sourced("–") for _ in range(1 + len(FIDELITY)))]
        row += [self._score(score, "control", self.report["control"]) for score in self.scores]
        row += self._share(self.report["control"])
        for place in self.places:
            row.append(Sourced(f"{self.whole['ceiling'][place]:.2f}×", joined("speed", "model", "ceiling", place)))
        row.append(Sourced("ceiling" if self.places else "–"))
        row += self._costs(FREE, "speedup")
        return [*row, *(Sourced("–") for _ in range(2 if self.report["decode"] else 0))]

    # ---------------------------------------------------------------------------------------------- cells

    def _score(self, score: Score, place: str, quality: dict[str, Any]) -> Sourced:
        value = score.of(quality)
        return Sourced(score.show(value), None if value is None else "/".join(("", place, *score.path)))

    def _share(self, quality: dict[str, Any], index: int | None = None) -> list[Sourced]:
        """Of the reference's score; of perplexities the change; of several tasks the mean. index: of the mechanism."""
        cells = []
        if self.shares:
            share = kept(self.report, quality)
            higher = self.scores[0].higher
            text = "–" if share is None else f"{share:.1%}" if higher else f"{1 / share - 1:+.1%}"
            cells.append(Sourced(text))
        if self.tasks > 1:
            mean = recovered(self.report, quality)
            found = (self.report.get("advice") or {}).get("recovered")
            known = found[index] if found and index is not None else None
            spread = known and known["spread"]
            text = "–" if mean is None else f"{mean:.1%}" + ("" if spread is None else f" ± {spread:.1%}")
            cells.append(Sourced(text, joined("advice", "recovered", index, "mean") if known and mean else None))
        return cells

    def _costs(self, name: str, key: str) -> list[Sourced]:
        """Memory, throughput and prefill, those that were measured. key: what stands for the prefill."""
        wanted = [("model", self.memory, "memory"), ("throughput", self.many, "tokens_per_second")]
        wanted.append(("prefill", self.prompt, key))
        return [self._row_cell(part, name, place, shown) for part, place, shown in wanted if place is not None]

    def _row_cell(self, part: str, name: str, place: int, key: str) -> Sourced:
        value = self.report["speed"][part]["rows"][name][place].get(key)
        source = joined("speed", part, "rows", name, place, key)
        return Sourced("–") if value is None else Sourced(SHOW[key](value), source)

    def _decode(self, name: str, key: str) -> list[Sourced]:
        decode = self.report["decode"]
        if not decode:
            return []
        last = len(decode["contexts"]) - 1
        row, start = decode["rows"][name][last], ("decode", "rows", name, last)
        text = format_seconds(row["median"]) if key == "median" else f"{row['speedup']:.2f}×"
        cache = Sourced(format_bytes(row["cache_bytes"]), joined(*start, "cache_bytes"))
        return [Sourced(text, joined(*start, key)), cache]


def _spread_of(held: dict[str, Any], state: str, score: Score) -> str:
    """` ± 0.004` where there are several seeds."""
    value = score.of(held.get(f"{state}_spread"))
    return "" if value is None else f" ± {fixed(value, score.digits)}"
