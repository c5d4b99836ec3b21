"""Records: what a round, a trial, a search or an evaluation did, for logs, boards and callbacks.

`scheduler.on_record(listener)` hands over every record, `scheduler.on_round(listener)` rounds only.
A record is the same on every rank, except where a field says "this rank".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """What a rule that is fed by a probe measured and decided at the end of a round."""

    losses: tuple[float, ...]
    """This rank's losses on the probe's batches."""
    seconds: float
    """Time of the probe on this rank."""
    verdict: str
    """What the rule decided, in words; empty if it decided nothing."""
    evidence: dict[str, float]
    """The statistic of each factor, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round: T steps at different rates, then the averaging of the replicas."""

    kind: ClassVar[str] = "round"

    round: int
    """Index of the round that ended."""
    step: int
    """Optimizer steps done in all."""
    losses: tuple[float, ...]
    """Each replica's mean training loss over the round; NaN where there was none."""
    values: dict[str, tuple[float, ...]]
    """For each factor what each replica used in the last step of the round."""
    bases: dict[str, float]
    """For each factor the base after the rule has moved it."""
    velocities: dict[str, float]
    """For each factor that the paper's rule moves, the rule's velocity."""
    quarantined: tuple[int, ...]
    """Replicas left out of the mean."""
    seconds: float
    """Time of the averaging on this rank."""
    wire_bytes: int
    """Bytes that this rank sent for it."""
    probe: ProbeRecord | None = None
    """Set where the rule is fed by a probe and explored in this round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One trial: a short, complete schedule of one team of replicas at one rate, from the initial
    weights. Trials that were run side by side have the same step."""

    kind: ClassVar[str] = "trial"

    stage: str
    """Stage of the search: "first" or "second"."""
    trial: int
    """Index within the search, from 0."""
    step: int
    """Optimizer steps done in all."""
    rates: dict[str, float]
    """For each factor its peak rate, as it was trained."""
    loss: float
    """Held-out loss after the decay; infinite where the trial diverged."""
    error: float
    """Standard error of the difference to the initial rate's trial of the same stage; of the loss
    itself for that trial and for those that ended before it. Infinite where it is not known."""
    losses: tuple[float, ...]
    """The loss of each of the probe's batches; without a probe the training loss of each step in
    the last third of the trial."""
    translation: float
    """What a trial's rate is multiplied with to give the rate of the run."""
    verdict: str
    """What was decided after this trial, in words; empty where another of the stage follows."""
    seconds: float
    """Time of the evaluation on this rank, for all trials of this step together; 0 in all records
    of a step but the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """A search that is over; the run itself begins after this step."""

    kind: ClassVar[str] = "search"

    step: int
    """Optimizer steps done in all: those of the search."""
    trials: int
    """How many trials were evaluated."""
    initial: dict[str, float]
    """For each factor the peak of the schedule, as the user gave it."""
    taken: dict[str, float]
    """For each factor the peak that the run begins with."""
    completed: bool
    """False where the search was given up before its end."""
    verdict: str
    """What the search decided, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One evaluation of the watch: the run's loss on held-out batches."""

    kind: ClassVar[str] = "evaluation"

    step: int
    """Optimizer steps done in all."""
    loss: float
    """Mean held-out loss; infinite where one batch's was not finite."""
    losses: tuple[float, ...]
    """The loss of each batch."""
    scale: float
    """What the schedule is multiplied with from now on."""
    rates: dict[str, float]
    """For each factor its value at this step."""
    restart: bool
    """Whether the weights went back to those of the lowest loss after this step. The schedule goes
    on."""
    verdict: str
    """What the watch decided, in words; empty if it decided nothing."""
    seconds: float
    """Time of the evaluation on this rank."""


Record = RoundRecord | TrialRecord | SearchRecord | EvaluationRecord
"""What a listener of `scheduler.on_record` receives."""
