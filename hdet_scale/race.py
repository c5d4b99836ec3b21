"""The race: short but complete schedules at learning rates over decades, judged after their decay.

A loss in the middle of a run charges a high learning rate for noise that its decay would have
removed, so that every rule that compares such losses ends too low. A race compares what is left
after the decay. From the same weights, team j runs h steps of

    eta_j(i) = eta_peak exp(x_j) / c * s(i, h)            s: warm-up, cosine to zero

and is judged by its loss on common probe batches. A team is one replica with its own gradients, or,
of N >= 16 replicas, N // 8 that share theirs: eight to fifteen teams, so that the batch of a team
does not shrink with N. Two stages: K = 8 levels x of a factor four around the learning rate given,
then eight over four octaves around the best of those. The minimum of a parabola through these is
what was found. The replicas then go back to where the race began, and the run starts with
eta_peak exp(x*).

c translates: of M teams each has 1/M of the batch and a small part h/S of the steps, and the best
learning rate moves with both,

    c = M^alpha (h / S)^beta

with exponents that were fitted on small tasks for each family of optimizers (docs/controller.md):
the larger batch of the run allows more, its longer horizon less.

Do no harm. The learning rate given is a level of the race. What was found replaces it only if

1. it beats it by more than the scatter of the levels around the parabola, and
2. it is higher; or the best heat took off at least LEARNT of the loss it started from, and the
   heat at the learning rate given stayed finite. Otherwise it is contested: where nothing was
   learnt yet, the noise of an eighth of a batch always speaks for less; and a run's own batch and
   longer warm-up may bear what a heat could not. The run then begins with the learning rate given
   and decides (hdet_scale.watch). Where nobody watches (`settle`), less is taken only from one that
   diverged.

Pure: no torch, no process group. A heat costs the run 2 (K + 1) numbers whatever N is: counts and
sums of the losses at each level, and of the loss before.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHARES = (0.028, 0.038)
"""Of the run's steps, for the first and the second stage."""
COARSE = math.log(4.0)
"""Distance of the levels of the first stage when there are eight."""
FINE = math.log(4.0)
"""Half of the span of the second stage."""
SMALLEST_MOVE = math.log(1.25)
"""Less than a race can tell apart."""
LEARNT = 0.15
"""Share of the first loss that the best heat must take off before a race may speak for less."""
SIZE = 8
"""Levels of a stage."""
ENOUGH = 12
"""Steps of a heat below which `rule="auto"` runs no race: too few to tell learning rates apart."""
WARM = 0.05
"""Share of a heat that is its warm-up."""
EXPONENTS = {"adaptive": (0.25, 0.4), "gradient": (0.6, 0.05)}
"""(alpha, beta) of optimizers that divide by the gradient's size, and of those that do not."""


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
        self.contested = False
        """True where a run must show first that the learning rate given does not."""
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
        alpha, beta = EXPONENTS["adaptive" if self.adaptive else "gradient"]
        horizon = self.steps(stage) / self.total_steps
        return math.exp(alpha * math.log(self.teams) + beta * math.log(horizon))

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

    # -- verdicts -------------------------------------------------------------------------------

    def _coarse(self) -> str:
        """The best decade; the levels of the second stage around it."""
        losses = [level.mean for level in self.seen]
        best = min(range(self.size), key=lambda k: (losses[k], abs(self.offsets[k])))
        if not math.isfinite(losses[best]):
            self.stage = 1
            return "no learning rate of the race stayed finite: the schedule given stays"
        middle = Parabola.through(self.offsets, losses, width=2).minimum
        given = losses[self.size // 2]
        self.coarse = list(zip(self.offsets, losses, strict=True))
        self.offsets = [middle + FINE * (2 * k / (self.size - 1) - 1) for k in range(self.size)]
        if abs(middle) <= FINE:
            nearest = min(range(self.size), key=lambda k: abs(self.offsets[k]))
            self.offsets[nearest] = 0.0
        return (
            f"best around {math.exp(middle):.3g} x the learning rate given (loss "
            f"{losses[best]:.4g}, given {given:.4g})"
        )

    def _fine(self) -> str:
        losses = [level.mean for level in self.seen]
        if not any(math.isfinite(x) for x in losses):
            return "no learning rate of the second stage stayed finite: the schedule given stays"
        curve = Parabola.through(self.offsets, losses, width=3)
        nearest = min(range(self.size), key=lambda k: abs(self.offsets[k]))
        gain = losses[nearest] - curve.lowest
        if self.offsets[nearest] != 0.0:
            # Outside the span of this stage: its edge, and what the first stage showed.
            gain = max(gain, dict(self.coarse)[0.0] - min(loss for _, loss in self.coarse))
        ahead = (
            f"{math.exp(curve.minimum):.3g} x the learning rate given, ahead of it by {gain:.3g} "
            f"in the loss with a scatter of {curve.scatter:.3g}"
        )
        if not gain > curve.scatter or abs(curve.minimum) < SMALLEST_MOVE:
            return f"{ahead}: not enough, the schedule given stays"
        self.found = curve.minimum
        learnt = self._learnt(min(losses)) >= LEARNT
        self.contested = curve.minimum < 0.0 and not (learnt and not self._diverged())
        if learnt or self.contested:
            self.promise = (self.start.mean + min(losses)) / 2
        if not self.contested:
            return f"found {ahead}"
        why = (
            "the heat at the learning rate given diverged"
            if learnt
            else f"the best heat only came from a loss of {self.start.mean:.4g} to "
            f"{min(losses):.4g}"
        )
        return f"found {ahead}: but {why}, so that the run has to show it"

    def settle(self) -> None:
        """Decide what is contested without a run that shows it."""
        contested, self.contested = self.contested, False
        if contested and not self._diverged():
            self.found = 0.0
            self.verdict += ": nobody looks, the schedule given stays"

    def _learnt(self, best: float) -> float:
        """Share of the first loss that is gone; 1 where that loss has no natural zero or is not
        known."""
        first = self.start.mean
        return 1 - best / first if 0 < first < math.inf else 1.0

    def _diverged(self) -> bool:
        """Whether the heat at the very learning rate given, not translated, did. A loss above the
        one before it says little: the batch of the run is larger."""
        at = math.log(self.translation(0))
        _, loss = min(self.coarse, key=lambda level: abs(level[0] - at))
        return not math.isfinite(loss)

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
            "contested": self.contested,
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
        self.contested = bool(state.get("contested", False))
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


@dataclass(frozen=True, slots=True)
class Parabola:
    """y = y0 + a (x - x0) + b (x - x0)^2 through the levels around the lowest.

    A loss rises like a parabola near its minimum and like a cliff beyond the edge of stability:
    level k counts with w_k = 1 / (1 + ((y_k - min y) / h)^2), h the median of y_k - min y, so that
    a cliff holds the minimum back and does not pass for noise.
    """

    minimum: float
    """Where it is lowest, at most a level below the lowest level or half a level above it, where
    there may be a cliff, and never beyond the levels."""
    lowest: float
    """Its value there."""
    scatter: float
    """Standard deviation of the levels around it; 0 where it goes through all of them."""

    @classmethod
    def through(cls, xs: Sequence[float], ys: Sequence[float], *, width: int) -> Parabola:
        """By least squares over the 2 width + 1 finite levels around the lowest, fewer on one side
        where they end."""
        finite = [k for k in range(len(ys)) if math.isfinite(ys[k])]
        best = min(finite, key=lambda k: (ys[k], abs(xs[k])))
        if len(finite) < 3:
            return cls(xs[best], ys[best], 0.0)
        first = max(0, min(finite.index(best) - width, len(finite) - (2 * width + 1)))
        near = finite[first : first + 2 * width + 1]
        u = [xs[k] - xs[best] for k in near]
        v = [ys[k] - ys[best] for k in near]
        typical = statistics.median(ys[k] - ys[best] for k in finite)
        weights = [1 / (1 + (y / typical) ** 2) if typical > 0 else 1.0 for y in v]
        c0, c1, c2 = _least_squares(u, v, weights)
        left = [y - (c0 + c1 * x + c2 * x * x) for x, y in zip(u, v, strict=True)]
        squares = math.fsum(w * e * e for w, e in zip(weights, left, strict=True))
        spare = math.fsum(weights) * (len(near) - 3) / len(near)
        scatter = math.sqrt(squares / spare) if spare > 0 else 0.0
        gap = max(b - a for a, b in itertools.pairwise(u))
        low, high = max(-gap, u[0]), min(gap / 2, u[-1])
        # Not convex: noise, or the edge of a plateau. The lowest level is all that is known.
        at = max(low, min(high, -c1 / (2 * c2))) if c2 > 0 else 0.0
        lowest = c0 + c1 * at + c2 * at * at if c2 > 0 else 0.0
        return cls(xs[best] + at, ys[best] + lowest, scatter)


def _least_squares(
    u: Sequence[float], v: Sequence[float], weights: Sequence[float]
) -> tuple[float, float, float]:
    """Coefficients of 1, u, u^2; Gram-Schmidt on three columns, which stays exact enough."""
    basis: list[list[float]] = []
    mixes: list[list[float]] = []  # each basis vector in terms of 1, u, u^2
    for power, column in enumerate(([1.0] * len(u), list(u), [x * x for x in u])):
        mix = [float(power == k) for k in range(3)]
        rest = list(column)
        for earlier, terms in zip(basis, mixes, strict=True):
            share = _dot(column, earlier, weights) / _dot(earlier, earlier, weights)
            rest = [x - share * y for x, y in zip(rest, earlier, strict=True)]
            mix = [x - share * y for x, y in zip(mix, terms, strict=True)]
        basis.append(rest)
        mixes.append(mix)
    out = [0.0, 0.0, 0.0]
    for vector, terms in zip(basis, mixes, strict=True):
        share = _dot(v, vector, weights) / _dot(vector, vector, weights)
        out = [x + share * y for x, y in zip(out, terms, strict=True)]
    return out[0], out[1], out[2]


def _dot(a: Sequence[float], b: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(w * x * y for w, x, y in zip(weights, a, b, strict=True))
