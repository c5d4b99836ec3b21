"""The result of a search, for people and notebooks: which rate, how sure, at what cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hdet_scale.search.constants import STEP
from hdet_scale.search.decision import RateSearch
from hdet_scale.search.evidence import mean_loss, standard_error


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One rate that was tried."""

    stage: str
    """"first" or "second"."""
    rates: tuple[float, ...]
    """The peak of each param group that a run at this rate would have."""
    loss: float
    """Held-out loss after the trial; infinite where it diverged."""
    error: float
    """Standard error of the difference to the initial rate's trial of the same stage; of the loss
    itself for that trial. Infinite where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found."""

    initial: tuple[float, ...]
    """The peak of each param group, as the user gave it."""
    proposed: tuple[float, ...] | None
    """What the trials say is better; None where they say that the initial rate stays."""
    taken: tuple[float, ...]
    """What the run begins with."""
    curve: tuple[CurvePoint, ...]
    """Every rate that was tried, in the order of the trials."""
    initial_loss: float
    """Held-out loss of the initial weights; NaN where it is not known."""
    steps: int
    """Steps of the search."""
    cost: float
    """The same, as a share of the run's steps."""
    head_start: bool
    """Whether the run begins with the weights that went on with it during the search. If not, it
    begins with the initial weights."""
    verdict: str
    """What was decided and why, in words."""

    def __str__(self) -> str:
        """One sentence: the rate, why, and the cost."""
        moved = f"max_lr {self.initial[0]:.3g} -> {self.taken[0]:.3g}"
        rate = f"max_lr stays {self.initial[0]:.3g}" if self.proposed is None else moved
        begins = "the weights of the search" if self.head_start else "the initial weights"
        return (
            f"{rate} ({self.verdict}); {self.steps} steps, {self.cost:.1%}; the run begins with "
            f"{begins}"
        )


def result_of(rule: RateSearch, peaks: Sequence[float]) -> SearchResult:
    """The result of a search that is over.

    Args:
        rule: the search.
        peaks: the peak of each param group.
    """
    taken = tuple(peak * rule.scale for peak in peaks)
    return SearchResult(
        initial=tuple(peaks),
        proposed=None if rule.offset == 0 else taken,
        taken=taken,
        curve=curve_of(rule, peaks),
        initial_loss=mean_loss(rule.start) if rule.start else math.nan,
        steps=rule.steps,
        cost=rule.steps / rule.total_steps,
        head_start=rule.keeps_head_start,
        verdict=rule.verdict,
    )


def curve_of(rule: RateSearch, peaks: Sequence[float]) -> tuple[CurvePoint, ...]:
    """A point for each rate that was tried."""
    initial = {arm.stage: arm.losses for arm in rule.arms if arm.offset == 0}
    points = []
    for arm in rule.arms:
        losses, first = arm.losses, initial.get(arm.stage)
        if arm.offset != 0 and first is not None:
            losses = tuple(a - b for a, b in zip(arm.losses, first, strict=False))
        points.append(
            CurvePoint(
                stage=arm.stage,
                rates=tuple(peak * STEP**arm.offset for peak in peaks),
                loss=arm.mean,
                error=standard_error(losses),
            )
        )
    return tuple(points)
