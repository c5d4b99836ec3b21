"""The engine protocol: an engine that nothing in the package knows trains as DDP does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from hdet_scale import OneCycleAutoLR, Replicas
from hdet_scale.engines import Engine
from hdet_scale.engines.gradient_mean import GradientMean
from tests.support.fleet import Fleet
from tests.support.toy import batch, parameters, toy

STEPS = 900
"""Enough for a search of two replicas in two stages."""


class FlatEngine(Engine):
    """A newcomer's engine: one flat tensor is trained, and the model computes with copies of it.

    It takes the mean of gradients itself, over whomever the phase says.
    """

    separable = True

    def __init__(self, model: nn.Module, replicas: Replicas) -> None:
        self.flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        super().__init__(AdamW([self.flat], lr=1e-3, foreach=False), model, replicas)
        self.whole = model
        self._mean = GradientMean(2**20)

    def share_within(self, size: int | None, bucket_bytes: int) -> None:
        self._set_team(size)

    @torch.no_grad()
    def refresh(self) -> None:
        sizes = [p.numel() for p in self.whole.parameters()]
        for p, part in zip(self.whole.parameters(), self.flat.split(sizes), strict=True):
            p.copy_(part.view_as(p))

    def step(self) -> None:
        """What this engine's user calls after a backward."""
        gradients = [p.grad for p in self.whole.parameters() if p.grad is not None]
        self.flat.grad = torch.cat([g.reshape(-1) for g in gradients])
        self._mean([self.flat.grad], self.sharers)
        self.optimizer.step()
        self.refresh()


def held_out(model: nn.Module) -> Any:
    def losses(part: int = 0, parts: int = 1) -> list[Tensor]:
        pairs = [batch(10_000 + k, 0) for k in range(part, 4, parts)]
        return [(model(x) - y).square().mean() for x, y in pairs]

    return losses


def options(rule: str) -> dict[str, Any]:
    if rule == "auto":
        return {"rule": rule}
    return {"rule": rule, "spread": 0.3, "interval": 3, "warmup_steps": 1, "pct_start": 0.1}


def on_ddp(rank: int, size: int, rule: str, steps: int) -> tuple[list[Tensor], float, str]:
    model = toy(0)
    optimizer = AdamW(model.parameters(), lr=1e-3, foreach=False)
    probe = held_out(model.module) if rule == "auto" else None
    scheduler = OneCycleAutoLR(
        optimizer, 3e-4, STEPS, model=model, probe=probe, cycle_momentum=False, **options(rule)
    )
    for step in range(steps):
        x, y = batch(step, rank)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    return parameters(model), scheduler.get_base_lr()[0], scheduler.phase


def on_the_newcomer(rank: int, size: int, rule: str, steps: int) -> tuple[list[Tensor], float, str]:
    model = toy(wrap=False)
    engine = FlatEngine(model, Replicas.world())
    probe = held_out(model) if rule == "auto" else None
    scheduler = OneCycleAutoLR(
        engine.optimizer,
        3e-4,
        STEPS,
        engine=engine,
        probe=probe,
        cycle_momentum=False,
        **options(rule),
    )
    for step in range(steps):
        x, y = batch(step, rank)
        loss = (model(x) - y).square().mean()
        model.zero_grad()
        loss.backward()
        engine.step()
        scheduler.step(loss)
    return parameters(model), scheduler.get_base_lr()[0], scheduler.phase


@pytest.mark.parametrize(("rule", "steps"), [("paper", 200), ("auto", 200)])
def test_an_unknown_engine_trains_as_ddp_does(pair: Fleet, rule: str, steps: int) -> None:
    theirs = pair.run(on_ddp, rule, steps)
    ours = pair.run(on_the_newcomer, rule, steps)
    for (mine, base, phase), (wanted, rate, name) in zip(ours, theirs, strict=True):
        assert phase == name
        assert base == pytest.approx(rate, rel=1e-4)
        for a, b in zip(mine, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
