"""A search with Schedule-Free optimizers: their averages go back with the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch.optim.lr_scheduler import LambdaLR

from hdet_scale import AutoLR, HDETConfig
from hdet_scale.search.constants import STEP
from tests.support.toy import batch, parameters, same, toy

S = 4000
BATCHES, MERGED = 16, 8
"""Of the probe, each of so many batches of training."""


class Run:
    """The probe evaluates the average x; training goes on at y."""

    def __init__(self, kind: Any, lr: float, rule: str = "auto") -> None:
        self.model = toy(wrap=False, norm=False)
        self.optimizer = kind(self.model.parameters(), lr=lr, warmup_steps=10)
        self.optimizer.train()
        schedule = LambdaLR(self.optimizer, lambda _: 1.0)
        config = HDETConfig(rule=rule, spread=0.0, total_steps=S)
        probe = self.probe if rule == "auto" else None
        self.scheduler = AutoLR(schedule, config, model=self.model, probe=probe)
        self.step = 0

    def probe(self) -> list[float]:
        self.optimizer.eval()
        drawn = [float(self.loss_of(10_000 + i)) for i in range(BATCHES * MERGED)]
        self.optimizer.train()
        return [sum(drawn[i::BATCHES]) / MERGED for i in range(BATCHES)]

    def loss_of(self, index: int) -> torch.Tensor:
        x, y = batch(index, 0)
        return (self.model(x) - y).square().mean()

    def train(self, until: int) -> None:
        while self.step < until:
            loss = self.loss_of(self.step)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)
            self.step += 1

    def averaged_loss(self) -> float:
        with torch.no_grad():
            return sum(self.probe()) / BATCHES


@pytest.mark.parametrize(("kind", "lr"), [(AdamWScheduleFree, 1e-5), (SGDScheduleFree, 1e-3)])
def test_a_search_goes_back_to_a_fresh_average_and_proposes_more(kind: Any, lr: float) -> None:
    """From a rate that is too low by more than the two steps that a search may move it."""
    run = Run(kind, lr)
    start = parameters(run.model)
    while run.scheduler.searching:
        run.train(run.step + 1)
    assert same(parameters(run.model), start)
    assert not any(run.optimizer.state.values())
    (group,) = run.optimizer.param_groups
    assert (group["k"], group["weight_sum"]) == (0, 0.0)
    assert group["lr_max"] <= 0.0
    rate = float(group["lr"])
    assert rate == lr * STEP**2, run.scheduler.verdict
    # From here on it is the run of a fresh optimizer at the proposed rate.
    fresh = Run(kind, rate, rule="none")
    fresh.step = run.step
    for until in (run.step + 1, run.step + 10):
        run.train(until)
        fresh.train(until)
        assert same(parameters(run.model), parameters(fresh.model))
    low = Run(kind, lr, rule="none")
    run.train(run.step + 500)
    low.train(500)
    assert run.averaged_loss() < 0.8 * low.averaged_loss()
