"""The outer step: Nesterov momentum on the step from the last converged point to the mean (DiLoCo).

delta = mean - point;  u <- momentum u + delta;  theta <- point + lr (delta + momentum u)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """The settings of an outer step; lr 1 and momentum 0 are the plain mean.

    Limitations: the point and u are kept, which is two more copies of what is averaged.
    """

    lr: float = 0.7
    """Outer learning rate, in (0, 10)."""
    momentum: float = 0.9
    """Outer momentum, in [0, 1)."""

    def __post_init__(self) -> None:
        if not (isinstance(self.lr, int | float) and 0 < self.lr < 10):
            raise ValueError(f"outer lr must be in (0, 10), got {self.lr!r}; DiLoCo uses 0.7")
        if not (isinstance(self.momentum, int | float) and 0 <= self.momentum < 1):
            raise ValueError(
                f"outer momentum must be in [0, 1), got {self.momentum!r}; DiLoCo uses 0.9"
            )


def outer_step(mean: Tensor, point: Tensor, momentum: Tensor, outer: OuterStep) -> None:
    """Replace `mean` by the outer step from `point`, and update `momentum`, both in place."""
    delta = mean.sub_(point)
    momentum.mul_(outer.momentum).add_(delta)
    delta.add_(momentum, alpha=outer.momentum).mul_(outer.lr).add_(point)
