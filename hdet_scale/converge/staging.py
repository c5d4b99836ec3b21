"""Staging: tensors copied one behind the other into a flat buffer, and back.

On a GPU a bucket of any number of tensors is one launch, which looks for what is not finite while
it copies; `Pieces` keeps the tables of a launch between converges. On a CPU each tensor is copied
in blocks that are still in the cache when they are checked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdet_scale.kernels.choice import on_kernels

if TYPE_CHECKING:
    from hdet_scale.kernels.pieces import Pieces


CHECKED = 2**18
"""Elements that are copied and then summed: few enough for the sum to read the cache."""
NARROW = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels copy by way of fp32, exactly."""


class StagedBucket:
    """The tensors of a bucket and their way into a flat buffer and back."""

    def __init__(self, views: Sequence[Tensor]) -> None:
        self.views = views
        self._pieces: Pieces | None = None
        self._unread: Tensor | None = None
        """The flag of copies that are not checked: kept, so that a copy is one launch."""

    def move_to(self, views: Sequence[Tensor]) -> None:
        """Copy other tensors of the same sizes and dtypes from now on; none lets go of these."""
        self.views = views
        if self._pieces is not None:
            self._pieces.move_to(views)

    def gather(self, flat: Tensor) -> Tensor:
        """Copy the views one behind the other into `flat`, cast to its type."""
        pieces = self._kernels(flat)
        if pieces is not None:
            if self._unread is None:
                self._unread = torch.zeros(1, dtype=torch.int32, device=flat.device)
            pieces.gather(flat, flag=self._unread)
            return flat
        for view, part in zip(self.views, _parts(flat, self.views), strict=True):
            part.copy_(view)
        return flat

    def gather_checked(self, flat: Tensor) -> Tensor:
        """The same; returns a scalar on the device that is finite where all that was read is.

        It may be infinite too where only a sum has overflowed: then look at each element.
        """
        pieces = self._kernels(flat)
        if pieces is not None:
            return torch.where(pieces.gather(flat) == 0, 0.0, torch.inf)[0]
        sums = [
            to.copy_(block).sum()
            for view, part in zip(self.views, _parts(flat, self.views), strict=True)
            for to, block in zip(part.split(CHECKED), view.split(CHECKED), strict=True)
        ]
        return torch.stack(sums).sum() if sums else torch.zeros((), device=flat.device)

    def scatter(self, flat: Tensor, factor: float | None = None) -> None:
        """Copy `flat` back into the views, times `factor`; `flat` is used up."""
        pieces = self._kernels(flat)
        if pieces is not None:
            pieces.scatter(flat, None if factor is None else _scalar(factor, flat.device))
            return
        if factor is not None:
            flat.mul_(factor)
        for view, part in zip(self.views, _parts(flat, self.views), strict=True):
            view.copy_(part)

    def add(self, flat: Tensor) -> None:
        """Add `flat` to the views, in fp32 and rounded once."""
        pieces = self._kernels(flat)
        if pieces is not None:
            pieces.scatter(flat, add=True)
            return
        for view, part in zip(self.views, _parts(flat, self.views), strict=True):
            view.add_(part)

    def _kernels(self, flat: Tensor) -> Pieces | None:
        exact = flat.dtype == torch.float32 and all(v.dtype in NARROW for v in self.views)
        if not (exact and on_kernels(flat)):
            return None
        if self._pieces is None:
            from hdet_scale.kernels.pieces import Pieces

            self._pieces = Pieces(self.views)
        return self._pieces


def _parts(flat: Tensor, views: Sequence[Tensor]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = flat.split([v.numel() for v in views])
    return parts


@functools.lru_cache(maxsize=64)
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)
