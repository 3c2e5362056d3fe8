"""What a score says about a mechanism, beside the exact model's and that of a model without attention."""

from dataclasses import dataclass

#: The exact model must be better than the floor by this share of its score, and by this number of standard errors. Else
#: the data say nothing about attention.
MIN_GAP, MIN_GAP_ERRORS = 0.02, 3.0


@dataclass(frozen=True)
class Assessment:
    """What a score says about a mechanism."""

    valid: bool  # the data can judge attention: the floor is clearly worse than the exact model
    worse: bool  # than the exact model
    below_floor: bool  # worse than the floor, too
    floor: float | None  # the score without attention, or of a constant answer where that is not worse
    floor_name: str  # whose it is


def assess(
    score: float | None,
    exact: float | None,
    floor: float | None,
    *,
    greater_is_better: bool,
    constant_answer: float | None = None,
    stderr: float = 0.0,
) -> Assessment:
    """Compare a score with the exact model's first, and then with the floor.

    `floor` is the score of the model without attention (None: undefined); of a classifier, that of always giving the
    same answer takes its place where it is not worse. `stderr` is that of the difference of `exact` and `floor`.
    """
    sign, name = 1 if greater_is_better else -1, "without attention"
    if constant_answer is not None and (floor is None or sign * (constant_answer - floor) >= 0):
        floor, name = constant_answer, "always giving the same answer"
    gap = 0.0 if exact is None or floor is None else sign * (exact - floor)
    valid = gap > max(MIN_GAP * abs(exact or 0.0), MIN_GAP_ERRORS * stderr)
    if score is None or exact is None:
        return Assessment(valid, True, False, floor, name)
    gain = sign * (score - exact)
    return Assessment(valid, gain < 0, valid and gain < -gap, floor, name)
