"""Steering by a probe: evidence in, decision out.

A rule is a small pure object: no torch, no process group, no clock, no random numbers. At the end
of a round it is given `Sums` (hdet_scale.rules.sums) over all replicas, the same on every rank,
and answers with a Decision, the same on every rank:

    rule.update(sums, step) -> Decision
    rule.decision                          the last one, or the initial one
    rule.state_dict() / load_state_dict()  plain numbers; a resumed rule decides bit for bit alike

`GuidedSteering` evaluates the probe before the averaging and applies the decisions. The base of
factor g is

    base_g(t) = space_g^-1(space_g(schedule_g(t)) + m_g)

with the offsets m of the decision. In log space, where m moves a learning rate, that is
schedule_g(t) exp(m_g).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from hdet_scale.factors.space import Factor
from hdet_scale.method.records import ProbeRecord
from hdet_scale.rules.designs import levels
from hdet_scale.rules.sums import Sums
from hdet_scale.topology import Replicas

logger = logging.getLogger("hdet_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What holds in the next round."""

    offsets: tuple[float, ...]
    """m: for each factor how far its base is from the schedule, in its space."""
    spread: float
    """a of the next round; 0 once the exploration is over: plain training from there on."""
    verdict: str = ""
    """What was decided in this round, in words; empty where nothing was."""
    evidence: dict[str, float] = field(default_factory=dict)
    """For the log: for each factor the statistic that is compared with the gate."""


class Rule(Protocol):
    """The interface above."""

    @property
    def decision(self) -> Decision: ...

    def update(self, sums: Sums, step: int) -> Decision:
        """The evidence of a round that ended after `step` steps in all."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class GuidedSteering:
    """The shared base of each factor, as a rule's decisions have it.

    Args:
        factors: what is explored.
        rule: decides at the end of each round.
        seed: of the designs.
    """

    def __init__(self, factors: Sequence[Factor], rule: Rule, *, seed: int = 0) -> None:
        self.factors, self.rule, self.seed = list(factors), rule, seed
        self.probe: Callable[[], list[float]] | None = None

    @property
    def spread(self) -> float:
        """a of the round under way."""
        return self.rule.decision.spread

    def bases(self, schedule: Sequence[float]) -> list[float]:
        """The base of each factor, given what the schedule says now."""
        moves = zip(self.factors, schedule, self.rule.decision.offsets, strict=True)
        return [s if m == 0.0 else f.at(s, math.exp(m)) for f, s, m in moves]

    def fans(self, replicas: int, round: int) -> list[list[float]]:
        """For each factor every replica's multiplier in a round."""
        names = [f.name for f in self.factors]
        chosen = levels(replicas, names, seed=self.seed, round=round)
        return [[1.0 + self.spread * x for x in column] for column in chosen]

    def ask(
        self,
        schedule: Sequence[float],
        multipliers: Sequence[float],
        replicas: Replicas,
        device: torch.device,
        step: int,
    ) -> ProbeRecord:
        """Evaluate this replica on the probe's batches and decide: one all-reduce of sums."""
        if self.probe is None:
            raise RuntimeError(
                "rule='slope' is fed by a probe, and none was given: pass probe=, a function that "
                "yields this replica's losses on batches that all replicas have in common"
            )
        start = time.perf_counter()
        losses = replicas.shard_means([float(x) for x in self.probe()], device)
        seconds = time.perf_counter() - start
        offsets = self.offsets(schedule, multipliers)
        total = replicas.sum(Sums.of(offsets, losses).vector, device)
        decision = self.rule.update(Sums.read(len(offsets), len(losses), total), step)
        if decision.verdict:
            logger.info("step %d: %s", step, decision.verdict)
        return ProbeRecord(
            losses=tuple(losses),
            seconds=seconds,
            verdict=decision.verdict,
            evidence=dict(decision.evidence),
        )

    def offsets(self, schedule: Sequence[float], multipliers: Sequence[float]) -> list[float]:
        """X of one replica: how far it is from the base in each factor's space."""
        bases = self.bases(schedule)
        return [
            f.offset(b, rho) for f, b, rho in zip(self.factors, bases, multipliers, strict=True)
        ]

    def update(self, *_: object) -> None:
        """The rule has decided before the averaging."""

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank."""
        return {"rule": self.rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another run's exploration."""
        self.rule.load_state_dict(state["rule"])


def pack(decision: Decision) -> dict[str, Any]:
    """A decision as plain values, for a state_dict."""
    return asdict(decision) | {"offsets": list(decision.offsets)}


def unpack(state: Mapping[str, Any]) -> Decision:
    """What `pack` made."""
    return Decision(**{**state, "offsets": tuple(float(m) for m in state["offsets"])})
