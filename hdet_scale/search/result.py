"""The result of a search, for people and notebooks: which rate, how sure, at what cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdet_scale.search.constants import STEP
from hdet_scale.search.decision import RateSearch
from hdet_scale.search.evidence import ahead, mean_loss, standard_error


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
    range: tuple[float, float]
    """The lowest and the highest plausible rate of the first param group: those that were tried and
    are not behind the one that was taken, and half a step around them, which was not tried."""
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

    @property
    def told(self) -> str:
        """One sentence without a run: the rate, how sure, why, and the cost."""
        (low, high), first = self.range, self.initial[0]
        moved = "stays" if self.proposed is None else f"{first:.3g} ->"
        return (
            f"max_lr {moved} {self.taken[0]:.3g}, plausible {low:.2g} to {high:.2g}; "
            f"{self.verdict}; {self.steps} steps, {self.cost:.1%} of the run"
        )

    def plot(self, path: str | Path | None = None) -> Any:
        """The held-out loss by learning rate, with errors; a matplotlib figure.

        Args:
            path: where it is saved (default: nowhere).

        Raises:
            ImportError: without matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("a plot needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        for stage in dict.fromkeys(point.stage for point in self.curve):
            shown = [p for p in self.curve if p.stage == stage and math.isfinite(p.loss)]
            shown.sort(key=lambda p: p.rates[0])
            errors = [p.error if math.isfinite(p.error) else 0.0 for p in shown]
            x, y = [p.rates[0] for p in shown], [p.loss for p in shown]
            axes.errorbar(x, y, errors, marker="o", label=f"{stage} stage")
        axes.axvspan(*self.range, color="0.9", zorder=0, label="plausible")
        axes.axvline(self.taken[0], color="0.4", linestyle="--", label=f"{self.taken[0]:.3g}")
        axes.set(xscale="log", xlabel="learning rate (peak)", ylabel="loss after the trial")
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure

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
        range=_plausible(rule, taken[0]),
        curve=curve_of(rule, peaks),
        initial_loss=mean_loss(rule.start) if rule.start else math.nan,
        steps=rule.steps,
        cost=rule.steps / rule.total_steps,
        head_start=rule.keeps_head_start,
        verdict=rule.verdict,
    )


def _plausible(rule: RateSearch, taken: float) -> tuple[float, float]:
    arms = [arm for arm in rule.arms if arm.stage == rule.arms[-1].stage]
    own = [arm for arm in arms if arm.offset == rule.offset]
    near = [arm.offset for arm in arms if own and not ahead(own[0].losses, arm.losses)]
    low, high = (x - rule.offset for x in (min(near, default=0), max(near, default=0)))
    if not (own and math.isfinite(own[0].mean)):
        low = high = 0
    return taken * STEP ** (min(low, 0) - 0.5), taken * STEP ** (max(high, 0) + 0.5)


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
