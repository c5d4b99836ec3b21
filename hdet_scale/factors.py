"""Factors: the scalars that are explored, and how a value is written to each."""

from __future__ import annotations

import math
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
    """The learning rate of one param group."""

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
        write_lr(self.group, base, multiplier)

    def read(self) -> float | Tensor:
        """A tensor learning rate is answered with a copy, as torch does: nobody waits for it."""
        rate = effective_lr(self.group)
        return rate.clone() if isinstance(rate, Tensor) else float(rate)

    def scheduled(self) -> float:
        return float(self.group["lr"])


def write_lr(group: dict[str, Any], base: float, multiplier: float) -> None:
    """Give a group its shared base LR and this replica's multiplier.

    The one place that decides how a multiplier reaches the optimizer: a group with an
    "lr_multiplier" (the fused optimizers) keeps the shared base in "lr" and multiplies inside
    the kernel; any other torch optimizer gets the product in "lr".
    """
    check_multiplier(multiplier)
    if "lr_multiplier" in group:
        _put(group, "lr", base)
        _put(group, "lr_multiplier", multiplier)
    else:
        _put(group, "lr", base * multiplier)


def effective_lr(group: dict[str, Any]) -> float | Tensor:
    """The LR that the step uses: base times multiplier, or the LR of another torch optimizer."""
    lr: float | Tensor = group["lr"]
    if "lr_multiplier" not in group:
        return lr
    product: float | Tensor = lr * group["lr_multiplier"]
    return product


def _put(group: dict[str, Any], name: str, value: float) -> None:
    # A tensor learning rate (capturable, compiled) is filled and never replaced: a captured graph
    # keeps reading the same memory. A float stays a float: foreach optimizers refuse a tensor.
    if isinstance(group.get(name), Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def check_multiplier(value: object) -> None:
    """A multiplier on another device is left to the kernel: reading it here would wait for it."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"lr_multiplier of shape {tuple(value.shape)}: give one element")
        if value.device.type != "cpu":
            return
        value = value.item()
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(
            f"lr_multiplier={value!r} is a {type(value).__name__}: give a number or a tensor of one"
        )
    if not math.isfinite(value) or value < 0:
        raise ValueError(
            f"lr_multiplier={value}: valid is a finite number of at least 0, and 1.0 for no spread"
        )


def learning_rates(optimizer: Optimizer) -> list[LearningRate]:
    """One factor for each param group."""
    return [LearningRate(optimizer, i) for i in range(len(optimizer.param_groups))]
