"""Exploring: the published method, round by round.

    step 1 .. T      every replica steps with base x multiplier            (fan-out)
    after step T     a rule with a probe evaluates the replicas            (ask)
                     losses are exchanged, parameters averaged             (converge)
                     the rule moves the base                               (steer)
                     multipliers are assigned anew

Replicas may also diverge by local gradients alone, with a spread of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hdet_scale.converge.transfers import Outcome
from hdet_scale.method.records import ProbeRecord, RoundRecord
from hdet_scale.phases.plain import Plain, averaging_of
from hdet_scale.phases.run import Phase, Run, Turn


class Exploring(Phase):
    """Replicas diverge within a round and are averaged at its end."""

    name = "exploring"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.averaging = averaging_of(run)
        self._assign()

    @property
    def equal(self) -> bool:
        return self.averaging.equal

    @property
    def stride(self) -> int:
        return self.run.config.interval if self.run.round_step == 0 else 0

    @property
    def steps_to_converge(self) -> int | None:
        return -self.run.round_step % self.run.config.interval

    def replicas_differ(self, *, own: bool) -> bool:
        """In the middle of a round; or for good where the moments, or what a wire remembers, are
        each replica's own."""
        averaging, config = self.averaging, self.run.config
        if self.run.replicas.size == 1:
            return False
        averaging.complete()
        drift = self.run.engine.moments_drift(config.gradients)
        return (
            own
            or not averaging.equal
            or (drift and not averaging.average_moments)
            or config.converge.remembers
        )

    def leave(self) -> None:
        self.averaging.complete()

    def discard(self) -> None:
        self.averaging.discard()

    def _assign(self) -> None:
        """Multipliers of all replicas for this round, and this replica's own."""
        run = self.run
        self.fans = run.steering.fans(run.replicas.size, run.round)
        self.multipliers = [fan[run.replicas.rank] for fan in self.fans]

    def write(self) -> None:
        run = self.run
        bases = run.steering.bases(run.schedule)
        for factor, base, rho in zip(run.factors, bases, self.multipliers, strict=True):
            factor.write(base, rho)

    def count(self, loss: Tensor | float | None) -> Turn:
        run = self.run
        if run.engine.replicas.group is None:
            run.engine.connect()
        run.step += 1
        run.round_step += 1
        self.averaging.count(loss, run.round_step)
        if run.round_step >= run.config.interval:
            self._close()
        return run.turn()

    def _close(self) -> None:
        """End the round: ask, average, steer, publish, assign."""
        run, averaging = self.run, self.averaging
        bases, probe = run.steering.bases(run.schedule), None
        values = [
            [f.at(b, rho) for rho in fan]
            for f, b, fan in zip(run.factors, bases, self.fans, strict=True)
        ]
        if run.steering.spread > 0:
            averaging.complete()
            probe = run.steering.ask(
                run.schedule, self.multipliers, run.replicas, averaging.prepared().device, run.step
            )
        losses, outcome = averaging.close()
        included = zip(losses, outcome.included, strict=True)
        finite = [loss if ok else math.nan for loss, ok in included]
        run.steering.update(run.step, run.schedule, finite, values)
        if probe is not None and run.steering.spread == 0.0:
            self._settle()
        self._publish(losses, values, outcome, probe)
        averaging.open()
        run.next_round()
        if run.diverges:
            self._assign()
        else:
            self.successor = Plain(run)

    def _settle(self) -> None:
        """The rule is done exploring: average what overlap or fragments have left and, where
        nothing is averaged from here on, the moments that the policy leaves to each replica."""
        if not self.averaging.equal:
            self.averaging.converge(blocking=True)
        if not (self.run.diverges or self.averaging.average_moments):
            self.averaging.equalize_moments()

    def on_new_engine(self) -> Phase:
        self.averaging.move_to(self.run.engine, self.run.config.gradients)
        self._assign()
        return self

    def finalize(self, *, moments: bool = False) -> None:
        self.run.engine.connect()
        self.averaging.finalize(moments=moments)

    def _publish(
        self,
        losses: Sequence[float],
        values: Sequence[Sequence[float]],
        outcome: Outcome,
        probe: ProbeRecord | None,
    ) -> None:
        run = self.run
        if not run.listeners:
            return
        names, rules = run.names, getattr(run.steering, "rules", [])
        run.publish(
            RoundRecord(
                round=run.round,
                step=run.step,
                losses=tuple(losses),
                values={n: tuple(v) for n, v in zip(names, values, strict=True)},
                bases=dict(zip(names, run.steering.bases(run.schedule), strict=True)),
                velocities={n: rule.velocity for n, rule in zip(names, rules, strict=False)},
                quarantined=tuple(r for r, ok in enumerate(outcome.included) if not ok),
                seconds=outcome.seconds,
                wire_bytes=outcome.wire_bytes,
                probe=probe,
            )
        )

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.averaging.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, replicas: int) -> None:
        self.averaging.load_state_dict(state, replicas=replicas)
        self._assign()

    def replica_state_dict(self) -> dict[str, Any]:
        return self.averaging.replica_state_dict()

    def load_replica_state_dict(self, state: Mapping[str, Any]) -> None:
        self.averaging.load_replica_state_dict(state)
