"""The slope rule: a least-squares fit of common probe losses on the factors, and a gate.

The sums over replicas and the fit are in hdet_scale.rules.sums.

Before the averaging every replica evaluates its own weights on the same M probe batches: l_rj.
X_rg is the replica's offset of factor g (ln rho in log space); columns are centred.

    b_.j = (X'X)^-1 X' (l_.j - mean_r l_.j)                  the slope that batch j sees
    b_g  = mean_j b_gj
    u_g  = var_j(b_gj, ddof 1) / M  +  s^2 ((X'X)^-1)_gg     its variance
    A_g += w_g b_g;   U_g += w_g^2 u_g                       w_g = (X'X)_gg / n
    if |z(A_g / sqrt(U_g))| > c_n:  m_g <- clip(m_g - kappa sign(A_g));  A_g = U_g = 0

u has two parts because there are two kinds of noise, and each is blind to the other. With shared
gradients the error of a common batch is exactly linear in rho: the fit leaves no residual, and only
the scatter between batches shows it. What a replica has of its own (its dropout masks, its
gradients in local mode) is common to all batches: only the residual variance s^2 of the replicas'
mean losses around the fit shows it. Noise of each replica in each batch is counted twice, which is
on the safe side. w makes a round count by its information when the spread changes: all rounds
together are then one regression.

The gate. A is tested after every round, so that a fixed threshold leads to false moves: a
sum without drift crosses 2.5 standard deviations sooner or later, by the law of the
iterated logarithm. With n rounds in the sum,

    c_n^2 = (1 + 1/n) (ln(1 + n) + 2 ln(1/alpha))

is the boundary of the normal mixture (Robbins): a sum of noise ever crosses it, at any n, with a
probability of at most alpha. A and U start afresh only after a move, so that alpha bounds the
chance that a factor without effect is ever moved, however long the run. The price: about 4.8
standard deviations instead of 2.5, nearly four times the rounds where the evidence is weak.

U is estimated, so that A / sqrt(U) is not normal but Student's t with nu = U^2 / V degrees of
freedom (Welch and Satterthwaite; V sums w^4 (part^2 / its degrees)). z turns it into the normal
deviate of the same probability, z = (8 nu + 1) / (8 nu + 3) sqrt(nu ln(1 + t^2 / nu)) (Wallace).
Where no residual is left (two replicas) nothing within a round shows the replicas' own noise: then
the scatter of b between rounds has to agree as well.

Only sums over replicas are needed: 2 + G + G (G + 1) / 2 + M + G M numbers in one all-reduce,
whatever N is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdet_scale.rules.guided import Decision, pack, unpack
from hdet_scale.rules.sums import Fit, Slopes, Sums

LIMIT = math.log(16.0)
"""m_max: how far a base may be moved from the schedule."""
FALSE_MOVES = 1e-4
"""alpha: the chance that a factor without effect is ever moved."""


@dataclass(slots=True)
class Evidence:
    """What has gathered for one factor since its last move."""

    n: int = 0
    A: float = 0.0
    U: float = 0.0
    V: float = 0.0
    squares: float = 0.0
    blind: bool = False
    """True with a round in which nothing showed the replicas' own noise."""

    def add(self, slope: Slopes, fit: Fit) -> None:
        """One more round."""
        w2 = slope.weight**2
        self.n += 1
        self.A += slope.weight * slope.mean
        self.U += w2 * (slope.between + slope.residual)
        for part, degrees in ((slope.between, fit.batch_degrees), (slope.residual, fit.free)):
            self.V += (w2 * part) ** 2 / degrees if degrees else 0.0
        self.squares += w2 * slope.mean**2
        self.blind = self.blind or not fit.free

    @property
    def z(self) -> float:
        """The normal deviate of A; 0 where nothing can be said, which includes losses that are
        equal to the last bit."""
        within = _deviate(self.A, self.U, self.U**2 / self.V if self.V > 0 else 0.0)
        if not self.blind:
            return within
        if self.n < 2:
            return 0.0
        scatter = (self.squares - self.A**2 / self.n) * self.n / (self.n - 1)
        return min(within, _deviate(self.A, scatter, self.n - 1), key=abs)


class Width:
    """The spread of the next round: wide while there is evidence, narrow as it dies, then zero.

    Every `patience` rounds without a move the spread is halved; a move makes it wide again; what
    would fall below widest / 2^halvings ends the exploration. patience=None: wide for ever.
    """

    def __init__(self, widest: float, patience: int | None = 50, halvings: int = 2) -> None:
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1 round or None, got {patience}")
        if halvings < 0:
            raise ValueError(f"halvings must be 0 or more, got {halvings}")
        self.widest, self.patience, self.halvings = widest, patience, halvings
        self.quiet = 0

    def update(self, moved: bool) -> float:
        """The spread of the next round."""
        self.quiet = 0 if moved else self.quiet + 1
        return self.spread

    @property
    def spread(self) -> float:
        """Of the round under way."""
        if self.patience is None:
            return self.widest
        halved = self.quiet // self.patience
        return self.widest / 2**halved if halved <= self.halvings else 0.0


class Slope:
    """The rule above for all factors of a run."""

    def __init__(
        self,
        factors: Sequence[str],
        width: Width,
        *,
        step: float | None = None,
        limit: float = LIMIT,
        false_moves: float = FALSE_MOVES,
    ) -> None:
        if not 0 < false_moves < 1:
            raise ValueError(
                f"false_moves must be in (0, 1), got {false_moves}; the default is {FALSE_MOVES}"
            )
        self.step = width.widest if step is None else step
        if not (self.step > 0 and limit > 0):
            raise ValueError(f"step and limit must be above 0, got {self.step} and {limit}")
        self.factors = list(factors)
        self.width, self.limit, self.false_moves = width, limit, false_moves
        self.gathered = [Evidence() for _ in self.factors]
        self._decision = Decision(offsets=(0.0,) * len(self.factors), spread=width.spread)

    @property
    def decision(self) -> Decision:
        return self._decision

    def update(self, sums: Sums, step: int) -> Decision:
        """The evidence of one round; a round that says nothing is a quiet one."""
        if sums.factors != len(self.factors):
            raise ValueError(f"sums of {sums.factors} factors for the rule of {self.factors}")
        if sums.batches < 2:
            raise ValueError(
                f"the slope rule takes its variance from between the probe batches, got "
                f"{sums.batches}: probe at least 2, better 8"
            )
        fit = sums.fit()
        for g, slope in (fit.slopes if fit is not None else {}).items():
            self.gathered[g].add(slope, fit)  # type: ignore[arg-type]
        shown = {n: e.z for n, e in zip(self.factors, self.gathered, strict=True)}
        moves = [self._move(g) for g in range(len(self.factors))]
        offsets = [
            min(max(m + move, -self.limit), self.limit)
            for m, move in zip(self._decision.offsets, moves, strict=True)
        ]
        spread = self.width.update(tuple(offsets) != self._decision.offsets)
        said = [
            f"{n} {'up' if move > 0 else 'down'} (z {shown[n]:+.1f})"
            for n, move in zip(self.factors, moves, strict=True)
            if move
        ]
        ended = spread == 0.0 and self._decision.spread > 0.0
        self._decision = Decision(
            offsets=tuple(offsets),
            spread=spread,
            verdict=", ".join(
                said + (["no evidence is left: the exploration ends"] if ended else [])
            ),
            evidence=shown,
        )
        return self._decision

    def _move(self, g: int) -> float:
        """-kappa sign(A) past the gate, and a fresh start."""
        z, n = self.gathered[g].z, self.gathered[g].n
        if n == 0 or abs(z) <= gate(n, self.false_moves):
            return 0.0
        self.gathered[g] = Evidence()
        return -math.copysign(self.step, z)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        return {
            "decision": pack(self._decision),
            "quiet": self.width.quiet,
            "gathered": [[e.n, e.A, e.U, e.V, e.squares, e.blind] for e in self.gathered],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another run of this rule."""
        if len(state["gathered"]) != len(self.factors):
            raise ValueError(
                f"the state is of {len(state['gathered'])} factors, this rule has {self.factors}"
            )
        self._decision = unpack(state["decision"])
        self.width.quiet = int(state["quiet"])
        self.gathered = [Evidence(*row) for row in state["gathered"]]


def gate(rounds: int, false_moves: float = FALSE_MOVES) -> float:
    """c_n: what |z| has to pass with n rounds in the sum."""
    return math.sqrt(
        (1.0 + 1.0 / rounds) * (math.log1p(rounds) + 2.0 * math.log(1.0 / false_moves))
    )


def _deviate(total: float, variance: float, degrees: float) -> float:
    """t = total / sqrt(variance) with its degrees of freedom, as a normal deviate."""
    if not (variance > 0 and degrees > 0):
        return 0.0
    square = total**2 / variance
    size = math.sqrt(degrees * math.log1p(square / degrees))
    return math.copysign(size * (8 * degrees + 1) / (8 * degrees + 3), total)
