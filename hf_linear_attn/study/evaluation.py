"""The result of an evaluation: every number, a summary with one row per mechanism, and what follows from it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from ..measure.assessment import assess
from ..measure.metric import Score, is_shown
from ..measure.speed import DECODING, FORMATS, FORWARD, NOT_MEASURABLE, TRAINING
from ..utils.environment import json_safe
from ..utils.files import write_json
from ..utils.formatting import fixed
from ..utils.timing import EQUAL, FASTER, Crossover, crossover, is_measurable
from .comparison import Comparison, Quality
from .study import Record, defaults_of
from .variants import EXACT_LABEL, LINEAR_STATES, STATES, WITHOUT_ATTENTION

EVALUATION_FILE = "evaluation.json"

#: The format of that file.
FORMAT_VERSION = 2

#: Shares of the exact model's score from which a mechanism counts as keeping it, and as losing a little.
KEEPS, LOSES_LITTLE = 0.98, 0.9

#: Quality on inputs shorter than this share of the longest timed ones says little about these.
SHORT_SHARE = 0.5

#: Numbers that say how near a mechanism is to its own exact attention.
FIDELITY = (
    Score("fidelity", "kl", "KL, nats", greater_is_better=False, digits=2),
    Score("fidelity", "output_error", "output error", greater_is_better=False, digits=2),
)


@dataclass(frozen=True)
class Conclusion:
    """One sentence about a mechanism. `worthwhile` is True, False, or None where the data do not decide."""

    label: str
    sentence: str
    worthwhile: bool | None


@dataclass(frozen=True)
class Measured:
    """The numbers of one measurement of one variant."""

    label: str  # the row of the summary
    attention: str
    state: str  # one of `variants.STATES`; empty for times, which do not depend on it
    measurement: str
    values: Mapping[str, Any]
    seed: int | None = None
    length: int | None = None  # of times
    batch_size: int | None = None

    @classmethod
    def of(cls, record: Record, label: str) -> Measured:
        """Return what a record holds of a metric, for a row of the summary."""
        names = ("attention", "state", "measurement", "seed")
        return cls(label, values=record.numbers, **{name: record.conditions[name] for name in names})

    @classmethod
    def of_times(cls, record: Record) -> list[Measured]:
        """Return what a record holds of the times of all variants."""
        conditions = record.conditions
        sizes = {name: conditions[name] for name in ("measurement", "length", "batch_size")}
        attentions = {label: options["attention"] for label, options in conditions["options"].items()}
        return [cls(label, attentions[label], "", values=values, **sizes) for label, values in record.numbers.items()]


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What an evaluation measured.

    Attributes:
        model, data, settings, environment, backend: What was evaluated, on which data, how, on which machine.
        scores: The numbers that stand for the quality, the most important first.
        measured: Every measurement.
        checkpoints: The folders of each row of converted or tuned checkpoints.
        notes: What was left out, and why.
        examples: Tables for a person to read, by their titles, as columns.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    backend: str
    scores: tuple[Score, ...]
    measured: tuple[Measured, ...]
    checkpoints: Mapping[str, list[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    examples: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    seconds: float = 0.0

    @cached_property
    def states(self) -> dict[str, str]:
        """The rows of the summary and what was done to their models: exact, tuned, mechanisms, without attention."""
        last = {entry.label: entry.state for entry in self.measured if entry.state}
        return dict(sorted(last.items(), key=lambda row: STATES.index(row[1])))

    @property
    def labels(self) -> list[str]:
        """The rows of the summary."""
        return list(self.states)

    @property
    def mechanisms(self) -> list[str]:
        """The rows of linear attention."""
        return [label for label, state in self.states.items() if state in LINEAR_STATES]

    @property
    def table(self) -> pd.DataFrame:
        """Every number: one row for each measurement of a variant."""
        rows = []
        for entry in self.measured:
            row = asdict(entry)
            rows.append({**row, **row.pop("values")})
        return pd.DataFrame(rows)

    def select(self, measurement: str, label: str, *, before: bool = False) -> list[Mapping[str, Any]]:
        """Return the numbers of a metric, by seed or checkpoint; `before` an attention transfer, if there was one."""
        state = self.states.get(label)
        expected = "untrained" if before else state
        if before and state != "transferred":
            return []
        return [
            entry.values
            for entry in self.measured
            if (entry.measurement, entry.label, entry.state) == (measurement, label, expected)
        ]

    def quality(self, score: Score, label: str, *, before: bool = False) -> Quality | None:
        """Return a score of a row (see `select`); None where it was not measured or is no number."""
        rows = self.select(score.measurement, label, before=before)
        rows = [values for values in rows if values.get(score.metric) is not None]
        if not rows:
            return None
        numbers = tuple(float(values[score.metric]) for values in rows)
        errors = [values.get(f"{score.metric}_stderr") for values in rows]
        stderr = None if None in errors else fmean(error for error in errors if error is not None)
        return Quality(fmean(numbers), stdev(numbers) if len(numbers) > 1 else None, stderr, numbers)

    def times(self, measurement: str, label: str, batch_size: int = 1) -> dict[int, Mapping[str, Any]]:
        """Return the numbers of a timed measurement of a row by length."""
        key = (measurement, label, batch_size)
        return {
            int(entry.length): entry.values
            for entry in self.measured
            if entry.length is not None and (entry.measurement, entry.label, entry.batch_size) == key
        }

    def lengths(self, measurement: str, batch_size: int = 1) -> list[int]:
        """Return the lengths at which something was timed."""
        return sorted(self.times(measurement, EXACT_LABEL, batch_size))

    def nearest_length(self, measurement: str = FORWARD) -> int | None:
        """Return the timed length that is nearest to that of the inputs, `data.max_length`; else the longest one."""
        lengths = self.lengths(measurement)
        longest = self.settings["data"]["max_length"]
        if longest is None or not lengths:
            return max(lengths, default=None)
        return min(lengths, key=lambda length: abs(length - longest))

    @property
    def length(self) -> int | None:
        """The length that the summary and the conclusions are about."""
        return self.nearest_length()

    def speedup(self, label: str, length: int, measurement: str = FORWARD) -> float | None:
        """Return the time of the exact model divided by this one's; both were timed side by side."""
        return self.times(measurement, label).get(length, {}).get("speedup")

    def is_measurable(self, label: str, length: int, measurement: str = FORWARD) -> bool:
        """Return whether the spread of a speedup is narrower than its effect (see `utils.timing.is_measurable`)."""
        values = self.times(measurement, label).get(length)
        return values is None or is_measurable(values["speedup_p20"], values["speedup_p80"])

    def crossover(self, label: str) -> Crossover | None:
        """Return the length from which a mechanism is faster than the exact model, by what is measurable."""
        speedups = {
            length: values["speedup"]
            for length, values in sorted(self.times(FORWARD, label).items())
            if is_measurable(values["speedup_p20"], values["speedup_p80"])
        }
        return crossover(list(speedups), list(speedups.values())) if speedups else None

    def compare(self, label: str, score: Score) -> Comparison | None:
        """Compare a row's score with that of exact attention, and with that of the model without attention.

        A converted checkpoint is compared with the tuned exact model where there is one: both were trained alike.
        """
        converted = self.states[label] == "converted"
        controls = [name for name, state in self.states.items() if converted and state == "tuned"]
        tuned = self.quality(score, controls[0]) if controls else None
        value = self.quality(score, label)
        reference = tuned or self.quality(score, EXACT_LABEL)
        if value is None or reference is None:
            return None
        floor = self.quality(score, WITHOUT_ATTENTION)
        errors = [quality.stderr for quality in (reference, floor) if quality is not None]
        assessment = assess(
            value.mean,
            reference.mean,
            None if floor is None else floor.mean,
            greater_is_better=score.greater_is_better,
            constant_answer=score.constant_answer,
            stderr=math.hypot(*(error or 0.0 for error in errors)),
        )
        return Comparison(score, value, reference, tuned is not None, assessment)

    def conclusions(self) -> list[Conclusion]:
        """Return one sentence per mechanism: its speed at the length of interest, and what it keeps of the quality."""
        return [self._conclusion(label) for label in self.mechanisms]

    def _conclusion(self, label: str) -> Conclusion:
        parts, speedup = [], None
        if self.length is not None:
            speedup = self.speedup(label, self.length)
            measurable = self.is_measurable(label, self.length)
            parts += [] if speedup is None else [f"{_speed_text(speedup, measurable)} at {self.length:,} tokens"]
            speedup = speedup if measurable else None
        compared = [self.compare(label, score) for score in self.scores]
        comparisons = [comparison for comparison in compared if comparison is not None]
        worthwhile = _worthwhile(speedup, comparisons[0] if comparisons else None)
        if worthwhile is not False and self._quality_of_short_inputs():
            worthwhile = None
        sentence = ", ".join(parts + [comparison.text() for comparison in comparisons])
        return Conclusion(label, f"{sentence}.", worthwhile)

    def _quality_of_short_inputs(self) -> bool:
        return self.length is not None and self.longest_quality_input() < SHORT_SHARE * self.length

    def longest_quality_input(self) -> int:
        """Return the tokens of the longest input that the first score was measured on."""
        rows = self.select(self.scores[0].measurement, EXACT_LABEL)
        return int(rows[0]["longest_input"]) if rows else 0

    def warnings(self) -> list[str]:
        """Return what limits the conclusions: data that cannot measure attention, noisy times, another precision."""
        lines: list[str] = []
        for score, label in itertools.product(self.scores, self.mechanisms):
            comparison = self.compare(label, score)
            floor = None if comparison is None else comparison.assessment.floor
            if comparison is not None and floor is not None and not comparison.assessment.valid:
                assessment = comparison.assessment
                value = fixed(comparison.reference.mean, score.digits)
                lowest = fixed(floor, score.digits)
                reference = "the control" if comparison.control else "the exact model"
                problem = f"{reference} ({value}) is not clearly better than {assessment.floor_name} ({lowest})"
                lines.append(f"{score.title}: these data cannot measure attention: {problem}. No conclusion is drawn.")
            rows = self.select(score.measurement, label)
            lost = sum(values.get(score.metric) is None for values in rows)
            if 0 < lost < len(rows):
                lines.append(
                    f"{label}: {score.title} is no number in {lost} of {len(rows)} runs; the others are shown."
                )
        if self._quality_of_short_inputs():
            lines.append(f"Quality was measured on inputs of at most {self.longest_quality_input():,} tokens.")
        timed, loaded = self.settings["speed"]["dtype"], self.model["dtype"]
        if timed != loaded:
            lines.append(f"Times are those of {timed}; quality was measured in {loaded}.")
        return [*dict.fromkeys(lines), *self.notes]

    def length_title(self, length: int) -> str:
        """Return a length as text, with a mark beyond the model's positions, which a note explains."""
        limit = self.model.get("positions")
        return f"{length:,}" + (" †" if limit is not None and length > limit else "")

    def positions_note(self) -> str:
        """Return the line that belongs to everything beyond the model's positions; empty where there is nothing."""
        return next((note for note in self.notes if note.startswith("†")), "")

    def example_tables(self) -> dict[str, pd.DataFrame]:
        """Return the examples as tables: what the exact and the converted models do."""
        tables = {title: pd.DataFrame(columns) for title, columns in self.examples.items()}
        return {title: frame.set_index(frame.columns[0]) for title, frame in tables.items()}

    def summary(self) -> pd.DataFrame:
        """Return the table that a report starts with: one row per mechanism, values as text.

        `±` is the standard deviation over seeds. Speeds are times as fast as the exact model, whose row has times.
        """
        return _frame({label: self._summary_row(label) for label in self.labels})

    def quality_table(self) -> pd.DataFrame:
        """Return the numbers of all metrics, `a → b` before and after attention transfer, and their fidelity."""
        return _frame({label: self._quality_row(label) for label in self.labels})

    def _quality_row(self, label: str) -> dict[str, str]:
        row: dict[str, str] = {}
        for score in (*self.scores, *FIDELITY):
            names = [score.metric] if score in FIDELITY else self._numbers(score)
            for name in names:
                number = Score(score.measurement, name, name, digits=score.digits)
                before = self.quality(number, label, before=True)
                after = self.quality(number, label)
                start = "" if before is None else f"{fixed(before.mean, score.digits)} → "
                title = score.title if name == score.metric else name.replace("_", " ")
                row[title] = "–" if after is None else f"{start}{after.text(score.digits)}"
        return row

    def _numbers(self, score: Score) -> list[str]:
        """Return the names of the numbers of a metric, the one that decides first."""
        rows = self.select(score.measurement, EXACT_LABEL)
        names = filter(is_shown, rows[0]) if rows else ()
        return list(dict.fromkeys((score.metric, *names)))

    def _summary_row(self, label: str) -> dict[str, str]:
        row: dict[str, str] = {}
        for score in self.scores:
            value = self.quality(score, label)
            row[score.title] = "–" if value is None else value.text(score.digits)
            compared = None if label == EXACT_LABEL else self.compare(label, score)
            change = "kept" if score.greater_is_better else "change"
            row[f"{score.title} {change}"] = compared.retained if compared else "–"
        row["faster from"] = _text(self.crossover(label) if label in self.mechanisms else None, str)
        for measurement in (FORWARD, TRAINING, DECODING):
            if (length := self.nearest_length(measurement)) is not None:
                row[f"{measurement} at {self.length_title(length)}"] = self._speed(label, measurement, length)
        for title, measurement, metric in (("memory", FORWARD, "peak_memory"), ("cache", DECODING, "cache_bytes")):
            if (length := self.nearest_length(measurement)) is not None:
                number = self.times(measurement, label).get(length, {}).get(metric)
                row[f"{title} at {self.length_title(length)}"] = _text(number, FORMATS[metric])
        return row

    def _speed(self, label: str, measurement: str, length: int) -> str:
        """Return how many times as fast a row is, or the time of the exact model."""
        values = self.times(measurement, label).get(length, {})
        if label == EXACT_LABEL:
            return _text(values.get("seconds"), FORMATS["seconds"])
        if not self.is_measurable(label, length, measurement):
            return NOT_MEASURABLE
        return _text(values.get("speedup"), FORMATS["speedup"])

    def report(self, folder: str | Path) -> Path:
        """Write `report.html`, `report.md` and their plots to a folder; return the path of the page.

        Raises:
            ImportError: matplotlib, jinja2 or tabulate is missing.
        """
        from .report import write_report

        return write_report(self, Path(folder))

    def save(self, folder: str | Path) -> None:
        """Write everything to `evaluation.json` in a folder."""
        values = json_safe(asdict(self))
        facts = {"format_version": FORMAT_VERSION, "defaults": defaults_of(values)}
        write_json(Path(folder) / EVALUATION_FILE, {**facts, **values})

    @classmethod
    def load(cls, folder: str | Path) -> Evaluation:
        """Read what `save` wrote.

        Raises:
            OSError, ValueError: The folder has no evaluation, or one of another format.
        """
        path = Path(folder) / EVALUATION_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{str(folder)!r} has no {EVALUATION_FILE}. Give the output of an evaluation.")
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"{str(path)!r} has another format. Use the release that wrote it.")
        values |= {"scores": tuple(Score(**score) for score in values["scores"]), "notes": tuple(values["notes"])}
        values["measured"] = tuple(Measured(**entry) for entry in values["measured"])
        return cls(**{item.name: values[item.name] for item in fields(cls)})

    def __repr__(self) -> str:
        lines = [self.summary().to_string(), *(f"{row.label}: {row.sentence}" for row in self.conclusions())]
        return "\n".join([*lines, *self.warnings()])

    def _repr_html_(self) -> str:
        return self.summary().to_html()


def _frame(rows: dict[str, dict[str, str]]) -> pd.DataFrame:
    frame = pd.DataFrame.from_dict(rows, orient="index").rename_axis("attention").fillna("–")
    return frame.loc[:, (frame != "–").any()]


def _speed_text(speedup: float, measurable: bool) -> str:
    if not measurable:
        return "its speed is not measurable on this machine now"
    if speedup >= FASTER:
        return f"{speedup:.1f}× faster" if speedup >= 1.15 else f"{speedup:.2f}× faster"
    return "as fast as exact attention" if speedup >= EQUAL else f"slower ({speedup:.2f}×)"


def _worthwhile(speedup: float | None, comparison: Comparison | None) -> bool | None:
    """Whether a mechanism is faster and keeps the quality; None where the data do not decide, or it loses a little."""
    if speedup is not None and speedup < FASTER:
        return False
    if comparison is None or not comparison.assessment.valid or speedup is None:
        return None
    if comparison.assessment.below_floor:
        return False
    share = comparison.share
    return None if share is None or LOSES_LITTLE <= share < KEEPS else share >= KEEPS


def _text(number: Any, form: Callable[[Any], str]) -> str:
    return "–" if number is None else form(number)
