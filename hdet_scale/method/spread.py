"""Fan-out: the multipliers of N replicas, and which replica gets which.

    d = max((N - 1) / 2, 0.5)
    rho_r = 1 + a (r - (N - 1) / 2) / d          r = 0 .. N-1, spread a in [0, 1)

Mean 1, within [1 - a, 1 + a]; a = 0 gives exactly 1.0 everywhere. Replica r of round k steps
with base x rho_pi(r). pi is the identity in round 0 and afterwards a permutation that is a pure
function of (seed, round, factor): all ranks compute the same one, nothing is communicated, no
random generator is touched, and a resumed run draws what the first run would have drawn.
"""

from __future__ import annotations

import hashlib
import math


def check_spread(spread: float) -> float:
    """The spread as a float, or an error that says what is valid."""
    if isinstance(spread, bool) or not isinstance(spread, int | float):
        raise TypeError(f"spread must be a number in [0, 1), got {spread!r}")
    if not (math.isfinite(spread) and 0 <= spread < 1):
        raise ValueError(
            f"spread must be in [0, 1), got {spread}: 1 or more would give a replica a learning "
            "rate of zero or below; the paper uses 1/9"
        )
    return float(spread)


def multipliers(n: int, spread: float) -> list[float]:
    """rho_0 .. rho_{n-1} of the equation above, smallest first.

    Args:
        n: N, the number of replicas.
        spread: a, in [0, 1); 0 gives 1.0 for all.
    """
    a = check_spread(spread)
    return [1.0 + a * level for level in fan(n)]


def fan(n: int) -> list[float]:
    """(r - (N - 1) / 2) / d for each replica: levels from exactly -1 to exactly 1, so that no
    rounding of a multiplier leaves its bounds."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n must be an int, got {n!r}")
    if n < 1:
        raise ValueError(f"n must be at least 1 replica, got {n}")
    middle = (n - 1) / 2
    d = max(middle, 0.5)
    return [(r - middle) / d for r in range(n)]


def assignment(n: int, *, seed: int, round: int, factor: int | str = 0) -> list[int]:
    """pi of (seed, round, factor): replica r takes multiplier pi[r].

    Indices are sorted by a hash of (seed, round, factor, index). A hash and not a random
    generator: the order depends on no library version, no device and no state.

    Args:
        n: N, the number of replicas.
        seed: of the run.
        round: index of the round; in round 0 replica r takes multiplier r.
        factor: index or name of the factor; each has permutations of its own.
    """
    if round < 0:
        raise ValueError(f"round must be 0 or more, got {round}")
    if round == 0:
        return list(range(n))
    return sorted(range(n), key=lambda i: _digest(seed, round, factor, i))


def _digest(*key: int | str) -> bytes:
    return hashlib.sha256(repr(key).encode()).digest()


def stream_seed(*key: int | str) -> int:
    """A seed of 63 bits for a generator of its own, a pure function of the key."""
    return int.from_bytes(_digest(*key)[:8], "big") >> 1
