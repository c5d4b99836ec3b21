"""Sums: the sufficient statistics of a round over all replicas, and the fit of slopes to them.

Only sums over replicas are needed: 2 + G + G (G + 1) / 2 + M + G M numbers in one all-reduce for
G factors and M probe batches, whatever the number of replicas. The equations are in
hdet_scale.rules.slope.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SINGULAR = 1e-6
"""A pivot of the correlation matrix below this: two factors were varied as one."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sufficient statistics of a round: of one replica, or of all after one all-reduce."""

    factors: int
    batches: int
    vector: tuple[float, ...]
    """n, sum x_g, sum x_g x_h (h <= g), sum l_j, sum x_g l_j, sum of squared mean losses."""

    @staticmethod
    def length(factors: int, batches: int) -> int:
        """Numbers of the vector."""
        return 2 + factors + factors * (factors + 1) // 2 + batches + factors * batches

    @classmethod
    def none(cls, factors: int, batches: int) -> Sums:
        """Of a replica without finite losses."""
        return cls(factors, batches, (0.0,) * cls.length(factors, batches))

    @classmethod
    def of(cls, offsets: Sequence[float], losses: Sequence[float]) -> Sums:
        """One replica's; nothing where a number is not finite."""
        if not all(math.isfinite(x) for x in (*offsets, *losses)):
            return cls.none(len(offsets), len(losses))
        mean = math.fsum(losses) / len(losses) if losses else 0.0
        numbers = [1.0, *offsets]
        numbers += [x * y for g, x in enumerate(offsets) for y in offsets[: g + 1]]
        numbers += [*losses, *(x * loss for x in offsets for loss in losses), mean * mean]
        return cls(len(offsets), len(losses), tuple(float(x) for x in numbers))

    @classmethod
    def read(cls, factors: int, batches: int, vector: Sequence[float]) -> Sums:
        """From the vector that came back from the all-reduce."""
        if len(vector) != cls.length(factors, batches):
            raise ValueError(
                f"{factors} factors and {batches} probe batches make "
                f"{cls.length(factors, batches)} sums, got {len(vector)}: every replica must "
                "explore the same factors and evaluate the same number of batches"
            )
        return cls(factors, batches, tuple(float(x) for x in vector))

    def __add__(self, other: Sums) -> Sums:
        if (self.factors, self.batches) != (other.factors, other.batches):
            raise ValueError(
                f"sums of {self.factors} factors and {self.batches} batches cannot be added to "
                f"those of {other.factors} and {other.batches}"
            )
        added = tuple(x + y for x, y in zip(self.vector, other.vector, strict=True))
        return Sums(self.factors, self.batches, added)

    @property
    def count(self) -> float:
        """Replicas with finite losses."""
        return self.vector[0]

    @property
    def mean_loss(self) -> float:
        """Over the replicas with finite losses and all batches; NaN where there is none."""
        if not (self.count and self.batches):
            return math.nan
        _, _, totals, _ = self._parts()
        return math.fsum(totals) / (self.count * self.batches)

    def _parts(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """sum x, sum x x', sum l, sum x l."""
        G, M = self.factors, self.batches
        cuts, start = [], 1
        for size in (G, G * (G + 1) // 2, M, G * M):
            cuts.append(list(self.vector[start : start + size]))
            start += size
        x, xx, totals, xl = cuts
        return x, xx, totals, xl

    def fit(self) -> Fit | None:
        """The slopes and their variances; None where the replicas cannot tell the factors apart.

        A factor that no replica varied (a bound, a spread of 0) is left out of the fit.
        """
        n, G, M = self.count, self.factors, self.batches
        x, xx, totals, xl = self._parts()
        if n < 2 or M < 1:
            return None
        gram = [[0.0] * G for _ in range(G)]
        for g in range(G):
            for h in range(g + 1):
                gram[g][h] = gram[h][g] = xx[g * (g + 1) // 2 + h] - x[g] * x[h] / n
        varied = [g for g in range(G) if gram[g][g] > 1e-12 * max(xx[g * (g + 3) // 2], 1e-300)]
        inverse = _inverse([[gram[g][h] for h in varied] for g in varied])
        if not varied or inverse is None or n < len(varied) + 1:
            return None
        cross = [[xl[g * M + j] - x[g] * totals[j] / n for j in range(M)] for g in varied]
        slopes = [
            [math.fsum(a * c[j] for a, c in zip(row, cross, strict=True)) for j in range(M)]
            for row in inverse
        ]
        means = [math.fsum(row) / M for row in slopes]
        explained = math.fsum(b * math.fsum(c) / M for b, c in zip(means, cross, strict=True))
        around = self.vector[-1] - (math.fsum(totals) / M) ** 2 / n - explained
        free = int(n) - len(varied) - 1
        noise = max(around, 0.0) / free if free else 0.0
        found = {
            g: Slopes(
                mean=means[i],
                between=_variance(slopes[i]) / M if M > 1 else 0.0,
                residual=noise * inverse[i][i],
                weight=gram[g][g] / n,
            )
            for i, g in enumerate(varied)
        }
        return Fit(found, batch_degrees=M - 1, free=free)


@dataclass(frozen=True, slots=True)
class Slopes:
    """One factor's slope in a round: b, the two parts of u, and w."""

    mean: float
    between: float
    residual: float
    weight: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A round's slopes by the factor's index, and the degrees of freedom of their variances."""

    slopes: dict[int, Slopes]
    batch_degrees: int
    free: int


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """Of a symmetric positive matrix by Gauss and Jordan on its correlations; None if singular."""
    size = len(matrix)
    scale = [math.sqrt(matrix[g][g]) for g in range(size)]
    rows = [
        [matrix[g][h] / (scale[g] * scale[h]) for h in range(size)]
        + [float(g == h) for h in range(size)]
        for g in range(size)
    ]
    for k in range(size):
        # Positive definite: the diagonal is a safe pivot, and its size says what is left.
        if rows[k][k] < SINGULAR:
            return None
        pivot = rows[k][k]
        rows[k] = [x / pivot for x in rows[k]]
        for g in range(size):
            if g != k:
                share = rows[g][k]
                rows[g] = [x - share * y for x, y in zip(rows[g], rows[k], strict=True)]
    return [[rows[g][size + h] / (scale[g] * scale[h]) for h in range(size)] for g in range(size)]
