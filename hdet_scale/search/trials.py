"""Stages of a race: how long they are, who runs which level together, and the shape of a heat.

A heat is a short but complete schedule. A stage runs eight levels of the learning rate, at once
where there are replicas enough, in several heats otherwise. A team is one replica with its own
gradients, or several that share theirs, so that the batch of a level does not shrink with their
number.

    coarse    2.8 % of the run's steps, teams of an eighth of the replicas
    fine      3.8 %, the same teams
    long      8 %, teams of a quarter: where the others could not tell

Pure: no torch, no process group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SIZE = 8
"""Levels of a stage."""
WARM = 0.05
"""Share of a heat that is its warm-up."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One of them."""

    name: str
    share: float
    """Of the run's steps."""
    parts: int
    """Teams that the replicas are divided into, where there are so many."""

    def team(self, replicas: int) -> int:
        """Replicas that run a level together."""
        return max(1, replicas // self.parts)

    def teams(self, replicas: int) -> int:
        """Whole ones; what is left over runs along and is not heard."""
        return replicas // self.team(replicas)

    def heats(self, replicas: int) -> int:
        """One after the other, until every level was run."""
        return -(-SIZE // self.teams(replicas))

    def steps(self, replicas: int, total_steps: int) -> int:
        """Of a heat."""
        return int(self.share * total_steps) // self.heats(replicas)


COARSE = Stage("coarse", 0.028, 8)
FINE = Stage("fine", 0.038, 8)
LONG = Stage("long", 0.08, 4)
STAGES = (COARSE, FINE, LONG)


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
    """Of the heats of the stage, where there are fewer teams than levels."""
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
