"""The one number that stands for the quality of a model: what it is for each kind of model, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .formats import fixed


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
