"""Searching: a run with a search that one, two or four replicas can be given, and that can be
interrupted; and which rate each replica is to step with.

S is the shortest run whose search has two stages with one or two replicas.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from hdet_scale import AutoLR, FusedAdamW, HDETConfig, OneCycleAutoLR
from hdet_scale.search.constants import FIRST_SHARE, HEAD_START, LEAST_STEPS, SECOND_SHARE, STEP
from hdet_scale.search.law import translation
from tests.support.toy import batch, bits, buffers, learn, parameters, toy

ROUNDS = {1: 3, 2: 3, 4: 1}
"""Of a stage of three rates, by the number of replicas; the first of several runs no trial."""
S = math.ceil(ROUNDS[1] * LEAST_STEPS / FIRST_SHARE)
SHARES = {"first": FIRST_SHARE, "second": SECOND_SHARE}
STEPS = {
    (stage, size): int(share * S) // rounds
    for stage, share in SHARES.items()
    for size, rounds in ROUNDS.items()
}
"""Of one trial."""
FIRST, BOTH = (sum(STEPS[s, 2] * ROUNDS[2] for s in stages) for stages in (["first"], SHARES))
"""Steps of a search that ends after its first stage, and after both."""
KINDS = ("one cycle", "cosine")
RIGHT = {1: 0.05, 2: 0.01, 4: 0.04}
"""A rate that is well ahead of those beside it after the first stage, by the number of replicas;
with four of them on the cosine schedule only."""
UNCLEAR = 0.1
"""What takes both stages to stay, with four replicas on the one-cycle schedule."""
LOW, HIGH = 1e-3, 10.0
"""Far too low; so high that the search takes a hundredth of it, below the head start's rate."""
ABOVE = {2: 1.0, 4: 3.0}
"""Too high, so that the search takes a tenth of it, by the number of replicas."""
BATCHES = 32


def optimizer_for(model: nn.Module, kind: str = "adamw", lr: float = 0.1) -> Optimizer:
    if kind == "sgd":
        return SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01)
    return {"adamw": AdamW, "fused": FusedAdamW}[kind](model.parameters(), lr=lr)


def settled(model: nn.Module) -> nn.Module:
    """The same model with statistics of the data in its BatchNorm: those that it begins with are
    better than the ones of the data here, by chance, and every trial would look like a loss."""
    inner = getattr(model, "module", model)  # a forward without gradients changes DDP's own state
    with torch.no_grad():
        for i in range(60):
            inner(batch(20_000 + i, 0)[0])
    return model


def held_out(model: nn.Module) -> Any:
    """The same batches on every rank, which replicas with equal weights split."""
    x = torch.randn(BATCHES, 32, 4, generator=torch.Generator().manual_seed(99))
    y = x.sum(2, keepdim=True).sin()

    def losses(part: int = 0, parts: int = 1) -> list[Tensor]:
        return [(model(x[i]) - y[i]).square().mean() for i in range(part, BATCHES, parts)]

    return losses


def scale_of(scheduler: Any) -> float:
    """What the schedule is multiplied with."""
    return float(scheduler.get_base_lr()[0] / scheduler.get_schedule()[0])


def hooks_of(model: nn.Module, optimizer: Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(model._forward_pre_hooks)


def moments_of(optimizer: Optimizer) -> list[Any]:
    """The optimizer's state of each parameter, without making an entry where there is none."""
    return [
        dict(optimizer.state[p]) if optimizer.state.get(p) else None
        for group in optimizer.param_groups
        for p in group["params"]
    ]


# -- what a replica is to do ----------------------------------------------------------------------


def whole_schedule(kind: str, lr: float) -> list[float]:
    """What torch's own scheduler gives each step of a run."""
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], lr=lr)
    inner: Any = CosineAnnealingLR(optimizer, S)
    if kind == "one cycle":
        inner = OneCycleLR(optimizer, lr, total_steps=S, cycle_momentum=False)
    rates = []
    for _ in range(S):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        inner.step()
    return rates


def rates_of_a_search(
    rank: int, size: int, kind: str, lr: float, stages: dict[str, tuple[int, ...]]
) -> list[float]:
    """The rate of each step on one of one, two or four replicas.

    Args:
        stages: the offsets of each stage that is run.
    """
    whole = whole_schedule(kind, lr)
    warm, rates, ahead, head = whole.index(max(whole)), [], 0, HEAD_START
    for stage, offsets in stages.items():
        if min(offsets) < -1:
            head, ahead = HEAD_START / STEP, 0  # below it, from the snapshot again
        steps, at_once = STEPS[stage, size], max(1, size - 1)
        c = translation(size, steps, S, adaptive=True)
        for first in range(0, len(offsets), at_once):
            for i in range(steps):
                if size > 1 and rank == 0:
                    ahead += 1
                    rates.append(lr * head * (min(1.0, ahead / warm) if warm else 1.0))
                else:
                    offset = offsets[first + max(0, rank - 1)]
                    rates.append(lr * STEP**offset / c * warm_then_cosine(i, steps, warm))
    return rates


def warm_then_cosine(i: int, steps: int, warm: int) -> float:
    """A trial: the run's warm-up, but at most half of the trial; then a cosine to zero."""
    warm = max(1, min(warm, steps // 2))
    if i < warm:
        return (i + 1) / warm
    return (1 + math.cos(math.pi * (i - warm) / (steps - warm))) / 2


# -- a run ----------------------------------------------------------------------------------------


class Run:
    """Everything a script builds.

    Without a probe, a trial is told losses that are lowest at `best` steps from the initial rate.
    """

    def __init__(
        self,
        rank: int,
        kind: str = "one cycle",
        lr: float = LOW,
        *,
        how: str = "adamw",
        total: int = S,
        probed: bool = True,
        best: int = 1,
        wrap: bool = True,
        **options: Any,
    ) -> None:
        self.rank, self.probed, self.best = rank, probed, best
        self.model = settled(toy(rank, norm=True, rebuild=False, wrap=wrap))
        self.optimizer = optimizer_for(self.model, how, lr)
        probe = held_out(self.model) if probed else None
        config = HDETConfig(rule="auto", total_steps=total, **options)
        if kind == "one cycle":
            self.scheduler: Any = OneCycleAutoLR(
                self.optimizer, lr, total_steps=total, config=config, model=self.model,
                probe=probe, cycle_momentum=False,
            )  # fmt: skip
        else:
            inner = CosineAnnealingLR(self.optimizer, total)
            self.scheduler = AutoLR(inner, config, model=self.model, probe=probe)
        self.step = 0
        self.rates: list[float] = []
        self.records: list[Any] = []
        self.scheduler.on_record(self.records.append)
        self.stepped: Any = None
        """What was held after the last optimizer step, before the scheduler was told of it."""

    def train(self, until: int) -> None:
        while self.step < until:
            self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
            loss = learn(self.model, self.optimizer, self.step, self.rank)
            if self.scheduler.searching:
                self.stepped = self.held()
            self.scheduler.step(self.told(loss))
            self.step += 1

    def told(self, loss: Tensor) -> Tensor | float:
        if self.probed or not self.scheduler.searching:
            return loss
        phase = self.scheduler._phase
        arm = phase.trial.arm(self.rank)
        offset = 0 if arm is None else phase.trial.offsets[arm]
        return 1.0 + (offset - self.best) ** 2 + 0.01 * (phase.step % 3)

    def search(self) -> None:
        """To the first step of the run."""
        while self.scheduler.searching:
            self.train(self.step + 1)

    def save(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "own": self.scheduler.replica_state_dict(),
                "step": self.step,
            }
        )

    def load(self, saved: dict[str, Any], *, own: bool = True) -> None:
        saved = copy.deepcopy(saved)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        if own:
            self.scheduler.load_replica_state_dict(saved["own"])
        self.step = saved["step"]

    def held(self) -> Any:
        """The bits of weights, buffers and the optimizer's state."""
        counts = [b.clone() for b in self.model.buffers()]
        return bits([parameters(self.model), buffers(self.model), counts, self.moments()])

    def moments(self) -> list[Any]:
        return moments_of(self.optimizer)

    def everything(self) -> Any:
        return [
            self.held(),
            bits([self.scheduler.state_dict()["hdet"], self.scheduler.get_last_lr()]),
        ]
