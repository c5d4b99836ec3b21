"""One record of each kind, for tests of what is made from records."""

from __future__ import annotations

import math

from hdet_scale.method.records import (
    EvaluationRecord,
    ProbeRecord,
    RoundRecord,
    SearchRecord,
    TrialRecord,
)

PROBE = ProbeRecord(
    losses=(1.0, 2.0),
    seconds=0.01,
    verdict="lr/group0 up",
    evidence={"lr/group0": -0.5, "noise": 2.0},
)


def a_round(step: int, *, probed: bool = False) -> RoundRecord:
    """Of two replicas, after each 10 steps; replica 1 was not finite."""
    return RoundRecord(
        round=step // 10 - 1,
        step=step,
        losses=(2.5, math.nan),
        values={"lr/group0": (1e-3, 1.2e-3), "lr/group1": (1e-4, 1.2e-4)},
        bases={"lr/group0": 1.1e-3, "lr/group1": 1.1e-4},
        velocities={"lr/group0": 3e-5, "lr/group1": -3e-6},
        quarantined=(1,),
        seconds=0.25,
        wire_bytes=4096,
        probe=PROBE if probed else None,
    )


def a_trial(
    step: int, *, trial: int = 0, stage: str = "first", verdict: str = "", diverged: bool = False
) -> TrialRecord:
    """After each 4 steps; one that diverged had ten times the rate."""
    rate = 1e-2 if diverged else 1e-3
    return TrialRecord(
        stage=stage,
        trial=trial,
        step=step,
        rates={"lr/group0": rate, "lr/group1": rate / 10},
        loss=math.inf if diverged else 2.5,
        error=math.inf if diverged else 0.1,
        losses=(2.4, math.nan) if diverged else (2.4, 2.6),
        translation=0.5,
        verdict=verdict,
        seconds=0.02,
    )


def a_search(
    step: int, *, trials: int = 1, completed: bool = True, verdict: str = ""
) -> SearchRecord:
    """It proposes ten times the initial rate, unless it is given up."""
    factor = 10.0 if completed else 1.0
    return SearchRecord(
        step=step,
        trials=trials,
        initial={"lr/group0": 1e-4, "lr/group1": 1e-5},
        taken={"lr/group0": factor * 1e-4, "lr/group1": factor * 1e-5},
        completed=completed,
        verdict=verdict,
    )


def an_evaluation(step: int) -> EvaluationRecord:
    """One batch was not finite, and the weights go back to those of the lowest loss."""
    return EvaluationRecord(
        step=step,
        loss=math.inf,
        losses=(2.0, math.nan),
        scale=2.5,
        rates={"lr/group0": 1e-3, "lr/group1": 1e-4},
        restart=True,
        verdict="the rate is divided by 10, and the weights go back",
        seconds=0.03,
    )
