"""Costs: the hops and bytes that the ways to form a mean among n ranks take of a link.

    ring      2 (n-1) hops,           2 (n-1)/n m bytes       least bytes, latency grows with n
    tree      2 ceil(log2 n) hops,    2 m bytes               two trees that carry half each
    direct    2 (n-1) hops,           what the wire sends     every rank to every other; 2 ranks: 1

m is the size of the message. `hdet_scale.plan.links` turns a cost into seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """What a transfer asks of a link."""

    hops: float
    """Messages of a rank that wait for one another."""
    nbytes: float
    """Bytes that a rank sends."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.hops + other.hops, self.nbytes + other.nbytes)


AllReduceCost = Callable[[int, float], Cost]
"""The cost of an all-reduce among so many ranks of so many bytes: `ring`, `tree`, or the cheaper of
them on a link."""


def ring(n: int, nbytes: float) -> Cost:
    """Reduce-scatter and all-gather around a ring."""
    return Cost(2 * (n - 1), 2 * (n - 1) / n * nbytes)


def tree(n: int, nbytes: float) -> Cost:
    """Up and down two binary trees at once."""
    return Cost(2 * math.ceil(math.log2(n)), 2 * nbytes if n > 1 else 0.0)


def direct(n: int, sent: float) -> Cost:
    """Segments to their owners and back; two ranks exchange all in one trip. One hop a message is
    pessimistic where messages to different ranks overlap."""
    return Cost(1 if n == 2 else 2 * (n - 1), sent)
