"""The mean of gradients over replicas, where the engine itself does not take it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.converge.buckets import Bucket, Plan, laid_out, plan
from hdet_scale.converge.shelf import Shelf
from hdet_scale.converge.staging import StagedBucket
from hdet_scale.topology import Replicas


class GradientMean:
    """Shared gradients: g <- mean over replicas of g, in place, summed in fp32.

    An infinity or NaN of one replica reaches all of them, so that all skip the step alike. The
    plan is kept while gradients are laid out alike, wherever they lie; a bucket is copied in one
    launch on a GPU. No gradient is kept.

    Extra memory: two staging buckets, kept; fp32 gradients of 1 MiB or more are reduced where
    they lie.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._shelf = Shelf()
        self._laid_out: Hashable = None
        self._plan: Plan
        self._staged: list[StagedBucket]

    @torch.no_grad()
    def __call__(self, gradients: list[Tensor], sharers: Replicas) -> None:
        """Of these replicas; on all of them."""
        if sharers.size == 1:
            return
        layout = self._planned(gradients)
        flying: deque[tuple[Bucket, StagedBucket, Tensor, Any]] = deque()
        for bucket, staged in zip(layout.buckets, self._staged, strict=True):
            if len(flying) == 2:
                self._land(sharers.size, *flying.popleft())
            staged.move_to(layout.views(bucket))
            flat = self._lift(bucket, staged)
            work = dist.all_reduce(flat, group=sharers.connected(), async_op=True)
            flying.append((bucket, staged, flat, work))
        while flying:
            self._land(sharers.size, *flying.popleft())

    def _planned(self, gradients: list[Tensor]) -> Plan:
        """The plan over these gradients, a new one only where they are laid out differently."""
        found = laid_out(gradients)
        if found != self._laid_out:
            made = plan(gradients, bucket_bytes=self.bucket_bytes, itemsize=4)
            self._staged = [StagedBucket(made.views(b)) for b in made.buckets]
            self._plan, self._laid_out = made.over([]), found
        return self._plan.over(gradients)

    def _lift(self, bucket: Bucket, staged: StagedBucket) -> Tensor:
        if _in_place(bucket):
            return staged.views[0]
        wide = torch.float64 if bucket.dtype == torch.float64 else torch.float32
        return staged.gather(self._shelf.borrow(bucket.numel, wide, bucket.device))

    def _land(self, n: int, bucket: Bucket, staged: StagedBucket, flat: Tensor, work: Any) -> None:
        work.wait()
        if _in_place(bucket):
            flat.mul_(1.0 / n)
        else:
            staged.scatter(flat, 1.0 / n)
            self._shelf.give_back(flat)
        staged.move_to([])  # gradients must not outlive zero_grad


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
