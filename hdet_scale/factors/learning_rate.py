"""LearningRate: the learning rate of a param group as a factor."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet_scale.factors.space import Space
from hdet_scale.optim.rates import effective_lr, write_lr


class LearningRate:
    """The learning rate of one param group: log space, no bound but zero.

    Args:
        optimizer: any torch optimizer, fused or not.
        index: of the param group.
    """

    space = Space("log", (0.0, math.inf))
    in_step = True

    def __init__(self, optimizer: Optimizer, index: int) -> None:
        if not 0 <= index < len(optimizer.param_groups):
            raise ValueError(
                f"the optimizer has {len(optimizer.param_groups)} param groups, got index {index}"
            )
        self.optimizer = optimizer
        self.index = index

    @property
    def name(self) -> str:
        return f"lr/group{self.index}"

    @property
    def group(self) -> dict[str, Any]:
        """Looked up each time: loading an optimizer's state replaces its groups."""
        return self.optimizer.param_groups[self.index]

    def at(self, base: float, multiplier: float) -> float:
        return base * multiplier

    def offset(self, base: float, multiplier: float) -> float:
        return self.space.offset(base, multiplier)

    def write(self, base: float, multiplier: float) -> None:
        write_lr(self.group, base, multiplier)

    def read(self) -> float | Tensor:
        """What the step uses. A tensor is returned as a copy, as torch does, without a host
        synchronisation."""
        rate = effective_lr(self.group)
        return rate.clone() if isinstance(rate, Tensor) else float(rate)

    def scheduled(self) -> float:
        return float(self.group["lr"])


def learning_rates(optimizer: Optimizer) -> list[LearningRate]:
    """One factor for each param group."""
    return [LearningRate(optimizer, i) for i in range(len(optimizer.param_groups))]
