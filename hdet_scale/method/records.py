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
    """One trial on each replica: a short schedule, all of them from the same weights."""

    kind: ClassVar[str] = "trial"

    stage: str
    """Stage of the search: "coarse", "fine" or "long"."""
    trial: int
    """Index within the search, from 0."""
    step: int
    """Optimizer steps done in all."""
    rates: dict[str, tuple[float, ...]]
    """For each factor every replica's peak rate, as it trained."""
    losses: tuple[float, ...]
    """Held-out loss after the decay at each replica's level: the mean over the replicas that ran
    that level; not finite where all of them diverged."""
    translation: float
    """What a trial's rate is multiplied with to give the rate of the run."""
    verdict: str
    """What the stage decided, in words; empty until its last trial."""
    probe_losses: tuple[float, ...]
    """This rank's losses on the probe's batches."""
    probe_seconds: float
    """Time of the probe on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """A search that is over; the run itself begins after this step."""

    kind: ClassVar[str] = "search"

    step: int
    """Optimizer steps done in all: those of the search."""
    trials: int
    """How many trials each replica ran."""
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
    """Mean held-out loss; NaN where one batch's was not finite."""
    losses: tuple[float, ...]
    """The loss of each batch."""
    scale: float
    """What the schedule is multiplied with from now on."""
    rates: dict[str, float]
    """For each factor its value at this step."""
    restart: bool
    """Whether the run went back to its snapshot after this step."""
    verdict: str
    """What the watch decided, in words; empty if it decided nothing."""
    seconds: float
    """Time of the evaluation on this rank."""


Record = RoundRecord | TrialRecord | SearchRecord | EvaluationRecord
"""What a listener of `scheduler.on_record` receives."""
