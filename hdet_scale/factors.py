"""Factors: the scalars that are explored, and how a value is written to each."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer


class Factor(Protocol):
    """A scalar with a name that is the same on every rank."""

    @property
    def name(self) -> str:
        """Names the assignment's stream and the keys of the log."""
        ...

    def write(self, base: float, multiplier: float) -> None:
        """Make base x multiplier what the next step uses on this replica."""
        ...

    def read(self) -> float | Tensor:
        """What the next step uses on this replica: base x multiplier."""
        ...

    def scheduled(self) -> float:
        """The base that stands there while nothing is explored."""
        ...


class LearningRate:
    """The learning rate of one param group.

    The one place that decides how a multiplier reaches the optimizer: a group with an
    "lr_multiplier" (the fused optimizers) keeps the shared base in "lr" and multiplies inside
    the kernel; any other torch optimizer gets the product in "lr".
    """

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

    def write(self, base: float, multiplier: float) -> None:
        if "lr_multiplier" in self.group:
            self._set("lr", base)
            self._set("lr_multiplier", multiplier)
        else:
            self._set("lr", base * multiplier)

    def read(self) -> float | Tensor:
        """A tensor learning rate is answered with a copy, as torch does: nobody waits for it."""
        lr, rho = self.group["lr"], self.group.get("lr_multiplier")
        if rho is not None:
            product: float | Tensor = lr * rho
            return product
        return lr.clone() if isinstance(lr, Tensor) else float(lr)

    def scheduled(self) -> float:
        return float(self.group["lr"])

    def _set(self, key: str, value: float) -> None:
        # A tensor learning rate (capturable, compiled) is filled and never replaced: a captured
        # graph keeps reading the same memory. A float stays a float: foreach optimizers refuse
        # a tensor.
        if isinstance(self.group.get(key), Tensor):
            self.group[key].fill_(value)
        else:
            self.group[key] = value


def learning_rates(optimizer: Optimizer) -> list[LearningRate]:
    """One factor for each param group."""
    return [LearningRate(optimizer, i) for i in range(len(optimizer.param_groups))]
