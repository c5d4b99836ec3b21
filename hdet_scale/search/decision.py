"""The decision of a search: losses of trials in, and at its end a scale for the schedule.

A loss in the middle of a run charges a high learning rate for noise that its decay would have
removed, so that every rule that compares such losses ends too low. A search compares what is left
after the decay. From the same weights, team j (hdet_scale.search.trials) runs h steps of

    eta_j(i) = eta_peak exp(x_j) / c * s(i, h)            s: warm-up, cosine to zero

and is evaluated on common held-out batches. Of M teams each has 1/M of the batch and a share h/S of
the steps: c translates the best learning rate of a trial into that of a run. Then the replicas go
back to the initial weights, and the run starts with eta_peak exp(x*).

**Coarse**: eight levels, a factor of four apart, around the initial rate. **Fine**: eight levels
over four octaves around the result. How x* is read off the loss curve (hdet_scale.search.curve)
differs between two families of optimizers:

    that divide by the gradient's size   x* is the minimum of a parabola, c = M^0.25 (h/S)^0.4
    that do not                          x* is the edge, where a trial learns half as much as the
                                         best, c = M^0.3 / 3: their rate is bounded by the
                                         curvature, which a short trial shows; the minimum of
                                         trials with a small batch depends on its noise

**Long**, in place of fine, if no coarse trial reduces the loss by LEARNT. The levels then differ by
noise, which favours low rates, or by networks that died. Trials are longer, and teams larger where
there are eight replicas or more. For the first family the levels are a factor of three apart, from
the edge downwards, and x* is the minimum, or, where still nothing was learnt, two thirds of the way
from there to the edge. For the second family, whose networks die without diverging, the levels are
the coarse ones and x* is the minimum. c = 1.

(All measured: docs/search.md.)

**Do no harm.** The proposed rate replaces the initial one only if

1. it is further from it than a search can tell apart: a factor of 2, for the second family 2.5, in
   the long stage 3; and, where a minimum counts, is better than it: by more than the scatter of the
   fine levels, by more than a tenth of what the best long trial learnt;
2. it is higher, or the coarse stage could not rank rates, or the trial at the initial rate stayed
   finite and the levels of the first family are CLEAR. Otherwise it is contested: the run's own
   batch and longer warm-up may allow a rate at which a trial diverged, and a small batch has a
   minimum of its own. The run then begins with the initial rate and the watch decides
   (hdet_scale.search.watch). Without a watch (`settle`) the initial rate stays, unless it diverged.

Pure: no torch, no process group. The end of a trial costs 2 (K + 1) numbers whatever N is: counts
and sums of the losses at each of K levels, and of the loss before the first step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from hdet_scale.search.curve import Parabola, edge
from hdet_scale.search.ledger import COARSE_DISTANCE, OVER, Ledger
from hdet_scale.search.trials import COARSE, FINE, LONG, STAGES, Stage

FINE_HALF_SPAN = math.log(4.0)
"""Half of the span of the fine stage."""
LONG_DISTANCE = math.log(3.0)
"""Distance of the levels of the long stage."""
LEARNT = 0.1
"""Share of the first loss that the best trial must remove before its neighbours mean anything."""
NOTHING = 0.02
"""The same in the long stage, for one of its levels to mean anything."""
TOWARDS = 2 / 3
"""Of the way from a minimum that may be noise to the edge."""
EDGE = {"coarse": 0.75, "fine": 0.5}
"""A trial is beyond the edge where it learnt less than this share of what the best did. The coarse
stage asks for more: networks that died have learnt what a guess is."""
TORN = 0.1
"""Of the initial loss: a trial that ends so far above it has diverged, whatever the noise."""
CLEAR = 12.0
"""Times the scatter of the levels that the best of them should have learnt."""
KEPT = 0.9
"""Of what the best long trial learnt: the initial rate stays where it learnt as much."""
UNSURE = math.log(3.0)
"""A factor that a long stage cannot tell apart."""
BELOW = 0.5 * math.log(2.0)
"""How far the fine stage is centred below an edge."""


class RateSearch(Ledger):
    """The rule: trials out, losses in, and at the end a scale for the schedule."""

    def decide(self, stage: Stage, losses: Sequence[float]) -> str:
        self._first, self._c = self.start.mean, self.trial.translation
        return {COARSE: self._coarse, FINE: self._fine, LONG: self._long}[stage](losses)

    # -- the coarse stage -----------------------------------------------------------------------

    def _coarse(self, losses: Sequence[float]) -> str:
        """The best decade, and where the levels of the next stage are."""
        self.shown = list(zip(self.offsets, losses, strict=True))
        best = min(range(self.size), key=lambda k: (losses[k], abs(self.offsets[k])))
        if not math.isfinite(losses[best]):
            self.stage = STAGES.index(FINE)
            low = self.offsets[0] - 2 * FINE_HALF_SPAN
            self.offsets = [low + 2 * FINE_HALF_SPAN * k / self.size for k in range(self.size)]
            return "no trial stayed finite: lower rates are next"
        if self._learnt(losses) < LEARNT:
            return self._look_longer(losses)
        middle, why = self._best(losses, Parabola.through(self.offsets, losses, width=2))
        initial = losses[self.size // 2]
        centre = middle - BELOW if self.family.by_edge else middle
        self.stage = STAGES.index(FINE)
        self._lay(
            [centre + FINE_HALF_SPAN * (2 * k / (self.size - 1) - 1) for k in range(self.size)]
        )
        return (
            f"best around {math.exp(middle):.3g} x the initial rate ({why}; loss "
            f"{losses[best]:.4g}, {initial:.4g} at the initial rate)"
        )

    def _lay(self, offsets: Sequence[float]) -> None:
        """The levels of a stage; the initial rate is one of them where it is among them."""
        self.offsets = list(offsets)
        if offsets[0] <= 0.0 <= offsets[-1]:
            nearest = min(range(self.size), key=lambda k: abs(offsets[k]))
            self.offsets[nearest] = 0.0

    # -- the fine stage -------------------------------------------------------------------------

    def _fine(self, losses: Sequence[float]) -> str:
        if not any(math.isfinite(x) for x in losses):
            self.stage = OVER
            return "no trial of the fine stage stayed finite: the initial rate stays"
        if not self._lowest(losses) < self._first:
            self.stage = OVER
            return "no trial has learnt anything: the initial rate stays"
        curve = Parabola.through(self.offsets, losses, width=3)
        proposed, why = self._best(losses, curve)
        self.stage = OVER
        ahead = f"{math.exp(proposed):.3g} x the initial rate, {why}"
        if abs(proposed) < self.family.unsure:
            return f"{ahead}: too near to tell apart, the initial rate stays"
        if not self.family.by_edge:
            gain = self._gain(losses, curve)
            ahead += f", better by {gain:.3g} in the loss with a scatter of {curve.scatter:.3g}"
            if not gain > curve.scatter:
                return f"{ahead}: not enough, the initial rate stays"
        self._take(proposed, losses)
        why = self._doubt(losses, curve) if proposed < 0.0 else ""
        self.contested = bool(why)
        return f"proposed {ahead}" + (f": but {why}, so that the run has to decide" if why else "")

    def _doubt(self, losses: Sequence[float], curve: Parabola) -> str:
        """Why a run might do better with the initial rate than a search can tell."""
        initial, first = self._at_initial, self._first
        if not all(math.isfinite(loss) for loss in initial):
            return "the trial at the initial rate diverged"
        noisy = first - self._lowest(losses) < CLEAR * curve.scatter
        self.duel = noisy and initial[0] < first and not self.family.by_edge
        told = "the levels are noisy, and the trial at the initial rate learnt too"
        return told if self.duel else ""

    def _best(self, losses: Sequence[float], curve: Parabola) -> tuple[float, str]:
        """x* as the levels of this stage have it, and where it comes from."""
        if not self.family.by_edge:
            return curve.minimum, f"trials are best at {self._rate(curve.minimum):.3g} x"
        at = self._edge(losses, self._left(losses, EDGE[STAGES[self.stage].name]))
        at = self.offsets[-1] if at is None else at
        return at, f"trials diverge at {self._rate(at):.3g} x"

    def _gain(self, losses: Sequence[float], curve: Parabola) -> float:
        """How much lower the minimum is than the loss at the initial rate."""
        nearest = min(range(self.size), key=lambda k: abs(self.offsets[k]))
        gain = losses[nearest] - curve.lowest
        if self.offsets[nearest] != 0.0:
            # Outside the span of this stage: its edge, and what the first stage showed.
            gain = max(gain, dict(self.shown)[0.0] - min(loss for _, loss in self.shown))
        return gain

    # -- the long stage -------------------------------------------------------------------------

    def _look_longer(self, losses: Sequence[float]) -> str:
        """The levels of the long stage."""
        first = self._first
        torn = self._edge(losses, first + TORN * abs(first))
        top = self.offsets[-1] + COARSE_DISTANCE if torn is None else torn
        top -= math.log(self._c)
        self.stage = STAGES.index(LONG)
        if not self.family.by_edge:
            self._lay([top - LONG_DISTANCE * (self.size - 1 - k) for k in range(self.size)])
        return (
            f"trials learnt next to nothing (loss {min(losses):.4g}, {first:.4g} before): longer "
            "ones of larger teams are next"
        )

    def _long(self, losses: Sequence[float]) -> str:
        self.stage = OVER
        if not any(math.isfinite(x) for x in losses):
            return "no long trial stayed finite: the initial rate stays"
        learnt, first, best = self._learnt(losses), self._first, min(losses)
        proposed, why = self._lowest_or_further(losses, learnt < LEARNT)
        ahead = f"{math.exp(proposed):.3g} x the initial rate, {why}"
        if abs(proposed) < UNSURE:
            return f"{ahead}: too near to tell apart, the initial rate stays"
        initial = dict(zip(self.offsets, losses, strict=True)).get(0.0, math.inf)
        if self.family.by_edge and learnt < NOTHING and initial < first + TORN * abs(first):
            return f"{ahead}: but they have learnt nothing, the initial rate stays"
        if first - initial >= KEPT * (first - best) and (self.family.by_edge or learnt >= LEARNT):
            return (
                f"{ahead}: not enough, the loss is {best:.4g} at best and {initial:.4g} at the "
                "initial rate, which stays"
            )
        self._take(proposed, losses)
        return f"proposed {ahead}"

    def _lowest_or_further(self, losses: Sequence[float], blind: bool) -> tuple[float, str]:
        """x* of the long stage, and where it comes from."""
        width = 2 if self.family.by_edge else 3  # levels further apart: fewer of them are near
        low = Parabola.through(self.offsets, losses, width=width).minimum
        if self.family.by_edge or not blind:
            return low, f"long trials are best at {math.exp(low):.3g} x"
        first = self._first
        torn = edge(self.offsets, losses, first + TORN * abs(first))
        torn = self.offsets[-1] if torn is None else torn
        return low + TOWARDS * (torn - low), (
            f"between long trials that learn next to nothing at {math.exp(low):.3g} x and diverge "
            f"at {math.exp(torn):.3g} x"
        )

    # -- what stages have in common -------------------------------------------------------------

    def _take(self, proposed: float, losses: Sequence[float]) -> None:
        """x*, and the target loss: halfway to that of the best trial."""
        self.proposed, self.target = proposed, self._left(losses, 0.5)

    def _left(self, losses: Sequence[float], share: float) -> float:
        """The loss of a trial that learnt that share of what the best did; infinite where the
        initial loss is not known."""
        first = self._first
        learnt = max(0.0, first - self._lowest(losses))
        return first - share * learnt if math.isfinite(learnt) else math.inf

    def _rate(self, offset: float) -> float:
        """Rate of a trial over the initial rate."""
        return math.exp(offset) / self._c

    def _edge(self, losses: Sequence[float], limit: float) -> float | None:
        """The edge of this stage, or above its levels that of the first; None without one."""
        limit = limit if math.isfinite(limit) else sys.float_info.max
        at = edge(self.offsets, losses, limit)
        if at is not None:
            return at
        offsets, first = zip(*self.shown, strict=True)
        at = edge(offsets, first, limit)
        return None if at is None else max(at, self.offsets[-1])

    def _lowest(self, losses: Sequence[float]) -> float:
        """Of this stage and the first."""
        return min(*losses, *(loss for _, loss in self.shown))

    def _learnt(self, losses: Sequence[float]) -> float:
        """Share of the first loss that is gone; 1 where that loss has no natural zero or is not
        known."""
        first = self._first
        return 1 - self._lowest(losses) / first if 0 < first < math.inf else 1.0

    @property
    def _at_initial(self) -> list[float]:
        """Losses of the trial at the initial rate itself, not translated, and of the next above
        it. A loss above the initial one says little: the batch of the run is larger."""
        at = math.log(self.translation(0))
        nearest = min(range(self.size), key=lambda k: abs(self.shown[k][0] - at))
        return [loss for _, loss in self.shown[nearest : nearest + 2]]

    def settle(self) -> None:
        """Decide what is contested where no watch follows."""
        contested, self.contested = self.contested, False
        if contested and all(math.isfinite(loss) for loss in self._at_initial):
            self.proposed = 0.0
            self.verdict += ": no evaluation follows, the initial rate stays"
