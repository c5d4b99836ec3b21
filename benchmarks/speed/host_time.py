"""The host time of an optimizer step on kernels, on a machine that cannot start them.

`without_starts` replaces the lowest seam, `kernel[programs](...)` in `kernels/launch.py`. All that
comes before it runs, with tensors on the CPU in the place of a GPU's. What is left out is Triton's
own time to start two kernels, and the pinned memory that an upload is made from.
"""

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.speed.shapes import llama_7b
from hdet_scale.kernels import advance, launch, update
from hdet_scale.optim.fused_adamw import FusedAdamW


class _Unstarted:
    """A kernel that takes its grid and arguments and does nothing."""

    starts = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(*_: Any, **__: Any) -> None:
            _Unstarted.starts += 1

        return start


@contextlib.contextmanager
def without_starts() -> Iterator[None]:
    """Run every step on kernels up to where a kernel is started."""
    with (
        mock.patch.object(launch, "check_device", return_value=None),
        mock.patch.object(advance, "advance_kernel", _Unstarted()),
        mock.patch.object(update, "update_kernel", _Unstarted()),
    ):
        yield


class Moving:
    """Gradients that come back at other addresses before every step, after `zero_grad`."""

    def __init__(
        self, params: list[torch.nn.Parameter], make: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> None:
        self.params, self.make = params, make
        self.turn = 0

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        held = [p.grad for p in self.params]  # until the next have their place
        optimizer.zero_grad(set_to_none=True)
        self.turn += 1
        for p in self.params:
            p.grad = self.make(p, self.turn)
        del held


class Llama:
    """Llama's shapes as views of one memory map that no one reads, and FusedAdamW over them.

    Args:
        scale: Divides the width: the same number of tensors with fewer elements.
    """

    def __init__(self, scale: int) -> None:
        self.shapes = llama_7b(scale)
        self.elements = sum(map(math.prod, self.shapes))
        largest = max(map(math.prod, self.shapes))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._map = mmap.mmap(-1, 4 * largest + 2**24, flags=flags)
        self._place = 0
        self.params = [torch.nn.Parameter(self.view(shape)) for shape in self.shapes]
        self.optimizer = FusedAdamW(self.params, backend="triton")
        for p in self.params:
            moments = {name: self.view(p.shape) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[p] = {"step": torch.zeros(()), **moments}
        self.move = Moving(self.params, lambda p, _: self.view(p.shape))

    def view(self, shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
        """A tensor at another address than the last."""
        self._place = (self._place + 64) % 2**24
        count = math.prod(shape)
        flat = torch.frombuffer(self._map, dtype=torch.float32, count=count, offset=self._place)
        return flat.view(shape)
