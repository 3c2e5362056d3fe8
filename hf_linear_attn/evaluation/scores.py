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

    def show(self, value: float | None) -> str:
        return "–" if value is None else fixed(value, self.digits)

    def better(self, value: float) -> float:
        """The value with its sign turned where less is better."""
        return value if self.higher else -value


PERPLEXITY = Score(("perplexity", "perplexity"), "perplexity", False, 2)
SENTENCES = Score(("sentences", "cosine"), "sentence cosine", True, 3, relative=False)
SIMILARITY = Score(("sts", "spearmanr"), "STS-B Spearman", True, 3)
TASK = Score(("task", "score"), "score", True, 3)


def scores_of(report: Mapping[str, Any]) -> list[Score]:
    """What was measured on the models of a report, the headline first."""
    exact = report["exact"]
    found = [score for score in (PERPLEXITY, SIMILARITY, SENTENCES) if score.path[0] in exact]
    if "task" in exact:
        metric = report["text"]["metrics"][0]
        found.insert(0, Score(TASK.path, f"{report['text']['task']} {metric}", True, TASK.digits))
    return found


def score_of(report: Mapping[str, Any]) -> Score:
    """The headline."""
    return scores_of(report)[0]


def reference_quality(report: Mapping[str, Any]) -> dict[str, Any]:
    """What quality is compared with: a tuned exact model where one was given, else the exact model itself."""
    reference = report.get("reference")
    return reference["quality"] if reference else report["exact"]


def kept(report: Mapping[str, Any], quality: Mapping[str, Any] | None) -> float | None:
    """The share of the reference's score that is kept; of perplexities `reference / own`. None where undefined."""
    score = score_of(report)
    own, reference = score.of(quality), score.of(reference_quality(report))
    if own is None or reference is None or not own or not reference:
        return None
    return own / reference if score.higher else reference / own
