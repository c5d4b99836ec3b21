"""Watched: the run after a search, evaluated on held-out batches.

Replicas have equal weights and split the probe's batches. An evaluation is one all-reduce of two
numbers for each batch; a step between evaluations adds a number on the host. The weights of the
lowest loss are kept in the host's memory. At three quarters of the run the evaluations end, and
they are freed. The rule is in hdet_scale.search.watch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hdet_scale.method.records import EvaluationRecord
from hdet_scale.phases.plain import Plain, equalize
from hdet_scale.phases.run import Phase, Run, Turn
from hdet_scale.search.evidence import mean_loss
from hdet_scale.search.probe import NO_LOSS, Probe
from hdet_scale.search.snapshot import Snapshot
from hdet_scale.search.watch import Watch

logger = logging.getLogger("hdet_scale")


class Watched(Phase):
    """Training whose rate may still be lowered.

    Args:
        run: the run.
        watch: the rule; None where a state is loaded next.
        snapshot: the weights of the lowest loss; None where the run never goes back.
    """

    name = "watched"

    def __init__(
        self, run: Run, watch: Watch | None = None, snapshot: Snapshot | None = None
    ) -> None:
        super().__init__(run)
        self._watch, self.snapshot = watch, snapshot

    @property
    def watch(self) -> Watch:
        """The rule."""
        if self._watch is None:
            raise RuntimeError("this phase has no watch: load a state first")
        return self._watch

    def count(self, loss: Tensor | float | None) -> Turn:
        run, watch = self.run, self.watch
        turn = run.advance()
        if run.probe is None or (self.snapshot is None and watch.budget > 0):
            self._end()
        elif watch.count():
            self._evaluate(run.probe)
        if watch.over:
            self.successor = Plain(run)
        return turn

    def _evaluate(self, probe: Probe) -> None:
        run, watch, start = self.run, self.watch, time.perf_counter()
        losses = evaluate(probe, run)
        seconds, move = time.perf_counter() - start, watch.evaluate(losses)
        if move.back and self.snapshot is not None:
            self.snapshot.restore()
        elif move.best and watch.budget > 0 and not watch.over:
            self.snapshot = Snapshot(run.engine, host=True)
        if move.scale is not None:
            run.steering.scale = move.scale
            if run.writes_log:
                logger.warning("watch, step %d: %s", run.step, watch.verdict)
        run.publish(
            EvaluationRecord(
                step=run.step,
                loss=mean_loss(losses),
                losses=tuple(losses),
                scale=watch.scale,
                rates=dict(zip(run.names, [float(f.read()) for f in run.factors], strict=True)),
                restart=move.back,
                verdict=watch.verdict if move.scale is not None else "",
                seconds=seconds,
            )
        )

    def _end(self) -> None:
        """Nothing to go back to, or nothing to evaluate with."""
        self.successor = Plain(self.run)
        if not self.run.writes_log:
            return
        logger.warning(
            "the watch ends at step %d: %s",
            self.run.step,
            "the state that was loaded has no snapshot to go back to (save_snapshot)"
            if self.run.probe is not None
            else "there is no probe to evaluate with",
        )

    def check_move(self, moved: bool) -> None:
        raise ValueError(
            "rule='auto' has taken a snapshot of the model as it was: attach the engine before the "
            "first step and before a state is loaded"
        )

    def finalize(self, *, moments: bool = False) -> None:
        equalize(self.run, moments=moments)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"watch": self.watch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, replicas: int) -> None:
        self._watch, self.snapshot = Watch.of_state(state["watch"]), None

    @property
    def kept(self) -> Snapshot | None:
        return self.snapshot

    def keep(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot


def evaluate(probe: Probe, run: Run) -> list[float]:
    """The held-out loss of each of the probe's batches, the same on every rank; replicas with equal
    weights split them. Collective."""
    if run.engine.replicas.group is None:
        run.engine.connect()
    where, device, limit = run.engine.replicas, run.engine.device, probe.limit
    parts = probe.parts(where.rank, where.size)
    own = where.shard_means(list(parts.values()), device)
    count, total = [0.0] * limit, [0.0] * limit
    for batch, value in zip(parts, own, strict=True):
        count[batch], total[batch] = 1.0, value
    sums = where.sum(count + total, device)
    losses = [t / n for n, t in zip(sums[:limit], sums[limit:], strict=True) if n]
    if not losses:
        raise ValueError(NO_LOSS)
    return losses
