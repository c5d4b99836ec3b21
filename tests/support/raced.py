"""Raced: a real run with a race before it, on one process, and its log; a world that overfits."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import AdamW

from hdet_scale import OneCycleAutoLR
from hdet_scale.runs.log import RunLog
from hdet_scale.search.trials import LONG
from hdet_scale.topology import local
from tests.support.toy import learn, toy

STEPS, EVERY = 1600, 10
TURN = 0.3
GIVEN = (1e-5, 2e-5)


@contextlib.contextmanager
def short_runs() -> Iterator[None]:
    """rule="auto" races from heats of five steps on: a test has no time for more."""
    with (
        mock.patch("hdet_scale.phases.assembly.ENOUGH", 5),
        mock.patch("hdet_scale.search.driver.ENOUGH", 5),
    ):
        yield


@contextlib.contextmanager
def blind(parts: int) -> Iterator[None]:
    """Every race has a long stage, of so many teams."""
    before = LONG.parts
    object.__setattr__(LONG, "parts", parts)
    try:
        with mock.patch("hdet_scale.search.decision.LEARNT", 2.0):
            yield
    finally:
        object.__setattr__(LONG, "parts", before)


def sighted(work: Any) -> Any:
    """A test's heats of five steps learn next to nothing: for `work` they count all the same."""

    @functools.wraps(work)
    def patched(*args: Any, **options: Any) -> Any:
        with mock.patch("hdet_scale.search.decision.LEARNT", -1.0):
            return work(*args, **options)

    return patched


class Way:
    """How far the weights have come, and losses that depend on nothing else."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.start = model, [local(p).detach().clone() for p in model.parameters()]
        self.looked = 0

    def gone(self) -> float:
        squares = [
            (local(p).detach() - s).square().sum()
            for p, s in zip(self.model.parameters(), self.start, strict=True)
        ]
        return math.sqrt(float(torch.stack(squares).sum()))

    def losses(self, part: int = 0, parts: int = 1) -> Any:
        self.looked += 1
        held = 0.5 + math.log((self.gone() + 1e-3) / TURN) ** 2
        return (held + 0.01 * i for i in range(part, 8, parts))

    def trained(self) -> float:
        return 0.1 / (0.1 + self.gone())


def raced(folder: Path, *, stop: int = STEPS, overfits: bool = False) -> Any:
    """Two param groups, one twice as fast; the scheduler."""
    torch.manual_seed(0)
    model = toy(wrap=False)
    parts = list(model.parameters())
    optimizer = AdamW([{"params": parts[:2]}, {"params": parts[2:]}])
    way = Way(model) if overfits else None
    with short_runs():
        scheduler = OneCycleAutoLR(
            optimizer,
            list(GIVEN),
            STEPS,
            rule="race" if way is None else "auto",
            model=model,
            cycle_momentum=False,
            probe=None if way is None else way.losses,
        )
    bases: list[list[float]] = []
    with RunLog(folder) as log:
        log.begin({"engine": "ddp", "size": "toy", "replicas": 1})
        scheduler.on_record(log.record)
        for step in range(1, stop + 1):
            bases.append(scheduler.get_base_lr())
            loss = learn(model, optimizer, step, 0)
            scheduler.step(loss if way is None else way.trained())
            if step % EVERY == 0:
                columns = zip(*bases, strict=True)
                log.step(step, float(loss), {f"lr/group{i}": c for i, c in enumerate(columns)})
                bases.clear()
        if stop == STEPS:
            log.end(stop)
    return scheduler
