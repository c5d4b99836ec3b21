"""The race: short but complete schedules at learning rates over decades, judged after their decay.

A loss in the middle of a run charges a high learning rate for noise that its decay would have
removed, so that every rule that compares such losses ends too low. A race compares what is left
after the decay. From the same weights, team j runs h steps of

    eta_j(i) = eta_peak exp(x_j) / c * s(i, h)            s: warm-up, cosine to zero

and is judged by its loss on common probe batches. A team is one replica with its own gradients, or,
of N >= 16 replicas, N // 8 that share theirs: eight to fifteen teams, so that the batch of a team
does not shrink with N. Two stages: K = 8 levels x of a factor four around the learning rate given,
then eight over four octaves around what those say.

What is read off the levels (hdet_scale.valley) differs between two families of optimizers. Of M
teams each has 1/M of the batch and a small part h/S of the steps, and

    that divide by the gradient's size   run best near x*, the lowest point of a parabola, with
                                         c = M^0.25 (h/S)^0.35
    that do not                          run best near x*, the edge where a heat ends no better
                                         than it began, with c = M^0.3 / 6: their learning rate
                                         is bounded by the curvature, which needs no long heat to
                                         be seen; where heats of a small batch are lowest says
                                         more about its noise

(measured: docs/controller.md). A race is blind where the best heat took off less than LEARNT of the
loss it began with. The levels of the first family are noise then, but not their edge: what is taken
is halfway, in the logarithm, between the lowest heat and where heats end TORN above their start.
The replicas then go back to where the race began, and the run starts with eta_peak exp(x*).

Do no harm. What was found replaces the learning rate given only if

1. it is further from it than a race can tell apart, a factor of 2 or 3 by family; and, where the
   lowest point counts, beats it by more than the scatter of the levels around the parabola;
2. the race was not blind; and it is higher, or the heat at the learning rate given stayed finite,
   and the levels of the first family are CLEAR. Otherwise it is contested: what nothing learnt from
   says little, a run's own batch and longer warm-up may bear what a heat could not, and the noise
   of a small batch has a bottom of its own. The run then begins with the learning rate given and
   decides (hdet_scale.watch). Where nobody watches (`settle`), the learning rate given stays,
   unless it diverged.

Pure: no torch, no process group. A heat costs the run 2 (K + 1) numbers whatever N is: counts and
sums of the losses at each level, and of the loss before.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdet_scale.valley import Parabola, edge

SHARES = (0.028, 0.038)
"""Of the run's steps, for the first and the second stage."""
COARSE = math.log(4.0)
"""Distance of the levels of the first stage when there are eight."""
FINE = math.log(4.0)
"""Half of the span of the second stage."""
LEARNT = 0.15
"""Share of the first loss that the best heat must take off before its neighbours mean anything."""
TORN = 0.1
"""Of the loss at the start: what ends so far above it has broken, whatever the noise."""
TIMID = 0.5 * math.log(2.0)
"""What a blind race stays below the middle of its heats."""
UNSURE = math.log(3.0)
"""A factor that a blind race cannot tell apart."""
CLEAR = 12.0
"""Times the scatter of the levels that the best of them should have learnt."""
SHOWN = 1.35
"""Times what the best heat took off the loss: by that a run shows that it learns, where a race was
blind."""
BELOW = 0.5 * math.log(2.0)
"""How far the second stage is centred below an edge."""
SIZE = 8
"""Levels of a stage."""
ENOUGH = 12
"""Steps of a heat below which `rule="auto"` runs no race: too few to tell learning rates apart."""
WARM = 0.05
"""Share of a heat that is its warm-up."""


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
GRADIENT = Family(1 / 6, 0.3, 0.0, by_edge=True, unsure=math.log(3.0))
"""Optimizers that do not."""


@dataclass(frozen=True, slots=True)
class Level:
    """What is known of one learning rate: sums over the replicas that ran it to the end."""

    count: float = 0.0
    total: float = 0.0

    @classmethod
    def of(cls, loss: float) -> Level:
        """One replica's loss; one that is not finite has nothing to add."""
        return cls(1.0, loss) if math.isfinite(loss) else cls()

    def __add__(self, other: Level) -> Level:
        return Level(self.count + other.count, self.total + other.total)

    @property
    def mean(self) -> float:
        """Infinite where every replica diverged."""
        return self.total / self.count if self.count else math.inf


@dataclass(frozen=True, slots=True)
class Heat:
    """What the replicas run next."""

    stage: int
    index: int
    """Of the heats of the stage, where there are fewer replicas than levels."""
    steps: int
    levels: tuple[int, ...]
    """The level of each replica."""
    multipliers: tuple[float, ...]
    """For each replica what its peak learning rate is, times the schedule's peak."""
    judged: int
    """Replicas that are members of a team; the last ones beyond are not heard."""


def shape(i: int, steps: int) -> float:
    """s(i, h): linear warm-up over the first steps, then a cosine that ends at zero."""
    warm = max(1, round(WARM * steps))
    if i < warm:
        return (i + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (i - warm) / (steps - warm)))


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
        self.team = max(1, replicas // SIZE)
        self.teams = replicas // self.team
        self.heats = -(-self.size // self.teams)
        shortest = min(self.steps(stage) for stage in (0, 1))
        if shortest < 4 and not idle:
            raise ValueError(
                f"total_steps={total_steps} leaves heats of {shortest} steps for {replicas} "
                f"replicas: a race needs {self.least_steps(replicas, 4)} steps in all; "
                "use rule='none' for shorter runs"
            )
        self.stage, self.index = 0, 0
        self.offsets = [COARSE * (k - self.size // 2) for k in range(self.size)]
        self.seen = [Level() for _ in range(self.size)]
        self.start = Level()
        """The loss before any step of the race."""
        self.coarse: list[tuple[float, float]] = []
        """Offsets and losses of the first stage."""
        self.found = 0.0
        self.promise = math.inf
        """Held-out loss that a run must soon come below."""
        self.blind = False
        """True where the heats hardly learnt anything."""
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
        teams = replicas // max(1, replicas // SIZE)
        return math.ceil(heat * -(-SIZE // teams) / min(SHARES))

    def steps(self, stage: int) -> int:
        """Of a heat."""
        return int(SHARES[stage] * self.total_steps) // self.heats

    @property
    def budget(self) -> int:
        """Steps of the whole race."""
        return sum(self.steps(stage) * self.heats for stage in (0, 1))

    @property
    def over(self) -> bool:
        """True when there is nothing left to run."""
        return self.stage > 1

    @property
    def scale(self) -> float:
        """What the schedule is multiplied with: 1.0 until the race is over, and where the
        learning rate given was not beaten."""
        return math.exp(self.found) if self.over else 1.0

    def translation(self, stage: int) -> float:
        """c: a learning rate of the run over that of a replica which stands for it."""
        kind, horizon = self.family, self.steps(stage) / self.total_steps
        powers = kind.alpha * math.log(self.teams) + kind.beta * math.log(horizon)
        return kind.factor * math.exp(powers)

    def heat(self) -> Heat:
        """The heat that is under way."""
        first = self.index * self.teams
        last = self.teams - 1
        levels = tuple(
            (first + min(r // self.team, last)) % self.size for r in range(self.replicas)
        )
        c = self.translation(self.stage)
        return Heat(
            self.stage,
            self.index,
            self.steps(self.stage),
            levels,
            tuple(math.exp(self.offsets[k]) / c for k in levels),
            self.teams * self.team,
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
        if self.index < self.heats:
            return ""
        self.verdict = self._coarse() if self.stage == 0 else self._fine()
        self.index = 0
        self.stage += 1
        self.seen = [Level() for _ in range(self.size)]
        return self.verdict

    def skip(self) -> None:
        """No race: the schedule given stays."""
        self.stage, self.found, self.verdict = 2, 0.0, "no race was run"
        self.coarse = []

    @property
    def ran(self) -> bool:
        """True where a race is over that was run to its end."""
        return self.over and bool(self.coarse)

    # -- verdicts -------------------------------------------------------------------------------

    def _coarse(self) -> str:
        """The best decade; the levels of the second stage around it."""
        losses = [level.mean for level in self.seen]
        best = min(range(self.size), key=lambda k: (losses[k], abs(self.offsets[k])))
        self.coarse = list(zip(self.offsets, losses, strict=True))
        if not math.isfinite(losses[best]):
            low = self.offsets[0] - 2 * FINE
            self.offsets = [low + 2 * FINE * k / self.size for k in range(self.size)]
            return "no learning rate of the race stayed finite: lower ones are next"
        middle, why = self._best(losses, Parabola.through(self.offsets, losses, width=2))
        given = losses[self.size // 2]
        centre = middle - BELOW if self.family.by_edge else middle
        self.offsets = [centre + FINE * (2 * k / (self.size - 1) - 1) for k in range(self.size)]
        if abs(centre) <= FINE:
            nearest = min(range(self.size), key=lambda k: abs(self.offsets[k]))
            self.offsets[nearest] = 0.0
        return (
            f"best around {math.exp(middle):.3g} x the learning rate given ({why}; loss "
            f"{losses[best]:.4g}, given {given:.4g})"
        )

    def _fine(self) -> str:
        losses = [level.mean for level in self.seen]
        if not any(math.isfinite(x) for x in losses):
            return "no learning rate of the second stage stayed finite: the schedule given stays"
        curve = Parabola.through(self.offsets, losses, width=3)
        found, why = self._best(losses, curve)
        self.blind = self._learnt(losses) < LEARNT
        ahead = f"{math.exp(found):.3g} x the learning rate given, {why}"
        if abs(found) < (UNSURE if self.blind else self.family.unsure):
            return f"{ahead}: too near to tell, the schedule given stays"
        if not (self.blind or self.family.by_edge):
            gain = self._gain(losses, curve)
            ahead += f", ahead by {gain:.3g} in the loss with a scatter of {curve.scatter:.3g}"
            if not gain > curve.scatter:
                return f"{ahead}: not enough, the schedule given stays"
        self.found = found
        first, lowest = self.start.mean, self._lowest(losses)
        if math.isfinite(first):
            self.promise = first - (SHOWN if self.blind else 0.5) * (first - lowest)
        noisy = first - lowest < CLEAR * curve.scatter and not self.family.by_edge
        self.contested, why = self._contested(found, noisy)
        if not self.contested:
            return f"found {ahead}"
        return f"found {ahead}: but {why}, so that the run has to show it"

    def _contested(self, found: float, noisy: bool) -> tuple[bool, str]:
        """Whether a run might do better with the learning rate given than a race can see, and
        why."""
        if self.blind:
            return True, "the race was blind"
        if found > 0.0:
            return False, ""
        at = [loss for _, loss in self._at_given()]
        if not all(math.isfinite(loss) for loss in at):
            return True, "the heat at the learning rate given diverged"
        self.duel = noisy and at[0] < self.start.mean
        return self.duel, "the levels are noisy, and the one at the learning rate given learnt too"

    def _best(self, losses: Sequence[float], curve: Parabola) -> tuple[float, str]:
        """x* as the levels of this stage have it, and where it comes from."""
        blind, first = self._learnt(losses) < LEARNT, self.start.mean
        high = self._edge(losses, first + TORN * abs(first) if blind else first)
        if self.family.by_edge:
            return high, f"heats break at {self._rate(high):.3g} x"
        low = curve.minimum
        if not blind:
            return low, f"heats are best at {self._rate(low):.3g} x"
        middle = (low + high) / 2 - TIMID - math.log(self.translation(self.stage))
        return middle, (
            f"between heats that learn next to nothing at {self._rate(low):.3g} x and break at "
            f"{self._rate(high):.3g} x"
        )

    def _rate(self, offset: float) -> float:
        """Of a heat, over the learning rate given."""
        return math.exp(offset) / self.translation(self.stage)

    def _edge(self, losses: Sequence[float], limit: float) -> float:
        """Where this stage breaks; above its levels what the first has shown."""
        limit = limit if math.isfinite(limit) else sys.float_info.max
        at = edge(self.offsets, losses, limit)
        if at is not None:
            return at
        offsets, first = zip(*self.coarse, strict=True)
        return max(
            at if (at := edge(offsets, first, limit)) is not None else -math.inf, self.offsets[-1]
        )

    def _gain(self, losses: Sequence[float], curve: Parabola) -> float:
        """What the lowest point is ahead of the learning rate given."""
        nearest = min(range(self.size), key=lambda k: abs(self.offsets[k]))
        gain = losses[nearest] - curve.lowest
        if self.offsets[nearest] != 0.0:
            # Outside the span of this stage: its edge, and what the first stage showed.
            gain = max(gain, dict(self.coarse)[0.0] - min(loss for _, loss in self.coarse))
        return gain

    def _lowest(self, losses: Sequence[float]) -> float:
        """Of both stages so far."""
        return min(*losses, *(loss for _, loss in self.coarse))

    def settle(self) -> None:
        """Decide what is contested without a run that shows it."""
        contested, self.contested = self.contested, False
        if contested and all(math.isfinite(loss) for _, loss in self._at_given()):
            self.found = 0.0
            self.verdict += ": nobody looks, the schedule given stays"

    def _learnt(self, losses: Sequence[float]) -> float:
        """Share of the first loss that is gone; 1 where that loss has no natural zero or is not
        known."""
        first = self.start.mean
        return 1 - self._lowest(losses) / first if 0 < first < math.inf else 1.0

    def _at_given(self) -> list[tuple[float, float]]:
        """The heat at the very learning rate given, not translated, and the next above it. A loss
        above the one before it says little: the batch of the run is larger."""
        at = math.log(self.translation(0))
        nearest = min(range(self.size), key=lambda k: abs(self.coarse[k][0] - at))
        return self.coarse[nearest : nearest + 2]

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank."""
        return {
            "replicas": self.replicas,
            "total_steps": self.total_steps,
            "stage": self.stage,
            "index": self.index,
            "offsets": list(self.offsets),
            "seen": [[x.count, x.total] for x in self.seen],
            "start": [self.start.count, self.start.total],
            "coarse": [list(level) for level in self.coarse],
            "found": self.found,
            "promise": self.promise,
            "blind": self.blind,
            "contested": self.contested,
            "duel": self.duel,
            "verdict": self.verdict,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another race stopped."""
        self.check_state(state)
        self.stage, self.index = int(state["stage"]), int(state["index"])
        self.offsets = [float(x) for x in state["offsets"]]
        self.seen = [Level(*map(float, row)) for row in state["seen"]]
        self.start = Level(*map(float, state["start"]))
        self.coarse = [(float(x), float(y)) for x, y in state["coarse"]]
        self.found = float(state["found"])
        self.promise = float(state.get("promise", math.inf))
        self.blind = bool(state.get("blind", False))
        self.contested = bool(state.get("contested", False))
        self.duel = bool(state.get("duel", False))
        self.verdict = str(state["verdict"])

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a race of other replicas or another length; once it is over, it fits any."""
        same = (state["replicas"], state["total_steps"]) == (self.replicas, self.total_steps)
        if int(state["stage"]) <= 1 and not same:
            raise ValueError(
                f"the state was saved in a race of {state['replicas']} replicas and "
                f"{state['total_steps']} steps, and this run has {self.replicas} and "
                f"{self.total_steps}: resume with the same, or from a checkpoint after the race"
            )
