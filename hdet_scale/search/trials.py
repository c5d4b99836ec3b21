"""Trials: the two stages of a search, which replica runs what, and a trial's schedule.

A trial is a short, complete schedule at one rate. The replicas are divided into teams, which share
their gradients. One team goes on with the run during the search, at a quarter of the initial rate;
each other team runs a trial. Where there are fewer teams than rates, a stage has several rounds.

    first     4 % of the run's steps: a tenth, one and ten times the initial rate
    second    8 %, where the first stage does not show that the initial rate is right: the same,
              or one, ten and a hundred times it, or one, a tenth and a hundredth

Pure: no torch, no process group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hdet_scale.search.constants import (
    FIRST_SHARE,
    HEAD_START,
    MOST_STEPS,
    SECOND_SHARE,
    STEP,
    TEAMS,
)

SHARES = {"first": FIRST_SHARE, "second": SECOND_SHARE}
"""The stages, and their share of the run's steps."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the teams run next. What one replica runs is found in O(1)."""

    stage: str
    steps: int
    team: int
    """Replicas of a team."""
    teams: int
    offsets: tuple[int, ...]
    """The rates of the stage, in steps of a factor STEP from the initial rate."""
    index: int
    """Round of the stage."""
    translation: float
    """c: what a trial's rate is multiplied with to give the run's."""
    head: float = HEAD_START
    """Rate of the team that goes on with the run, over the initial rate."""

    @property
    def has_head_start(self) -> bool:
        """Whether the first team goes on with the run; a single team has to run the trials."""
        return self.teams > 1

    @property
    def rounds(self) -> int:
        """Rounds until every rate was tried."""
        return rounds_of(self.teams, len(self.offsets))

    def goes_on(self, replica: int) -> bool:
        """Whether a replica goes on with the run."""
        return self.has_head_start and replica < self.team

    def arm(self, replica: int) -> int | None:
        """Index of the rate that a replica tries; None where it goes on with the run, and for
        left-over replicas, which train along and are not evaluated."""
        team = replica // self.team
        if self.goes_on(replica) or team >= self.teams:
            return None
        first = 1 if self.has_head_start else 0
        return (self.index * (self.teams - first) + team - first) % len(self.offsets)

    def multiplier(self, replica: int) -> float:
        """The peak of a replica's schedule over the peak of the run's at the initial rate."""
        arm = self.arm(replica)
        return self.head if arm is None else STEP ** self.offsets[arm] / self.translation

    def arms(self) -> list[int]:
        """The rates of this round."""
        replicas = range(0, self.teams * self.team, self.team)
        return sorted({arm for r in replicas if (arm := self.arm(r)) is not None})


def team_size(replicas: int) -> int:
    """Replicas of a team."""
    return max(1, replicas // TEAMS)


def rounds_of(teams: int, rates: int) -> int:
    """Rounds of a stage of so many rates."""
    return -(-rates // max(1, teams - 1))


def trial_steps(stage: str, replicas: int, total_steps: int, rates: int) -> int:
    """Steps of one trial: those of the stage, divided by its rounds."""
    steps = SHARES[stage] * min(total_steps, MOST_STEPS / sum(SHARES.values()))
    return int(steps) // rounds_of(replicas // team_size(replicas), rates)


def shape(i: int, steps: int, warm: int) -> float:
    """s(i, h): linear warm-up, as long as the run's but at most half of the trial, then a cosine
    that ends at zero."""
    warm = max(1, min(warm, steps // 2))
    if i < warm:
        return (i + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (i - warm) / (steps - warm)))


def head_start(i: int, warm: int) -> float:
    """The schedule of the team that goes on with the run: its warm-up, then the peak."""
    return min(1.0, (i + 1) / max(1, warm))
