"""The watch: what a race found, seen on held-out batches while there is time to take it back.

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
                    the difference batch by batch; training below what it was then by LEARNT of it
    memorising      held-out no lower, training below what it was then by MEMORISED of it

(a learning rate at the edge of stability makes both rise, and both fall again). PATIENCE such looks
in a row are a verdict. Where the held-out loss is not finite any more, or LOST looks in a row were
above the mark's and none below it, what was found is taken back, for the learning rate given.

What a race found by going down may be contested (hdet_scale.race): where its heats hardly learnt,
or could not bear the learning rate given. The run itself decides then, with its own batch and
warm-up. It begins with the learning rate given. If the held-out loss at the first look after TRIED
of the run is not below the middle between the mark's and that of the best heat, or before that is
not finite or twice the mark's in PATIENCE looks, the run starts again with what was found.
Otherwise it goes on, unwatched.

Looks are rare and ever rarer, at steps a factor GROWTH apart. They end at UNTIL of the run, or with
a turn so late that what is left is less than ENOUGH of the way there: from then on the run is plain
training.

Pure: no torch, no process group. A look costs the run two numbers for each batch of the probe and
two for the training loss, whatever the number of replicas.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hdet_scale.race import Parabola

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
LEARNT = 0.1
"""Of the training loss at the lowest held-out loss."""
MEMORISED = 0.5
"""The same where the held-out loss has not risen, but does not fall."""
PATIENCE = 2
"""Looks in a row that are a verdict."""
LOST = 4
"""The same where the loss has never been lower than at the mark."""
TRIED = 0.06
"""Share of the run that the learning rate given has to show itself."""


class Watch:
    """The rule: losses in, and the scale to start again with out.

    total_steps: S, of the whole run, the race included.
    begun: steps that are gone before the run: those of the race.
    mean: m.
    scale: what the schedule is multiplied with, as the race found it.
    before: the losses at the mark, one a batch.
    contest: the loss that the learning rate given must come below first; None where `scale` is not
        contested.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        begun: int,
        mean: float,
        scale: float,
        before: Sequence[float],
        contest: float | None = None,
    ) -> None:
        self.total_steps, self.mean, self.begun = total_steps, mean, begun
        self.found, self.contest = scale, contest
        self.scale = scale if contest is None else 1.0
        self.before = [float(x) for x in before]
        self.verdict = ""
        self.over = False
        self._start(FIRST)

    def _start(self, share: float) -> None:
        self.step, self.path, self.rises = 0, 0.0, 0
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
        mean = statistics.fmean(losses)
        broken = not math.isfinite(mean)
        self.curve.append((self.step, self.path, math.inf if broken else mean))
        if self.contest is not None:
            return self._tried(mean, self.contest)
        if mean < statistics.fmean(self.best):
            self.best, self.trained, self.rises = [float(x) for x in losses], trained, 0
        else:
            worse = broken or self._overfits(losses, trained)
            self.rises = self.rises + 1 if worse else 0
        self._wait()
        if self.rises < (LOST if self._lost and not broken else PATIENCE):
            return None
        return self._taken_back() if self._lost or broken else self._shortened()

    def _wait(self) -> None:
        self.next = max(self.step + 1, round(self.step * GROWTH))
        self._end_in_time()

    def _tried(self, mean: float, contest: float) -> float | None:
        """The learning rate given before what was found."""
        before = statistics.fmean(self.before)
        self.rises = 0 if mean < 2 * abs(before) else self.rises + 1
        done = self.step >= TRIED * self.total_steps
        told = f"the held-out loss is {mean:.4g} after {self.step} steps, {before:.4g} before them"
        if done and mean < contest:
            self.verdict = f"the learning rate given stays: {told}"
            self.over = True
            return None
        if not done and self.rises < PATIENCE:
            self._wait()
            return None
        self.scale, self.begun, self.contest = self.found, self.begun + self.step, None
        self.verdict = (
            f"{told}: the run starts again with {self.scale:.3g} x the learning rate given"
        )
        self._start(FIRST)
        return self.scale

    @property
    def _lost(self) -> bool:
        """True where no look was better than the mark."""
        return self.best is self.before

    def _overfits(self, losses: Sequence[float], trained: float) -> bool:
        known = self.trained and math.isfinite(self.trained)
        fallen = (self.trained - trained) / abs(self.trained) if known else 0.0
        return fallen > MEMORISED or (self._rose(losses) and (self._lost or fallen > LEARNT))

    def _rose(self, losses: Sequence[float]) -> bool:
        rises = [x - y for x, y in zip(losses, self.best, strict=True)]
        rise = statistics.fmean(rises)
        error = statistics.stdev(rises) / math.sqrt(len(rises)) if len(rises) > 1 else 0.0
        return rise > max(SIGNIFICANT * error, RISE * abs(statistics.fmean(self.best)))

    def _shortened(self) -> float | None:
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
            f"{seen} and is {losses[-1]:.4g} while the training loss falls: the run starts again "
            f"with {scale:.3g} x the learning rate given instead of {self.scale:.3g} x"
        )
        self.scale, self.begun = scale, begun
        self._start(AGAIN)
        return scale

    def _taken_back(self) -> float | None:
        self.over = True
        lost = self.curve[-1][2] < math.inf
        told = (
            f"the held-out loss never fell below {statistics.fmean(self.before):.4g}"
            if lost
            else "the held-out loss is not finite any more"
        )
        if self.scale <= 1.0:
            self.verdict = f"{told}, at a learning rate that is not above the one given"
            return None
        self.verdict = f"{told}: the run starts again with the learning rate given"
        self.scale = 1.0
        return 1.0

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank."""
        return {
            "total_steps": self.total_steps,
            "begun": self.begun,
            "mean": self.mean,
            "scale": self.scale,
            "found": self.found,
            "contest": self.contest,
            "before": list(self.before),
            "best": None if self._lost else list(self.best),
            "trained": self.trained,
            "curve": [list(point) for point in self.curve],
            "step": self.step,
            "path": self.path,
            "rises": self.rises,
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
            contest=state["contest"],
        )
        watch.scale = float(state["scale"])
        if state["best"] is not None:
            watch.best = [float(x) for x in state["best"]]
        watch.trained = float(state["trained"])
        watch.curve = [(int(t), float(x), float(y)) for t, x, y in state["curve"]]
        watch.step, watch.path = int(state["step"]), float(state["path"])
        watch.rises, watch.next = int(state["rises"]), int(state["next"])
        watch.over, watch.verdict = bool(state["over"]), str(state["verdict"])
        return watch
