"""The result of an evaluation: its tidy table, a summary with one row per mechanism, and what follows from it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from ..utils.environment import json_safe
from ..utils.files import atomic_write
from ..utils.formatting import fixed, format_bytes, format_flops, format_rate, format_seconds
from ..utils.timing import Crossover, crossover
from .evaluator import EXACT_LABEL, lengths_to_show
from .metrics import Assessment, Score, assess
from .records import RECORDS_FILE, Records
from .speed import DECODING, FORWARD, PREFILL, TRAINING, WITHOUT_ATTENTION

if TYPE_CHECKING:
    import pandas

#: The file with what the report needs besides the records.
EVALUATION_FILE = "evaluation.json"

#: The tidy table as a file for other programs.
TABLE_FILE = "records.csv"

#: Shares of the exact model's score from which a mechanism counts as keeping it, and as losing a little.
KEEPS, LOSES_LITTLE = 0.98, 0.9

#: Speedups that count as faster, and as equal.
FASTER, EQUAL = 1.05, 0.95

#: Quality on inputs shorter than this share of the user's length says little about that length.
SHORT_SHARE = 0.5

#: Below this relative error of all outputs, a mechanism computes exact attention on these inputs.
EXACT_ERROR = 1e-3

#: p80 / p20 of the exact model's times from which the report warns.
NOISY = 1.5


#: How the values of a metric are shown.
FORMATS: dict[str, Callable[[float], str]] = {
    "seconds": format_seconds,
    "tokens_per_second": format_rate,
    "peak_memory": format_bytes,
    "cache_bytes": format_bytes,
    "flops": format_flops,
}


@dataclass(frozen=True)
class Quality:
    """A score of one row: mean and sample standard deviation over seeds or checkpoints (None for one)."""

    mean: float
    std: float | None
    stderr: float | None
    values: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """A mechanism's score beside that of a model with exact attention.

    `share` is the share of the reference's score that is kept, in (0, 1]; None where it is not defined, or where the
    mechanism is better than the reference.
    """

    score: Score
    own: Quality
    reference: Quality
    control: bool  # whether the reference is the tuned exact model, and not the exact model itself
    further: bool  # whether all weights of the mechanism's model were trained further, and those of the reference not
    share: float | None
    assessment: Assessment


@dataclass(frozen=True)
class Conclusion:
    """One sentence about a mechanism. `worthwhile` is True, False, or None where the data do not decide."""

    label: str
    sentence: str
    worthwhile: bool | None


@dataclass
class Evaluation:
    """What an evaluation measured.

    Attributes:
        table: Tidy records: one row per value (see `evaluation.records`).
        info: What was evaluated, on which data, with which settings, on which machine.
        records: The records of this evaluation, and perhaps of others in the same folder.
    """

    table: pandas.DataFrame
    info: dict[str, Any] = field(default_factory=dict)
    records: Records | None = field(default=None, repr=False)

    # ---------------------------------------------------------------------------------------------- parts

    @property
    def scores(self) -> list[Score]:
        """The scores of the models, the most important first."""
        return [Score(**entry) for entry in self.info["scores"]]

    @property
    def labels(self) -> list[str]:
        """The rows of the summary: the exact model, tuned exact models, mechanisms, the model without attention."""
        return self.info["labels"]

    @property
    def mechanisms(self) -> list[str]:
        """The rows of linear attention."""
        return [label for label in self.labels if label in self.info["mechanisms"]]

    @property
    def length(self) -> int | None:
        """The measured length that is nearest to the user's own."""
        return self._nearest(FORWARD, 1) or None

    @cached_property
    def throughput_batch_size(self) -> int:
        """The largest number of sequences that were timed at once."""
        sizes = self.table.loc[self.table["measurement"].isin((FORWARD, DECODING)), "batch_size"]
        return int(sizes.max()) if len(sizes) else 1

    @cached_property
    def _rows(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """The rows of each measurement and metric as dicts: looking up values one by one is slow in pandas."""
        rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in self.table.to_dict("records"):
            rows.setdefault((row["measurement"], row["metric"]), []).append(row)
        return rows

    def _find(self, measurement: str, metric: str, **columns: Any) -> list[dict[str, Any]]:
        rows = self._rows.get((measurement, metric), ())
        return [row for row in rows if all(row[name] == expected for name, expected in columns.items())]

    def lengths(self, measurement: str, batch_size: int = 1) -> list[int]:
        """Return the lengths at which something was timed for all rows."""
        counts = Counter(int(row["length"]) for row in self._find(measurement, "seconds", batch_size=batch_size))
        return sorted(length for length, count in counts.items() if count == max(counts.values()))

    def select(self, measurement: str, metric: str, **columns: Any) -> pandas.DataFrame:
        """Return the rows of a metric with these columns."""
        rows = self.table[(self.table["measurement"] == measurement) & (self.table["metric"] == metric)]
        for name, expected in columns.items():
            rows = rows[rows[name] == expected]
        return rows

    def value(self, measurement: str, metric: str, *, column: str = "value", **columns: Any) -> float | None:
        """Return the only value of a metric with these columns, the mean of several, or None."""
        return _mean(row.get(column) for row in self._find(measurement, metric, **columns))

    def quality(self, score: Score, label: str, *, before: bool = False) -> Quality | None:
        """Return a score of a row.

        Args:
            score: Which score.
            label: Which row.
            before: The mechanism as patched, before attention transfer; None where there was no transfer.
        """
        rows = self._states(score.measurement, score.metric, label, before, task=score.task)
        values = tuple(row["value"] for row in rows if _is_number(row["value"]))
        if not values:
            return None
        std = stdev(values) if len(values) > 1 else None
        return Quality(fmean(values), std, _mean(row.get("stderr") for row in rows), values)

    def _states(
        self, measurement: str, metric: str, label: str, before: bool = False, **columns: Any
    ) -> list[dict[str, Any]]:
        """The rows before attention transfer, or those after it; without a transfer, all are after it."""
        rows = self._find(measurement, metric, label=label, **columns)
        if any(row["state"] == "transferred" for row in rows):
            return [row for row in rows if row["state"] == ("untrained" if before else "transferred")]
        return [] if before else rows

    def crossover(self, label: str, measurement: str = FORWARD) -> Crossover | None:
        """Return the length from which a mechanism is faster than the exact model."""
        speedups = {length: self.speedup(label, length, measurement) for length in self.lengths(measurement)}
        known = {length: speedup for length, speedup in speedups.items() if speedup is not None}
        return crossover(list(known), list(known.values())) if known else None

    def speedup(self, label: str, length: int, measurement: str = FORWARD, batch_size: int = 1) -> float | None:
        """Return the time of the exact model divided by this one's; both were timed side by side."""
        columns: dict[str, Any] = {"label": label, "length": length, "batch_size": batch_size}
        return self.value(measurement, "seconds", column="speedup", **columns)

    # ---------------------------------------------------------------------------------------------- comparisons

    def compare(self, label: str, score: Score) -> Comparison | None:
        """Compare a row's score with that of exact attention, and with that of the model without attention.

        A converted checkpoint is compared with the tuned exact model where there is one: both were trained alike.
        """
        converted = label in [group["label"] for group in self.info["checkpoints"]]
        controls = [name for name in self.labels if name not in (EXACT_LABEL, WITHOUT_ATTENTION, *self.mechanisms)]
        tuned = [one for name in controls if converted and name != label and (one := self.quality(score, name))]
        own, reference = self.quality(score, label), tuned[0] if tuned else self.quality(score, EXACT_LABEL)
        if own is None or reference is None:
            return None
        result = self._assess(score, label, reference)
        if converted:  # training moves the outputs, too
            result = replace(result, chance=False)
        defined = result.valid and min(own.mean, reference.mean) > 0 and (result.worse or own.mean == reference.mean)
        share = _share(score, own.mean, reference.mean) if defined else None
        return Comparison(score, own, reference, bool(tuned), converted and not tuned, share, result)

    def _assess(self, score: Score, label: str, reference: Quality | None) -> Assessment:
        """Apply the rule that `plan` shares; a classifier must be better than one that always gives one answer, too."""
        own, floor = self.quality(score, label), self.quality(score, WITHOUT_ATTENTION)
        divergences = [
            _mean(row["value"] for row in self._states(score.measurement, "divergence", name, task=score.task))
            for name in (label, WITHOUT_ATTENTION)
        ]
        constant = self._constant_score(score)
        known = [row.stderr or 0.0 for row in (reference, floor) if row]
        rule: dict[str, Any] = {"higher_is_better": score.higher_is_better, "stderr": math.hypot(*known)}
        means = [None if row is None else row.mean for row in (own, reference, floor)]
        result = assess(*means, **rule, divergence=divergences[0], floor_divergence=divergences[1])
        if constant is None or assess(means[0], means[1], constant, **rule).valid:
            return result
        return replace(result, valid=False, below_floor=False)

    def _constant_score(self, score: Score) -> float | None:
        """The score of always giving the most frequent answer of a labelled task."""
        return self.value(score.measurement, "most_frequent_answer", label=EXACT_LABEL, task=score.task)

    def mean_share(self, label: str) -> tuple[float, float | None] | None:
        """Return the mean over the labelled tasks of the share that is kept, and its spread over seeds.

        A score above the reference's counts as 100 %. The result is None with fewer than two tasks, or where one of
        them cannot judge attention.
        """
        scores = [score for score in self.scores if score.measurement == "task"]
        known = [one for score in scores if (one := self.compare(label, score)) and one.assessment.valid]
        if len(scores) < 2 or len(known) < len(scores):
            return None
        same = len({len(one.own.values) for one in known}) == 1
        runs = zip(*(one.own.values if same else (one.own.mean,) for one in known), strict=True)
        means = [
            fmean(_share(one.score, own, one.reference.mean) for one, own in zip(known, run, strict=True))
            for run in runs
        ]
        return fmean(means), stdev(means) if len(means) > 1 else None

    def conclusions(self) -> list[Conclusion]:
        """Return one sentence per mechanism: its speed at the user's length, and what it keeps of the quality."""
        return [self._conclusion(label) for label in self.mechanisms]

    def _conclusion(self, label: str) -> Conclusion:
        speedup = None if self.length is None else self.speedup(label, self.length)
        parts = [] if speedup is None else [f"{_speed_text(speedup)} at {self.length:,} tokens"]
        comparisons = [one for score in self.scores if (one := self.compare(label, score)) is not None]
        parts += [_quality_text(one) for one in comparisons]
        mean = self.mean_share(label)
        if mean is not None:
            spread = "" if mean[1] is None else f" ± {100 * mean[1]:.1f}"
            parts.append(f"keeps {100 * mean[0]:.1f}{spread} % on average over the tasks")
        longest = self.longest_quality_input()
        worthwhile = _worthwhile(speedup, comparisons[0] if comparisons else None)
        error = self._overall("output_error", label)
        if error is not None and error < EXACT_ERROR:
            parts.append(f"exact here only because inputs of at most {longest:,} tokens fit its window or block")
            worthwhile = None
        elif self.length is not None and longest < SHORT_SHARE * self.length and worthwhile is not False:
            parts.append(f"quality was measured on inputs of at most {longest:,} tokens only")
            worthwhile = None
        return Conclusion(label, f"{'; '.join(parts)}.", worthwhile)

    def longest_quality_input(self) -> int:
        """Return the tokens of the longest input that the first score was measured on."""
        measured = self.value(self.scores[0].measurement, "longest_input", label=EXACT_LABEL)
        return int(measured or self.info["data"].get("held_out", {}).get("longest", 0))

    def warnings(self) -> list[str]:
        """Return what limits the conclusions: data that cannot judge attention, noisy times, another precision."""
        lines = [line for score in self.scores if (line := self._validity_text(score))]
        exact = self.select(FORWARD, "seconds", label=EXACT_LABEL, batch_size=1)
        spread = float((exact["p80"] / exact["p20"]).max()) if len(exact) else 1.0
        hardware = self.info["environment"]["hardware"]
        load, processors = hardware["load_average_at_start"] or 0.0, hardware["logical_cpus"] or 1
        if spread > NOISY:
            lines.append(f"The times are noisy: the exact model's vary by a factor of {spread:.1f} (p20 to p80).")
        if load > 0.75 * processors:
            lines.append(f"The machine was busy: {load:.1f} processes were running on {processors} CPUs at the start.")
        timed, own = self.info["settings"]["dtype"], self.info["model"]["dtype"]
        if timed != own:
            lines.append(f"Times are those of {timed}; quality was measured in {own}.")
        return [*lines, *self.info["notes"]]

    def _validity_text(self, score: Score) -> str:
        """Why a score cannot judge attention, or an empty string."""
        exact, floor = self.quality(score, EXACT_LABEL), self.quality(score, WITHOUT_ATTENTION)
        if exact is None or floor is None or self._assess(score, EXACT_LABEL, exact).valid:
            return ""
        other = f"without attention ({_show(score, floor.mean)})"
        constant, sign = self._constant_score(score), 1 if score.higher_is_better else -1
        if constant is not None and sign * (constant - floor.mean) >= 0:
            other = f"always giving the most frequent answer ({_show(score, constant)})"
        return (
            f"{score.title}: these data cannot judge attention: the exact model ({_show(score, exact.mean)}) is not "
            f"clearly better than {other}. No verdict is given."
        )

    # ---------------------------------------------------------------------------------------------- summary

    def summary(self) -> pandas.DataFrame:
        """Return the table that a report starts with: one row per mechanism, values as text.

        `a → b` is before and after attention transfer; `±` the standard deviation over seeds. Speeds are times as fast
        as the exact model, whose row has times.
        """
        import pandas

        rows = {label: self._summary_row(label) for label in self.labels}
        frame = pandas.DataFrame.from_dict(rows, orient="index").fillna("–")
        frame.index.name = "attention"
        return frame.loc[:, (frame != "–").any()]

    def _summary_row(self, label: str) -> dict[str, str]:
        row: dict[str, str] = {}
        for score in self.scores:
            before, after = self.quality(score, label, before=True), self.quality(score, label)
            if after is not None:
                spread = "" if after.std is None else f" ± {fixed(after.std, score.digits)}"
                start = "" if before is None else f"{_show(score, before.mean)} → "
                row[score.title] = f"{start}{_show(score, after.mean)}{spread}"
            row[f"{score.title} {'kept' if score.higher_is_better else 'change'}"] = self._share_text(label, score)
        mean = self.mean_share(label) if label in self.mechanisms else None
        if mean is not None:
            row["mean over tasks"] = f"{mean[0]:.1%}" + ("" if mean[1] is None else f" ± {mean[1]:.1%}")
        for metric, title in (("kl", "KL, nats"), ("output_error", "output error")):
            before_text, text = (_text(self._overall(metric, label, first), "{:.2f}".format) for first in (True, False))
            row[title] = text if before_text == "–" else f"{before_text} → {text}"
        row["learned parameters"] = _text(self.value("parameters", "learned_parameters", label=label), "{:,.0f}".format)
        return {**row, **self._speed_row(label)}

    def _share_text(self, label: str, score: Score) -> str:
        comparison = self.compare(label, score) if label != EXACT_LABEL and not score.agreement else None
        if comparison is None or not comparison.assessment.valid:
            return "–"
        if comparison.share is None:
            return "better than the control" if comparison.control else "better than exact"
        return f"{comparison.share:.1%}" if score.higher_is_better else f"{1 / comparison.share - 1:+.1%}"

    def _overall(self, metric: str, label: str, before: bool = False) -> float | None:
        """A metric of fidelity, over all layers and heads."""
        rows = self._states("fidelity", metric, label, before)
        return _mean(row["value"] for row in rows if not _is_number(row["layer"]))

    def _speed_row(self, label: str) -> dict[str, str]:
        own, size = self.length, self.throughput_batch_size
        shown = [("at", FORWARD, "seconds", length, 1) for length in lengths_to_show(self.lengths(FORWARD), own)]
        shown.append(("memory at", FORWARD, "peak_memory", own or 0, 1))
        if size > 1:
            titles = {FORWARD: f"tokens/s, {size} ×", TRAINING: f"training tokens/s, {size} ×"}
            shown += [
                (title, one, "tokens_per_second", self._nearest(one, size), size) for one, title in titles.items()
            ]
        shown += [(f"{one} at", one, "seconds", self._nearest(one, 1), 1) for one in (TRAINING, PREFILL, DECODING)]
        shown.append(("cache at", DECODING, "cache_bytes", self._nearest(DECODING, 1), 1))
        row: dict[str, str] = {}
        for title, measurement, metric, length, batch_size in shown:
            if title == "memory at":
                row["faster from"] = self.crossover_text(label)
            if metric == "seconds" and label != EXACT_LABEL:
                text = _text(self.speedup(label, length, measurement), "{:.2f}×".format)
            else:
                text = self.text(label, measurement, metric, length, batch_size)
            row[f"{title} {length:,}"] = text
        return row

    def text(self, label: str, measurement: str, metric: str, length: int, batch_size: int = 1) -> str:
        """Return a measured value with its unit, or a dash."""
        return _text(
            self.value(measurement, metric, label=label, length=length, batch_size=batch_size), FORMATS[metric]
        )

    def crossover_text(self, label: str) -> str:
        """Return the length from which a mechanism is faster as text, or a dash."""
        change = self.crossover(label) if label in self.mechanisms else None
        return "–" if change is None else str(change)

    def _nearest(self, measurement: str, batch_size: int) -> int:
        """The measured length that is nearest to the user's own; without one, the longest; 0: nothing was measured."""
        lengths, own = self.lengths(measurement, batch_size), self.info["settings"]["length"]
        return min(lengths, key=lambda length: abs(length - (own or lengths[-1])), default=0)

    # ---------------------------------------------------------------------------------------------- files

    def report(self, folder: str | Path) -> Path:
        """Write `report.html` with its plots and `report.md` to a folder; return the path of the page.

        Raises:
            ImportError: matplotlib, jinja2 or tabulate is missing.
        """
        from .report import write_report

        return write_report(self, Path(folder))

    def save(self, folder: str | Path) -> None:
        """Write the records (which replace others in the folder), the tidy table as CSV, and `evaluation.json`."""
        path = Path(folder)
        if self.records is not None and self.records.path is None:
            self.records.save(path / RECORDS_FILE)
        atomic_write(path / TABLE_FILE, self.table.dropna(axis=1, how="all").to_csv(index=False))
        text = json.dumps(json_safe(self.info), indent=1, ensure_ascii=False, allow_nan=False)
        atomic_write(path / EVALUATION_FILE, f"{text}\n")

    @classmethod
    def load(cls, folder: str | Path) -> Evaluation:
        """Read what `save` wrote.

        Raises:
            OSError, ValueError: The folder has no evaluation, or its records are damaged.
        """
        path = Path(folder)
        if not (path / EVALUATION_FILE).is_file():
            raise FileNotFoundError(f"{str(folder)!r} has no {EVALUATION_FILE}. Give the output of an evaluation.")
        info = json.loads((path / EVALUATION_FILE).read_text(encoding="utf-8"))
        records = Records(path / RECORDS_FILE)
        table = records.to_frame()
        return cls(table[table["id"].isin(info["records"])].reset_index(drop=True), info, records)

    def _repr_html_(self) -> str:
        """Show the summary in a notebook."""
        return self.summary().to_html()


def _share(score: Score, own: float, reference: float) -> float:
    """The share of the reference's score that a score keeps, at most 1."""
    return min(1.0, own / reference if score.higher_is_better else reference / own)


def _speed_text(speedup: float) -> str:
    if speedup >= FASTER:
        return f"{speedup:.1f}× faster" if speedup >= 1.15 else f"{speedup:.2f}× faster"
    return "as fast as exact attention" if speedup >= EQUAL else f"slower ({speedup:.2f}×)"


def _quality_text(comparison: Comparison) -> str:
    """What a mechanism keeps of one score: first beside exact attention, then beside no attention."""
    score = comparison.score
    own, exact = _show(score, comparison.own.mean), _show(score, comparison.reference.mean)
    spread = "" if comparison.own.std is None else f" ± {fixed(comparison.own.std, score.digits)}"
    name = "the equally trained exact model" if comparison.control else "the exact model"
    if not comparison.assessment.valid:
        return f"{score.title} {own}{spread} ({name}: {exact}), without a verdict"
    if score.agreement:
        text = f"{score.title} {own}{spread}"
    elif comparison.share is None:
        text = f"{score.title} {own}{spread}, better than {name} ({exact})"
        text += ", which was not trained further" if comparison.further else ""
        text += ", although its outputs differ largely: that is chance" if comparison.assessment.chance else ""
    elif score.higher_is_better:
        text = f"{score.title} {own}{spread}, {100 * comparison.share:.1f} % of {name} ({exact})"
    else:
        text = f"{score.title} {own}{spread}, {1 / comparison.share - 1:+.1%} against {name} ({exact})"
    return f"{text}, worse than without attention" if comparison.assessment.below_floor else text


def _worthwhile(speedup: float | None, comparison: Comparison | None) -> bool | None:
    """Whether a mechanism is faster and keeps the quality; None where the data do not decide, or it loses a little."""
    if speedup is not None and speedup < FASTER:
        return False
    if comparison is None or not comparison.assessment.valid or speedup is None or comparison.assessment.chance:
        return None
    if comparison.assessment.below_floor:
        return False
    share = 1.0 if comparison.share is None else comparison.share
    return True if share >= KEEPS else None if share >= LOSES_LITTLE else False


def _show(score: Score, number: float) -> str:
    return fixed(number, score.digits)


def _text(number: float | None, form: Callable[[float], str]) -> str:
    return "–" if number is None else form(number)


def _is_number(value: Any) -> bool:
    """Whether a cell of the table has a value: pandas marks missing ones by NaN or None."""
    return isinstance(value, (int, float)) and not math.isnan(value)


def _mean(values: Iterable[Any]) -> float | None:
    numbers = [float(value) for value in values if _is_number(value)]
    return fmean(numbers) if numbers else None
