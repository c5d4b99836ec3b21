"""Records: what a round, a trial, a search or an evaluation did, for logs, boards and callbacks.

A record is the same on every rank, except for the seconds and this rank's own probe losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """What a rule that is fed by a probe saw and decided at the end of a round."""

    losses: tuple[float, ...]
    """This rank's losses on the probe's batches."""
    seconds: float
    """Time of the probe on this rank."""
    verdict: str
    """What the rule decided, in words; empty if nothing."""
    evidence: dict[str, float]
    """The statistic of each factor, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round of an exploration: T steps and the averaging after them."""

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
    """For each factor the base after the steering."""
    velocities: dict[str, float]
    """For each steered factor the velocity of the paper's rule."""
    quarantined: tuple[int, ...]
    """Replicas left out of the mean."""
    seconds: float
    """Time of the averaging on this rank."""
    wire_bytes: int
    """Bytes that this rank sent for it."""
    probe: ProbeRecord | None = None
    """Of a rule that is fed by a probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One trial of a search: each replica ran a short complete schedule from the same weights."""

    kind: ClassVar[str] = "trial"
    stage: str
    """Name of the stage."""
    trial: int
    """Index within the search."""
    step: int
    """Optimizer steps done in all."""
    rates: dict[str, tuple[float, ...]]
    """For each factor the peak rate of each replica, as it trained."""
    losses: tuple[float, ...]
    """For each replica the held-out loss after the decay at its level: the mean over the replicas
    that ran the level."""
    translation: float
    """What a trial's rate is multiplied with to give the run's."""
    verdict: str
    """What the stage decided, in words; empty until its last trial."""
    probe_losses: tuple[float, ...]
    """This rank's losses on the probe's batches."""
    probe_seconds: float
    """Time of the probe on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """The end of a search."""

    kind: ClassVar[str] = "search"
    step: int
    """Optimizer steps done in all."""
    trials: int
    """Trials that were run."""
    initial: dict[str, float]
    """For each factor the schedule's peak as the user gave it."""
    taken: dict[str, float]
    """For each factor the peak that the run begins with."""
    completed: bool
    """False where the search was given up before its end."""
    verdict: str
    """What was decided, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One evaluation of the watch: the held-out loss of the run."""

    kind: ClassVar[str] = "evaluation"
    step: int
    """Optimizer steps done in all."""
    loss: float
    """Mean held-out loss; NaN where the loss of a batch was not finite."""
    losses: tuple[float, ...]
    """Of each batch."""
    scale: float
    """What the schedule is multiplied with from now on."""
    rates: dict[str, float]
    """For each factor its value at this step."""
    restart: bool
    """Whether the run went back to its snapshot."""
    verdict: str
    """What the watch decided, in words; empty if nothing."""
    seconds: float
    """Time of the evaluation on this rank."""


Record = RoundRecord | TrialRecord | SearchRecord | EvaluationRecord
