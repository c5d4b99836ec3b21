"""Designs: which replica gets which level of which factor in a round.

Levels lie in [-1, 1]; a replica's multiplier is 1 + a level. Every level is a pure function of
(seed, round, factor names): all ranks compute the same design, nothing is communicated.

    one factor            the fan of hdet_scale.method.spread and its assignment
    several, orthogonal   two levels, -1 and 1: columns of a Hadamard matrix whose order divides N,
                          each with a random sign, rows shuffled. X'X is diagonal: no factor can be
                          taken for another. Needs N a multiple of such an order above G.
    several, otherwise    the fan for each factor, permuted; of a few draws the one whose columns
                          are the least alike. A joint least squares tells factors apart, which
                          needs N >= G + 2.

The columns change from round to round: with few rows a column is the product of two others, so
that a fixed choice would take the interaction of two factors for the effect of a third, for ever.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from hdet_scale.method.spread import assignment, fan, stream_seed

DRAWS = 16
"""Of permutations for few replicas, where a single one is often nearly collinear."""
FEW = 64


def levels(n: int, factors: Sequence[str], *, seed: int, round: int) -> list[list[float]]:
    """For each factor the level of each of the n replicas."""
    check_design(n, len(factors))
    if n == 1:
        return [[0.0] for _ in factors]
    steps = fan(n)
    if len(factors) == 1:
        return [[steps[i] for i in assignment(n, seed=seed, round=round, factor=factors[0])]]
    order = hadamard_order(n, len(factors))
    if order is not None:
        return _orthogonal(n, order, factors, seed, round)
    return _permuted(steps, factors, seed, round)


def check_design(n: int, factors: int) -> None:
    """Refuse a number of replicas that cannot tell the factors apart. One replica explores
    nothing, and is left to train."""
    if factors <= 1 or n == 1 or n >= factors + 2 or hadamard_order(n, factors) is not None:
        return
    orthogonal = next(k for k in range(factors + 1, 8 * factors + 8) if hadamard_order(k, factors))
    raise ValueError(
        f"{factors} factors cannot be told apart by {n} replicas: at least "
        f"{min(factors + 2, orthogonal)} are needed ({orthogonal} for an orthogonal design); start "
        f"more replicas, or explore at most {max(1, n - 2)} factors"
    )


@functools.cache
def hadamard_order(n: int, factors: int) -> int | None:
    """The largest order that divides n, has a construction here, and a column for each factor
    beside the constant one; None where there is none."""
    orders = [k for k in range(4, n + 1, 4) if n % k == 0 and k > factors and _base_order(k)]
    return max(orders, default=None)


def hadamard_column(order: int, column: int) -> list[int]:
    """A column of a Hadamard matrix whose column 0 is all ones.

    order = 2^k b: Sylvester's doubling of Paley's matrix of order b = q + 1 (q a prime, 3 mod 4).
    """
    base = _base_order(order)
    if base is None:
        raise ValueError(f"no Hadamard matrix of order {order} here: use 2^k or 2^k (q + 1)")
    outer, inner = divmod(column, base)
    small = [1] if base == 1 else _paley_column(base, inner)
    signs = ((-1) ** (r & outer).bit_count() for r in range(order // base))
    return [s * x for s in signs for x in small]


def _base_order(order: int) -> int | None:
    """b of the construction: 1 for a power of two."""
    while order >= 1:
        if order == 1 or (order % 4 == 0 and order & (order - 1) and _is_prime(order - 1)):
            return order
        if order % 2:
            return None
        order //= 2
    return None


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % d for d in range(2, math.isqrt(q) + 1))


def _paley_column(order: int, column: int) -> list[int]:
    """Of I + S, S = [[0, 1], [-1, Q]], Q_ij = chi(i - j), with rows negated so that column 0 is
    all ones; q = 3 mod 4 makes S skew, and I + S a Hadamard matrix."""
    q = order - 1
    if column == 0:
        return [1] * order
    squares = {x * x % q for x in range(1, q)}
    rest = []
    for i in range(q):
        d = (i - (column - 1)) % q
        entry = 1 if d == 0 or d in squares else -1
        rest.append(-entry)  # rows below the first begin with -1
    return [1, *rest]


def _orthogonal(
    n: int, order: int, factors: Sequence[str], seed: int, round: int
) -> list[list[float]]:
    key = (seed, round, "design")
    columns = sorted(range(1, order), key=lambda c: stream_seed(*key, "column", c))
    rows = sorted(range(n), key=lambda r: stream_seed(*key, "row", r))
    chosen = []
    for name, column in zip(factors, columns, strict=False):
        sign = 1.0 if stream_seed(*key, "sign", name) % 2 else -1.0
        entries = hadamard_column(order, column)
        chosen.append([sign * entries[r % order] for r in rows])
    return chosen


def _permuted(
    steps: Sequence[float], factors: Sequence[str], seed: int, round: int
) -> list[list[float]]:
    n = len(steps)
    draws = [
        [[steps[i] for i in _permutation(n, seed, round, name, draw)] for name in factors]
        for draw in range(DRAWS if n <= FEW else 1)
    ]
    return max(draws, key=_apartness)


def _permutation(n: int, seed: int, round: int, name: str, draw: int) -> list[int]:
    # Not the identity in round 0: it would give every factor the same column.
    return sorted(range(n), key=lambda i: stream_seed(seed, round, "permuted", name, draw, i))


def _apartness(columns: Sequence[Sequence[float]]) -> float:
    """Determinant of X'X: largest where the columns are the least alike."""
    gram = [[math.fsum(x * y for x, y in zip(a, b, strict=True)) for b in columns] for a in columns]
    value = 1.0
    for k, row in enumerate(gram):
        if row[k] <= 0:
            return 0.0
        value *= row[k]
        for other in gram[k + 1 :]:
            share = other[k] / row[k]
            other[:] = [x - share * y for x, y in zip(other, row, strict=True)]
    return value
