"""Trials: the stages of a search, which replica runs which learning rate, and a trial's schedule.

A trial is a short, complete schedule. A stage runs eight levels of the learning rate, all at once
where there are replicas enough, in several trials otherwise. A team is one replica with its own
gradients, or several that share theirs, so that the batch of a level does not shrink as the number
of replicas grows.

    coarse    2.8 % of the run's steps, teams of an eighth of the replicas
    fine      3.8 %, the same teams
    long      8 %, teams of a quarter: in place of fine where the coarse stage could not tell

Pure: no torch, no process group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SIZE = 8
"""Levels of a stage."""
WARM = 0.05
"""Share of a trial that is its warm-up."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a search."""

    name: str
    share: float
    """Of the run's steps."""
    parts: int
    """Teams that the replicas are divided into, where there are so many."""

    def team(self, replicas: int) -> int:
        """Replicas that run a level together."""
        return max(1, replicas // self.parts)

    def teams(self, replicas: int) -> int:
        """Whole teams. Left-over replicas train, but their loss is ignored."""
        return replicas // self.team(replicas)

    def trials(self, replicas: int) -> int:
        """Trials one after the other until every level was run."""
        return -(-SIZE // self.teams(replicas))

    def steps(self, replicas: int, total_steps: int) -> int:
        """Steps of one trial."""
        return int(self.share * total_steps) // self.trials(replicas)


COARSE = Stage("coarse", 0.028, 8)
FINE = Stage("fine", 0.038, 8)
LONG = Stage("long", 0.08, 4)
STAGES = (COARSE, FINE, LONG)


@dataclass(frozen=True, slots=True)
class Level:
    """The losses at one learning rate: sums over the replicas that ran it to the end."""

    count: float = 0.0
    total: float = 0.0

    @classmethod
    def of(cls, loss: float) -> Level:
        """One replica's loss; one that is not finite is left out."""
        return cls(1.0, loss) if math.isfinite(loss) else cls()

    @property
    def mean(self) -> float:
        """Infinite where every replica diverged."""
        return self.total / self.count if self.count else math.inf


@dataclass(frozen=True, slots=True)
class Trial:
    """What the replicas run next. What one replica runs is found in O(1)."""

    stage: int
    index: int
    """Within the stage, where there are fewer teams than levels."""
    steps: int
    team: int
    """Replicas of a team."""
    teams: int
    translation: float
    """c: what a trial's rate is multiplied with to give the run's."""
    multipliers: tuple[float, ...]
    """For each level the peak learning rate of its trial over the schedule's peak."""

    def level(self, replica: int) -> int:
        """The level that a replica runs."""
        return (self.index * self.teams + min(replica // self.team, self.teams - 1)) % SIZE

    def multiplier(self, replica: int) -> float:
        """The peak learning rate of a replica over the schedule's peak."""
        return self.multipliers[self.level(replica)]

    def levels(self, replicas: int) -> list[int]:
        """The level of each replica; for a record of all of them."""
        return [self.level(r) for r in range(replicas)]

    def counts(self, replica: int) -> bool:
        """Whether a replica is a member of a team: the loss of left-over replicas is ignored."""
        return replica < self.teams * self.team


def shape(i: int, steps: int) -> float:
    """s(i, h): linear warm-up over the first steps, then a cosine that ends at zero."""
    warm = max(1, round(WARM * steps))
    if i < warm:
        return (i + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (i - warm) / (steps - warm)))
