"""find_lr: the search alone, before any training loop.

    found = hdet_scale.find_lr(model, optimizer, batches, loss_fn, total_steps=10_000, probe=probe)
    print(found)        # max_lr 0.0003 -> 0.003, plausible 0.00095 to 0.0095; ...
    found.apply()       # every param group has its new rate
    found.plot("rates.png")

It runs the trials of rule="auto" (docs/search.md) on the given batches and then puts everything
back: weights, buffers, optimizer state, gradients, module modes, random generators. On one process,
under DistributedDataParallel and under fully_shard (FSDP2); every rank calls it.

A rule="auto" in the training loop finds the same rate, and the run goes on meanwhile. find_lr is
for loops that cannot be changed, and for looking before one starts. It costs up to 12 % of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hdet_scale.config import HDETConfig
from hdet_scale.phases.kept import kept_as_it_is
from hdet_scale.schedulers import AutoLR
from hdet_scale.search.probe import Losses
from hdet_scale.search.result import CurvePoint, SearchResult
from hdet_scale.topology import Replicas

WARM_SHARE = 0.05
"""Share of the run that is its warm-up, where no schedule is given."""


class Found:
    """What find_lr found: the rate, how sure it is, and what it cost."""

    def __init__(self, result: SearchResult, optimizer: Optimizer) -> None:
        self.result, self.optimizer = result, optimizer

    @property
    def lr(self) -> float:
        """The learning rate of the first param group: the peak of the run's schedule."""
        return self.result.taken[0]

    @property
    def lrs(self) -> tuple[float, ...]:
        """That of each param group; their ratios are those of the initial rates."""
        return self.result.taken

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest plausible rate of the first group."""
        return self.result.range

    @property
    def curve(self) -> tuple[CurvePoint, ...]:
        """Every rate that was tried, with its held-out loss and the error of it."""
        return self.result.curve

    def plot(self, path: str | Path | None = None) -> Any:
        """The losses by rate as a matplotlib figure, saved to `path` where one is given."""
        return self.result.plot(path)

    def apply(self) -> None:
        """Give every param group its rate, for a scheduler that is made afterwards."""
        for group, rate in zip(self.optimizer.param_groups, self.lrs, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            if "initial_lr" in group:
                group["initial_lr"] = rate

    def __str__(self) -> str:
        return self.result.told


def find_lr(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    total_steps: int,
    probe: Losses | None = None,
    replicas: Replicas | None = None,
    mesh: DeviceMesh | None = None,
    scheduler: LRScheduler | None = None,
    passes: float | None = None,
    probe_batches: int = 64,
) -> Found:
    """Search for the learning rate of a run, and leave everything as it was.

    Args:
        model: plain, in DistributedDataParallel, or sharded by fully_shard.
        optimizer: steps its parameters; the "lr" of its groups is the initial rate, which stays if
            no other one is shown to be better.
        batches: training batches of this rank: a DataLoader, a list, anything that starts anew at
            each `iter(batches)`. Repeated where there are too few.
        loss_fn: called as loss_fn(model, batch), returns the loss to call backward() on.
        total_steps: optimizer steps of the run that the rate is for.
        probe: yields losses on held-out batches, the same on every rank (default None: the training
            losses at the end of a trial are compared, which needs larger differences).
        replicas: this rank's place, where ranks are not simply replicas (default None: found).
        mesh: of replicas x shards, where the model is under fully_shard (default None: found).
        scheduler: a torch scheduler of `optimizer`, not yet stepped, whose shape the run will have
            (default None: a warm-up of 5 % and a cosine to zero).
        passes: how often the run goes over its data (default None: fresh data).
        probe_batches: at most so many losses are taken from the probe (default 64).

    Returns:
        Found: `.lr`, `.lrs`, `.range`, `.curve`, `.result`, `.plot()`, `.apply()`.

    Raises:
        ValueError: where total_steps is too short for a search, or a batch yields no gradient step.
        TypeError: for batches that cannot be started anew, or an optimizer that is not torch's.

    Limitations:
        A DeepSpeed engine is refused: use rule="auto" of hdet_scale.deepspeed.initialize. One
        learning rate for all param groups together is searched. `batches` that keep a position of
        their own beside a torch generator are advanced.
    """
    _check(optimizer, batches)
    config = HDETConfig(
        rule="auto", total_steps=total_steps, passes=passes, probe_batches=probe_batches,
        restart_budget=0.0,
    )  # fmt: skip
    with kept_as_it_is(model, optimizer, batches):
        model.train()
        inner = scheduler or LambdaLR(optimizer, lambda t: shape(t, total_steps))
        phased = AutoLR(inner, config, model=model, replicas=replicas, probe=probe)
        undo = phased.detach
        try:
            if any(hasattr(p, "device_mesh") for p in model.parameters()):
                undo = _attach(model, optimizer, phased, mesh)
            if not phased.searching:
                raise ValueError(
                    f"total_steps={total_steps} is too short for a search with "
                    f"{phased.replicas.size} replicas: give the steps of the whole run"
                )
            result = _run_trials(phased, model, optimizer, batches, loss_fn)
        finally:
            undo()
    return Found(result, optimizer)


def _check(optimizer: Optimizer, batches: Iterable[Any]) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}: with "
            "DeepSpeed use hdet_scale.deepspeed.initialize and rule='auto'"
        )
    if isinstance(batches, Iterator):
        raise TypeError(
            f"batches must start anew at each iter(batches), got the iterator "
            f"{type(batches).__name__}: give the DataLoader or list that it comes from"
        )
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise ValueError(
            f"the initial rates are {rates}, and a search multiplies them: give every param group "
            "a positive lr, and a scheduler that has not begun its warm-up"
        )


def _attach(
    model: nn.Module, optimizer: Optimizer, phased: AutoLR, mesh: DeviceMesh | None
) -> Callable[[], None]:
    from hdet_scale.fsdp import attach

    return attach(model, optimizer, phased, mesh=mesh).detach


def shape(t: int, steps: int) -> float:
    """A warm-up of WARM_SHARE of the steps, then a cosine to zero; over its peak."""
    warm = max(1, round(WARM_SHARE * steps))
    if t < warm:
        return (t + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (t - warm) / max(1, steps - warm))))


def _run_trials(
    phased: AutoLR,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
) -> SearchResult:
    for batch in _repeated(batches):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        phased.step(loss.detach())
        if phased.search_result is not None:
            return phased.search_result
    raise RuntimeError("the batches ended")  # they repeat


def _repeated(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, from the start again when they end."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError("batches are empty: give the training batches of this rank")
