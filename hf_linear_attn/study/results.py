"""The result of an evaluation: its tidy table, a summary with one row per mechanism, and what follows from it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from ..measure.quality import Score, assess
from ..measure.speed import DECODING, FORMATS, FORWARD, NOT_MEASURABLE, TRAINING
from ..utils.environment import json_safe
from ..utils.files import atomic_write, write_json
from ..utils.formatting import fixed
from ..utils.timing import EQUAL, FASTER, Crossover, crossover, is_measurable
from .comparison import Comparison, Quality
from .study import RECORDS_FILE, Records
from .variants import EXACT_LABEL, LINEAR_STATES, STATES, WITHOUT_ATTENTION

#: What the report needs besides the records, and the tidy table for other programs.
EVALUATION_FILE, TABLE_FILE = "evaluation.json", "records.csv"

#: Shares of the exact model's score from which a mechanism counts as keeping it, and as losing a little.
KEEPS, LOSES_LITTLE = 0.98, 0.9

#: Quality on inputs shorter than this share of the user's length says little about that length.
SHORT_SHARE = 0.5

#: So many scores have a column of their own in the summary; of further ones it has only what is kept of them.
WHOLE_SCORES = 2

#: Columns that say how near a mechanism is to its own exact attention.
FIDELITY = (
    Score("fidelity", "kl", "KL, nats", higher_is_better=False, digits=2),
    Score("fidelity", "output_error", "output error", higher_is_better=False, digits=2),
)


@dataclass(frozen=True)
class Conclusion:
    """One sentence about a mechanism. `worthwhile` is True, False, or None where the data do not decide."""

    label: str
    sentence: str
    worthwhile: bool | None


@dataclass(repr=False)
class Evaluation:
    """What an evaluation measured.

    Attributes:
        table: Tidy records: one row per value (see `Records.to_frame`).
        info: What was evaluated, on which data, with which settings, on which machine.
        records: The records of this evaluation, and perhaps of others in the same folder.
    """

    table: pd.DataFrame
    info: dict[str, Any] = field(default_factory=dict)
    records: Records | None = None

    @property
    def scores(self) -> list[Score]:
        """The scores of the models, the most important first."""
        return [Score(**entry) for entry in self.info["scores"]]

    @cached_property
    def states(self) -> dict[str, str]:
        """The rows of the summary and what was done to their models: exact, tuned, mechanisms, without attention."""
        rows = self.table[self.table["state"].isin(STATES)].drop_duplicates("label", keep="last")
        return dict(sorted(zip(rows["label"], rows["state"], strict=True), key=lambda row: STATES.index(row[1])))

    @property
    def labels(self) -> list[str]:
        """The rows of the summary: the exact model, tuned exact models, mechanisms, the model without attention."""
        return list(self.states)

    @property
    def mechanisms(self) -> list[str]:
        """The rows of linear attention."""
        return [label for label, state in self.states.items() if state in LINEAR_STATES]

    @cached_property
    def _parts(self) -> dict[tuple[str, str], pd.DataFrame]:
        """The rows of each measurement and metric; `before` marks those before an attention transfer."""
        transferred = self.table.loc[self.table["state"] == "transferred", "label"]
        before = (self.table["state"] == "untrained") & self.table["label"].isin(transferred)
        return dict(iter(self.table.assign(before=before).groupby(["measurement", "metric"])))

    def select(self, measurement: str, metric: str, **columns: Any) -> pd.DataFrame:
        """Return the rows of a metric with these columns."""
        rows = self._parts.get((measurement, metric), self.table.iloc[:0].assign(before=False))
        for name, expected in columns.items():
            rows = rows[rows[name] == expected]
        return rows

    def value(self, measurement: str, metric: str, **columns: Any) -> float | None:
        """Return the only value of a metric with these columns, the mean of several, or None."""
        mean = float(self.select(measurement, metric, **columns)["value"].astype(float).mean())
        return None if math.isnan(mean) else mean

    def quality(self, score: Score, label: str, *, before: bool = False) -> Quality | None:
        """Return a score of a row; `before` attention transfer, as patched, None where there was no transfer."""
        rows = self._score_rows(score, label, before=before).dropna(subset="value")
        if not len(rows):
            return None
        values, stderr = tuple(map(float, rows["value"])), rows["stderr"].astype(float).mean()
        spread = stdev(values) if len(values) > 1 else None
        return Quality(fmean(values), spread, None if math.isnan(stderr) else float(stderr), values)

    def _score_rows(self, score: Score, label: str, **columns: Any) -> pd.DataFrame:
        """The values of a score by seed or checkpoint, those that are no number among them."""
        rows = self.select(score.measurement, score.metric, task=score.task, label=label, **columns)
        return rows[rows["layer"].isna()]

    def lengths(self, measurement: str, batch_size: int = 1) -> list[int]:
        """Return the lengths at which something was timed for all rows."""
        counts = self.select(measurement, "seconds", batch_size=batch_size)["length"].value_counts()
        return sorted(int(length) for length in counts.index[counts == counts.max()])

    def nearest_length(self, measurement: str = FORWARD) -> int | None:
        """Return the timed length that is nearest to the user's own, or None."""
        lengths, own = self.lengths(measurement), self.info["settings"]["length"]
        return min(lengths, key=lambda length: abs(length - own), default=None)

    @property
    def length(self) -> int | None:
        """The timed length that is nearest to the user's own."""
        return self.nearest_length()

    def speedup(self, label: str, length: int, measurement: str = FORWARD) -> float | None:
        """Return the time of the exact model divided by this one's; both were timed side by side."""
        rows = self._timings(label, measurement, length=length)
        return float(rows["speedup"].iloc[-1]) if len(rows) else None

    def measurable(self, label: str, length: int, measurement: str = FORWARD) -> bool:
        """Return whether the spread of a speedup is narrower than its effect (see `utils.timing.is_measurable`)."""
        spread = self.spread(label, length, measurement)
        return not spread or is_measurable(*spread)

    def spread(self, label: str, length: int, measurement: str = FORWARD) -> list[float]:
        """Return the 20th and the 80th percentile of a speedup; nothing where it was not timed."""
        rows = self._timings(label, measurement, length=length)
        return [float(rows[name].iloc[-1]) for name in ("speedup_p20", "speedup_p80") if len(rows)]

    def _timings(self, label: str, measurement: str = FORWARD, **columns: Any) -> pd.DataFrame:
        return self.select(measurement, "seconds", label=label, batch_size=1, **columns).dropna(subset="speedup")

    def crossover(self, label: str) -> Crossover | None:
        """Return the length from which a mechanism is faster than the exact model, by what is measurable."""
        rows = self._timings(label).sort_values("length")
        rows = rows[[*map(is_measurable, rows["speedup_p20"], rows["speedup_p80"])]]
        return crossover(rows["length"].astype(int).tolist(), rows["speedup"].tolist()) if len(rows) else None

    def compare(self, label: str, score: Score) -> Comparison | None:
        """Compare a row's score with that of exact attention, and with that of the model without attention.

        A converted checkpoint is compared with the tuned exact model where there is one: both were trained alike.
        """
        converted = self.states[label] == "converted"
        controls = [name for name, state in self.states.items() if converted and state == "tuned"]
        tuned = [quality for name in controls if (quality := self.quality(score, name)) is not None]
        own, reference = self.quality(score, label), tuned[0] if tuned else self.quality(score, EXACT_LABEL)
        if own is None or reference is None:
            return None
        floor = self.quality(score, WITHOUT_ATTENTION)
        divergences = replace(score, metric="divergence")
        gap = None if tuned else self.quality(replace(score, metric="difference"), WITHOUT_ATTENTION)
        constant = self.value(score.measurement, "most_frequent_answer", label=EXACT_LABEL, task=score.task)
        moved, most = (self.quality(divergences, name) for name in (label, WITHOUT_ATTENTION))
        stderr = math.hypot(*(known.stderr or 0.0 for known in (reference, floor) if known is not None))
        assessment = assess(
            own.mean,
            reference.mean,
            None if floor is None else floor.mean,
            higher_is_better=score.higher_is_better,
            most_frequent_answer=constant,
            stderr=stderr if gap is None or gap.stderr is None else gap.stderr,
            divergence=None if moved is None or converted else moved.mean,  # training moves the outputs, too
            floor_divergence=None if most is None else most.mean,
        )
        return Comparison(score, own, reference, bool(tuned), assessment)

    def mean_share(self, label: str) -> float | None:
        """Return the mean over the labelled tasks of the share that is kept, where a better score counts as 1.

        The result is None with fewer than two tasks, or where one of them cannot measure attention.
        """
        comparisons = [self.compare(label, score) for score in self.scores if score.measurement == "task"]
        shares = [one.share for one in comparisons if one is not None and one.assessment.valid]
        known = [share for share in shares if share is not None]
        return fmean(known) if 2 <= len(known) == len(comparisons) else None

    def examples(self) -> dict[str, pd.DataFrame]:
        """Return tables for a person to read, by their titles: what the exact and the converted models do."""
        tables = self.info.get("examples", {})
        return {title: pd.DataFrame(one).set_index(next(iter(one))) for title, one in tables.items()}

    def conclusions(self) -> list[Conclusion]:
        """Return one sentence per mechanism: its speed at the user's length, and what it keeps of the quality."""
        return [self._conclusion(label) for label in self.mechanisms]

    def _conclusion(self, label: str) -> Conclusion:
        parts, speedup = [], None
        if self.length is not None:
            speedup, measurable = self.speedup(label, self.length), self.measurable(label, self.length)
            parts += [] if speedup is None else [f"{_speed_text(speedup, measurable)} at {self.length:,} tokens"]
            speedup = speedup if measurable else None
        comparisons = [one for score in self.scores if (one := self.compare(label, score)) is not None]
        worthwhile = _worthwhile(speedup, comparisons[0] if comparisons else None)
        if worthwhile is not False and self._quality_of_short_inputs():
            worthwhile = None
        return Conclusion(label, f"{', '.join(parts + [one.text() for one in comparisons])}.", worthwhile)

    def _quality_of_short_inputs(self) -> bool:
        return self.length is not None and self.longest_quality_input() < SHORT_SHARE * self.length

    def longest_quality_input(self) -> int:
        """Return the tokens of the longest input that the first score was measured on."""
        first = self.scores[0]
        return int(self.value(first.measurement, "longest_input", label=EXACT_LABEL, task=first.task) or 0)

    def warnings(self) -> list[str]:
        """Return what limits the conclusions: data that cannot measure attention, noisy times, another precision."""
        lines: list[str] = []
        for score, label in itertools.product(self.scores, self.mechanisms):
            one = self.compare(label, score)
            if one is not None and one.assessment.floor is not None and not one.assessment.valid:
                own, lowest = (fixed(value, score.digits) for value in (one.reference.mean, one.assessment.floor))
                reference = "the control" if one.control else "the exact model"
                problem = f"{reference} ({own}) is not clearly better than {one.assessment.floor_name} ({lowest})"
                lines.append(f"{score.title}: these data cannot measure attention: {problem}. No conclusion is drawn.")
            rows = self._score_rows(score, label, before=False)
            if 0 < (lost := int(rows["value"].isna().sum())) < len(rows):
                runs = f"in {lost} of {len(rows)} runs"
                lines.append(f"{label}: {score.title} is no number {runs}; the others are shown.")
        if self._quality_of_short_inputs():
            lines.append(f"Quality was measured on inputs of at most {self.longest_quality_input():,} tokens.")
        timed, own = self.info["settings"]["dtype"], self.info["model"]["dtype"]
        if timed != own:
            lines.append(f"Times are those of {timed}; quality was measured in {own}.")
        return [*dict.fromkeys(lines), *self.info["notes"]]

    def length_title(self, length: int) -> str:
        """Return a length as text, with a mark beyond the model's positions, which a note explains."""
        limit = self.info["model"].get("positions")
        return f"{length:,}" + (" †" if limit is not None and length > limit else "")

    def positions_note(self) -> str:
        """Return the line that belongs to everything beyond the model's positions; empty where there is nothing."""
        return next((note for note in self.info["notes"] if note.startswith("†")), "")

    def summary(self) -> pd.DataFrame:
        """Return the table that a report starts with: one row per mechanism, values as text.

        `±` is the standard deviation over seeds. Speeds are times as fast as the exact model, whose row has times.
        """
        return _frame({label: self._summary_row(label) for label in self.labels})

    def quality_table(self) -> pd.DataFrame:
        """Return all scores of the mechanisms, `a → b` before and after attention transfer, and their fidelity."""
        return _frame({label: self._quality_row(label) for label in self.mechanisms})

    def _quality_row(self, label: str) -> dict[str, str]:
        row: dict[str, str] = {}
        for score in (*self.scores, *FIDELITY):
            before, after = self.quality(score, label, before=True), self.quality(score, label)
            start = "" if before is None else f"{fixed(before.mean, score.digits)} → "
            row[score.title] = "–" if after is None else f"{start}{after.text(score.digits)}"
        row["learned parameters"] = _text(self.value("parameters", "learned_parameters", label=label), "{:,.0f}".format)
        return row

    def _summary_row(self, label: str) -> dict[str, str]:
        row: dict[str, str] = {}
        for index, score in enumerate(self.scores):
            own = self.quality(score, label)
            if index < WHOLE_SCORES:
                row[score.title] = "–" if own is None else own.text(score.digits)
            compared = None if label == EXACT_LABEL else self.compare(label, score)
            row[f"{score.title} {'kept' if score.higher_is_better else 'change'}"] = compared.kept if compared else "–"
        row["mean over tasks"] = _text(self.mean_share(label) if label in self.mechanisms else None, "{:.1%}".format)
        row["faster from"] = _text(self.crossover(label) if label in self.mechanisms else None, str)
        for measurement in (FORWARD, TRAINING, DECODING):
            if (length := self.nearest_length(measurement)) is not None:
                row[f"{measurement} at {self.length_title(length)}"] = self._speed(label, measurement, length)
        for title, measurement, metric in (("memory", FORWARD, "peak_memory"), ("cache", DECODING, "cache_bytes")):
            if (length := self.nearest_length(measurement)) is not None:
                number = self.value(measurement, metric, label=label, length=length, batch_size=1)
                row[f"{title} at {self.length_title(length)}"] = _text(number, FORMATS[metric])
        return row

    def _speed(self, label: str, measurement: str, length: int) -> str:
        """Return how many times as fast a row is, or the time of the exact model."""
        if label == EXACT_LABEL:
            seconds = self.value(measurement, "seconds", label=label, length=length, batch_size=1)
            return _text(seconds, FORMATS["seconds"])
        if not self.measurable(label, length, measurement):
            return NOT_MEASURABLE
        return _text(self.speedup(label, length, measurement), FORMATS["speedup"])

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
        if self.records is not None and (self.records.path or Path()).resolve() != (path / RECORDS_FILE).resolve():
            self.records.save(path / RECORDS_FILE)
        atomic_write(path / TABLE_FILE, self.table.dropna(axis=1, how="all").to_csv(index=False))
        write_json(path / EVALUATION_FILE, json_safe(self.info))

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
        if missing := info["records"].keys() - {record.id for record in records}:
            problem = f"lacks {len(missing)} of the {len(info['records'])} records of its evaluation"
            raise ValueError(f"{str(folder)!r} {problem}. Copy {RECORDS_FILE}, too.")
        return cls(records.to_frame(info["records"]), info, records)

    def __repr__(self) -> str:
        lines = [self.summary().to_string(), *(f"{one.label}: {one.sentence}" for one in self.conclusions())]
        return "\n".join([*lines, *self.warnings()])

    def _repr_html_(self) -> str:
        return self.summary().to_html()


def _frame(rows: dict[str, dict[str, str]]) -> pd.DataFrame:
    frame = pd.DataFrame.from_dict(rows, orient="index").rename_axis("attention")
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
    if comparison is None or not comparison.assessment.valid or speedup is None or comparison.assessment.chance:
        return None
    if comparison.assessment.below_floor:
        return False
    share = comparison.share
    return None if share is None or LOSES_LITTLE <= share < KEEPS else share >= KEEPS


def _text(number: Any, form: Callable[[Any], str]) -> str:
    return "–" if number is None else form(number)
