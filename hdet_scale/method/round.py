"""The round: count steps, collect losses, converge, steer, reassign.

    step 1 .. T      every replica steps with base x rho_pi(r)             (fan-out)
    after step T     one exchange of losses and flags, parameters averaged (converge)
                     the rule moves the base                               (steer)
                     (a rule with a probe is told its losses from before the averaging)
                     a fresh pi                                            (reassign)

A step that does not end a round adds one number to an accumulator on the device: no collective,
no host synchronisation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hdet_scale.config import HDETConfig
from hdet_scale.converge.overlap import Pending, with_own_group
from hdet_scale.converge.pipeline import Converge, distinct
from hdet_scale.converge.transfers import Outcome
from hdet_scale.engines.averaged import Averaged
from hdet_scale.factors import Factor
from hdet_scale.method.losses import LossMeter
from hdet_scale.method.paper import PaperRule, Steering
from hdet_scale.method.records import RoundRecord
from hdet_scale.method.spread import assignment, multipliers
from hdet_scale.rules.guided import Decision, Guided
from hdet_scale.rules.slope import Sums
from hdet_scale.search.snapshot import Mark
from hdet_scale.topology import Replicas, is_distributed

logger = logging.getLogger("hdet_scale")

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Asked:
    """What a probe answered: sums over all replicas, and this rank's own losses and time."""

    sums: Sums
    losses: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """Whether replicas would average the same things."""

    renewed: bool
    """A replica has made a new plan: all must, since a new plan is compared first."""
    parameters_alike: bool
    moments_alike: bool


class Round:
    """The cycle for a set of factors; it is told at each step what the schedule says."""

    def __init__(
        self,
        *,
        factors: Sequence[Factor],
        replicas: Replicas,
        config: HDETConfig,
        steering: Steering | Guided,
        averaged: Averaged,
        step: int = 0,
        probe: Callable[[], Iterable[float | Tensor]] | None = None,
    ) -> None:
        self.factors = list(factors)
        self.steering = steering
        self.probe = probe
        self.averaged = averaged
        self.replicas = replicas
        self.config = config
        self.index, self.steps = divmod(step, config.interval)
        self.meter = LossMeter()
        self.listeners: list[Callable[[RoundRecord], None]] = []
        self._converge: Converge | None = None
        self._saved: dict[str, Any] = {}
        self._mark: Mark | None = None
        self._pending: Pending | None = None
        self._fold_in = 0
        policy = config.converge
        self._due = {
            math.ceil((i + 1) * config.interval / policy.fragments): i
            for i in range(policy.fragments)
        }
        self._renewed = False
        self._agreed = True
        self._losses: list[list[float]] = []
        self._spent = Outcome((), 0.0, 0)
        self._apart: Replicas | None = None
        self._warned_without_loss = False
        self._assign()

    @property
    def average_moments(self) -> bool:
        """Whether a converge averages the optimizer's moments too."""
        asked = self.config.converge.moments
        if asked is not None:
            return asked
        return self.averaged.moments_drift(self.config.gradients) or any(
            getattr(f, "moves_moments", False) for f in self.factors
        )

    @property
    def spread(self) -> float:
        """a of this round: the config's, or what a rule with a probe made of it."""
        return self.steering.spread if isinstance(self.steering, Guided) else self.config.spread

    @property
    def diverges(self) -> bool:
        """True when replicas come apart in this round."""
        if isinstance(self.steering, Guided):
            return self.steering.spread > 0 or self.config.gradients == "local"
        return self.config.diverges

    @property
    def goes_back(self) -> bool:
        """True while the rule may send the replicas back to where it began."""
        steering = self.steering
        return isinstance(steering, Guided) and steering.rule.rewinds and steering.spread > 0

    @property
    def marked(self) -> bool:
        """True when the place to go back to is known."""
        return self._mark is not None

    def mark_start(self) -> None:
        """Before the first step of a search that may go back: this is where to."""
        if self.goes_back and self._mark is None:
            self._mark = Mark(self.averaged)

    def rehome(self, replicas: Replicas, model: nn.Module | None, gradients: str | None) -> None:
        """Another set of replicas, between two rounds."""
        place = (self.replicas.rank, self.replicas.size, self.replicas.shard_size)
        if self.steps and place != (replicas.rank, replicas.size, replicas.shard_size):
            raise ValueError(
                f"the replicas can change only at a converge, and this round is {self.steps} steps "
                "old: call finalize() first"
            )
        if self._mark is not None:
            raise ValueError(
                f"rule={self.config.rule!r} has marked where its search began, of the model as it "
                "was: attach the engine before the first step and before a state is loaded"
            )
        if gradients is not None:
            self.config = dataclasses.replace(self.config, gradients=gradients)
        if model is not None and self.config.converge.buffers:
            self.averaged = Averaged(self.averaged.optimizer, model)
        self.replicas, self._converge, self._apart = replicas, None, None
        self._assign()

    # -- fan-out --------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Multipliers of all replicas for this round, and mine."""
        n = self.replicas.size
        if isinstance(self.steering, Guided):
            self.fans = self.steering.fans(n, self.config.seed, self.index)
            return
        fan = multipliers(n, self.config.spread)
        self.fans = [
            [fan[i] for i in assignment(n, seed=self.config.seed, round=self.index, factor=f.name)]
            for f in self.factors
        ]

    @property
    def multipliers(self) -> list[float]:
        """This replica's multiplier of each factor in this round."""
        return [fan[self.replicas.rank] for fan in self.fans]

    def write(self, schedule: Sequence[float]) -> None:
        """Give the next step base x multiplier on this replica."""
        bases = self.steering.bases(schedule)
        for factor, base, rho in zip(self.factors, bases, self.multipliers, strict=True):
            factor.write(base, rho)

    # -- counting -------------------------------------------------------------------------------

    def count(self, loss: Tensor | float | None) -> bool:
        """One optimizer step is done; True when it ends the round."""
        self.connect()
        self.mark_start()  # a replica that skipped its first step is still there
        if loss is not None and self.diverges:
            self.meter.add(loss)
        self.steps += 1
        self._agreed = False
        self._fold_when_due()
        ends = self.steps >= self.config.interval
        if not ends and self.diverges and self.steps in self._due:
            self._converge_now(self._due[self.steps])
        return ends

    def _fold_when_due(self) -> None:
        """At a fixed step, so that a run gives the same bits however fast the network was."""
        if self._pending is not None:
            self._fold_in -= 1
            if self._fold_in <= 0:
                self.complete()

    def complete(self) -> None:
        """Fold in an averaging that is under way; local, waits for it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._spend(pending.finish())
            self.averaged.refresh()

    def _spend(self, outcome: Outcome) -> None:
        """What the averagings of this round have cost so far."""
        self._spent = Outcome(
            outcome.included,
            self._spent.seconds + outcome.seconds,
            self._spent.wire_bytes + outcome.wire_bytes,
        )

    def connect(self) -> None:
        """Replicas declared before init_process_group are found at the first step."""
        if self.replicas.group is not None or not is_distributed():
            return
        world = Replicas.world()
        if world.size == 1 and self.replicas.size == 1:
            return
        if (world.rank, world.size) != (self.replicas.rank, self.replicas.size):
            raise RuntimeError(
                f"the scheduler was made for replica {self.replicas.rank} of {self.replicas.size} "
                f"before the process group was there, and this is rank {world.rank} of "
                f"{world.size}: make the scheduler after init_process_group, or pass rank= and "
                "world_size="
            )
        self.replicas = world

    # -- converge -------------------------------------------------------------------------------

    def close(self, schedule: Sequence[float], step: int) -> None:
        """End the round after `step` steps in all: exchange, average, steer, reassign."""
        if self.diverges:
            asked = self._ask(schedule)
            bases = self.steering.bases(schedule)
            values = [
                [f.at(b, rho) for rho in fan]
                for f, b, fan in zip(self.factors, bases, self.fans, strict=True)
            ]
            decision = None
            if isinstance(self.steering, Guided) and asked is not None:
                decision = self.steering.update(asked.sums, step)
            if decision is not None and decision.rewind:
                losses, outcome = self._go_back()
            else:
                last = self.config.converge.fragments - 1
                losses, outcome = self._converge_now(last if last else None)
            if isinstance(self.steering, Steering):
                fit = zip(losses, outcome.included, strict=True)
                heard = [loss if ok else math.nan for loss, ok in fit]
                self._warn_without_loss(heard)
                self.steering.update(step, schedule, heard, values)
            elif decision is not None:
                self._obey(decision)
            self._publish(losses, values, schedule, outcome, step, asked)
        self._next()

    def _ask(self, schedule: Sequence[float]) -> Asked | None:
        """Every replica's probe as sums over all of them, one all-reduce; None without a search."""
        if not isinstance(self.steering, Guided) or not self.spread:
            return None
        if self.probe is None:
            raise RuntimeError(
                f"rule={self.config.rule!r} is fed by a probe, and none was given: pass probe=, a "
                "function that yields this replica's losses on batches that all replicas have in "
                "common"
            )
        self.complete()
        device = self._prepared().device
        start = time.perf_counter()
        drawn = [float(x) for x in self.probe()]
        losses = self.replicas.shard_means(drawn, device)
        seconds = time.perf_counter() - start
        offsets = self.steering.offsets(schedule, self.multipliers)
        total = self.replicas.sum(Sums.of(offsets, losses).vector, device)
        return Asked(Sums.read(len(offsets), len(losses), total), tuple(losses), seconds)

    def _obey(self, decision: Decision) -> None:
        """What a decision asks for beside the bases, which `write` takes from it."""
        if decision.verdict:
            logger.info("round %d: %s", self.index, decision.verdict)
        if decision.spread > 0.0:
            return
        # The search is over. Nothing is averaged from here on: what overlap, fragments or the
        # policy for moments have left is, now.
        self._mark = None
        if not self._agreed:
            self._converge_now(blocking=True)
        if not (self.diverges or self.average_moments):
            self._agree_on_moments()

    def _go_back(self) -> tuple[list[float], Outcome]:
        """Every replica to where the search began, in place of a converge: there may be no replica
        left that is fit for a mean. What the converge remembers of the way is forgotten."""
        losses, included, _ = self._hear(self._prepared(), None)
        if self._mark is not None:
            self._mark.restore()
        self._converge, self._saved = None, {}
        self._agreed = self._prepared().replicas_agree()
        self._spend(Outcome(tuple(included), 0.0, 0))
        return losses, self._spent

    def finalize(self, *, moments: bool = False) -> None:
        """Make the replicas agree now, in the middle of a round too; collective.

        The round goes on: its steps, losses and multipliers stay, and it ends and is steered when
        it would have. Does nothing where replicas already agree, so that plain training stays
        plain. `moments`: the optimizer's too, though the policy leaves them to each replica.
        """
        self.connect()
        self.complete()
        if self.replicas.size == 1:
            return
        if moments and not self.average_moments:
            self._agree_on_moments()
        if self.diverges and self._agreed:
            return
        if self.diverges or not self._prepared().replicas_agree():
            self._converge_now(blocking=True)
        if moments:
            self._share_losses()

    def _agree_on_moments(self) -> None:
        """Average moments that the policy leaves to each replica; where one has none yet, as it
        skipped its steps, each keeps its own."""
        own = self.averaged.moments()
        rows = self.replicas.exchange([_fingerprint(own)], self._prepared().device)
        if any(row != rows[0] for row in rows):
            logger.warning("replicas hold different moments: they are not averaged")
        elif own:
            apart = Converge(own, self.replicas)
            if not apart.replicas_agree():
                apart()

    def _share_losses(self) -> None:
        """Every replica's losses of the round so far, into the state that all ranks save."""
        mine = [self.meter.total(), float(self.meter.count)]
        self._losses = self.replicas.exchange(mine, self._prepared().device)
        self._take_losses()
        if self._converge is not None:
            self._converge.forget_residuals()

    def _take_losses(self) -> None:
        if len(self._losses) == self.replicas.size:
            total, count = self._losses[self.replicas.rank]
            self.meter.load_state_dict({"sum": total, "count": count})

    @property
    def replicas_agree(self) -> bool:
        """True where replicas are equal: after a blocking converge of everything, before the next
        step."""
        return self.diverges and self._agreed

    def _converge_now(
        self, fragment: int | None = None, *, blocking: bool = False
    ) -> tuple[list[float], Outcome]:
        self.complete()
        converge = self._prepared()
        losses, included, plans = self._hear(converge, fragment)
        alike = plans.moments_alike
        converge = self._in_step(converge, plans)
        self._renewed = False
        self._agreed = blocking or (
            not self.config.converge.overlap and self.config.converge.fragments == 1
        )
        if not all(included):
            # The others need the bad replica no longer, and it needs all of them.
            outcome = converge.average(included)
            self._report(included, losses)
            if alike and not self.average_moments:
                Converge(self.averaged.moments(), self.replicas).average(included)
        elif self.config.converge.overlap and not blocking:
            self._pending = converge.start(included, fragment)
            self._fold_in = self.config.converge.overlap_steps
            outcome = Outcome(tuple(included), 0.0, 0)
        else:
            outcome = converge.average(included, fragment)
        if self._pending is None:
            self.averaged.refresh()
        self._spend(outcome)
        return losses, self._spent

    def _next(self) -> None:
        self.index += 1
        self.steps = 0
        self._spent = Outcome((), 0.0, 0)
        self.meter.reset()
        self._assign()

    def tensors(self) -> list[Tensor]:
        """What a converge averages today."""
        moments = self.averaged.moments() if self.average_moments else []
        return self.averaged.tensors() + moments

    def _prepared(self) -> Converge:
        """The converge over today's tensors; the plan is kept while they stay the same."""
        moments = self.averaged.moments() if self.average_moments else []
        parameters, plain = self.averaged.parameters(), self.averaged.buffers() + moments
        known = self._converge
        if known is None or not (_same(known.tensors, parameters) and _same(known.plain, plain)):
            self._converge = self._over(parameters, plain)
            self._renewed = True
            return self._converge
        return known

    def _over(self, parameters: Sequence[Tensor], plain: Sequence[Tensor]) -> Converge:
        """A converge that goes on where the one before it, or a loaded state, has stopped."""
        policy = self.config.converge
        if policy.overlap and self._apart is None:
            # Once, at the first converge, where every rank is: new_group is collective.
            self._apart = with_own_group(self.replicas)
        converge = Converge(
            parameters,
            self._apart or self.replicas,
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
        correction goes by each replica's own step count. A new converge compares plans first, so
        that a replica which kept its old one must make a new one too.
        """
        if not plans.parameters_alike:
            self.averaged.complete()
        if self.average_moments and not plans.moments_alike:
            logger.warning("replicas hold different moments: they are not averaged in this round")
            self._converge = self._over(self.averaged.parameters(), self.averaged.buffers())
        elif not plans.parameters_alike:
            self._converge = self._over(self.averaged.parameters(), converge.plain)
        elif plans.renewed and not self._renewed:
            self._converge = self._over(converge.tensors, converge.plain)
        return self._converge or converge

    def _hear(
        self, converge: Converge, fragment: int | None
    ) -> tuple[list[float], list[bool], Plans]:
        """Every replica's mean loss, whether it is fit for the mean, and what is to be averaged:
        one small exchange."""
        has = float(self.meter.count > 0)
        mean = self.meter.total() / self.meter.count if has else 0.0
        overlap = self.config.converge.overlap
        mine = [mean, has, float(converge.healthy(fragment, snapshot=overlap))]
        held = (converge.tensors, self.averaged.moments())
        plan = [float(self._renewed), *map(_fingerprint, held)]
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

    def find(self, scale: float) -> None:
        """What a search before the run found: the schedule is multiplied with it."""
        if isinstance(self.steering, Steering):
            self.steering.found = [scale] * len(self.factors)

    @property
    def _paper_rules(self) -> list[PaperRule]:
        return self.steering.rules if isinstance(self.steering, Steering) else []

    def _warn_without_loss(self, heard: Sequence[float]) -> None:
        silent = not any(math.isfinite(x) for x in heard)
        if silent and self._paper_rules and not self._warned_without_loss:
            self._warned_without_loss = True
            logger.warning("no replica passed a loss in this round: call step(loss) to steer")

    def _report(self, included: Sequence[bool], losses: Sequence[float]) -> None:
        out = [r for r, ok in enumerate(included) if not ok]
        if self.replicas.rank == next(r for r, ok in enumerate(included) if ok):
            logger.warning(
                "round %d: replicas %s left out of the mean (losses %s): a parameter or a loss "
                "was not finite; they took the mean of the others",
                self.index,
                out,
                [losses[r] for r in out],
            )

    def _publish(
        self,
        losses: Sequence[float],
        values: Sequence[Sequence[float]],
        schedule: Sequence[float],
        outcome: Outcome,
        step: int,
        asked: Asked | None,
    ) -> None:
        if not self.listeners:
            return
        names = [f.name for f in self.factors]
        decision = self.steering.decision if isinstance(self.steering, Guided) and asked else None
        record = RoundRecord(
            round=self.index,
            step=step,
            losses=tuple(losses),
            values={n: tuple(v) for n, v in zip(names, values, strict=True)},
            bases=dict(zip(names, self.steering.bases(schedule), strict=True)),
            velocities={
                n: rule.velocity for n, rule in zip(names, self._paper_rules, strict=False)
            },
            quarantined=tuple(r for r, ok in enumerate(outcome.included) if not ok),
            seconds=outcome.seconds,
            wire_bytes=outcome.wire_bytes,
            phase=decision.phase if decision else "",
            verdict=decision.verdict if decision else "",
            probe_losses=asked.losses if asked else (),
            probe_seconds=asked.seconds if asked else 0.0,
            evidence=dict(decision.evidence) if decision else {},
        )
        for listener in self.listeners:
            listener(record)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank: no rank, no multiplier, no replica's loss. An averaging that
        is under way is folded in first."""
        self.complete()
        return {
            "version": STATE_VERSION,
            "round": self.index,
            "steps": self.steps,
            "replicas": self.replicas.size,
            "agreed": self._agreed or not self.diverges,
            "losses": self._losses if self._agreed else [],
            "factors": [f.name for f in self.factors],
            "steering": self.steering.state_dict(),
            "converge": self._remembered("points", "momenta"),
            "mark": self.mark_state() if self.replicas.shard_size == 1 else None,
        }

    def mark_state(self) -> dict[str, Any] | None:
        """Where the search began, on this rank; of whole replicas the same on every rank."""
        return None if self._mark is None else self._mark.state_dict()

    def load_mark(self, state: Mapping[str, Any] | None) -> None:
        """Go back to that place from now on."""
        self._mark = None
        if state is not None and self.goes_back:
            self._mark = Mark(self.averaged, state)

    def replica_state_dict(self) -> dict[str, Any]:
        """What is this replica's own: the losses of the round, the residuals of the int8 wire; and
        this rank's slices of the mark, where replicas are sharded."""
        self.complete()
        return {
            "losses": self.meter.state_dict(),
            "converge": self._remembered("residuals"),
            "mark": self.mark_state() if self.replicas.shard_size > 1 else None,
        }

    def load_replica_state_dict(self, state: Mapping[str, Any]) -> None:
        """After `load_state_dict`."""
        self.meter.load_state_dict(state["losses"])
        self._remember(state["converge"])
        if state.get("mark") is not None:
            self.load_mark(state["mark"])

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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken; the multipliers are this replica's own."""
        self.check_state(state)
        self.index, self.steps = int(state["round"]), int(state["steps"])
        if self._pending is not None:
            self._pending.discard()
            self._pending = None
        self._agreed = bool(state["agreed"])
        self._losses = [list(row) for row in state["losses"]]
        self.meter.reset()
        self._take_losses()
        self.steering.load_state_dict(state["steering"])
        self.load_mark(state.get("mark"))
        self._remember(self._fitting(state))
        self._assign()

    def _fitting(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the converge kept, unless its buckets were made for another number of replicas."""
        kept: Mapping[str, Any] = state["converge"]
        if state["replicas"] == self.replicas.size or not any(kept.values()):
            return kept
        logger.warning(
            "the state is of %d replicas and these are %d: the last converged point and the outer "
            "momentum are dropped, the next converge is a plain mean in full precision",
            state["replicas"],
            self.replicas.size,
        )
        self._converge = None
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that cannot be continued, before anything is changed."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"the state has version {state.get('version')!r}, this is version {STATE_VERSION}"
            )
        names = [f.name for f in self.factors]
        if list(state["factors"]) != names:
            raise ValueError(
                f"the state explores {list(state['factors'])} and this run {names}: use the same "
                "param groups and factors"
            )
        if ("rule" in state["steering"]) != isinstance(self.steering, Guided):
            raise ValueError(
                f"the state is of another kind of rule than rule={self.config.rule!r}: resume with "
                "the rule that the run was started with"
            )
        # One replica agrees with itself at every step.
        if state["replicas"] not in (1, self.replicas.size) and not state["agreed"]:
            raise ValueError(
                f"the state was saved by {state['replicas']} replicas, {state['steps']} steps into "
                f"a round, and there are {self.replicas.size} now: the number of replicas can "
                "change only at a converge; save right after one, or call finalize() first"
            )


def _fingerprint(tensors: Sequence[Tensor]) -> float:
    """Equal for lists of the same shapes and types; 40 bits, so that a float64 sums it exactly."""
    text = "|".join(f"{t.dtype}{list(t.shape)}" for t in tensors)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:5], "big"))


def _same(old: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    fresh = distinct(new)
    return len(old) == len(fresh) and all(
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype
        for a, b in zip(old, fresh, strict=True)
    )
