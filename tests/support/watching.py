"""Watching: a run whose held-out loss follows a script once its search is over.

The loss is a function of the steps that are done, so that a run that is resumed sees the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from hdet_scale.method.records import EvaluationRecord
from hdet_scale.search.constants import FIRST, GROWTH, PATIENCE, UNTIL
from tests.support.searching import BATCHES, RIGHT, Run, S
from tests.support.searching import FIRST as SEARCHED
from tests.support.toy import learn

LEFT = S - SEARCHED
"""Steps of the run, whose search ends after its first stage."""


def evaluation_steps() -> list[int]:
    """Steps of the whole run after which it is evaluated."""
    found, step = [], round(FIRST * LEFT)
    while step <= UNTIL * LEFT:
        found.append(SEARCHED + step)
        step = round(step * GROWTH)
    return found


EVALUATIONS = evaluation_steps()
LEARNS = [0.4, 0.3]
FAILS = [0.6] * PATIENCE
LOWERED = len(LEARNS) + PATIENCE - 1
"""Index of the evaluation that lowers the rate for the first time."""
BACK = len(LEARNS) - 1
"""Index of the evaluation whose weights it goes back to."""
SCRIPT = [*LEARNS, *FAILS, 0.25, *FAILS]
"""Of the held-out loss: it learns, loses it again, goes back, learns more and loses that too."""
AGAIN = len(SCRIPT) - 1
"""Index of the evaluation that lowers the rate for the second time."""
ONCE = (EVALUATIONS[LOWERED] - EVALUATIONS[BACK]) / S
"""A budget that is used up by going back once."""


def evaluations(records: Sequence[Any]) -> list[EvaluationRecord]:
    return [record for record in records if isinstance(record, EvaluationRecord)]


class Watching(Run):
    """A run with that script, whose state is kept around each evaluation."""

    def __init__(
        self, rank: int, kind: str = "one cycle", script: Sequence[float] = SCRIPT, **options: Any
    ) -> None:
        super().__init__(rank, kind, RIGHT[2], **options)
        self.script, self.before, self.after = list(script), {}, {}
        probe = self.scheduler._run.probe
        if probe is not None:
            self.measured, probe.losses = probe.losses, self.losses

    def losses(self, part: int = 0, parts: int = 1) -> Iterator[float]:
        if self.scheduler.searching:
            return iter(self.measured(part, parts))
        done = [s for s in EVALUATIONS if s <= self.scheduler.steps_done]
        loss = self.script[min(len(done), len(self.script)) - 1] if done else 1.0
        return (loss + 0.001 * i for i in range(part, BATCHES, parts))

    def train(self, until: int) -> None:
        while self.step < until:
            self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
            loss = learn(self.model, self.optimizer, self.step, self.rank)
            self.step += 1
            at = self.step in EVALUATIONS
            if at:
                self.before[self.step] = self.held()
            self.scheduler.step(loss)
            if at:
                self.after[self.step] = self.held()

    def save_for_all(self, *, own: bool) -> dict[str, Any]:
        """Each replica's own state, or the first one's for all; collective."""
        file = [self.save()]
        if not own:
            dist.broadcast_object_list(file)
        return file[0]
