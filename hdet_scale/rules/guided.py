"""Rules that are fed by a probe: evidence in, decision out.

A rule is a small pure object: no torch, no process group, no clock, no random numbers. At the end
of a round it is given `Sums` (hdet_scale.rules.slope) over all replicas, the same on every rank,
and answers with a Decision, the same on every rank:

    rule.update(sums, step) -> Decision
    rule.decision                          the last one, or what it starts with
    rule.state_dict() / load_state_dict()  plain numbers; a resumed rule decides bit for bit alike

`Guided` carries the decisions out between two rounds. The base of factor g is

    base_g(t) = space_g^-1(space_g(schedule_g(t)) + m_g)

with the offsets m of the decision. In log space, where m moves a learning rate, that is
schedule_g(t) exp(m_g).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hdet_scale.rules.designs import levels

if TYPE_CHECKING:
    from hdet_scale.factors.space import Factor
    from hdet_scale.rules.slope import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What holds in the next round."""

    offsets: tuple[float, ...]
    """m: for each factor how far its base is from the schedule, in its space."""
    spread: float
    """a of the next round; 0 once the search is over: plain training from there on."""
    phase: str = "search"
    """Where the rule is: "search", "climb" or "hold"."""
    verdict: str = ""
    """What was decided in this round, in words; empty where nothing was."""
    rewind: bool = False
    """True where the replicas have to go back to the weights that the search began with."""
    evidence: dict[str, float] = field(default_factory=dict)
    """For the log: for each factor the statistic that is held against the gate."""


class Rule(Protocol):
    """The interface above."""

    together: bool
    """True where all factors take the same level: one question for all of them."""
    rewinds: bool
    """True where it may send the replicas back to where it began: that place is then marked, at
    the cost of a copy, until the search is over (hdet_scale.search.snapshot)."""

    @property
    def decision(self) -> Decision: ...

    def update(self, sums: Sums, step: int) -> Decision:
        """The evidence of a round that ended after `step` steps in all."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Guided:
    """The shared base of each factor, as a rule's decisions have it."""

    def __init__(self, factors: Sequence[Factor], rule: Rule) -> None:
        self.factors = list(factors)
        self.rule = rule

    @property
    def decision(self) -> Decision:
        return self.rule.decision

    @property
    def spread(self) -> float:
        """Of the round under way."""
        return self.decision.spread

    def bases(self, schedule: Sequence[float]) -> list[float]:
        """The base of each factor, given what the schedule says now."""
        moves = zip(self.factors, schedule, self.decision.offsets, strict=True)
        return [s if m == 0.0 else f.at(s, math.exp(m)) for f, s, m in moves]

    def fans(self, n: int, seed: int, round: int) -> list[list[float]]:
        """For each factor every replica's multiplier in a round."""
        names = [f.name for f in self.factors]
        if self.rule.together:
            (common,) = levels(n, ["together"], seed=seed, round=round)
            chosen = [common for _ in names]
        else:
            chosen = levels(n, names, seed=seed, round=round)
        return [[1.0 + self.spread * x for x in column] for column in chosen]

    def offsets(self, schedule: Sequence[float], multipliers: Sequence[float]) -> list[float]:
        """X of one replica: how far it is from the base in each factor's space."""
        bases = self.bases(schedule)
        told = [
            f.offset(b, rho) for f, b, rho in zip(self.factors, bases, multipliers, strict=True)
        ]
        return told[:1] if self.rule.together else told

    def update(self, sums: Sums, step: int) -> Decision:
        """Steer at the converge after `step` steps."""
        return self.rule.update(sums, step)

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank."""
        return {"rule": self.rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another run's search."""
        self.rule.load_state_dict(state["rule"])


def pack(decision: Decision) -> dict[str, Any]:
    """A decision as plain values, for a state_dict."""
    return asdict(decision) | {"offsets": list(decision.offsets)}


def unpack(state: Mapping[str, Any]) -> Decision:
    """What `pack` made."""
    return Decision(**{**state, "offsets": tuple(float(m) for m in state["offsets"])})
