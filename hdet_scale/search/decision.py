"""The race: short but complete schedules at learning rates over decades, judged after their decay.

A loss in the middle of a run charges a high learning rate for noise that its decay would have
removed, so that every rule that compares such losses ends too low. A race compares what is left
after the decay. From the same weights, team j (hdet_scale.search.trials) runs h steps of

    eta_j(i) = eta_peak exp(x_j) / c * s(i, h)            s: warm-up, cosine to zero

and is judged by its loss on common probe batches. Of M teams each has 1/M of the batch and a part
h/S of the steps: c is what the best learning rate of a run is over theirs. Then the replicas go
back to where the race began, and the run starts with eta_peak exp(x*).

**Coarse**: eight levels, a factor of four apart, around the learning rate given. **Fine**: eight
over four octaves around what those say. What is read off them (hdet_scale.search.curve) differs
between two families of optimizers:

    that divide by the gradient's size   x* is the lowest point of a parabola, c = M^0.25 (h/S)^0.4
    that do not                          x* is the edge, where a heat learns half as much as the
                                         best, c = M^0.3 / 3: their learning rate is bounded by
                                         the curvature, which needs no long heat to be seen; where
                                         heats of a small batch are lowest says more about its noise

**Long**, in place of fine, where the race is blind: its best heat took off less than LEARNT of the
loss. What is left between the levels is noise, which speaks for less, or networks that died, at the
loss of a guess. Heats are longer then, and teams larger where there are eight replicas or more. For
the first family the levels are a factor of three apart, from where heats break downwards, and x* is
the lowest point, or, where still nothing was learnt, two thirds of the way from there to where they
break. For the second, whose networks die without breaking, the levels are the coarse ones and x* is
the lowest point. c = 1.

(All measured: docs/controller.md.)

**Do no harm.** What was found replaces the learning rate given only if

1. it is further from it than a race can tell apart, a factor of 2, for the second family 2.5, in
   the long stage 3; and, where a lowest point counts, is ahead of it: by more than the scatter of
   the fine levels, by more than a tenth of what the best long heat learnt;
2. it is higher, or the race was blind, or the heat at the learning rate given stayed finite and the
   levels of the first family are CLEAR. Otherwise it is contested: a run's own batch and longer
   warm-up may bear what a heat could not, and the noise of a small batch has a bottom of its own.
   The run then begins with the learning rate given and decides (hdet_scale.search.watch). Where
   nobody watches (`settle`), the learning rate given stays, unless it diverged.

Pure: no torch, no process group. A heat costs the run 2 (K + 1) numbers whatever N is: counts and
sums of the losses at each level, and of the loss before.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdet_scale.search.curve import Parabola, edge
from hdet_scale.search.trials import COARSE, FINE, LONG, SIZE, STAGES, Heat, Level, Stage

STATE_VERSION = 2
OVER = len(STAGES)
"""The stage after the last."""
FAR = math.log(4.0)
"""Distance of the levels of the coarse stage."""
NEAR = math.log(4.0)
"""Half of the span of the fine stage."""
APART = math.log(3.0)
"""Distance of the levels of the long stage."""
LEARNT = 0.1
"""Share of the first loss that the best heat must take off before its neighbours mean anything."""
NOTHING = 0.02
"""The same in the long stage, for one of its levels to mean anything."""
TOWARDS = 2 / 3
"""Of the way from a lowest point that may be noise to where heats break."""
EDGE = {"coarse": 0.75, "fine": 0.5}
"""A heat has broken where it learnt less than this share of what the best did. The coarse stage
asks for more: networks that died have learnt what a guess is."""
TORN = 0.1
"""Of the loss at the start: what ends so far above it has broken, whatever the noise."""
CLEAR = 12.0
"""Times the scatter of the levels that the best of them should have learnt."""
KEPT = 0.9
"""Of what the best heat of the long stage took off the loss: the learning rate given stays where
it did as much."""
UNSURE = math.log(3.0)
"""A factor that a long stage cannot tell apart."""
BELOW = 0.5 * math.log(2.0)
"""How far the fine stage is centred below an edge."""
ENOUGH = 12
"""Steps of a heat below which `rule="auto"` runs no race: too few to tell learning rates apart."""


@dataclass(frozen=True, slots=True)
class Family:
    """Optimizers of a kind: what a heat says of a run, c = factor M^alpha (h/S)^beta."""

    factor: float
    alpha: float
    beta: float
    by_edge: bool
    """Whether the edge of the heats counts, or their lowest point."""
    unsure: float
    """A factor, as its logarithm, that a race cannot tell apart."""


ADAPTIVE = Family(1.0, 0.25, 0.4, by_edge=False, unsure=math.log(2.0))
"""Optimizers that divide by the gradient's size."""
GRADIENT = Family(1 / 3, 0.3, 0.0, by_edge=True, unsure=math.log(2.5))
"""Optimizers that do not."""


class Race:
    """The rule: heats out, levels in, and at the end a scale for the schedule.

    idle: there is no race to run; it can hold the state of one that was run elsewhere.
    """

    def __init__(
        self, *, replicas: int, total_steps: int, adaptive: bool, idle: bool = False
    ) -> None:
        if replicas < 1:
            raise ValueError(f"a race needs at least one replica, got {replicas}")
        self.replicas, self.total_steps, self.adaptive = replicas, total_steps, adaptive
        self.family = ADAPTIVE if adaptive else GRADIENT
        self.size = SIZE
        shortest = min(stage.steps(replicas, total_steps) for stage in STAGES)
        if shortest < 4 and not idle:
            raise ValueError(
                f"total_steps={total_steps} leaves heats of {shortest} steps for {replicas} "
                f"replicas: a race needs {self.least_steps(replicas, 4)} steps in all; "
                "use rule='none' for shorter runs"
            )
        self.stage, self.index = 0, 0
        self.heats_run, self.last_heat = 0, 0
        """How many have ended, and the steps of the last."""
        self.offsets = [FAR * (k - self.size // 2) for k in range(self.size)]
        self.seen = [Level() for _ in range(self.size)]
        self.start = Level()
        """The loss before any step of the race."""
        self.shown: list[tuple[float, float]] = []
        """Offsets and losses of the coarse stage."""
        self.found = 0.0
        self.promise = math.inf
        """Held-out loss that a run must soon come below."""
        self.contested = False
        """True where the run has to decide, beginning with the learning rate given."""
        self.duel = False
        """True where it decides by which of the two learns more."""
        self.verdict = ""
        if idle:
            self.skip()

    @staticmethod
    def least_steps(replicas: int, heat: int) -> int:
        """Steps of the shortest run whose heats have at least `heat`."""
        return max(math.ceil(heat * s.heats(replicas) / s.share) for s in STAGES)

    @property
    def budget(self) -> int:
        """Steps of a race that can tell after its fine stage."""
        return self._steps_of(COARSE) + self._steps_of(FINE)

    @property
    def longest(self) -> int:
        """Steps of a race that is blind."""
        return self._steps_of(COARSE) + self._steps_of(LONG)

    def _steps_of(self, stage: Stage) -> int:
        return stage.steps(self.replicas, self.total_steps) * stage.heats(self.replicas)

    @property
    def team(self) -> int:
        """Replicas that run a level together in the present stage."""
        return STAGES[min(self.stage, OVER - 1)].team(self.replicas)

    def steps(self, stage: int) -> int:
        """Of a heat."""
        return STAGES[stage].steps(self.replicas, self.total_steps)

    @property
    def over(self) -> bool:
        """True when there is nothing left to run."""
        return self.stage >= OVER

    @property
    def scale(self) -> float:
        """What the schedule is multiplied with: 1.0 until the race is over, and where the
        learning rate given was not beaten."""
        return math.exp(self.found) if self.over else 1.0

    def translation(self, stage: int) -> float:
        """c: a learning rate of the run over that of a replica which stands for it."""
        if STAGES[stage] is LONG:
            return 1.0
        kind, horizon = self.family, self.steps(stage) / self.total_steps
        teams = STAGES[stage].teams(self.replicas)
        powers = kind.alpha * math.log(teams) + kind.beta * math.log(horizon)
        return kind.factor * math.exp(powers)

    def heat(self) -> Heat:
        """The heat that is under way."""
        stage = STAGES[self.stage]
        team, teams = stage.team(self.replicas), stage.teams(self.replicas)
        first, last = self.index * teams, teams - 1
        levels = tuple((first + min(r // team, last)) % self.size for r in range(self.replicas))
        c = self.translation(self.stage)
        return Heat(
            self.stage,
            self.index,
            self.steps(self.stage),
            levels,
            tuple(math.exp(self.offsets[k]) / c for k in levels),
            teams * team,
        )

    def close(self, levels: Sequence[Level], start: Level | None = None) -> str:
        """Take in what a heat showed of each level, and the loss before it where it is known, and
        go on; says what was decided."""
        if self.over:
            raise ValueError("the race is over: there is no heat to close")
        if len(levels) != self.size:
            raise ValueError(f"a race of {self.size} levels, got {len(levels)}")
        self.seen = [a + b for a, b in zip(self.seen, levels, strict=True)]
        self.start += start or Level()
        self.index += 1
        self.heats_run, self.last_heat = self.heats_run + 1, self.steps(self.stage)
        stage = STAGES[self.stage]
        if self.index < stage.heats(self.replicas):
            return ""
        losses = [level.mean for level in self.seen]
        self.seen, self.index = [Level() for _ in range(self.size)], 0
        decide = {COARSE: self._coarse, FINE: self._fine, LONG: self._long}[stage]
        self.verdict = decide(losses)
        return self.verdict

    def skip(self) -> None:
        """No race: the schedule given stays."""
        self.stage, self.found, self.verdict = OVER, 0.0, "no race was run"
        self.shown = []

    @property
    def ran(self) -> bool:
        """True where a race is over that was run to its end."""
        return self.over and bool(self.shown)

    # -- the coarse stage -----------------------------------------------------------------------

    def _coarse(self, losses: Sequence[float]) -> str:
        """The best decade, and where the levels of the next stage are."""
        self.shown = list(zip(self.offsets, losses, strict=True))
        best = min(range(self.size), key=lambda k: (losses[k], abs(self.offsets[k])))
        if not math.isfinite(losses[best]):
            self.stage = STAGES.index(FINE)
            low = self.offsets[0] - 2 * NEAR
            self.offsets = [low + 2 * NEAR * k / self.size for k in range(self.size)]
            return "no learning rate of the race stayed finite: lower ones are next"
        if self._learnt(losses) < LEARNT:
            return self._look_longer(losses)
        middle, why = self._best(losses, Parabola.through(self.offsets, losses, width=2))
        given = losses[self.size // 2]
        centre = middle - BELOW if self.family.by_edge else middle
        self.stage = STAGES.index(FINE)
        self._lay([centre + NEAR * (2 * k / (self.size - 1) - 1) for k in range(self.size)])
        return (
            f"best around {math.exp(middle):.3g} x the learning rate given ({why}; loss "
            f"{losses[best]:.4g}, given {given:.4g})"
        )

    def _lay(self, offsets: Sequence[float]) -> None:
        """The levels of a stage; the learning rate given is one of them where it is among them."""
        self.offsets = list(offsets)
        if offsets[0] <= 0.0 <= offsets[-1]:
            nearest = min(range(self.size), key=lambda k: abs(offsets[k]))
            self.offsets[nearest] = 0.0

    # -- the fine stage -------------------------------------------------------------------------

    def _fine(self, losses: Sequence[float]) -> str:
        if not any(math.isfinite(x) for x in losses):
            self.stage = OVER
            return "no learning rate of the fine stage stayed finite: the schedule given stays"
        if not self._lowest(losses) < self.start.mean:
            self.stage = OVER
            return "no heat has learnt anything: the schedule given stays"
        curve = Parabola.through(self.offsets, losses, width=3)
        found, why = self._best(losses, curve)
        self.stage = OVER
        ahead = f"{math.exp(found):.3g} x the learning rate given, {why}"
        if abs(found) < self.family.unsure:
            return f"{ahead}: too near to tell, the schedule given stays"
        if not self.family.by_edge:
            gain = self._gain(losses, curve)
            ahead += f", ahead by {gain:.3g} in the loss with a scatter of {curve.scatter:.3g}"
            if not gain > curve.scatter:
                return f"{ahead}: not enough, the schedule given stays"
        self._take(found, losses)
        why = self._doubt(losses, curve) if found < 0.0 else ""
        self.contested = bool(why)
        return f"found {ahead}" + (f": but {why}, so that the run has to show it" if why else "")

    def _doubt(self, losses: Sequence[float], curve: Parabola) -> str:
        """Why a run might do better with the learning rate given than a race can see."""
        given, first = self._given, self.start.mean
        if not all(math.isfinite(loss) for loss in given):
            return "the heat at the learning rate given diverged"
        noisy = first - self._lowest(losses) < CLEAR * curve.scatter
        self.duel = noisy and given[0] < first and not self.family.by_edge
        told = "the levels are noisy, and the one at the learning rate given learnt too"
        return told if self.duel else ""

    def _best(self, losses: Sequence[float], curve: Parabola) -> tuple[float, str]:
        """x* as the levels of this stage have it, and where it comes from."""
        if not self.family.by_edge:
            return curve.minimum, f"heats are best at {self._rate(curve.minimum):.3g} x"
        at = self._edge(losses, self._left(losses, EDGE[STAGES[self.stage].name]))
        at = self.offsets[-1] if at is None else at
        return at, f"heats break at {self._rate(at):.3g} x"

    def _gain(self, losses: Sequence[float], curve: Parabola) -> float:
        """What the lowest point is ahead of the learning rate given."""
        nearest = min(range(self.size), key=lambda k: abs(self.offsets[k]))
        gain = losses[nearest] - curve.lowest
        if self.offsets[nearest] != 0.0:
            # Outside the span of this stage: its edge, and what the first stage showed.
            gain = max(gain, dict(self.shown)[0.0] - min(loss for _, loss in self.shown))
        return gain

    # -- the long stage -------------------------------------------------------------------------

    def _look_longer(self, losses: Sequence[float]) -> str:
        """The levels of the long stage."""
        first = self.start.mean
        torn = self._edge(losses, first + TORN * abs(first))
        top = self.offsets[-1] + FAR if torn is None else torn
        top -= math.log(self.translation(self.stage))
        self.stage = STAGES.index(LONG)
        if not self.family.by_edge:
            self._lay([top - APART * (self.size - 1 - k) for k in range(self.size)])
        return (
            f"heats learnt next to nothing (loss {min(losses):.4g}, {first:.4g} before): longer "
            "ones of larger teams are next"
        )

    def _long(self, losses: Sequence[float]) -> str:
        self.stage = OVER
        if not any(math.isfinite(x) for x in losses):
            return "no learning rate of the long heats stayed finite: the schedule given stays"
        learnt, first, best = self._learnt(losses), self.start.mean, min(losses)
        found, why = self._lowest_or_further(losses, learnt < LEARNT)
        ahead = f"{math.exp(found):.3g} x the learning rate given, {why}"
        if abs(found) < UNSURE:
            return f"{ahead}: too near to tell, the schedule given stays"
        given = dict(zip(self.offsets, losses, strict=True)).get(0.0, math.inf)
        if self.family.by_edge and learnt < NOTHING and given < first + TORN * abs(first):
            return f"{ahead}: but they have learnt nothing, the schedule given stays"
        if first - given >= KEPT * (first - best) and (self.family.by_edge or learnt >= LEARNT):
            return (
                f"{ahead}: not enough, the loss is {best:.4g} at best and {given:.4g} at the "
                "learning rate given, the schedule given stays"
            )
        self._take(found, losses)
        return f"found {ahead}"

    def _lowest_or_further(self, losses: Sequence[float], blind: bool) -> tuple[float, str]:
        """x* of the long stage, and where it comes from."""
        width = 2 if self.family.by_edge else 3  # levels further apart: fewer of them are near
        low = Parabola.through(self.offsets, losses, width=width).minimum
        if self.family.by_edge or not blind:
            return low, f"long heats are best at {math.exp(low):.3g} x"
        first = self.start.mean
        torn = edge(self.offsets, losses, first + TORN * abs(first))
        torn = self.offsets[-1] if torn is None else torn
        return low + TOWARDS * (torn - low), (
            f"between long heats that learn next to nothing at {math.exp(low):.3g} x and break at "
            f"{math.exp(torn):.3g} x"
        )

    # -- what stages have in common -------------------------------------------------------------

    def _take(self, found: float, losses: Sequence[float]) -> None:
        """x*, and the loss halfway to that of the best heat: what a run must soon come below."""
        self.found, self.promise = found, self._left(losses, 0.5)

    def _left(self, losses: Sequence[float], share: float) -> float:
        """The loss of one that learnt that share of what the best heat did; infinite where the
        loss before it is not known."""
        first = self.start.mean
        learnt = max(0.0, first - self._lowest(losses))
        return first - share * learnt if math.isfinite(learnt) else math.inf

    def _rate(self, offset: float) -> float:
        """Of a heat, over the learning rate given."""
        return math.exp(offset) / self.translation(self.stage)

    def _edge(self, losses: Sequence[float], limit: float) -> float | None:
        """Where this stage breaks, and above its levels where the first did; None where neither."""
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
        first = self.start.mean
        return 1 - self._lowest(losses) / first if 0 < first < math.inf else 1.0

    @property
    def _given(self) -> list[float]:
        """Losses of the heat at the very learning rate given, not translated, and the next above
        it. A loss above the one before it says little: the batch of the run is larger."""
        at = math.log(self.translation(0))
        nearest = min(range(self.size), key=lambda k: abs(self.shown[k][0] - at))
        return [loss for _, loss in self.shown[nearest : nearest + 2]]

    def settle(self) -> None:
        """Decide what is contested without a run that shows it."""
        contested, self.contested = self.contested, False
        if contested and all(math.isfinite(loss) for loss in self._given):
            self.found = 0.0
            self.verdict += ": nobody looks, the schedule given stays"

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank."""
        return {
            "version": STATE_VERSION,
            "replicas": self.replicas,
            "total_steps": self.total_steps,
            "stage": self.stage,
            "index": self.index,
            "heats_run": self.heats_run,
            "last_heat": self.last_heat,
            "offsets": list(self.offsets),
            "seen": [[x.count, x.total] for x in self.seen],
            "start": [self.start.count, self.start.total],
            "shown": [list(level) for level in self.shown],
            "found": self.found,
            "promise": self.promise,
            "contested": self.contested,
            "duel": self.duel,
            "verdict": self.verdict,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another race stopped."""
        self.check_state(state)
        self.stage, self.index = int(state["stage"]), int(state["index"])
        self.heats_run, self.last_heat = int(state["heats_run"]), int(state["last_heat"])
        self.offsets = [float(x) for x in state["offsets"]]
        self.seen = [Level(*map(float, row)) for row in state["seen"]]
        self.start = Level(*map(float, state["start"]))
        self.shown = [(float(x), float(y)) for x, y in state["shown"]]
        self.found, self.promise = float(state["found"]), float(state["promise"])
        self.contested, self.duel = bool(state["contested"]), bool(state["duel"])
        self.verdict = str(state["verdict"])

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a race of other replicas or another length; once it is over, it fits any."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"the state of a race has version {state.get('version')!r} and this version of "
                f"hdet_scale reads {STATE_VERSION}: resume with the one that wrote it"
            )
        same = (state["replicas"], state["total_steps"]) == (self.replicas, self.total_steps)
        if int(state["stage"]) < OVER and not same:
            raise ValueError(
                f"the state was saved in a race of {state['replicas']} replicas and "
                f"{state['total_steps']} steps, and this run has {self.replicas} and "
                f"{self.total_steps}: resume with the same, or from a checkpoint after the race"
            )
