"""Counted: a training loop that is not ours, whose scheduler steps count once an optimizer step.

A trainer calls `lr_scheduler.step()` when it sees fit: Accelerate once for each process, others
never on a skipped step. Here the call becomes ours: the first one after an optimizer step tells
the round the loss and moves the schedule by one, the others do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet_scale.config import HDETConfig
from hdet_scale.phases.phased import PhasedScheduler
from hdet_scale.schedulers import AutoLR


class Counted:
    """An AutoLR around a trainer's own scheduler; `detach` gives everything back.

    optimizer, scheduler: bare or wrapped by Accelerate.
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: Any,
        config: HDETConfig,
        model: nn.Module | None = None,
    ) -> None:
        if config.searches:
            raise ValueError(
                f"rule={config.rule!r} trains replicas on their own gradients for a while, which "
                "this integration does not support: use rule='paper' or 'slope', or a loop of "
                "your own with OneCycleAutoLR(model=...)"
            )
        self.inner = bare_scheduler(scheduler)
        if bare_optimizer(self.inner.optimizer) is not bare_optimizer(optimizer):
            raise ValueError(
                "the scheduler was made for another optimizer: pass the pair that trains the model"
            )
        self._kind, self._theirs = type(self.inner), self.inner.optimizer
        # A scheduler that was made for Accelerate's wrapper: hooks need the optimizer itself.
        self.inner.optimizer = bare_optimizer(optimizer)
        self.exploring = AutoLR(self.inner, config, model=model)
        self._pending = self._counting = False
        self._sums: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0
        raw = self.exploring.optimizer
        self._hook = raw.register_step_post_hook(lambda *_: self._stepped())
        # A class of its own and not an attribute: that would go into the scheduler's state_dict.
        self.inner.__class__ = _stepped_by(self._kind, self._called)

    def add_loss(self, loss: Tensor, weight: Tensor | float = 1.0) -> None:
        """Add a micro-batch's mean loss; `weight` is its share of the step."""
        self._sums = self._sums + loss.detach() * weight
        self._weight = self._weight + weight

    def _stepped(self) -> None:
        self._pending = True

    def _called(self, *args: Any, **kwargs: Any) -> None:
        """What the trainer takes for its scheduler's step."""
        if self._counting:
            self._kind.step(self.inner, *args, **kwargs)
            return
        if not self._pending:
            return
        loss = self._sums / self._weight if isinstance(self._sums, Tensor) else None
        self._sums = self._weight = 0.0
        self._pending, self._counting = False, True
        try:
            self.exploring.step(loss)
        finally:
            self._counting = False

    def detach(self) -> None:
        """The scheduler's own step again, no hook left."""
        self._hook.remove()
        self.inner.__class__ = self._kind
        self.inner.optimizer = self._theirs
        self.exploring.detach()


def _stepped_by(kind: type[LRScheduler], called: Callable[..., None]) -> type[LRScheduler]:
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        called(*args, **kwargs)

    return type(kind.__name__, (kind,), {"step": step})


def bare_optimizer(optimizer: Any) -> Optimizer:
    """What Accelerate has wrapped."""
    found = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(found, Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is not a torch optimizer, nor wraps one")
    return found


def bare_scheduler(scheduler: Any) -> LRScheduler:
    """What Accelerate has wrapped; one that explores already is refused by AutoLR."""
    found = (
        getattr(scheduler, "scheduler", scheduler)
        if not isinstance(scheduler, PhasedScheduler)
        else scheduler
    )
    if not isinstance(found, LRScheduler):
        raise TypeError(
            f"{type(scheduler).__name__} is not a torch scheduler, nor wraps one: use a schedule "
            "of the step count, such as cosine or linear"
        )
    return found
