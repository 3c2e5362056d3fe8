"""A model's score beside that of a model with exact attention, in the report of an evaluation and on a model card."""

from __future__ import annotations

from dataclasses import dataclass

from ..measure.assessment import Assessment
from ..measure.metric import Score
from ..utils.formatting import fixed


@dataclass(frozen=True)
class Quality:
    """A score of one model: mean and sample standard deviation over seeds or checkpoints (None for one)."""

    mean: float
    std: float | None = None
    stderr: float | None = None
    values: tuple[float, ...] = ()

    def text(self, digits: int) -> str:
        """Return `mean ± std`."""
        return fixed(self.mean, digits) + ("" if self.std is None else f" ± {fixed(self.std, digits)}")


@dataclass(frozen=True)
class Comparison:
    """A mechanism's score beside that of a model with exact attention."""

    score: Score
    quality: Quality
    reference: Quality
    control: bool  # whether the reference is the tuned exact model, and not the exact model itself
    assessment: Assessment

    @property
    def better(self) -> bool:
        """Whether it is better than the reference."""
        return not self.assessment.worse and self.quality.mean != self.reference.mean

    @property
    def share(self) -> float | None:
        """The share of the reference's score that is kept: 1 where it is better; None where that is not positive."""
        value, reference = self.quality.mean, self.reference.mean
        if self.better:
            return 1.0
        if reference <= 0 or (value <= 0 and not self.score.greater_is_better):
            return None
        return value / reference if self.score.greater_is_better else reference / value

    @property
    def retained(self) -> str:
        """The share as text: `95.2%`, of a perplexity its change `+1.2%`, `better than exact`, or a dash."""
        if not self.assessment.valid or self.score.is_agreement:
            return "–"
        if self.better:
            return "better than the control" if self.control else "better than exact"
        if self.share is None:
            return "–"
        return f"{self.share:.1%}" if self.score.greater_is_better else f"{1 / self.share - 1:+.1%}"

    def text(self) -> str:
        """Return what is kept of the score, such as `keeps 97.3% of STS-B Spearman`."""
        title, assessment = self.score.title, self.assessment
        if not assessment.valid:
            return f"{title}: no conclusion"
        if assessment.below_floor:
            return f"{title}: worse than {assessment.floor_name}"
        if self.score.is_agreement or self.share is None:
            return f"{title} {self.quality.text(self.score.digits)}"
        if self.better:
            return f"{title}: {self.retained}"
        if self.score.greater_is_better:
            return f"keeps {self.retained} of {title}"
        return f"{title} {self.retained}"
