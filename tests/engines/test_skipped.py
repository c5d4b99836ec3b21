"""A replica that skips steps has less optimizer state than the others, and converges with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet_scale import ConvergePolicy, FusedAdamW, FusedSGD, OneCycleAutoLR
from tests.support.fleet import Fleet
from tests.support.toy import batch, moments, parameters, same, toy

T, S = 4, 24
SGD = {"momentum": 0.9, "dampening": 0.5}


def backward(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = (t.to(next(model.parameters()).dtype) for t in batch(step, rank))
    loss = (model(x) - y).square().mean()
    model.zero_grad()
    loss.backward()
    return loss.detach().float()


def skips(model: nn.Module, step: int, rank: int, what: str) -> bool:
    """Replica 1 in its first round: takes the gradients away, of all parameters or of some."""
    if rank != 1 or step >= T:
        return False
    for p in list(model.parameters())[2 if what == "some" else 0 :]:
        p.grad = None
    return what == "all"


class Run:
    """A 16-bit toy with fp32 masters, or "wide" in fp32; local gradients."""

    def __init__(self, kind: str, **policy: Any) -> None:
        self.model = toy(wrap=False)
        if kind != "wide":
            self.model.bfloat16()
        params = list(self.model.parameters())
        if kind == "wide":
            self.optimizer: Any = torch.optim.AdamW(params)
        elif kind == "adamw":
            self.optimizer = FusedAdamW(params, lr=0.1, master_weights=True)
        else:
            self.optimizer = FusedSGD(params, lr=0.1, master_weights=True, **SGD)
        self.scheduler = OneCycleAutoLR(
            self.optimizer,
            0.05,
            total_steps=S,
            ensemble_lr_spread_ratio=0.4,
            model_sync_interval=T,
            cycle_momentum=False,
            model=self.model,
            gradients="local",
            converge=ConvergePolicy(**policy),
        )
        self.rates: list[float] = []

    def train(self, first: int, last: int, rank: int, what: str) -> None:
        for step in range(first, last):
            self.rates.append(float(self.scheduler.get_last_lr()[0]))
            loss = backward(self.model, step, rank)
            skipped = skips(self.model, step, rank, what)
            if not skipped:
                self.optimizer.step()
            self.scheduler.step(None if skipped else loss)

    def masters(self) -> list[Tensor]:
        return [self.optimizer.state[p]["master"].clone() for p in self.model.parameters()]


class Plain:
    """One replica by torch's own optimizer: fp32 masters beside a 16-bit model."""

    def __init__(self, kind: str) -> None:
        self.model = toy(wrap=False).bfloat16()
        self.masters = [p.detach().float() for p in self.model.parameters()]
        # A group each: torch's fused SGD steps no group of which only some have a momentum.
        groups = [{"params": [m]} for m in self.masters]
        if kind == "adamw":
            self.optimizer: Any = torch.optim.AdamW(groups, fused=True)
        else:
            self.optimizer = torch.optim.SGD(groups, fused=True, **SGD)

    def step(self, step: int, rank: int, lr: float, what: str) -> None:
        backward(self.model, step, rank)
        skipped = skips(self.model, step, rank, what)
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if not skipped:
            self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            p.copy_(master)

    def moments(self) -> list[Tensor]:
        state = self.optimizer.state
        return [
            v
            for m in self.masters
            for _, v in sorted(state[m].items())
            if isinstance(v, Tensor) and v.shape == m.shape
        ]


@torch.no_grad()
def averaged(one: list[Tensor], two: list[Tensor]) -> None:
    for a, b in zip(one, two, strict=True):
        a.copy_((a + b) / 2)
        b.copy_(a)


def by_torch(kind: str, rates: list[list[float]], what: str) -> list[list[Tensor]]:
    """Both replicas in one process: masters after each of three rounds."""
    pair, ends = [Plain(kind), Plain(kind)], []
    for step in range(3 * T):
        for rank, replica in enumerate(pair):
            replica.step(step, rank, rates[rank][step], what)
        if (step + 1) % T == 0:
            averaged(pair[0].masters, pair[1].masters)
            held = [replica.moments() for replica in pair]
            if len(held[0]) == len(held[1]):  # moments wait until every replica has them
                averaged(*held)
            for replica in pair:
                replica.round()
            ends.append([m.clone() for m in pair[0].masters])
    return ends


def _masters(rank: int, size: int, kind: str, what: str, policy: dict[str, Any]) -> Any:
    run, ends = Run(kind, **policy), []
    for end in range(T, 4 * T, T):
        run.train(end - T, end, rank, what)
        ends.append(run.masters())
    return run.rates, ends, parameters(run.model)


@pytest.mark.parametrize("what", ["all", "some"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_masters_made_at_the_first_step_are_averaged_without_one(
    pair: Fleet, kind: str, what: str
) -> None:
    """A replica without a first step used to list 16-bit parameters beside the others' masters,
    and every rank raised at the converge."""
    (rates, mine, weights), (other_rates, other, _) = pair.run(_masters, kind, what, {}, seconds=60)
    wanted = by_torch(kind, [rates, other_rates], what)
    for ours, theirs, plain in zip(mine, other, wanted, strict=True):
        assert same(ours, theirs, plain)
    assert same(weights, [m.bfloat16() for m in wanted[-1]])


@pytest.mark.parametrize(
    "policy", [{"overlap": True}, {"fragments": 2}, {"wire": "int8"}, {"moments": False}]
)
def test_other_converges_take_in_a_replica_without_masters(
    pair: Fleet, policy: dict[str, Any]
) -> None:
    runs = pair.run(_finished, policy, seconds=60)
    assert same(*(masters for masters, _ in runs))
    assert all(bool(m.isfinite().all()) for masters, _ in runs for m in masters)
    assert all(same([m.bfloat16() for m in masters], weights) for masters, weights in runs)


def _finished(rank: int, size: int, policy: dict[str, Any]) -> Any:
    run = Run("adamw", **policy)
    run.train(0, 2 * T + 1, rank, "all")
    run.scheduler.finalize()
    return run.masters(), parameters(run.model)


def _checkpointed(rank: int, size: int, until: int) -> Any:
    run = Run("wide", moments=False)
    run.train(0, until, rank, "all")
    run.scheduler.equalize()
    return parameters(run.model), [m for m in moments(run.optimizer) if m.dim()]


@pytest.mark.parametrize("until", [T, T + 2])
def test_a_checkpoint_for_all_where_moments_are_each_replicas_own(pair: Fleet, until: int) -> None:
    """A replica without moments used to leave the others alone in their averaging."""
    (mine, held), (other, theirs) = pair.run(_checkpointed, until, seconds=20)
    assert same(mine, other)
    assert same(held, theirs) is (until > T)
