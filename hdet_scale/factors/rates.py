"""How a base and a multiplier reach an optimizer's param group, and what its step then uses."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def write_lr(group: dict[str, Any], base: float, multiplier: float) -> None:
    """Give a param group its shared base LR and this replica's multiplier.

    This is the only place that decides how a multiplier reaches the optimizer. A group with an
    "lr_multiplier" (the fused optimizers) keeps the shared base in "lr" and multiplies inside the
    kernel. Any other torch optimizer gets the product in "lr".
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


def check_multiplier(value: object) -> None:
    """Raise TypeError or ValueError unless the value is a finite number of at least 0.

    Limitations: a tensor on another device than the CPU is not read, since reading it would block
    the host. Only its shape is checked.
    """
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


def _put(group: dict[str, Any], name: str, value: float) -> None:
    # A tensor learning rate (capturable, compiled) is filled and never replaced: a captured graph
    # keeps reading the same memory. A float stays a float: foreach optimizers refuse a tensor.
    if isinstance(group.get(name), Tensor):
        group[name].fill_(value)
    else:
        group[name] = value
