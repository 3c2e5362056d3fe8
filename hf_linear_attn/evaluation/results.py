"""The result of an evaluation: its tidy table, a summary with one row per mechanism, and what follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.environment import json_safe
from ..utils.files import atomic_write
from ..utils.formatting import fixed, format_bytes, format_rate, format_seconds
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


@dataclass(frozen=True)
class Quality:
    """A score of one row: mean and sample standard deviation over seeds or checkpoints (None for one)."""

    mean: float
    std: float | None
    stderr: float | None
    values: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """A mechanism's score beside that of the exact model.

    Attributes:
        score: Which score.
        own: The mechanism's.
        exact: The exact model's.
        floor: The score of the model without attention.
        share: Share of the exact model's score that is kept, in (0, 1]; None where it is not defined, or where the
            mechanism is better than the exact model.
        valid, below_floor, chance: As in `metrics.Assessment`.
    """

    score: Score
    own: Quality
    exact: Quality
    floor: Quality | None
    share: float | None
    valid: bool
    below_floor: bool
    chance: bool


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
        """The rows of the summary: the exact model, baselines, mechanisms, the model without attention."""
        return self.info["labels"]

    @property
    def mechanisms(self) -> list[str]:
        """The rows of linear attention."""
        return [label for label in self.labels if label in self.info["mechanisms"]]

    @property
    def length(self) -> int | None:
        """The measured length that is nearest to the user's own."""
        lengths, own = self.lengths(FORWARD), self.info["settings"]["length"]
        if not lengths:
            return None
        return lengths[-1] if own is None else min(lengths, key=lambda length: abs(length - own))

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

    def lengths(self, measurement: str, batch_size: int = 1) -> list[int]:
        """Return the lengths at which something was timed for all rows."""
        counts: dict[int, int] = {}
        for row in self._rows.get((measurement, "seconds"), ()):
            if row["batch_size"] == batch_size:
                counts[int(row["length"])] = counts.get(int(row["length"]), 0) + 1
        return sorted(length for length, count in counts.items() if count == max(counts.values()))

    def select(self, measurement: str, metric: str, **columns: Any) -> pandas.DataFrame:
        """Return the rows of a metric with these columns."""
        rows = self.table[(self.table["measurement"] == measurement) & (self.table["metric"] == metric)]
        for name, expected in columns.items():
            rows = rows[rows[name] == expected]
        return rows

    def value(self, measurement: str, metric: str, *, column: str = "value", **columns: Any) -> float | None:
        """Return the only value of a metric with these columns, the mean of several, or None."""
        rows = self._rows.get((measurement, metric), ())
        rows = [row for row in rows if all(row[name] == expected for name, expected in columns.items())]
        return _mean([row.get(column) for row in rows])

    def quality(self, score: Score, label: str, *, before: bool = False) -> Quality | None:
        """Return a score of a row.

        Args:
            score: Which score.
            label: Which row.
            before: The mechanism as patched, before attention transfer; None where there was no transfer.
        """
        rows = self._states(score.measurement, score.metric, label, before, task=score.task)
        values = [row["value"] for row in rows if _is_number(row["value"])]
        if not values:
            return None
        std = _std(values) if len(values) > 1 else None
        stderr = _mean([row.get("stderr") for row in rows])
        return Quality(sum(values) / len(values), std, stderr, tuple(values))

    def _states(self, measurement: str, metric: str, label: str, before: bool, **columns: Any) -> list[dict[str, Any]]:
        """The rows before attention transfer, or those after it; without a transfer, all are after it."""
        rows = self._rows.get((measurement, metric), ())
        rows = [row for row in rows if row["label"] == label and all(row[name] == columns[name] for name in columns)]
        if any(row["state"] == "transferred" for row in rows):
            return [row for row in rows if row["state"] == ("untrained" if before else "transferred")]
        return [] if before else rows

    def crossover(self, label: str, measurement: str = FORWARD) -> Crossover | None:
        """Return the length from which a mechanism is faster than the exact model."""
        lengths = self.lengths(measurement)
        speedups = [self.speedup(label, length, measurement) for length in lengths]
        known = [(length, speedup) for length, speedup in zip(lengths, speedups, strict=True) if speedup is not None]
        return crossover(*zip(*known, strict=True)) if known else None

    def speedup(self, label: str, length: int, measurement: str = FORWARD, batch_size: int = 1) -> float | None:
        """Return the time of the exact model divided by this one's; both were timed side by side."""
        columns: dict[str, Any] = {"label": label, "length": length, "batch_size": batch_size}
        return self.value(measurement, "seconds", column="speedup", **columns)

    # ---------------------------------------------------------------------------------------------- comparisons

    def compare(self, label: str, score: Score) -> Comparison | None:
        """Compare a row's score with the exact model's, and with that of the model without attention."""
        own, exact = self.quality(score, label), self.quality(score, EXACT_LABEL)
        if own is None or exact is None:
            return None
        result = self._assess(score, label)
        share = None
        if result.valid and min(own.mean, exact.mean) > 0 and (result.worse or own.mean == exact.mean):
            share = own.mean / exact.mean if score.higher_is_better else exact.mean / own.mean
        floor = self.quality(score, WITHOUT_ATTENTION)
        return Comparison(score, own, exact, floor, share, result.valid, result.below_floor, result.chance)

    def _assess(self, score: Score, label: str) -> Assessment:
        """Apply the rule that `plan` shares."""
        own, exact, floor = (self.quality(score, name) for name in (label, EXACT_LABEL, WITHOUT_ATTENTION))
        divergences = [
            _mean([row["value"] for row in self._states(score.measurement, "divergence", name, False, task=score.task)])
            for name in (label, WITHOUT_ATTENTION)
        ]
        return assess(
            *(row and row.mean for row in (own, exact, floor)),
            higher_is_better=score.higher_is_better,
            stderr=math.hypot(*(row.stderr or 0.0 for row in (exact, floor) if row)),
            divergence=divergences[0],
            floor_divergence=divergences[1],
        )

    def mean_share(self, label: str) -> tuple[float, float | None] | None:
        """Return the mean over the labelled tasks of the share that is kept, and its spread over seeds.

        A score above the exact model's counts as 100 %. The result is None with fewer than two tasks, or where one of
        them cannot judge attention.
        """
        scores = [score for score in self.scores if score.measurement == "task"]
        comparisons = [self.compare(label, score) for score in scores]
        if len(scores) < 2 or any(one is None or not one.valid for one in comparisons):
            return None
        known = [one for one in comparisons if one is not None]
        shares = [_retained_share(one, one.own.mean) for one in known]
        runs = list(zip(*(one.own.values for one in known), strict=False))
        means = [sum(map(_retained_share, known, run)) / len(run) for run in runs]
        same = len({len(one.own.values) for one in known}) == 1 and len(means) > 1
        return sum(shares) / len(shares), _std(means) if same else None

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
        first = self.scores[0]
        measured = self.value(first.measurement, "longest_input", label=EXACT_LABEL)
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
        exact, floor = self.quality(score, EXACT_LABEL), self.quality(score, WITHOUT_ATTENTION)
        if exact is None or floor is None or self._assess(score, EXACT_LABEL).valid:
            return ""
        return (
            f"{score.title}: the data cannot judge attention, because the model without attention scores "
            f"{_show(score, floor.mean)} against {_show(score, exact.mean)} of the exact one."
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
            row[f"{score.title} kept"] = self._share_text(label, score)
        mean = self.mean_share(label) if label in self.mechanisms else None
        row["mean over tasks"] = (
            "–" if mean is None else f"{mean[0]:.1%}" + ("" if mean[1] is None else f" ± {mean[1]:.1%}")
        )
        for metric, title, digits in (("kl", "KL, nats", 2), ("output_error", "output error", 2)):
            row[title] = self._change_text(metric, label, digits)
        parameters = self.value("parameters", "learned_parameters", label=label)
        row["learned parameters"] = "–" if parameters is None else f"{parameters:,.0f}"
        return {**row, **self._speed_row(label)}

    def _share_text(self, label: str, score: Score) -> str:
        comparison = self.compare(label, score) if label != EXACT_LABEL and not score.agreement else None
        if comparison is None or not comparison.valid:
            return "–"
        if comparison.share is None:
            return "above exact"
        return f"{comparison.share:.1%}" if score.higher_is_better else f"{1 / comparison.share - 1:+.1%}"

    def _overall(self, metric: str, label: str, *, before: bool = False) -> float | None:
        """A metric of fidelity, over all layers and heads."""
        rows = self._states("fidelity", metric, label, before)
        return _mean([row["value"] for row in rows if not _is_number(row["layer"])])

    def _change_text(self, metric: str, label: str, digits: int) -> str:
        before, after = self._overall(metric, label, before=True), self._overall(metric, label)
        if after is None:
            return "–"
        return fixed(after, digits) if before is None else f"{fixed(before, digits)} → {fixed(after, digits)}"

    def _speed_row(self, label: str) -> dict[str, str]:
        row: dict[str, str] = {}
        own = self.length
        for length in lengths_to_show(self.lengths(FORWARD), own):
            row[f"at {length:,}"] = self._time_text(label, FORWARD, length)
        change = self.crossover(label) if label in self.mechanisms else None
        row["faster from"] = "–" if change is None else str(change)
        memory = None if own is None else self.value(FORWARD, "peak_memory", label=label, length=own, batch_size=1)
        if own is not None:
            row[f"memory at {own:,}"] = "–" if memory is None else format_bytes(memory)
        size = self.throughput_batch_size
        for measurement, title in ((FORWARD, "tokens/s"), (TRAINING, "training tokens/s")):
            nearest = self._nearest(measurement, size) if size > 1 else None
            rate = (
                None
                if nearest is None
                else self.value(measurement, "tokens_per_second", label=label, length=nearest, batch_size=size)
            )
            if rate is not None:
                row[f"{title}, {size} × {nearest:,}"] = format_rate(rate)
        for measurement in (TRAINING, PREFILL, DECODING):
            nearest = self._nearest(measurement, 1)
            if nearest is not None:
                row[f"{measurement} at {nearest:,}"] = self._time_text(label, measurement, nearest)
        context = self._nearest(DECODING, 1)
        if context is not None:
            cache = self.value(DECODING, "cache_bytes", label=label, length=context, batch_size=1)
            row[f"cache at {context:,}"] = "–" if cache is None else format_bytes(cache)
        return row

    def _nearest(self, measurement: str, batch_size: int) -> int | None:
        lengths = self.lengths(measurement, batch_size)
        return min(lengths, key=lambda length: abs(length - (self.length or length))) if lengths else None

    def _time_text(self, label: str, measurement: str, length: int) -> str:
        columns: dict[str, Any] = {"label": label, "length": length, "batch_size": 1}
        if label == EXACT_LABEL:
            seconds = self.value(measurement, "seconds", **columns)
            return "–" if seconds is None else format_seconds(seconds)
        speedup = self.value(measurement, "seconds", column="speedup", **columns)
        return "–" if speedup is None else f"{speedup:.2f}×"

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


def _retained_share(comparison: Comparison, own: float) -> float:
    """The share of the exact model's score that a score keeps, at most 1."""
    exact = comparison.exact.mean
    return min(1.0, own / exact if comparison.score.higher_is_better else exact / own)


def _speed_text(speedup: float) -> str:
    if speedup >= FASTER:
        return f"{speedup:.1f}× faster" if speedup >= 1.15 else f"{speedup:.2f}× faster"
    return "as fast as exact attention" if speedup >= EQUAL else f"slower ({speedup:.2f}×)"


def _quality_text(comparison: Comparison) -> str:
    """What a mechanism keeps of one score: first beside the exact model, then beside no attention."""
    score = comparison.score
    own, exact = _show(score, comparison.own.mean), _show(score, comparison.exact.mean)
    spread = "" if comparison.own.std is None else f" ± {fixed(comparison.own.std, score.digits)}"
    if not comparison.valid:
        return f"{score.title} {own}{spread} against {exact}, which these data cannot relate to attention"
    if score.agreement:
        text = f"{score.title} {own}{spread}"
    elif comparison.share is None:
        text = f"{score.title} {own}{spread}, better than the exact model's {exact}"
        text += ", although its outputs differ largely: that is chance" if comparison.chance else ""
    elif score.higher_is_better:
        text = f"keeps {100 * comparison.share:.1f} % of {score.title} ({own}{spread} against {exact})"
    else:
        text = f"{score.title} {own}{spread} against {exact} ({1 / comparison.share - 1:+.1%})"
    return f"{text}, worse than without attention" if comparison.below_floor else text


def _worthwhile(speedup: float | None, comparison: Comparison | None) -> bool | None:
    """Whether a mechanism is faster and keeps the quality; None where the data do not decide, or at a price."""
    if speedup is not None and speedup < FASTER:
        return False
    if comparison is None or not comparison.valid or speedup is None:
        return None
    if comparison.chance:
        return None
    if comparison.below_floor:
        return False
    share = 1.0 if comparison.share is None else comparison.share
    return True if share >= KEEPS else None if share >= LOSES_LITTLE else False


def _show(score: Score | Mapping[str, Any], number: float) -> str:
    return fixed(number, score.digits if isinstance(score, Score) else score["digits"])


def _is_number(value: Any) -> bool:
    """Whether a cell of the table has a value: pandas marks missing ones by NaN or None."""
    return isinstance(value, (int, float)) and not math.isnan(value)


def _mean(values: list[Any]) -> float | None:
    numbers = [float(value) for value in values if _is_number(value)]
    return sum(numbers) / len(numbers) if numbers else None


def _std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
