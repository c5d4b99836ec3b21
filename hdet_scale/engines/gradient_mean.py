"""The mean of gradients over replicas, where the engine itself does not take it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.converge.buckets import Bucket, Plan, plan
from hdet_scale.converge.staging import gather, scatter
from hdet_scale.topology import Replicas


class GradientMean:
    """Shared gradients: g <- mean over replicas of g, in place, summed in fp32.

    An infinity or NaN of one replica reaches all of them, so that all skip the step alike.
    Extra memory: two staging buckets, kept; fp32 gradients of 1 MiB or more are reduced where
    they lie.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._shelf: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, gradients: list[Tensor], sharers: Replicas) -> None:
        """Of these replicas; on all of them."""
        if sharers.size == 1:
            return
        layout = plan(gradients, bucket_bytes=self.bucket_bytes, itemsize=4)
        flying: deque[tuple[Bucket, Tensor, Any]] = deque()
        for bucket in layout.buckets:
            if len(flying) == 2:
                self._land(sharers.size, layout, *flying.popleft())
            flat = self._lift(layout, bucket)
            work = dist.all_reduce(flat, group=sharers.connected(), async_op=True)
            flying.append((bucket, flat, work))
        while flying:
            self._land(sharers.size, layout, *flying.popleft())

    def _lift(self, layout: Plan, bucket: Bucket) -> Tensor:
        views = layout.views(bucket)
        if _in_place(bucket):
            return views[0]
        return gather(views, self._staging(bucket))

    def _land(self, n: int, layout: Plan, bucket: Bucket, flat: Tensor, work: Any) -> None:
        work.wait()
        flat.div_(n)
        if not _in_place(bucket):
            scatter(flat, layout.views(bucket))
            self._shelf.append(flat if flat._base is None else flat._base)

    def _staging(self, bucket: Bucket) -> Tensor:
        """A buffer that is free and large enough, or a new one in place of a smaller one."""
        wide = torch.float64 if bucket.dtype == torch.float64 else torch.float32
        for i, free in enumerate(self._shelf):
            if (free.dtype, free.device) == (wide, bucket.device):
                self._shelf.pop(i)
                if free.numel() >= bucket.numel:
                    return free[: bucket.numel]
                break
        return torch.empty(bucket.numel, dtype=wide, device=bucket.device)


def _in_place(bucket: Bucket) -> bool:
    return len(bucket.pieces) == 1 and bucket.dtype in (torch.float32, torch.float64)


def gradient_of(p: Tensor) -> Tensor:
    """A parameter that the loss did not reach has the gradient 0: replicas may differ in that."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


def average_after_backward(
    params: Sequence[Tensor], sharers: Callable[[], Replicas], bucket_bytes: int
) -> Callable[[], None]:
    """Average gradients over `sharers()` at the end of each backward.

    The end of the backward is also where DDP's own mean is ready: clipping and a loss scaler then
    see the shared gradient, and an infinity makes all sharers skip the step. With accumulation the
    accumulated gradient is averaged: mean(mean(g_1) + g_2) = mean(g_1 + g_2).

    Returns:
        The call that undoes it.
    """
    mean, last = GradientMean(bucket_bytes), [-1]

    def finish() -> None:
        mean([gradient_of(p) for p in params], sharers())

    def queue(_: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != last[0]:
            last[0] = backward
            torch.autograd.Variable._execution_engine.queue_callback(finish)

    hooks = [p.register_post_accumulate_grad_hook(queue) for p in params]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo
