"""Space: the arithmetic of a factor's values. Factor: what the method asks of a factor.

The equation of the three spaces is in the docstring of the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

SPACES = ("log", "linear", "logit")
Bounds = tuple[float, float]


class Factor(Protocol):
    """A scalar that is explored.

    Two attributes are optional:
        in_step (bool, default True): the factor acts between the all-reduce of the gradients and
            the end of the optimizer's step. A factor that acts in forward or backward makes no
            difference between replicas that step with the same mean gradient: it needs local
            gradients.
        moves_moments (bool, default False): replicas with different values have different
            optimizer moments, which a converge must then average.
    """

    @property
    def name(self) -> str:
        """The same on every rank. Selects the assignment's random stream and the log's keys."""
        ...

    def at(self, base: float, multiplier: float) -> float:
        """The value of a replica with this multiplier."""
        ...

    def offset(self, base: float, multiplier: float) -> float:
        """The distance of that value from the base in the factor's space: ln multiplier, or less
        if a bound clipped the value."""
        ...

    def write(self, base: float, multiplier: float) -> None:
        """Make the next step on this replica use `at(base, multiplier)`."""
        ...

    def read(self) -> float | Tensor:
        """The value that the next step on this replica uses."""
        ...

    def scheduled(self) -> float:
        """The base that the user or their schedule has set, while nothing is explored."""
        ...


def check_factors(factors: Sequence[Factor], gradients: str = "local") -> list[Factor]:
    """Check that factors can be explored together, and return them as a list.

    Args:
        factors: what to explore.
        gradients: "local" (default) or "shared", what the replicas step with.

    Raises:
        TypeError: if an object lacks a member of `Factor`.
        ValueError: if two factors have the same name, or if a factor acts in forward or backward
            and the gradients are shared.
    """
    needed = ("name", "at", "offset", "write", "read", "scheduled")
    for factor in factors:
        missing = [n for n in needed if not hasattr(factor, n)]
        if missing:
            raise TypeError(
                f"{factor!r} is no factor, it lacks {missing}: use hdet_scale.factors, for any "
                "other scalar Pair(name, get, set)"
            )
    names = [f.name for f in factors]
    if len(set(names)) != len(names):
        raise ValueError(f"factors need different names, got {names}: pass name= to one of them")
    idle = [f.name for f in factors if not getattr(f, "in_step", True)]
    if gradients == "shared" and idle:
        raise ValueError(
            f"{idle} act in forward or backward, and with shared gradients every replica steps "
            "with the same mean gradient, so that they show no effect: use gradients='local'"
        )
    return list(factors)


class Space:
    """The arithmetic of a factor: a scale on which values are compared, and their bounds.

    Args:
        kind: "log", "linear" or "logit".
        bounds: (low, high) of the values. Log space needs low >= 0, logit space bounds in [0, 1].
        unit: in linear space, what an offset of 1 adds. Default 1.0.
    """

    def __init__(self, kind: str, bounds: Bounds, unit: float = 1.0) -> None:
        if kind not in SPACES:
            raise ValueError(f"space must be one of {list(SPACES)}, got {kind!r}")
        low, high = (float(x) for x in bounds)
        if not low < high:
            raise ValueError(
                f"bounds must be (low, high) with low below high, got {tuple(bounds)}: swap them, "
                "or widen them"
            )
        if kind == "log" and low < 0:
            raise ValueError(f"bounds {tuple(bounds)} in log space: low must be 0 or more")
        if kind == "logit" and not (low >= 0 and high <= 1):
            raise ValueError(f"bounds {tuple(bounds)} in logit space: they must lie in [0, 1]")
        if not (math.isfinite(unit) and unit > 0):
            raise ValueError(f"unit must be above 0, got {unit}: it is what an offset of 1 adds")
        self.kind, self.low, self.high, self.unit = kind, low, high, float(unit)

    def check(self, base: float, name: str) -> float:
        """Return the base, or raise ValueError if no multiplier can move it or it is out of
        bounds."""
        stuck = (self.kind == "log" and base <= 0) or (self.kind == "logit" and not 0 < base < 1)
        if stuck or not math.isfinite(base):
            raise ValueError(
                f"{name} is {base}, which a multiplier in {self.kind} space can never move: start "
                "with a small value inside the bounds, or pass space='linear' and a unit"
            )
        if not self.low <= base <= self.high:
            raise ValueError(
                f"{name} is {base}, outside its bounds [{self.low}, {self.high}]: start inside "
                "them, or pass wider bounds"
            )
        return base

    def at(self, base: float, multiplier: float) -> float:
        """The value of a replica with this multiplier, within the bounds."""
        if multiplier == 1.0:
            return base
        return min(max(self._free(base, multiplier), self.low), self.high)

    def offset(self, base: float, multiplier: float) -> float:
        """ln multiplier, or the part of it that the bounds allow."""
        if multiplier <= 0:
            return -math.inf
        free, value = self._free(base, multiplier), self.at(base, multiplier)
        if value == free:
            return math.log(multiplier)
        return self._place(value) - self._place(base)

    def _free(self, base: float, multiplier: float) -> float:
        """The value before it is clipped to the bounds."""
        if self.kind == "log":
            return base * multiplier
        if self.kind == "linear":
            return base + self.unit * math.log(multiplier)
        return base * multiplier / (1.0 - base + base * multiplier)

    def _place(self, value: float) -> float:
        """space(value)."""
        if self.kind == "linear":
            return value / self.unit
        if value <= 0 or (self.kind == "logit" and value >= 1):
            return -math.inf if value <= 0 else math.inf
        return math.log(value) if self.kind == "log" else math.log(value / (1.0 - value))
