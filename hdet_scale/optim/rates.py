"""How a shared base and a replica's multiplier reach the learning rate of a param group.

A fused optimizer takes two numbers: `group["lr"]` is the shared base, which a scheduler writes on
every replica alike, and `group["lr_multiplier"]` is this replica's factor. Its step uses the
product. Any other torch optimizer has one number, and gets the product in `group["lr"]`.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def write_lr(group: dict[str, Any], base: float, multiplier: float) -> None:
    """Give a param group its shared base LR and this replica's multiplier.

    The one place that decides how a multiplier reaches the optimizer: a group with an
    "lr_multiplier" (the fused optimizers) keeps the shared base in "lr" and multiplies inside
    the kernel; any other torch optimizer gets the product in "lr".

    Args:
        group: A param group of any torch optimizer.
        base: The LR that all replicas share.
        multiplier: This replica's factor of it: finite, at least 0.
    """
    check_multiplier(multiplier)
    if "lr_multiplier" in group:
        put(group, "lr", base)
        put(group, "lr_multiplier", multiplier)
    else:
        put(group, "lr", base * multiplier)


def effective_lr(group: dict[str, Any]) -> float | Tensor:
    """The LR that the step uses: base times multiplier, or the LR of another torch optimizer."""
    lr: float | Tensor = group["lr"]
    if "lr_multiplier" not in group:
        return lr
    product: float | Tensor = lr * group["lr_multiplier"]
    return product


def put(group: dict[str, Any], name: str, value: float) -> None:
    """Write a number of a param group in the way that its optimizer can take.

    A tensor (capturable, compiled) is filled and never replaced: a captured graph keeps reading
    the same memory. A float stays a float: foreach optimizers refuse a tensor.
    """
    if isinstance(group.get(name), Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def check_multiplier(value: object) -> None:
    """Refuse a multiplier that is not one finite number of at least 0.

    A multiplier on another device is left to the kernel: reading it here would wait for it.

    Raises:
        TypeError: It is no number.
        ValueError: It has several elements, is negative, or is not finite.
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
