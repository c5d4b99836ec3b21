"""The record: what a round, a heat or a look has done, for logs, boards and callbacks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """What one round did: the same on every rank, but for the seconds."""

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
    """For each steered factor the rule's velocity."""
    quarantined: tuple[int, ...]
    """Replicas left out of the mean."""
    seconds: float
    """Time of the averaging on this rank."""
    wire_bytes: int
    """Bytes that this rank sent for it."""
    phase: str = ""
    """What the rule was doing, where it has phases."""
    verdict: str = ""
    """What it decided, in words."""
    probe_losses: tuple[float, ...] = ()
    """This rank's losses on the probe's batches."""
    probe_seconds: float = 0.0
    """Time of the probe on this rank."""
    evidence: dict[str, float] = field(default_factory=dict)
    """What the rule weighed, by name."""
