"""The watch: evaluations of the run on held-out batches while there is time to restart it.

A search is over before the data repeat. Where they repeat many times, the learning rate that learns
fastest overfits long before the end, and no search can see it. The run itself can: the held-out
loss falls, and rises again. Where it turns depends hardly on the learning rate but on the path

    I(t) = sum over i < t of s(i)                s: the schedule over its peak

times the peak. With the loss lowest at I*, the peak that ends just there, of a schedule whose mean
is m and for which L steps are left, is

    eta' = eta min(1, I* / (m L))

and the run restarts from the snapshot with it. An evaluation of the held-out loss, and of the
training loss of the step before it, shows overfitting in either of

    a rise          held-out above its lowest by RISE of it, and by SIGNIFICANT standard errors of
                    the difference batch by batch
    memorising      held-out no lower, training below MEMORISED of what it was then

where training is below GAP of held-out: a learning rate at the edge of stability makes both go up
and down together. It takes PATIENCE such evaluations in a row.

The proposed rate is on trial until TRIED of the schedule's whole path. It fails where the held-out
loss is then not below the search's target loss (hdet_scale.search.decision); before that, in
PATIENCE evaluations in a row, not below BROKEN times the initial loss; after it, not below the
target: some networks learn at first and die. It fails too where the run degrades: in PATIENCE
evaluations in a row, until LATE of the run, the held-out loss has lost LOST of what was learnt,

    L > min L + LOST (L_0 - min L)               L_0: the loss at the snapshot

and the training loss is above that, and has not fallen below NO_LOWER of what it was at the lowest
held-out loss: where it falls the run overfits. Where that was seen at a smaller share of the peak,
LOST_RISING counts instead: both losses rise with the learning rate of a schedule, but not so much.
The run then restarts at a quarter of the proposed rate, on trial for four times the path since it
learns so much more slowly, at last at the initial rate, which has no target; below the initial
rate, which would degrade too, at a quarter again.

A proposed rate may be contested: trials diverged at the initial rate, or were noisy and learnt with
it too. The run itself decides then, with its own batch and warm-up: the initial rate is on trial
first. If it reaches the target loss it stays; if not, the proposed rate is next. In the second case
it is a duel: both have a turn, until DUEL of the path, and the one with the lower held-out loss is
taken.

Evaluations are rare and ever rarer, at steps a factor GROWTH apart. They end at UNTIL of the run,
or with a turn so late that what is left is less than WORTH of the way there: from then on the run
is plain training.

Pure: no torch, no process group. An evaluation costs two numbers for each batch of the probe and
two for the training loss, whatever the number of replicas.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hdet_scale.search.curve import Parabola

FIRST = 0.015
"""Share of the run before the first evaluation."""
AGAIN = 0.1
"""The same after a restart, whose learning rate is about right."""
GROWTH = 1.3
"""Steps of an evaluation over those of the one before."""
UNTIL = 0.75
"""Share of the run after which there are no evaluations."""
WORTH = 0.5
"""Of the path to the turn, which the steps left must reach at the present peak."""
RISE = 0.03
"""Of the lowest loss."""
SIGNIFICANT = 1.5
"""Standard errors of a rise."""
GAP = 0.75
"""Of the held-out loss: a training loss below it is of what was learnt by heart."""
MEMORISED = 0.5
"""Of the training loss at the lowest held-out loss, where that does not fall any more."""
PATIENCE = 2
"""Evaluations in a row that decide."""
TRIED = 0.05
"""Share of the schedule's path after which a rate must have reached the target loss."""
DUEL = 0.1
"""The same for two rates that are compared with each other."""
BROKEN = 2.0
"""Times the loss at the snapshot."""
LOST = 0.1
"""Of what was learnt since the snapshot: a rate that fits seldom loses so much for long."""
LOST_RISING = 0.25
"""The same while the schedule is higher than it was at the lowest loss."""
NO_LOWER = 0.9
"""Of the training loss at the lowest held-out loss: one step's is noisy."""
EVEN = 0.99
"""Shares of the peak that pass for equal."""
LATE = 0.6
"""Share of the run after which a degraded run is left to the decay."""
STEP_BACK = 4.0
"""What a scale that failed is divided by."""


class Watch:
    """The rule: losses in, and the scale to restart with out.

    Args:
        total_steps: S, of the whole run, the search included.
        begun: steps that are gone before the run: those of the search.
        mean: m.
        scale: what the schedule is multiplied with, as the search proposed it.
        before: the losses at the snapshot, one a batch.
        target: the held-out loss to reach in time; infinite where there is none.
        contested: True where the initial rate is on trial first.
        duel: True where it is then compared with the proposed rate, and not with the target.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        begun: int,
        mean: float,
        scale: float,
        before: Sequence[float],
        target: float = math.inf,
        contested: bool = False,
        duel: bool = False,
    ) -> None:
        self.total_steps, self.mean, self.begun = total_steps, mean, begun
        self.proposed, self.target, self.contested = scale, target, contested
        self.duel, self.rival = duel, math.inf
        self.initial_failed = False
        """True where the initial rate was on trial and did not reach the target loss in time."""
        self.scale = 1.0 if contested else scale
        self.before = [float(x) for x in before]
        self.verdict = ""
        self.over = False
        self._start(FIRST)

    def _start(self, share: float) -> None:
        self.step, self.path = 0, 0.0
        self.rises, self.breaks, self.degraded = 0, 0, 0
        self.tried = False
        self.next = max(2, round(share * self.total_steps))
        self.curve: list[tuple[int, float, float]] = []
        self.best, self.trained = self.before, math.inf
        self._end_in_time()

    def _end_in_time(self) -> None:
        self.over = self.over or self.begun + self.next > UNTIL * self.total_steps

    @property
    def due(self) -> bool:
        """True when it is time for an evaluation."""
        return not self.over and self.step >= self.next

    def count(self, share: float) -> None:
        """One step of the run is done, at `share` of the schedule's peak."""
        self.step += 1
        self.path += share

    def evaluate(self, losses: Sequence[float], trained: float) -> float | None:
        """Add the held-out loss of each batch, and the training loss of the step before; the
        scale to restart with, or None to go on."""
        losses = [float(x) for x in losses[: len(self.best)]]  # a resume may have fewer, or more
        mean = statistics.fmean(losses)
        self.curve.append((self.step, self.path, mean if math.isfinite(mean) else math.inf))
        self.next = max(self.step + 1, round(self.step * GROWTH))
        self._end_in_time()
        if self._fails(mean) or self._degrades(losses, trained):
            return self._step_back(mean)
        if not self.tried and (self.duel or self.scale == 1.0):
            return None  # a loss may go up and down while it warms up
        if mean < statistics.fmean(self.best[: len(losses)]):
            self.best, self.trained, self.rises = losses, trained, 0
        elif math.isfinite(mean):
            self.rises = self.rises + 1 if self._overfits(losses, trained) else 0
        return None if self.rises < PATIENCE else self._shortened(trained)

    # -- a rate on trial -----------------------------------------------------------------------

    def _fails(self, mean: float) -> bool:
        limit = self._broken
        if self.tried:
            limit = min(limit, self.target)
        self.breaks = 0 if mean < limit else self.breaks + 1
        if self.breaks >= PATIENCE:
            self.duel = self.duel and not self.contested  # what breaks is no rival
            return True
        slower = 1.0 if self.scale == 1.0 else min(STEP_BACK, self.proposed / self.scale)
        share = DUEL if self.duel else TRIED * slower
        if self.tried or self.path < share * self.mean * self.total_steps:
            return False
        self.tried = True
        return self._loses(mean) if self.duel else not self._reaches(mean)

    def _degrades(self, losses: Sequence[float], trained: float) -> bool:
        """At the proposed rate alone: the initial one is the user's."""
        late = self.begun + self.step > LATE * self.total_steps
        if late or not self.tried or self.duel or self.scale == 1.0:
            return False
        lowest, before = (
            statistics.fmean(batches[: len(losses)]) for batches in (self.best, self.before)
        )
        limit = lowest + (LOST if self._past_the_peak() else LOST_RISING) * (before - lowest)
        # A training loss that is not known is above nothing.
        risen = statistics.fmean(losses) > limit and trained > max(limit, NO_LOWER * self.trained)
        self.degraded = self.degraded + 1 if risen else 0
        return self.degraded >= PATIENCE

    def _past_the_peak(self) -> bool:
        """True where the schedule was no lower before the lowest evaluation than now."""
        points = [(0, 0.0, math.inf), *self.curve]
        shares = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
        seen = [loss for _, _, loss in self.curve[:-1]]
        return bool(seen) and shares[seen.index(min(seen))] >= EVEN * shares[-1]

    @property
    def _broken(self) -> float:
        return BROKEN * abs(statistics.fmean(self.before)) or math.inf

    def _reaches(self, mean: float) -> bool:
        reached = mean < self.target
        if reached and self.contested:
            self.verdict = f"the initial rate stays: {self._told(mean)}"
            self.contested = False
        return reached

    def _loses(self, mean: float) -> bool:
        """Of two turns: the first is only measured."""
        if self.contested:
            self.rival = mean
            return True
        lost = not mean < self.rival
        if not lost:
            self.verdict = f"the proposed rate stays: {self._told(mean)}"
            self.duel = False
        return lost

    def _told(self, mean: float) -> str:
        before = statistics.fmean(self.before)
        told = f"the held-out loss is {mean:.4g} after {self.step} steps, {before:.4g} before them"
        if self.duel and not self.contested:
            told += f", {self.rival:.4g} at the initial rate"
        if self.degraded >= PATIENCE:
            told += f", {statistics.fmean(self.best):.4g} at its lowest"
        return told

    def _step_back(self, mean: float) -> float | None:
        told, scale = self._told(mean), self._next(mean)
        if scale is None:
            self.verdict = f"{told}, at a rate that is not above the initial one"
            self.over = True
            return None
        self.duel = self.duel and self.contested
        above = self.degraded >= PATIENCE and self.scale < 1.0  # a higher rate would degrade too
        self.initial_failed = self.initial_failed or above or (self.contested and not self.duel)
        self.scale, self.contested = scale, False
        self.verdict = f"{told}: the run restarts with {scale:.3g} x the initial rate"
        if scale == 1.0:
            self.target = math.inf  # the user's own rate has no target
        self.begun += self.step
        self._start(FIRST)
        return scale

    def _next(self, mean: float) -> float | None:
        """What is on trial after the present scale has failed; None where nothing is left."""
        if self.contested:
            return self.proposed
        if self.duel:
            return 1.0  # lost to the initial rate
        if self.scale > 1.0:
            return max(1.0, self.scale / STEP_BACK)
        if self.degraded >= PATIENCE:
            return self.scale / STEP_BACK
        # A rate that learns nothing may be too low; one that diverges would diverge if higher.
        slow = self.scale < 1.0 and mean < self._broken
        return 1.0 if slow and not self.initial_failed else None

    # -- what overfits --------------------------------------------------------------------------

    def _overfits(self, losses: Sequence[float], trained: float) -> bool:
        if not 0.0 < trained < GAP * statistics.fmean(losses):
            return False  # unknown, or it does as well on what it has not seen
        return trained < MEMORISED * self.trained or self._rose(losses)

    def _rose(self, losses: Sequence[float]) -> bool:
        rises = [x - y for x, y in zip(losses, self.best, strict=False)]
        rise = statistics.fmean(rises)
        error = statistics.stdev(rises) / math.sqrt(len(rises)) if len(rises) > 1 else 0.0
        return rise > max(SIGNIFICANT * error, RISE * abs(statistics.fmean(self.best)))

    def _shortened(self, trained: float) -> float | None:
        steps, paths, losses = zip(*(point for point in self.curve if point[1] > 0), strict=True)
        turn = Parabola.through([math.log(x) for x in paths], losses, width=3)
        begun = self.begun + self.step
        short = math.exp(turn.minimum) / (self.mean * (self.total_steps - begun))
        scale = self.scale * min(1.0, short)
        lowest = min(losses)
        seen = f"the held-out loss was lowest ({lowest:.4g}) at step {steps[losses.index(lowest)]}"
        if short > 1 / WORTH:
            self.over = True
            self.verdict = f"{seen}, too late to restart"
            return None
        self.verdict = (
            f"{seen} and is {losses[-1]:.4g} at a training loss of {trained:.4g}: the run "
            f"restarts with {scale:.3g} x the initial rate instead of {self.scale:.3g} x"
        )
        self.scale, self.begun = scale, begun
        self._start(AGAIN)
        self.tried = True  # it has learnt before
        return scale

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank."""
        return {
            "total_steps": self.total_steps,
            "begun": self.begun,
            "mean": self.mean,
            "scale": self.scale,
            "proposed": self.proposed,
            "target": self.target,
            "contested": self.contested,
            "duel": self.duel,
            "rival": self.rival,
            "initial_failed": self.initial_failed,
            "before": list(self.before),
            "best": list(self.best),
            "trained": self.trained,
            "curve": [list(point) for point in self.curve],
            "step": self.step,
            "path": self.path,
            "rises": self.rises,
            "breaks": self.breaks,
            "degraded": self.degraded,
            "tried": self.tried,
            "next": self.next,
            "over": self.over,
            "verdict": self.verdict,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Watch:
        """Go on where another watch stopped."""
        watch = cls(
            total_steps=int(state["total_steps"]),
            begun=int(state["begun"]),
            mean=float(state["mean"]),
            scale=float(state["proposed"]),
            before=state["before"],
            target=float(state["target"]),
            contested=bool(state["contested"]),
            duel=bool(state["duel"]),
        )
        watch.rival = float(state["rival"])
        watch.initial_failed = bool(state["initial_failed"])
        watch.scale = float(state["scale"])
        watch.best = [float(x) for x in state["best"]]
        watch.trained = float(state["trained"])
        watch.curve = [(int(t), float(x), float(y)) for t, x, y in state["curve"]]
        watch.step, watch.path = int(state["step"]), float(state["path"])
        watch.rises, watch.next = int(state["rises"]), int(state["next"])
        watch.breaks, watch.degraded = int(state["breaks"]), int(state["degraded"])
        watch.tried = bool(state["tried"])
        watch.over, watch.verdict = bool(state["over"]), str(state["verdict"])
        return watch
