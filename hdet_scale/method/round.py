"""The averaging at the end of a round.

    step 1 .. T      every replica steps with base x multiplier, or with its own gradients
    after step T     one exchange of losses and flags, then the parameters are averaged

A step that does not end a round adds one number to an accumulator on the device: no collective,
no host synchronisation. With overlap the averaging is folded in a few steps later; with fragments
a part of the buckets is averaged every T / P steps.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hdet_scale.converge.overlap import Pending, with_own_group
from hdet_scale.converge.pipeline import Converge, distinct
from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.converge.transfers import Outcome
from hdet_scale.engines.protocol import Engine
from hdet_scale.method.losses import LossMeter
from hdet_scale.topology import Replicas

logger = logging.getLogger("hdet_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """Whether replicas would average the same things."""

    renewed: bool
    """A replica has made a new plan: all must, since a new plan is compared first."""
    parameters_alike: bool
    moments_alike: bool


class Round:
    """The averaging of diverged replicas, and what it remembers from round to round.

    Args:
        engine: which tensors make the replica.
        policy: how they are averaged.
        gradients: "shared" or "local"; decides whether moments diverge.
        interval: T, the steps of a round.
        moves_moments: whether a factor makes replicas' moments diverge.
    """

    def __init__(
        self,
        engine: Engine,
        policy: ConvergePolicy,
        *,
        gradients: str,
        interval: int,
        moves_moments: bool,
    ) -> None:
        self.engine, self.policy, self.gradients = engine, policy, gradients
        self.meter = LossMeter()
        self.equal = True
        """True where replicas are equal: after a blocking converge of everything, before the next
        step."""
        self._moves_moments = moves_moments
        self._due = {
            math.ceil((i + 1) * interval / policy.fragments): i for i in range(policy.fragments)
        }
        self._converge: Converge | None = None
        self._saved: dict[str, Any] = {}
        self._pending: Pending | None = None
        self._fold_in = 0
        self._renewed = False
        self._losses: list[list[float]] = []
        self._spent = Outcome((), 0.0, 0)
        self._own_group: Replicas | None = None

    @property
    def replicas(self) -> Replicas:
        """This rank's place."""
        return self.engine.replicas

    def move_to(self, engine: Engine, gradients: str) -> None:
        """Average the tensors of another engine from now on."""
        self.engine, self.gradients = engine, gradients
        self._converge, self._own_group = None, None

    @property
    def average_moments(self) -> bool:
        """Whether a converge averages the optimizer's moments too."""
        asked = self.policy.moments
        if asked is not None:
            return asked
        return self._moves_moments or self.engine.moments_drift(self.gradients)

    def count(self, loss: Tensor | float | None, steps: int) -> None:
        """One step is done, the `steps`-th of the round: add its loss, fold in or average what is
        due before the round ends."""
        if loss is not None:
            self.meter.add(loss)
        self.equal = False
        if self._pending is not None:
            # At a fixed step, so that a run gives the same bits however fast the network was.
            self._fold_in -= 1
            if self._fold_in <= 0:
                self.complete()
        if steps in self._due and self._due[steps] < self.policy.fragments - 1:
            self.converge(self._due[steps])

    def close(self) -> tuple[list[float], Outcome]:
        """The averaging at the end of the round; losses of all replicas, and what it did."""
        last = self.policy.fragments - 1
        return self.converge(last if last else None)

    def open(self) -> None:
        """The next round begins."""
        self._spent = Outcome((), 0.0, 0)
        self.meter.reset()

    def complete(self) -> None:
        """Fold in an averaging that is under way; local, waits for it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._spend(pending.finish())
            self.engine.refresh()

    def discard(self) -> None:
        """Wait for an averaging that is under way and drop it: other weights are loaded."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.discard()

    def _spend(self, outcome: Outcome) -> None:
        """Add to what the averagings of this round have cost."""
        self._spent = Outcome(
            outcome.included,
            self._spent.seconds + outcome.seconds,
            self._spent.wire_bytes + outcome.wire_bytes,
        )

    # -- making replicas equal ------------------------------------------------------------------

    def finalize(self, *, moments: bool = False) -> None:
        """Make the replicas equal now, in the middle of a round too; collective.

        The round goes on: its steps and losses stay. Does nothing where replicas are equal.

        Args:
            moments: average the optimizer's moments too, even if the policy leaves them to each
                replica; for a checkpoint.
        """
        self.complete()
        if self.replicas.size == 1:
            return
        if moments and not self.average_moments:
            self.equalize_moments()
        if self.equal:
            return
        self.converge(blocking=True)
        if moments:
            self._share_losses()

    def equalize_moments(self) -> None:
        """Average moments that the policy leaves to each replica. Where a replica has none yet,
        because it skipped its steps, each keeps its own."""
        own = self.engine.moments()
        rows = self.replicas.exchange([fingerprint(own)], self.prepared().device)
        if any(row != rows[0] for row in rows):
            logger.warning("replicas hold different moments: they are not averaged")
        elif own:
            converge = Converge(own, self.replicas)
            if not converge.replicas_equal():
                converge()

    def _share_losses(self) -> None:
        """Put every replica's losses of the round into the state that all ranks save."""
        mine = [self.meter.total(), float(self.meter.count)]
        self._losses = self.replicas.exchange(mine, self.prepared().device)
        self._take_losses()
        if self._converge is not None:
            self._converge.forget_residuals()

    def _take_losses(self) -> None:
        if len(self._losses) == self.replicas.size:
            total, count = self._losses[self.replicas.rank]
            self.meter.load_state_dict({"sum": total, "count": count})

    # -- the averaging --------------------------------------------------------------------------

    def converge(
        self, fragment: int | None = None, *, blocking: bool = False
    ) -> tuple[list[float], Outcome]:
        """Exchange losses and flags, then average; blocking=True ignores the overlap."""
        self.complete()
        converge = self.prepared()
        losses, included, plans = self._exchange(converge, fragment)
        converge = self._in_step(converge, plans)
        self._renewed = False
        self.equal = blocking or (not self.policy.overlap and self.policy.fragments == 1)
        if not all(included):
            # The others need the bad replica no longer, and it needs all of them.
            outcome = converge.average(included)
            self._report(included, losses)
            if plans.moments_alike and not self.average_moments:
                Converge(self.engine.moments(), self.replicas).average(included)
        elif self.policy.overlap and not blocking:
            self._pending = converge.start(included, fragment)
            self._fold_in = self.policy.overlap_steps
            outcome = Outcome(tuple(included), 0.0, 0)
        else:
            outcome = converge.average(included, fragment)
        if self._pending is None:
            self.engine.refresh()
        self._spend(outcome)
        return losses, self._spent

    def tensors(self) -> list[Tensor]:
        """What a converge averages now."""
        moments = self.engine.moments() if self.average_moments else []
        return self.engine.parameters() + self.engine.buffers() + moments

    def prepared(self) -> Converge:
        """The converge over today's tensors; its plan is kept while they stay the same."""
        moments = self.engine.moments() if self.average_moments else []
        parameters, plain = self.engine.parameters(), self.engine.buffers() + moments
        known = self._converge
        if known is None or not (_same(known.tensors, parameters) and _same(known.plain, plain)):
            self._converge = self._over(parameters, plain)
            self._renewed = True
            return self._converge
        return known

    def _over(self, parameters: Sequence[Tensor], plain: Sequence[Tensor]) -> Converge:
        """A converge that continues the one before it, or a loaded state."""
        policy = self.policy
        if policy.overlap and self._own_group is None:
            # Once, at the first converge, where every rank is: new_group is collective.
            self._own_group = with_own_group(self.replicas)
        converge = Converge(
            parameters,
            self._own_group or self.replicas,
            policy.bucket_bytes,
            wire=policy.wire,
            fragments=policy.fragments,
            outer=policy.outer,
            background=policy.overlap,
            plain=plain,
        )
        before = {} if self._converge is None else self._converge.state_dict()
        converge.load_state_dict({**before, **self._saved})
        self._saved = {}
        return converge

    def _in_step(self, converge: Converge, plans: Plans) -> Converge:
        """The converge that every replica makes now.

        A replica that skipped its steps (an overflow, no batch) has no masters and no moments yet
        while the others have. It makes its masters from its parameters, and is averaged with the
        others'. Moments wait for a round in which all have them: zeros would not do, since Adam's
        correction depends on each replica's own step count. A new converge compares plans first,
        so that a replica which kept its old one must make a new one too.
        """
        if not plans.parameters_alike:
            self.engine.create_masters()
        if self.average_moments and not plans.moments_alike:
            logger.warning("replicas hold different moments: they are not averaged in this round")
            self._converge = self._over(self.engine.parameters(), self.engine.buffers())
        elif not plans.parameters_alike:
            self._converge = self._over(self.engine.parameters(), converge.plain)
        elif plans.renewed and not self._renewed:
            self._converge = self._over(converge.tensors, converge.plain)
        return self._converge or converge

    def _exchange(
        self, converge: Converge, fragment: int | None
    ) -> tuple[list[float], list[bool], Plans]:
        """Every replica's mean loss, whether it is finite, and what is to be averaged: one small
        exchange."""
        has = float(self.meter.count > 0)
        mean = self.meter.total() / self.meter.count if has else 0.0
        mine = [mean, has, float(converge.healthy(fragment, snapshot=self.policy.overlap))]
        held = (converge.tensors, self.engine.moments())
        plan = [float(self._renewed), *map(fingerprint, held)]
        rows = self.replicas.exchange(mine + plan, converge.device)
        # A shard without a loss reports (0, 0): the mean over the shards that have one.
        losses = [row[0] / row[1] if row[1] else math.nan for row in rows]
        included = [
            row[2] == 1.0 and (row[1] == 0.0 or math.isfinite(loss))
            for loss, row in zip(losses, rows, strict=True)
        ]
        plans = Plans(
            renewed=any(row[3] for row in rows),
            parameters_alike=all(row[4] == rows[0][4] for row in rows),
            moments_alike=all(row[5] == rows[0][5] for row in rows),
        )
        return losses, included, plans

    def _report(self, included: Sequence[bool], losses: Sequence[float]) -> None:
        out = [r for r, ok in enumerate(included) if not ok]
        if self.replicas.rank == next(r for r, ok in enumerate(included) if ok):
            logger.warning(
                "replicas %s left out of the mean (losses %s): a parameter or a loss was not "
                "finite; they took the mean of the others",
                out,
                [losses[r] for r in out],
            )

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank. An averaging that is under way is folded in first."""
        self.complete()
        return {
            "equal": self.equal,
            "losses": self._losses if self.equal else [],
            "converge": self._remembered("points", "momenta"),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, replicas: int) -> None:
        """Continue where a state of `replicas` replicas was taken."""
        self.discard()
        self.equal = bool(state["equal"])
        self._losses = [list(row) for row in state["losses"]]
        self.meter.reset()
        self._take_losses()
        self._remember(self._fitting(state["converge"], replicas))

    def replica_state_dict(self) -> dict[str, Any]:
        """What is this replica's own: the losses of the round, the residuals of the wire."""
        self.complete()
        return {"losses": self.meter.state_dict(), "converge": self._remembered("residuals")}

    def load_replica_state_dict(self, state: Mapping[str, Any]) -> None:
        """After `load_state_dict`."""
        self.meter.load_state_dict(state["losses"])
        self._remember(state["converge"])

    def _remembered(self, *names: str) -> dict[str, Any]:
        """What the converge keeps, or what was loaded for the one that is not there yet."""
        kept = self._saved if self._converge is None else self._converge.state_dict()
        return {name: kept.get(name, {}) for name in names}

    def _remember(self, saved: Mapping[str, Any]) -> None:
        """For the converge that is there, or for the one that the next round makes."""
        if self._converge is not None:
            self._converge.load_state_dict(saved)
        else:
            self._saved = {**self._saved, **saved}

    def _fitting(self, kept: Mapping[str, Any], replicas: int) -> Mapping[str, Any]:
        """What the converge kept, unless its buckets were made for another number of replicas."""
        if replicas == self.replicas.size or not any(kept.values()):
            return kept
        logger.warning(
            "the state is of %d replicas and there are %d now: the last converged point and the "
            "outer momentum are dropped, the next converge is a plain mean in full precision",
            replicas,
            self.replicas.size,
        )
        self._converge = None
        return {}


def fingerprint(tensors: Sequence[Tensor]) -> float:
    """Equal for lists of the same shapes and types; 40 bits, so that a float64 sums it exactly."""
    text = "|".join(f"{t.dtype}{list(t.shape)}" for t in tensors)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:5], "big"))


def _same(old: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    fresh = distinct(new)
    return len(old) == len(fresh) and all(
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype
        for a, b in zip(old, fresh, strict=True)
    )
