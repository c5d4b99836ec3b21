"""The watch: the run after a race, seen on held-out batches while there is time to start again.

A race is over before the data come twice. Where they run out many times, the learning rate that
learns fastest overfits long before the end, and no race can see it. The run itself can: the
held-out loss falls, and rises again. What decides where it turns is hardly the learning rate but
the path,

    I(t) = sum over i < t of s(i)                s: the schedule over its peak

times the peak. With the loss lowest at I*, the peak that ends just there, of a schedule whose mean
is m and for which L steps are left, is

    eta' = eta min(1, I* / (m L))

and the run starts again from the mark with it. A look at the held-out loss, and at the training
loss of the step before it, sees overfitting in either of

    a rise          held-out above its lowest by RISE of it, and by SIGNIFICANT standard errors of
                    the difference batch by batch
    memorising      held-out no lower, training below MEMORISED of what it was then

where training is below GAP of held-out: a learning rate at the edge of stability makes both go up
and down together. PATIENCE such looks in a row are a verdict.

What a race found is on trial until TRIED of the schedule's whole path. It fails where the held-out
loss is then not below what the race promised (hdet_scale.search.decision); before that, in PATIENCE
looks in a row, not below BROKEN times the mark's; after it, not below the promise: some learn
at first and die. It fails too where it unlearns: in PATIENCE looks in a row, until LATE of
the run, the held-out loss has lost LOST of what was learnt since the mark,

    L > min L + LOST (L(mark) - min L)

and the training loss is above that, and has not fallen below NO_LOWER of what it was at the lowest
held-out loss: where it falls the run overfits. Where that was seen at a smaller share of the peak,
LOST_RISING counts instead: both losses rise with the learning rate of a schedule, but not so much.
Near the peak what a run does not bear shows itself so, and the decay hides it. The run then starts
again with a quarter of what was found, on trial for four times the path since it learns so much
more slowly, at last with the learning rate given, of which nothing was promised; below the learning
rate given, which would unlearn too, with a quarter again.

What a race found may be contested: its heats could not bear the learning rate given, or were noisy
and learnt with it too. The run itself decides then, with its own batch and warm-up: the learning
rate given is on trial first. If it keeps the promise it stays; if it does not, what was found is
next. In the second case it is a duel: both have a turn, until DUEL of the path, and the one whose
held-out loss is lower then is the run's.

Looks are rare and ever rarer, at steps a factor GROWTH apart. They end at UNTIL of the run, or with
a turn so late that what is left is less than ENOUGH of the way there: from then on the run is plain
training.

Pure: no torch, no process group. A look costs the run two numbers for each batch of the probe and
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
"""Share of the run before the first look."""
AGAIN = 0.1
"""The same after a start anew, whose learning rate is about right."""
GROWTH = 1.3
"""Steps of a look over those of the one before."""
UNTIL = 0.75
"""Share of the run after which nobody looks any more."""
ENOUGH = 0.5
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
"""Looks in a row that are a verdict."""
TRIED = 0.05
"""Share of the schedule's path after which a start must have come below what was promised."""
DUEL = 0.1
"""The same for two starts that are held against each other."""
BROKEN = 2.0
"""Times the loss at the mark."""
LOST = 0.1
"""Of what was learnt since the mark: what fits seldom loses so much for long."""
LOST_RISING = 0.25
"""The same while the schedule is higher than it was at the lowest loss."""
NO_LOWER = 0.9
"""Of the training loss at the lowest held-out loss: one step's is noisy."""
EVEN = 0.99
"""Shares of the peak that pass for equal."""
LATE = 0.6
"""Share of the run after which what unlearns is left to the decay."""
STEP_BACK = 4.0
"""What a scale that failed is divided by."""


class Watch:
    """The rule: losses in, and the scale to start again with out.

    total_steps: S, of the whole run, the race included.
    begun: steps that are gone before the run: those of the race.
    mean: m.
    scale: what the schedule is multiplied with, as the race found it.
    before: the losses at the mark, one a batch.
    promise: the held-out loss that a start must come below; infinite where nothing was promised.
    contested: True where the learning rate given is on trial first.
    duel: True where it is then held against what was found, and not against the promise.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        begun: int,
        mean: float,
        scale: float,
        before: Sequence[float],
        promise: float = math.inf,
        contested: bool = False,
        duel: bool = False,
    ) -> None:
        self.total_steps, self.mean, self.begun = total_steps, mean, begun
        self.found, self.promise, self.contested = scale, promise, contested
        self.duel, self.rival = duel, math.inf
        self.given_failed = False
        """True where the learning rate given has been on trial and did not keep the promise."""
        self.scale = 1.0 if contested else scale
        self.before = [float(x) for x in before]
        self.verdict = ""
        self.over = False
        self._start(FIRST)

    def _start(self, share: float) -> None:
        self.step, self.path = 0, 0.0
        self.rises, self.breaks, self.unlearnt = 0, 0, 0
        self.tried = False
        self.next = max(2, round(share * self.total_steps))
        self.curve: list[tuple[int, float, float]] = []
        self.best, self.trained = self.before, math.inf
        self._end_in_time()

    def _end_in_time(self) -> None:
        self.over = self.over or self.begun + self.next > UNTIL * self.total_steps

    @property
    def due(self) -> bool:
        """True when it is time for a look."""
        return not self.over and self.step >= self.next

    def count(self, share: float) -> None:
        """One step of the run is done, at `share` of the schedule's peak."""
        self.step += 1
        self.path += share

    def look(self, losses: Sequence[float], trained: float) -> float | None:
        """Take in the held-out loss of each batch, and the training loss of the step before; the
        scale to start again with, or None to go on."""
        losses = [float(x) for x in losses[: len(self.best)]]  # a resume may have fewer, or more
        mean = statistics.fmean(losses)
        self.curve.append((self.step, self.path, mean if math.isfinite(mean) else math.inf))
        self.next = max(self.step + 1, round(self.step * GROWTH))
        self._end_in_time()
        if self._fails(mean) or self._unlearns(losses, trained):
            return self._step_back(mean)
        if not self.tried and (self.duel or self.scale == 1.0):
            return None  # a loss may go up and down while it warms up
        if mean < statistics.fmean(self.best[: len(losses)]):
            self.best, self.trained, self.rises = losses, trained, 0
        elif math.isfinite(mean):
            self.rises = self.rises + 1 if self._overfits(losses, trained) else 0
        return None if self.rises < PATIENCE else self._shortened(trained)

    # -- a start on trial -----------------------------------------------------------------------

    def _fails(self, mean: float) -> bool:
        limit = self._broken
        if self.tried:
            limit = min(limit, self.promise)
        self.breaks = 0 if mean < limit else self.breaks + 1
        if self.breaks >= PATIENCE:
            self.duel = self.duel and not self.contested  # what breaks is no rival
            return True
        slower = 1.0 if self.scale == 1.0 else min(STEP_BACK, self.found / self.scale)
        share = DUEL if self.duel else TRIED * slower
        if self.tried or self.path < share * self.mean * self.total_steps:
            return False
        self.tried = True
        return self._loses(mean) if self.duel else not self._keeps(mean)

    def _unlearns(self, losses: Sequence[float], trained: float) -> bool:
        """Of what was found alone: the learning rate given is the user's."""
        late = self.begun + self.step > LATE * self.total_steps
        if late or not self.tried or self.duel or self.scale == 1.0:
            return False
        lowest, before = (
            statistics.fmean(batches[: len(losses)]) for batches in (self.best, self.before)
        )
        limit = lowest + (LOST if self._past_the_peak() else LOST_RISING) * (before - lowest)
        # A training loss that is not known is above nothing.
        risen = statistics.fmean(losses) > limit and trained > max(limit, NO_LOWER * self.trained)
        self.unlearnt = self.unlearnt + 1 if risen else 0
        return self.unlearnt >= PATIENCE

    def _past_the_peak(self) -> bool:
        """True where the schedule was no lower before the lowest look than before this one."""
        points = [(0, 0.0, math.inf), *self.curve]
        shares = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
        seen = [loss for _, _, loss in self.curve[:-1]]
        return bool(seen) and shares[seen.index(min(seen))] >= EVEN * shares[-1]

    @property
    def _broken(self) -> float:
        return BROKEN * abs(statistics.fmean(self.before)) or math.inf

    def _keeps(self, mean: float) -> bool:
        kept = mean < self.promise
        if kept and self.contested:
            self.verdict = f"the learning rate given stays: {self._told(mean)}"
            self.contested = False
        return kept

    def _loses(self, mean: float) -> bool:
        """Of two turns: the first is only heard."""
        if self.contested:
            self.rival = mean
            return True
        lost = not mean < self.rival
        if not lost:
            self.verdict = f"what was found stays: {self._told(mean)}"
            self.duel = False
        return lost

    def _told(self, mean: float) -> str:
        before = statistics.fmean(self.before)
        told = f"the held-out loss is {mean:.4g} after {self.step} steps, {before:.4g} before them"
        if self.duel and not self.contested:
            told += f", {self.rival:.4g} with the learning rate given"
        if self.unlearnt >= PATIENCE:
            told += f", {statistics.fmean(self.best):.4g} at its lowest"
        return told

    def _step_back(self, mean: float) -> float | None:
        told, scale = self._told(mean), self._next(mean)
        if scale is None:
            self.verdict = f"{told}, at a learning rate that is not above the one given"
            self.over = True
            return None
        self.duel = self.duel and self.contested
        above = self.unlearnt >= PATIENCE and self.scale < 1.0  # what unlearns bears no more
        self.given_failed = self.given_failed or above or (self.contested and not self.duel)
        self.scale, self.contested = scale, False
        self.verdict = f"{told}: the run starts again with {scale:.3g} x the learning rate given"
        if scale == 1.0:
            self.promise = math.inf  # the user's own: nothing was promised of it
        self.begun += self.step
        self._start(FIRST)
        return scale

    def _next(self, mean: float) -> float | None:
        """What is on trial after the present scale has failed; None where nothing is left."""
        if self.contested:
            return self.found
        if self.duel:
            return 1.0  # lost to the learning rate given
        if self.scale > 1.0:
            return max(1.0, self.scale / STEP_BACK)
        if self.unlearnt >= PATIENCE:
            return self.scale / STEP_BACK
        # What learns nothing may be too little; what breaks would break with more.
        slow = self.scale < 1.0 and mean < self._broken
        return 1.0 if slow and not self.given_failed else None

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
        if short > 1 / ENOUGH:
            self.over = True
            self.verdict = f"{seen}, too late to start again"
            return None
        self.verdict = (
            f"{seen} and is {losses[-1]:.4g} at a training loss of {trained:.4g}: the run starts "
            f"again with {scale:.3g} x the learning rate given instead of {self.scale:.3g} x"
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
            "found": self.found,
            "promise": self.promise,
            "contested": self.contested,
            "duel": self.duel,
            "rival": self.rival,
            "given_failed": self.given_failed,
            "before": list(self.before),
            "best": list(self.best),
            "trained": self.trained,
            "curve": [list(point) for point in self.curve],
            "step": self.step,
            "path": self.path,
            "rises": self.rises,
            "breaks": self.breaks,
            "unlearnt": self.unlearnt,
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
            scale=float(state["found"]),
            before=state["before"],
            promise=float(state["promise"]),
            contested=bool(state["contested"]),
            duel=bool(state["duel"]),
        )
        watch.rival = float(state["rival"])
        watch.given_failed = bool(state["given_failed"])
        watch.scale = float(state["scale"])
        watch.best = [float(x) for x in state["best"]]
        watch.trained = float(state["trained"])
        watch.curve = [(int(t), float(x), float(y)) for t, x, y in state["curve"]]
        watch.step, watch.path = int(state["step"]), float(state["path"])
        watch.rises, watch.next = int(state["rises"]), int(state["next"])
        watch.breaks, watch.unlearnt = int(state["breaks"]), int(state.get("unlearnt", 0))
        watch.tried = bool(state["tried"])
        watch.over, watch.verdict = bool(state["over"]), str(state["verdict"])
        return watch
