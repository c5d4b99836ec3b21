"""Shelf: buffers that are kept from one converge to the next."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class Shelf:
    """Buffers by dtype and device, kept: the first touch of fresh memory costs more than a copy
    into memory that was used before."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], deque[Tensor]] = {}

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The smallest kept buffer that is large enough, or a new one."""
        free = self._free.setdefault((dtype, device), deque())
        fits = sorted((b.numel(), i) for i, b in enumerate(free) if b.numel() >= numel)
        if not fits:
            return torch.empty(numel, dtype=dtype, device=device)
        buffer = free[fits[0][1]]
        del free[fits[0][1]]
        return buffer[:numel]

    def give_back(self, *buffers: Tensor) -> None:
        """Keep the whole storage behind each buffer for the next one who borrows."""
        for b in buffers:
            whole = b.as_strided((b.untyped_storage().nbytes() // b.itemsize,), (1,), 0)
            self._free[b.dtype, b.device].append(whole)

    @property
    def nbytes(self) -> int:
        """Bytes kept, without what is lent out."""
        return sum(b.nbytes for free in self._free.values() for b in free)
