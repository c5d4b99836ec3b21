"""The climb: start far below, go up while the probe's slope says so, and hold where it gives out.

One question for all learning rates together: every factor takes the same level. m starts at
-ln(below), base(t) = schedule(t) exp(m), and at the end of round k, with b_k the mean slope of the
probe losses on ln rho (hdet_scale.rules.slope),

    steepest = max over j <= k of (-b_j)
    b_k < -f steepest        the slope is still there: m <- m + kappa            ("climb")
    otherwise                it has given out: m stays, spread 0                  ("hold")

f = 0.3 needs no constant for a back-off: the slope is held against its own largest value.

Safeguards, each for something that was seen:
- grace: a reversal in the first `grace` of the run is the sharpness of a fresh network and no
  verdict; the rule waits where it is.
- longest: a climb that is not over by then is ended, so that the run keeps its schedule.
- the way down: after the grace, a run that has never gone up and whose slope is plainly positive
  (z past the slope rule's gate) was started too high. m <- m - ln 10, and weights, buffers and
  optimizer state go back to where the search began, since an overshoot is not undone by a lower
  rate. The schedule and the count of steps go on.
- divergence: replicas without a finite loss, or a probe loss above `diverged` times the lowest
  one seen, cut and rewind at any time; what diverged is from then on a ceiling that the climb
  does not reach again.

Memory: until it holds, a mark of that place: one more copy of the parameters and buffers that a
rank keeps, and of the optimizer's state, which at the start of a run is empty.

Known limits: it compares losses before their decay, so that it is biased as every greedy rule is,
and how far depends on the task (docs of the controller).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hdet_scale.rules.guided import Decision, pack, unpack
from hdet_scale.rules.slope import FALSE_MOVES, Evidence, Fit, Slopes, Sums, gate

CUT = math.log(10.0)
MOST_CUTS = 6


class Climb:
    """The rule above."""

    together = True
    rewinds = True

    def __init__(
        self,
        factors: Sequence[str],
        total_steps: int,
        *,
        spread: float = 0.3,
        below: float = 100.0,
        step: float = 0.4,
        share: float = 0.3,
        grace: float = 0.1,
        longest: float = 0.2,
        diverged: float = 1.5,
        limit: float = math.log(1000.0),
    ) -> None:
        if total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {total_steps}")
        if below < 1:
            raise ValueError(
                f"below must be 1 or more, got {below}: the climb starts at base/below"
            )
        if not (0 < spread < 1 and step > 0):
            raise ValueError(
                f"spread must be in (0, 1) and step above 0, got {spread} and {step}: without a "
                "spread there is no slope to climb"
            )
        if not 0 <= share < 1:
            raise ValueError(f"share (f) must be in [0, 1), got {share}; the default is 0.3")
        if not 0 <= grace <= longest <= 1:
            raise ValueError(
                f"0 <= grace <= longest <= 1 of the run, got grace={grace} and longest={longest}"
            )
        if diverged <= 1:
            raise ValueError(f"diverged must be above 1, got {diverged}; the default is 1.5")
        self.factors = list(factors)
        self.total_steps, self.step, self.share = total_steps, step, share
        self.grace, self.longest, self.diverged, self.limit = grace, longest, diverged, limit
        self.steepest = 0.0
        self.lowest = math.inf
        self.ceiling = limit
        self.cuts = 0
        self.climbed = False
        self.against = Evidence()
        self._decision = self._decide(-math.log(below), spread)

    @property
    def decision(self) -> Decision:
        return self._decision

    @property
    def m(self) -> float:
        """How far the base is from the schedule."""
        return self._decision.offsets[0]

    def update(self, sums: Sums, step: int) -> Decision:
        """The evidence of the round that ended after `step` steps."""
        if self._decision.phase == "hold":
            return self._decision
        fit = sums.fit()
        slope = None if fit is None else fit.slopes.get(0)
        if self._has_diverged(sums):
            self.ceiling = min(self.ceiling, self.m - self.step)
            self._decision = self._cut("diverged")
        elif fit is None or slope is None:
            self._decision = self._wait("nothing was heard", step)
        else:
            self.steepest = max(self.steepest, -slope.mean)
            self._decision = self._judge(slope, fit, step)
        return self._decision

    def _judge(self, slope: Slopes, fit: Fit, step: int) -> Decision:
        seen = {"slope": slope.mean, "steepest": self.steepest}
        if slope.mean < -self.share * self.steepest:
            self.against = Evidence()
            if self.m + self.step > self.ceiling:
                return self._hold("the ceiling is reached", seen)
            if step >= self.longest * self.total_steps:
                return self._hold("the time is up", seen)
            self.climbed = True
            return self._decide(self.m + self.step, self._decision.spread, "up", seen)
        if slope.mean > 0:
            self.against.add(slope, fit)
        seen["z"] = self.against.z
        if step < self.grace * self.total_steps:
            return self._wait("within the grace", step, seen)
        if self.climbed:
            return self._hold("the slope has given out", seen)
        if self.against.n and self.against.z > gate(self.against.n, FALSE_MOVES):
            return self._cut("started too high", seen)
        return self._wait("no verdict yet", step, seen)

    def _has_diverged(self, sums: Sums) -> bool:
        loss = sums.mean_loss
        if not math.isfinite(loss):
            # A probe that was heard by nobody; before the first loss there is nothing to cut.
            return math.isfinite(self.lowest)
        self.lowest = min(self.lowest, loss)
        return loss > self.lowest + (self.diverged - 1.0) * abs(self.lowest)

    def _cut(self, why: str, seen: Mapping[str, float] | None = None) -> Decision:
        """A tenth of the learning rate, from the weights that the search began with."""
        self.cuts += 1
        self.against = Evidence()
        self.steepest, self.lowest, self.climbed = 0.0, math.inf, False
        if self.cuts > MOST_CUTS:
            return self._hold(f"{why}, and {MOST_CUTS} cuts have not helped", seen)
        said = f"{why}: a tenth of the learning rate, back to the start"
        return self._decide(self.m - CUT, self._decision.spread, said, seen, rewind=True)

    def _wait(self, why: str, step: int, seen: Mapping[str, float] | None = None) -> Decision:
        if step >= self.longest * self.total_steps:
            return self._hold("the time is up", seen)
        return self._decide(self.m, self._decision.spread, why, seen)

    def _hold(self, why: str, seen: Mapping[str, float] | None = None) -> Decision:
        return self._decide(self.m, 0.0, f"hold: {why}", seen)

    def _decide(
        self,
        m: float,
        spread: float,
        verdict: str = "",
        seen: Mapping[str, float] | None = None,
        *,
        rewind: bool = False,
    ) -> Decision:
        return Decision(
            offsets=(m,) * len(self.factors),
            spread=spread,
            phase="climb" if spread else "hold",
            verdict=verdict,
            rewind=rewind,
            evidence=dict(seen or {}),
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        e = self.against
        return {
            "decision": pack(self._decision),
            "steepest": self.steepest,
            "lowest": self.lowest,
            "ceiling": self.ceiling,
            "cuts": self.cuts,
            "climbed": self.climbed,
            "against": [e.n, e.A, e.U, e.V, e.squares, e.blind],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another run of this rule."""
        decision = unpack(state["decision"])
        if len(decision.offsets) != len(self.factors):
            raise ValueError(
                f"the state is of {len(decision.offsets)} factors, this rule has {self.factors}"
            )
        self._decision = decision
        self.steepest, self.lowest = float(state["steepest"]), float(state["lowest"])
        self.ceiling, self.cuts = float(state["ceiling"]), int(state["cuts"])
        self.climbed = bool(state["climbed"])
        self.against = Evidence(*state["against"])
