"""Watched: the run after a search, evaluated on held-out batches.

Replicas have equal weights and split the probe's batches. An evaluation is one all-reduce of two
numbers for each batch and two for the training loss; a step between evaluations adds a number on
the host. To restart, every replica goes back to the snapshot of the search. At three quarters of
the run the evaluations end, and the snapshot is freed. The rule is in hdet_scale.search.watch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hdet_scale.method.records import EvaluationRecord
from hdet_scale.phases.plain import Plain, equalize
from hdet_scale.phases.run import Phase, Run, Turn
from hdet_scale.search.probe import NO_LOSS, Probe
from hdet_scale.search.schedule import ScheduleShape
from hdet_scale.search.snapshot import Snapshot
from hdet_scale.search.watch import Watch

logger = logging.getLogger("hdet_scale")


class Watched(Phase):
    """Training that may restart at another rate.

    Args:
        run: the run.
        shape: of the user's schedule.
        watch: the rule; None where a state is loaded next.
        snapshot: what a restart goes back to; None where there is none, and the watch ends.
        position: the schedule's position at the snapshot, in its scheduler's own terms.
    """

    name = "watched"

    def __init__(
        self,
        run: Run,
        shape: ScheduleShape,
        watch: Watch | None = None,
        snapshot: Snapshot | None = None,
        position: Any = None,
    ) -> None:
        super().__init__(run)
        self.shape, self.snapshot, self.position = shape, snapshot, position
        self._watch = watch

    @property
    def watch(self) -> Watch:
        """The rule."""
        if self._watch is None:
            raise RuntimeError("this phase has no watch: load a state first")
        return self._watch

    def count(self, loss: Tensor | float | None) -> Turn:
        run, watch = self.run, self.watch
        share = self.shape.share(run.schedule)
        turn = run.advance()
        if self.snapshot is None or run.probe is None:
            self._end()
            return turn
        watch.count(share)
        if watch.step < watch.next and not watch.over:
            return turn
        restart = not watch.over and self._evaluate(run.probe, self.snapshot, loss)
        if watch.over:
            self.successor = Plain(run)
        if not restart:
            return turn
        run.discard()
        return Turn(0, self.position)

    def _evaluate(self, probe: Probe, snapshot: Snapshot, loss: Tensor | float | None) -> bool:
        """Evaluate the run; True when it restarts."""
        run, watch, start = self.run, self.watch, time.perf_counter()
        losses, trained = evaluate(probe, run, loss)
        seconds, said = time.perf_counter() - start, watch.verdict
        scale = watch.evaluate(losses, trained)
        if scale is not None:
            snapshot.restore()
            run.steering.scale = scale
        verdict = watch.verdict if watch.verdict != said else ""
        if verdict and run.writes_log:
            logger.info("watch, step %d: %s", run.step, verdict)
        finite = all(map(math.isfinite, losses))
        run.publish(
            EvaluationRecord(
                step=run.step,
                loss=math.fsum(losses) / len(losses) if finite else math.nan,
                losses=tuple(losses),
                scale=watch.scale,
                rates=dict(zip(run.names, [float(f.read()) for f in run.factors], strict=True)),
                restart=scale is not None,
                verdict=verdict,
                seconds=seconds,
            )
        )
        return scale is not None

    def _end(self) -> None:
        """Nothing to go back to, or nothing to evaluate with."""
        self.watch.over, self.successor = True, Plain(self.run)
        logger.warning(
            "the watch ends at step %d: %s",
            self.run.step,
            "the state that was loaded has no snapshot to go back to (save_snapshot)"
            if self.snapshot is None
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
        return {"watch": self.watch.state_dict(), "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any], *, replicas: int) -> None:
        self._watch, self.position = Watch.of_state(state["watch"]), state["position"]
        self.snapshot = None

    @property
    def kept(self) -> Snapshot | None:
        return self.snapshot

    def keep(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        snapshot.to_host()


def evaluate(
    probe: Probe, run: Run, loss: Tensor | float | None = None
) -> tuple[list[float], float]:
    """The held-out loss of each of the probe's batches, and the mean of `loss` over the ranks that
    have one, NaN where none has: the same on every rank. Collective."""
    if run.engine.replicas.group is None:
        run.engine.connect()
    where, device = run.engine.replicas, run.engine.device
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
