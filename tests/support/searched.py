"""Searched: a run with a search before it on one process, and its log; a run that overfits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from hdet_scale import OneCycleAutoLR
from hdet_scale.runs.log import RunLog
from hdet_scale.topology import local
from tests.support.toy import learn, toy

STEPS, EVERY = 1600, 10
TURN = 0.3
INITIAL = (1e-5, 2e-5)


class Overfitting:
    """Losses that depend on nothing but how far the weights are from their start.

    The held-out loss is lowest at a distance of `turn`, the training loss falls with the distance.
    """

    def __init__(self, model: nn.Module, turn: float = TURN) -> None:
        self.turn = turn
        self.model, self.start = model, [local(p).detach().clone() for p in model.parameters()]
        self.evaluations = 0

    def distance(self) -> float:
        squares = [
            (local(p).detach() - s).square().sum()
            for p, s in zip(self.model.parameters(), self.start, strict=True)
        ]
        return math.sqrt(float(torch.stack(squares).sum()))

    def losses(self, part: int = 0, parts: int = 1) -> Any:
        self.evaluations += 1
        held_out = 0.5 + math.log((self.distance() + 1e-3) / self.turn) ** 2
        return (held_out + 0.01 * i for i in range(part, 8, parts))

    def trained(self) -> float:
        return 0.1 / (0.1 + self.distance())


def searched(
    folder: Path, *, stop: int = STEPS, overfits: bool = False, restart_budget: float = 0.15
) -> Any:
    """Two param groups, one twice as fast; the scheduler after `stop` steps. One that overfits is
    at its best in the first third of the run, and later loses more than the watch allows."""
    torch.manual_seed(0)
    model = toy(wrap=False)
    parts = list(model.parameters())
    optimizer = AdamW([{"params": parts[:2]}, {"params": parts[2:]}])
    world = Overfitting(model, TURN / 3) if overfits else None
    scheduler = OneCycleAutoLR(
        optimizer,
        list(INITIAL),
        STEPS,
        rule="auto",
        model=model,
        cycle_momentum=False,
        restart_budget=restart_budget,
        probe=None if world is None else world.losses,
    )
    bases: list[list[float]] = []
    with RunLog(folder) as log:
        log.begin({"engine": "ddp", "size": "toy", "replicas": 1})
        scheduler.on_record(log.record)
        for step in range(1, stop + 1):
            bases.append(scheduler.get_base_lr())
            loss = learn(model, optimizer, step, 0)
            scheduler.step(loss if world is None else world.trained())
            if step % EVERY == 0:
                columns = zip(*bases, strict=True)
                log.step(step, float(loss), {f"lr/group{i}": c for i, c in enumerate(columns)})
                bases.clear()
        if stop == STEPS:
            log.end(stop)
    return scheduler
