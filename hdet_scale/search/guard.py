"""The guard: carries a watch out while the run is under way.

Replicas have the same weights then and split the probe's batches. A look is one all-reduce of two
numbers for each batch and two for the training loss; the steps between looks add up a number on
the host. To start again, every replica goes back to the mark of the race. At three quarters of the
run the guard goes, with its mark.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hdet_scale.method.records import EvaluationRecord
from hdet_scale.method.round import Round
from hdet_scale.search.probe import NO_LOSS, Probe
from hdet_scale.search.snapshot import Mark
from hdet_scale.search.watch import Watch

logger = logging.getLogger("hdet_scale")


class Guard:
    """A watch, the mark to go back to, and the place of the schedule at the mark.

    place: of the schedule when the run began, in its scheduler's own terms.
    mark: None where a state was loaded and its mark was not; then there is nothing to guard.
    """

    def __init__(self, watch: Watch, cycle: Round, mark: Mark | None, place: Any) -> None:
        self.watch, self.cycle, self.mark, self.place = watch, cycle, mark, place

    @property
    def over(self) -> bool:
        """True when there is nothing left to watch."""
        return self.watch.over

    def count(
        self, share: float, loss: Tensor | float | None, step: int, probe: Probe | None
    ) -> bool:
        """One step of the run is done, the run's `step`-th in all; True when the replicas went
        back to the mark."""
        if self.mark is None or probe is None:
            self.watch.over = True
            logger.warning(
                "the watch over what a race found ends at step %d: %s",
                step,
                "the state that was loaded has no mark to go back to"
                if self.mark is None
                else "there is no probe to look with",
            )
            return False
        self.watch.count(share)
        if not self.watch.due:
            return False
        start = time.perf_counter()
        losses, trained = look(probe, self.cycle, loss)
        seconds = time.perf_counter() - start
        said = self.watch.verdict
        scale = self.watch.look(losses, trained)
        if scale is not None:
            self.mark.restore()
            self.cycle.find(scale)
        verdict = self.watch.verdict if self.watch.verdict != said else ""
        where = self.cycle.replicas
        if verdict and where.rank == where.shard_rank == 0:
            logger.info("watch, step %d: %s", step, verdict)
        self._publish(losses, step, verdict, seconds, back=scale is not None)
        return scale is not None

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank; with the mark where a replica is one rank."""
        whole = self.cycle.replicas.shard_size == 1
        return {
            "rule": self.watch.state_dict(),
            "place": self.place,
            "mark": self.mark_state() if whole else None,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], cycle: Round) -> Guard:
        """Go on where another guard stopped."""
        guard = cls(Watch.of_state(state["rule"]), cycle, None, state["place"])
        guard.load_mark(state["mark"])
        return guard

    def mark_state(self) -> dict[str, Any] | None:
        """This rank's part of the mark."""
        return None if self.mark is None else self.mark.state_dict()

    def load_mark(self, state: Mapping[str, Any] | None) -> None:
        """Go back to that place from now on; None: there is none."""
        self.mark = None
        if state is not None:
            self.mark = Mark(self.cycle.averaged, state)
            self.mark.to_host()

    def _publish(
        self, losses: list[float], step: int, verdict: str, seconds: float, *, back: bool
    ) -> None:
        cycle = self.cycle
        mean = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
        names = [f.name for f in cycle.factors]
        rates = [float(f.read()) for f in cycle.factors]
        record = EvaluationRecord(
            step=step,
            loss=mean,
            losses=tuple(losses),
            scale=self.watch.scale,
            rates=dict(zip(names, rates, strict=True)),
            restart=back,
            verdict=verdict,
            seconds=seconds,
        )
        for listener in cycle.listeners:
            listener(record)


def look(
    probe: Probe, cycle: Round, loss: Tensor | float | None = None
) -> tuple[list[float], float]:
    """The loss of each of the probe's batches and the mean of `loss` over the ranks that have one,
    NaN where none has: the same on every rank. Collective."""
    where, device = cycle.replicas, cycle.averaged.parameters()[0].device
    drawn = probe.parts(where.rank, where.size)
    loss = loss.detach() if isinstance(loss, Tensor) else loss
    told = [0.0, 0.0] if loss is None else [float(loss), 1.0]
    own = where.shard_means([*drawn.values(), *told], device)
    count, total = [0.0] * probe.limit, [0.0] * probe.limit
    for batch, value in zip(drawn, own, strict=False):
        count[batch], total[batch] = 1.0, value
    *summed, trained, ranks = where.sum(count + total + own[-2:], device)
    pairs = zip(summed[: probe.limit], summed[probe.limit :], strict=True)
    losses = [t / n for n, t in pairs if n]
    if not losses:
        raise ValueError(NO_LOSS)
    return losses, trained / ranks if ranks else math.nan
