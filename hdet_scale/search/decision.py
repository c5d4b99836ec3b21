"""The decision of a search: losses of trials in, and at its end a scale for the schedule.

A loss in the middle of a run charges a high learning rate for noise that its decay would have
removed, so that every rule that compares such losses ends too low. A search compares what is left
after a complete, short schedule, from the same weights and on the same held-out batches.

**First stage.** A tenth, one and ten times the initial rate. If the initial rate is ahead of both,
and of what it learnt the lower one lost CLEAR and the higher one GAIN, it stays and the search is
over. If another one is ahead of it, the second stage looks a step further in that direction.

**Second stage.** The candidate is the rate with the lowest loss; one that is two steps away must be
ahead of the one between.

**Acceptance.** The candidate replaces the initial rate only if it is ahead of it by SIGNIFICANT
standard errors (hdet_scale.search.evidence), and of the initial weights too, unless these are ahead
of the initial rate. A higher rate must also have learnt more, by GAIN of what it learnt. Where the
initial rate's trial diverged, the candidate must also be ahead of the team that goes on with the
run at a quarter of that rate. Otherwise the initial rate stays. A rate that was not tried is never
taken.

**Head start.** The weights of the team that goes on with the run are kept if their rate was not
above the one that is taken and the initial weights are not ahead of them.

Pure: no torch, no process group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdet_scale.search.constants import (
    CLEAR,
    GAIN,
    HEAD_START,
    LEAST_STEPS,
    SIGNIFICANT,
    STEP,
)
from hdet_scale.search.evidence import ahead, lead, mean_loss
from hdet_scale.search.law import translation
from hdet_scale.search.trials import SHARES, Trial, rounds_of, team_size, trial_steps

SEARCH_VERSION = 6
NEAR = (-1, 0, 1)
"""The rates of the first stage."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A rate that was tried: its offset in steps of a factor STEP, its losses on the probe."""

    stage: str
    offset: int
    losses: tuple[float, ...]
    mean: float

    @classmethod
    def of(cls, stage: str, offset: int, losses: Sequence[float]) -> Arm:
        return cls(stage, offset, tuple(losses), mean_loss(losses))


class RateSearch:
    """The rule: trials out, losses in, and at the end a scale for the schedule.

    Args:
        replicas: how many there are.
        total_steps: S, steps of the whole run.
        adaptive: whether the optimizer divides by the gradient's size.
        passes: over the training data in the whole run; None where it is not known, which counts
            as fresh data.
        idle: there is no search to run; it can hold the state of one that was run elsewhere.
    """

    def __init__(
        self,
        *,
        replicas: int,
        total_steps: int,
        adaptive: bool,
        passes: float | None = None,
        idle: bool = False,
    ) -> None:
        if replicas < 1:
            raise ValueError(f"a search needs at least one replica, got {replicas}")
        self.replicas, self.total_steps, self.adaptive = replicas, total_steps, adaptive
        self.passes = 1.0 if passes is None else passes
        if total_steps < self.least_steps(replicas) and not idle:
            raise ValueError(
                f"total_steps={total_steps} is too short: a search with {replicas} replicas needs "
                f"{self.least_steps(replicas)} steps in all; use rule='none' for shorter runs"
            )
        self.arms: list[Arm] = []
        self.start: tuple[float, ...] = ()
        """Losses of the initial weights; empty where they are not known."""
        self.head: tuple[float, ...] = ()
        """Losses of the weights that go on with the run; empty where there are none."""
        self.quarter: tuple[float, ...] = ()
        """The same of the last round in which their rate was HEAD_START times the initial one."""
        self._head_rate = HEAD_START
        self.steps = self.trials_run = self.last_trial = 0
        """Of all rounds that have ended, how many there were, and the steps of the last."""
        self.offset = 0
        """What was decided, in steps of a factor STEP from the initial rate."""
        self.over, self.verdict = idle, "no search was run" if idle else ""
        self.laws = {} if idle else {stage: self._law(stage) for stage in SHARES}
        """c of each stage; a run that is resumed goes on with the one that it began with."""
        self._trial = None
        if not idle:
            self._trial = self._round("first" if self._has_first else "second", NEAR, 0)

    @staticmethod
    def least_steps(replicas: int) -> int:
        """Steps of the shortest run that a search fits into: that of its second stage."""
        rounds = rounds_of(replicas // team_size(replicas), len(NEAR))
        return math.ceil(LEAST_STEPS * rounds / SHARES["second"])

    @property
    def longest(self) -> int:
        """Steps of both stages, of the second with the most of what it may try."""
        stages = ["first", "second"] if self._has_first else ["second"]
        return rounds_of(self.replicas // self.team, len(NEAR)) * sum(map(self._steps, stages))

    @property
    def _has_first(self) -> bool:
        """The first stage is left out where its trials would be too short to tell anything."""
        return self._steps("first") >= LEAST_STEPS

    def _steps(self, stage: str) -> int:
        return trial_steps(stage, self.replicas, self.total_steps, len(NEAR))

    def _law(self, stage: str) -> float:
        ratio, steps = self.replicas / team_size(self.replicas), max(1, self._steps(stage))
        return translation(
            ratio, steps, self.total_steps, adaptive=self.adaptive, passes=self.passes
        )

    def _round(self, stage: str, offsets: tuple[int, ...], index: int) -> Trial:
        team, n = team_size(self.replicas), self.replicas
        steps = trial_steps(stage, n, self.total_steps, len(offsets))
        # If the second stage looks below the initial rate, so does the head start.
        head = HEAD_START / STEP if min(offsets) < min(NEAR) else HEAD_START
        return Trial(stage, steps, team, n // team, offsets, index, self.laws[stage], head)

    @property
    def team(self) -> int:
        """Replicas that share gradients in the present round."""
        return team_size(self.replicas)

    @property
    def scale(self) -> float:
        """What the schedule is multiplied with: 1.0 until the search is over, and where the
        initial rate was not beaten."""
        return STEP**self.offset if self.over else 1.0

    @property
    def keeps_head_start(self) -> bool:
        """Whether the run begins with the weights that went on with it during the search."""
        sound = bool(self.head) and math.isfinite(mean_loss(self.head))
        return sound and self.scale >= self._head_rate and not ahead(self.start, self.head)

    @property
    def trial(self) -> Trial:
        """The round that is under way."""
        if self._trial is None:
            raise ValueError("the search is over: there is no trial")
        return self._trial

    # -- the decision ---------------------------------------------------------------------------

    def close(
        self,
        losses: Mapping[int, Sequence[float]],
        start: Sequence[float] = (),
        head: Sequence[float] = (),
    ) -> str:
        """Add the losses of a round, and go on; says what was decided.

        Args:
            losses: on the probe's batches, for each rate of the round by its index in the stage; a
                rate without any counts as diverged.
            start: those of the initial weights, where they are known and were not yet given.
            head: those of the weights that went on with the run.
        """
        trial = self.trial
        for arm in trial.arms():
            if all(a.stage != trial.stage or a.offset != trial.offsets[arm] for a in self.arms):
                self.arms.append(Arm.of(trial.stage, trial.offsets[arm], losses.get(arm, ())))
        self.start, self.head = self.start or tuple(start), tuple(head)
        self._head_rate = trial.head
        if trial.head == HEAD_START:
            self.quarter = self.head
        self.steps, self.last_trial = self.steps + trial.steps, trial.steps
        self.trials_run += 1
        self._trial = None
        if trial.index + 1 < trial.rounds:
            self._trial = self._round(trial.stage, trial.offsets, trial.index + 1)
            return ""
        tried = {arm.offset: arm for arm in self.arms if arm.stage == trial.stage}
        best = min(tried.values(), key=lambda arm: (arm.mean, abs(arm.offset)))
        if trial.stage == "second":
            self._decide(tried, best)
        elif self._behind(tried[-1], tried[0], CLEAR) and self._behind(tried[1], tried[0], GAIN):
            self._stay("it is well ahead of the rates beside it")
        else:
            offsets = self._further(tried[0], best)
            self._trial = self._round("second", offsets, 0)
            rates = ", ".join(f"{STEP**x:g}" for x in offsets)
            return f"the second stage tries {rates} x the initial rate"
        return self.verdict

    def _learnt(self, arm: Arm) -> float:
        """What a trial learnt; 0 where the loss of the initial weights is not known."""
        before = mean_loss(self.start)
        return max(0.0, before - arm.mean) if math.isfinite(before) else 0.0

    def _behind(self, arm: Arm, better: Arm, share: float) -> bool:
        """Whether a rate lost so much of what a better one learnt, beyond doubt."""
        much = share * self._learnt(better)
        return arm.mean - better.mean > much and ahead(better.losses, arm.losses)

    def _further(self, initial: Arm, best: Arm) -> tuple[int, ...]:
        """The rates of the second stage."""
        if not math.isfinite(best.mean):
            return -2, -1, 0
        if ahead(best.losses, initial.losses):
            low, high = sorted((0, 2 * best.offset))
            return low, best.offset, high
        return NEAR

    def _stay(self, why: str) -> None:
        self.over, self.verdict = True, f"the initial rate stays: {why}"

    def _decide(self, tried: Mapping[int, Arm], best: Arm) -> None:
        initial, candidate = tried[0], self._nearest(tried, best)
        leads = lead(initial.losses, candidate.losses)
        told = f"{STEP**candidate.offset:g} x the initial rate"
        if not math.isfinite(best.mean):
            self._stay("no trial stayed finite")
        elif candidate is initial:
            self._stay("no other rate learnt more in its trial")
        elif leads < SIGNIFICANT:
            self._stay(
                f"{told} is {leads:.1f} standard errors ahead of it, and {SIGNIFICANT:g} are needed"
            )
        elif candidate.offset > 0 and not self._behind(initial, candidate, GAIN):
            self._stay(f"{told} has learnt hardly more, and short trials flatter high rates")
        elif not self._sound(initial, candidate):
            self._stay(f"{told} is best, but has learnt nothing")
        elif self._only_diverged(initial, candidate):
            self._stay("it diverged in its trial, but not at a quarter of it")
        else:
            self.over, self.offset = True, candidate.offset
            self.verdict = f"{told}: its trial is {leads:.1f} standard errors ahead"

    def _nearest(self, tried: Mapping[int, Arm], best: Arm) -> Arm:
        """The best rate; the one between it and the initial rate if that is not behind."""
        between = tried.get(best.offset // 2) if abs(best.offset) > 1 else None
        return best if between is None or ahead(best.losses, between.losses) else between

    def _sound(self, initial: Arm, candidate: Arm) -> bool:
        """Whether a candidate is ahead of the initial weights, or is at least not behind them where
        the initial rate is."""
        if not self.start or ahead(candidate.losses, self.start):
            return True
        unharmed = not ahead(self.start, candidate.losses)
        return unharmed and ahead(self.start, initial.losses)

    def _only_diverged(self, initial: Arm, candidate: Arm) -> bool:
        """Whether the initial rate's trial diverged while the team that goes on with the run, at a
        quarter of that rate, is as good as the candidate: the run's larger batch may bear it."""
        return (
            not math.isfinite(initial.mean)
            and math.isfinite(mean_loss(self.quarter))
            and not ahead(candidate.losses, self.quarter)
        )

    def skip(self) -> None:
        """No search: the initial rate stays."""
        self.over, self.offset, self.verdict = True, 0, "no search was run"
        self.arms, self.head, self._trial = [], (), None

    @property
    def ran(self) -> bool:
        """True where a search is over that was run to its end."""
        return self.over and bool(self.arms)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank."""
        trial = self._trial
        return {
            "version": SEARCH_VERSION,
            "replicas": self.replicas,
            "total_steps": self.total_steps,
            "arms": [[arm.stage, arm.offset, list(arm.losses)] for arm in self.arms],
            "start": list(self.start),
            "head": list(self.head),
            "quarter": list(self.quarter),
            "head_rate": self._head_rate,
            "steps": self.steps,
            "trials_run": self.trials_run,
            "last_trial": self.last_trial,
            "offset": self.offset,
            "over": self.over,
            "verdict": self.verdict,
            "laws": dict(self.laws),
            "trial": None if trial is None else [trial.stage, list(trial.offsets), trial.index],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another search stopped."""
        self.check_state(state)
        self.arms = [Arm.of(str(s), int(x), [float(v) for v in y]) for s, x, y in state["arms"]]
        self.start = tuple(map(float, state["start"]))
        self.head = tuple(map(float, state["head"]))
        self.quarter = tuple(map(float, state["quarter"]))
        self._head_rate = float(state["head_rate"])
        self.steps, self.trials_run = int(state["steps"]), int(state["trials_run"])
        self.last_trial, self.offset = int(state["last_trial"]), int(state["offset"])
        self.over, self.verdict = bool(state["over"]), str(state["verdict"])
        self.laws = {str(k): float(v) for k, v in state["laws"].items()}
        self._trial = None
        if state["trial"] is not None:
            stage, offsets, index = state["trial"]
            self._trial = self._round(str(stage), tuple(map(int, offsets)), int(index))

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a search of other replicas or another length; once it is over, it fits any."""
        if state.get("version") != SEARCH_VERSION:
            raise ValueError(
                f"the state of a search has version {state.get('version')!r} and this version of "
                f"hdet_scale reads {SEARCH_VERSION}: resume with the one that wrote it"
            )
        same = (state["replicas"], state["total_steps"]) == (self.replicas, self.total_steps)
        if not state["over"] and not same:
            raise ValueError(
                f"the state was saved in a search of {state['replicas']} replicas and "
                f"{state['total_steps']} steps, and this run has {self.replicas} and "
                f"{self.total_steps}: resume with the same, or from a checkpoint after the search"
            )
