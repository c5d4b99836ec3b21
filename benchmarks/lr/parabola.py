"""Parabola: the minimum of a loss by learning rate, by least squares around the lowest loss.

Pure: no torch, no process group.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parabola:
    """y = y0 + a (x - x0) + b (x - x0)^2 through the levels around the lowest.

    A loss rises like a parabola near its minimum and like a cliff beyond the edge of stability:
    level k counts with w_k = 1 / (1 + ((y_k - min y) / h)^2), h the median of y_k - min y, so that
    a cliff holds the minimum back and does not pass for noise.
    """

    minimum: float
    """Where it is lowest, at most a level below the lowest level or half a level above it, where
    there may be a cliff, and never beyond the levels."""
    lowest: float
    """Its value there."""
    scatter: float
    """Standard deviation of the levels around it; 0 where it goes through all of them."""

    @classmethod
    def through(cls, xs: Sequence[float], ys: Sequence[float], *, width: int) -> Parabola:
        """By least squares over the 2 width + 1 finite levels around the lowest, fewer on one side
        where they end."""
        finite = [k for k in range(len(ys)) if math.isfinite(ys[k])]
        best = min(finite, key=lambda k: (ys[k], abs(xs[k])))
        if len(finite) < 3:
            return cls(xs[best], ys[best], 0.0)
        first = max(0, min(finite.index(best) - width, len(finite) - (2 * width + 1)))
        near = finite[first : first + 2 * width + 1]
        u = [xs[k] - xs[best] for k in near]
        v = [ys[k] - ys[best] for k in near]
        typical = statistics.median([ys[k] - ys[best] for k in finite])
        weights = [1 / (1 + (y / typical) ** 2) if typical > 0 else 1.0 for y in v]
        c0, c1, c2 = _least_squares(u, v, weights)
        left = [y - (c0 + c1 * x + c2 * x * x) for x, y in zip(u, v, strict=True)]
        squares = math.fsum(w * e * e for w, e in zip(weights, left, strict=True))
        spare = math.fsum(weights) * (len(near) - 3) / len(near)
        scatter = math.sqrt(squares / spare) if spare > 0 else 0.0
        gap = max(b - a for a, b in itertools.pairwise(u))
        low, high = max(-gap, u[0]), min(gap / 2, u[-1])
        # Not convex: noise, or the edge of a plateau. The lowest level is all that is known.
        at = max(low, min(high, -c1 / (2 * c2))) if c2 > 0 else 0.0
        lowest = c0 + c1 * at + c2 * at * at if c2 > 0 else 0.0
        return cls(xs[best] + at, ys[best] + lowest, scatter)


def _least_squares(
    u: Sequence[float], v: Sequence[float], weights: Sequence[float]
) -> tuple[float, float, float]:
    """Coefficients of 1, u, u^2; Gram-Schmidt on three columns, which stays exact enough."""
    basis: list[list[float]] = []
    mixes: list[list[float]] = []  # each basis vector in terms of 1, u, u^2
    for power, column in enumerate(([1.0] * len(u), list(u), [x * x for x in u])):
        mix = [float(power == k) for k in range(3)]
        rest = list(column)
        for earlier, terms in zip(basis, mixes, strict=True):
            share = _dot(column, earlier, weights) / _dot(earlier, earlier, weights)
            rest = [x - share * y for x, y in zip(rest, earlier, strict=True)]
            mix = [x - share * y for x, y in zip(mix, terms, strict=True)]
        basis.append(rest)
        mixes.append(mix)
    out = [0.0, 0.0, 0.0]
    for vector, terms in zip(basis, mixes, strict=True):
        share = _dot(v, vector, weights) / _dot(vector, vector, weights)
        out = [x + share * y for x, y in zip(out, terms, strict=True)]
    return out[0], out[1], out[2]


def _dot(a: Sequence[float], b: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(w * x * y for w, x, y in zip(weights, a, b, strict=True))
