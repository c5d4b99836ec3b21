"""Ledger: how far a search has come, and the losses it has seen.

Which stage and trial are under way, what each replica runs, the sums of losses at each level, and
the state of all that. What the losses mean is decided in hdet_scale.search.decision.

Pure: no torch, no process group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdet_scale.search.trials import COARSE, FINE, LONG, SIZE, STAGES, Level, Stage, Trial

LEDGER_VERSION = 3
OVER = len(STAGES)
"""The stage after the last."""
COARSE_DISTANCE = math.log(4.0)
"""Distance of the levels of the coarse stage."""
LEAST_STEPS = 12
"""Steps of a trial below which no search is run: too few to tell learning rates apart."""


@dataclass(frozen=True, slots=True)
class Family:
    """Optimizers of a kind: how a trial translates into a run, c = factor M^alpha (h/S)^beta."""

    factor: float
    alpha: float
    beta: float
    by_edge: bool
    """Whether the edge of the trials counts, or their minimum."""
    unsure: float
    """A factor, as its logarithm, that a search cannot tell apart."""


ADAPTIVE = Family(1.0, 0.25, 0.4, by_edge=False, unsure=math.log(2.0))
"""Optimizers that divide by the gradient's size."""
GRADIENT = Family(1 / 3, 0.3, 0.0, by_edge=True, unsure=math.log(2.5))
"""Optimizers that do not."""


class Ledger:
    """The stage and the trial under way, the losses so far, and what was decided.

    Args:
        replicas: how many there are.
        total_steps: S, steps of the whole run.
        adaptive: whether the optimizer divides by the gradient's size.
        idle: there is no search to run; it can hold the state of one that was run elsewhere.
    """

    def __init__(
        self, *, replicas: int, total_steps: int, adaptive: bool, idle: bool = False
    ) -> None:
        if replicas < 1:
            raise ValueError(f"a search needs at least one replica, got {replicas}")
        self.replicas, self.total_steps, self.adaptive = replicas, total_steps, adaptive
        self.family = ADAPTIVE if adaptive else GRADIENT
        self.size = SIZE
        shortest = min(stage.steps(replicas, total_steps) for stage in STAGES)
        if shortest < 4 and not idle:
            raise ValueError(
                f"total_steps={total_steps} leaves trials of {shortest} steps for {replicas} "
                f"replicas: a search needs {self.least_steps(replicas, 4)} steps in all; "
                "use rule='none' for shorter runs"
            )
        self.stage, self.index = 0, 0
        self.trials_run, self.last_trial = 0, 0
        """How many have ended, and the steps of the last."""
        self.offsets = [COARSE_DISTANCE * (k - self.size // 2) for k in range(self.size)]
        self.seen = [Level() for _ in range(self.size)]
        self.start = Level()
        """The loss before any step of the search."""
        self.shown: list[tuple[float, float]] = []
        """Offsets and losses of the coarse stage."""
        self.proposed = 0.0
        self.target = math.inf
        """Target loss: what the run at the proposed rate must reach in time."""
        self.contested = False
        """True where the run has to decide, beginning with the initial rate."""
        self.duel = False
        """True where it decides by which of the two rates learns more."""
        self.verdict = ""
        self._trial: Trial | None = None
        if idle:
            self.skip()
        else:
            self._trial = self._next_trial()

    @staticmethod
    def least_steps(replicas: int, trial: int) -> int:
        """Steps of the shortest run whose trials have at least `trial` steps."""
        return max(math.ceil(trial * s.trials(replicas) / s.share) for s in STAGES)

    @property
    def budget(self) -> int:
        """Steps of a search that ends with its fine stage."""
        return self._steps_of(COARSE) + self._steps_of(FINE)

    @property
    def longest(self) -> int:
        """Steps of a search that needs its long stage."""
        return self._steps_of(COARSE) + self._steps_of(LONG)

    def _steps_of(self, stage: Stage) -> int:
        return stage.steps(self.replicas, self.total_steps) * stage.trials(self.replicas)

    @property
    def team(self) -> int:
        """Replicas that run a level together in the present stage."""
        return STAGES[min(self.stage, OVER - 1)].team(self.replicas)

    def steps(self, stage: int) -> int:
        """Steps of a trial."""
        return STAGES[stage].steps(self.replicas, self.total_steps)

    @property
    def over(self) -> bool:
        """True when there is nothing left to run."""
        return self.stage >= OVER

    @property
    def scale(self) -> float:
        """What the schedule is multiplied with: 1.0 until the search is over, and where the
        initial rate was not beaten."""
        return math.exp(self.proposed) if self.over else 1.0

    def translation(self, stage: int) -> float:
        """c: what a trial's rate is multiplied with to give the run's."""
        if STAGES[stage] is LONG:
            return 1.0
        kind, horizon = self.family, self.steps(stage) / self.total_steps
        teams = STAGES[stage].teams(self.replicas)
        powers = kind.alpha * math.log(teams) + kind.beta * math.log(horizon)
        return kind.factor * math.exp(powers)

    def _next_trial(self) -> Trial | None:
        """The trial of this stage and index; None once the search is over."""
        if self.over:
            return None
        stage, c = STAGES[self.stage], self.translation(self.stage)
        return Trial(
            self.stage,
            self.index,
            self.steps(self.stage),
            stage.team(self.replicas),
            stage.teams(self.replicas),
            c,
            tuple([math.exp(x) / c for x in self.offsets]),
        )

    @property
    def trial(self) -> Trial:
        """The trial that is under way."""
        if self._trial is None:
            raise ValueError("the search is over: there is no trial")
        return self._trial

    def close(self, levels: Sequence[Level], start: Level | None = None) -> str:
        """Add the losses of a trial at each level, and the loss before it where it is known, and
        go on; says what was decided."""
        if self.over:
            raise ValueError("the search is over: there is no trial to close")
        if len(levels) != self.size:
            raise ValueError(f"a search of {self.size} levels, got {len(levels)}")
        trial = self.trial
        self.seen = [_added(a, b) for a, b in zip(self.seen, levels, strict=True)]
        self.start = self.start if start is None else _added(self.start, start)
        self.index += 1
        self.trials_run, self.last_trial = self.trials_run + 1, trial.steps
        whole = self.index * trial.teams >= self.size
        if whole:
            losses = [x.total / x.count if x.count else math.inf for x in self.seen]
            self.seen, self.index = [Level() for _ in range(self.size)], 0
            self.verdict = self.decide(STAGES[self.stage], losses)
        self._trial = self._next_trial()
        return self.verdict if whole else ""

    def decide(self, stage: Stage, losses: Sequence[float]) -> str:
        """What the losses of a whole stage mean: moves on to the next stage, or ends the search."""
        raise NotImplementedError

    def skip(self) -> None:
        """No search: the initial rate stays."""
        self.stage, self.proposed, self.verdict = OVER, 0.0, "no search was run"
        self.shown, self._trial = [], None

    @property
    def ran(self) -> bool:
        """True where a search is over that was run to its end."""
        return self.over and bool(self.shown)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank."""
        return {
            "version": LEDGER_VERSION,
            "replicas": self.replicas,
            "total_steps": self.total_steps,
            "stage": self.stage,
            "index": self.index,
            "trials_run": self.trials_run,
            "last_trial": self.last_trial,
            "offsets": list(self.offsets),
            "seen": [[x.count, x.total] for x in self.seen],
            "start": [self.start.count, self.start.total],
            "shown": [list(level) for level in self.shown],
            "proposed": self.proposed,
            "target": self.target,
            "contested": self.contested,
            "duel": self.duel,
            "verdict": self.verdict,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another search stopped."""
        self.check_state(state)
        self.stage, self.index = int(state["stage"]), int(state["index"])
        self.trials_run, self.last_trial = int(state["trials_run"]), int(state["last_trial"])
        self.offsets = [float(x) for x in state["offsets"]]
        self.seen = [Level(*map(float, row)) for row in state["seen"]]
        self.start = Level(*map(float, state["start"]))
        self.shown = [(float(x), float(y)) for x, y in state["shown"]]
        self.proposed, self.target = float(state["proposed"]), float(state["target"])
        self.contested, self.duel = bool(state["contested"]), bool(state["duel"])
        self.verdict = str(state["verdict"])
        self._trial = self._next_trial()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a search of other replicas or another length; once it is over, it fits any."""
        if state.get("version") != LEDGER_VERSION:
            raise ValueError(
                f"the state of a search has version {state.get('version')!r} and this version of "
                f"hdet_scale reads {LEDGER_VERSION}: resume with the one that wrote it"
            )
        same = (state["replicas"], state["total_steps"]) == (self.replicas, self.total_steps)
        if int(state["stage"]) < OVER and not same:
            raise ValueError(
                f"the state was saved in a search of {state['replicas']} replicas and "
                f"{state['total_steps']} steps, and this run has {self.replicas} and "
                f"{self.total_steps}: resume with the same, or from a checkpoint after the search"
            )


def _added(a: Level, b: Level) -> Level:
    return Level(a.count + b.count, a.total + b.total)
