"""Plain: training as without HDET, bit for bit.

No collective, no evaluation, no copy: each step writes the shared base to the optimizer and counts.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.method.round import Round
from hdet_scale.phases.run import Phase, Run, Turn


class Plain(Phase):
    """Replicas stay equal: shared gradients and nothing left to explore."""

    name = "plain"

    def count(self, loss: Tensor | float | None) -> Turn:
        return self.run.advance()

    def finalize(self, *, moments: bool = False) -> None:
        """Compare the replicas by a checksum and average them if they differ, which noise at the
        start (`warm_init`) causes."""
        equalize(self.run, moments=moments)


def equalize(run: Run, *, moments: bool) -> bool:
    """Make replicas equal that should be; collective. True where they differed."""
    run.engine.connect()
    if run.replicas.size == 1:
        return False
    # Nothing goes on in the background: with overlap each call would make a process group.
    averaging = averaging_of(run, dataclasses.replace(run.config.converge, overlap=False))
    if moments and not averaging.average_moments:
        averaging.equalize_moments()
    if averaging.prepared().replicas_equal():
        return False
    averaging.converge(blocking=True)
    return True


def averaging_of(run: Run, policy: ConvergePolicy | None = None) -> Round:
    """The averaging of a run's replicas, as its config or `policy` has it."""
    return Round(
        run.engine,
        policy or run.config.converge,
        gradients=run.config.gradients,
        interval=run.config.interval,
        moves_moments=any(getattr(f, "moves_moments", False) for f in run.factors),
    )
