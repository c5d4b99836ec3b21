"""The watch: evaluations of the run on held-out batches, which may lower its learning rate.

A search ends before a run can overfit or become unstable. The run itself shows it: the held-out
loss rises again. With L_0 the loss of the initial weights and L_min the lowest loss so far, an
evaluation fails if

    L > L_min + LOST (L_0 - L_min)

and L_min is ahead of both L_0 and L by SIGNIFICANT standard errors, batch by batch
(hdet_scale.search.evidence). After PATIENCE failures in a row, or a loss that is not finite, the
rate is lowered by a factor of STEP. The weights go back to those of L_min, while all steps that are
discarded in this way are at most a share `budget` of the run, and where the loss is not finite;
otherwise they stay as they are. The schedule goes on in both cases.

Evaluations are rare and ever rarer, at steps a factor GROWTH apart, from FIRST until UNTIL of the
run. Then the run is plain training.

Pure: no torch, no process group. An evaluation costs two numbers for each batch of the probe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdet_scale.search.constants import FIRST, GROWTH, LOST, PATIENCE, STEP, UNTIL
from hdet_scale.search.evidence import ahead, mean_loss


@dataclass(frozen=True, slots=True)
class Move:
    """What follows from an evaluation."""

    best: bool = False
    """The lowest loss so far: these weights are kept."""
    scale: float | None = None
    """The schedule's scale from now on; None where it does not change."""
    back: bool = False
    """The weights go back to those of the lowest loss."""


class Watch:
    """When a run is evaluated, and what follows.

    Args:
        total_steps: S, of the whole run.
        begun: steps before the run: those of the search.
        scale: of the schedule.
        start: losses of the initial weights on the probe's batches.
        budget: share of the steps that going back may discard; 0: never.
    """

    def __init__(
        self, *, total_steps: int, begun: int, scale: float, start: Sequence[float], budget: float
    ) -> None:
        self.total_steps, self.steps = total_steps, total_steps - begun
        self.scale, self.start, self.budget = scale, tuple(start), budget
        self.best, self.best_step = self.start, 0
        """Losses and step of the lowest evaluation so far, or of the last move."""
        self.step = self.failures = self.discarded = 0
        self.next = max(1, round(FIRST * self.steps))
        self.verdict = ""

    @property
    def over(self) -> bool:
        """True when there is nothing left to evaluate."""
        return self.next > UNTIL * self.steps

    def count(self) -> bool:
        """One step of the run is done; True when it is to be evaluated."""
        self.step += 1
        return self.step >= self.next and not self.over

    def evaluate(self, losses: Sequence[float]) -> Move:
        """What follows from the losses of the present weights."""
        self.next = max(self.step + 1, round(self.step * GROWTH))
        now, lowest = mean_loss(losses), mean_loss(self.best)
        if now < lowest:
            self.best, self.best_step, self.failures = tuple(losses), self.step, 0
            return Move(best=True)
        self.failures = self.failures + 1 if self._fails(losses) else 0
        if self.failures < PATIENCE and math.isfinite(now):
            return Move()
        return self._lower(losses)

    def _fails(self, losses: Sequence[float]) -> bool:
        lowest = mean_loss(self.best)
        limit = lowest + LOST * (mean_loss(self.start) - lowest)
        learnt = ahead(self.best, self.start)
        return learnt and mean_loss(losses) > limit and ahead(self.best, losses)

    def _lower(self, losses: Sequence[float]) -> Move:
        now, lowest = mean_loss(losses), mean_loss(self.best)
        finite, lost = math.isfinite(now), self.step - self.best_step
        affordable = self.discarded + lost <= self.budget * self.total_steps
        back = self.budget > 0 and (affordable or not finite)
        self.scale, self.failures, self.best_step = self.scale / STEP, 0, self.step
        self.verdict = (
            f"held-out loss {now:.4g}, {lowest:.4g} {lost} steps ago: the rate is divided by "
            f"{STEP:g}"
        )
        if back:
            self.discarded += lost
            self.verdict += ", and the weights go back there"
        elif finite:
            self.best = tuple(losses)
        return Move(scale=self.scale, back=back, best=finite and not back)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank."""
        return {
            "total_steps": self.total_steps,
            "steps": self.steps,
            "scale": self.scale,
            "start": list(self.start),
            "budget": self.budget,
            "best": list(self.best),
            "best_step": self.best_step,
            "step": self.step,
            "failures": self.failures,
            "discarded": self.discarded,
            "next": self.next,
            "verdict": self.verdict,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Watch:
        """A watch that goes on where another stopped."""
        watch = cls(
            total_steps=int(state["total_steps"]),
            begun=int(state["total_steps"]) - int(state["steps"]),
            scale=float(state["scale"]),
            start=[float(x) for x in state["start"]],
            budget=float(state["budget"]),
        )
        watch.best, watch.best_step = tuple(map(float, state["best"])), int(state["best_step"])
        watch.step, watch.next = int(state["step"]), int(state["next"])
        watch.failures, watch.discarded = int(state["failures"]), int(state["discarded"])
        watch.verdict = str(state["verdict"])
        return watch
