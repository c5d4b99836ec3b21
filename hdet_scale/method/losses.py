"""The meter: losses as a user passes them, checked, and summed where they are."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class LossMeter:
    """The mean loss of a replica over a round, summed where the losses are."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._on_device: Tensor | None = None
        self._on_host = 0.0
        self.count = 0

    def add(self, loss: Tensor | float) -> None:
        """Add one loss; a tensor stays on its device, without a host synchronisation."""
        self.count += 1
        if not isinstance(loss, Tensor):
            self._on_host += loss
            return
        if self._on_device is None:
            wide = torch.float32 if loss.device.type == "mps" else torch.float64
            self._on_device = torch.zeros((), dtype=wide, device=loss.device)
        self._on_device += loss.detach().reshape(()).to(self._on_device.device)

    def total(self) -> float:
        """The sum; waits for the device."""
        return self._on_host + (0.0 if self._on_device is None else float(self._on_device))

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.total(), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._on_host, self.count = float(state["sum"]), int(state["count"])


def check_loss(loss: object) -> Tensor | float | None:
    """A loss as a scalar, or an error before anything has changed.

    An int is refused: a scheduler's `step(epoch)` and DeepSpeed's retry with the batch size
    would otherwise be taken for a loss.
    """
    if loss is None:
        return None
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ValueError(
                f"the loss must be one number, got a tensor of shape {list(loss.shape)}: pass "
                "loss.mean()"
            )
        if not loss.is_floating_point():
            raise TypeError(f"the loss must be a floating-point tensor, got {loss.dtype}")
        return loss
    if isinstance(loss, numbers.Real) and not isinstance(loss, numbers.Integral):
        return float(loss)
    raise TypeError(
        f"the loss must be a float or a tensor of one element, got {type(loss).__name__} "
        f"{loss!r}: pass the training loss of this step, or None where there is none"
    )
