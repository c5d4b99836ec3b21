"""Raced: a real run with a race before it, on one process, and its log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from hdet_scale import OneCycleAutoLR
from hdet_scale.runlog import RunLog
from tests.toy import learn, toy

STEPS, EVERY = 1200, 10
GIVEN = (1e-5, 2e-5)


def raced(folder: Path, *, stop: int = STEPS) -> Any:
    """Two param groups, one twice as fast; the scheduler."""
    torch.manual_seed(0)
    model = toy(wrap=False)
    parts = list(model.parameters())
    optimizer = AdamW([{"params": parts[:2]}, {"params": parts[2:]}])
    scheduler = OneCycleAutoLR(
        optimizer, list(GIVEN), STEPS, rule="race", model=model, cycle_momentum=False
    )
    bases: list[list[float]] = []
    with RunLog(folder) as log:
        log.begin({"engine": "ddp", "size": "toy", "replicas": 1, **scheduler.race_told})
        scheduler.on_round(log.round)
        for step in range(1, stop + 1):
            bases.append(scheduler.get_base_lr())
            loss = learn(model, optimizer, step, 0)
            scheduler.step(loss)
            if step % EVERY == 0:
                columns = zip(*bases, strict=True)
                log.step(step, float(loss), {f"lr/group{i}": c for i, c in enumerate(columns)})
                bases.clear()
        if stop == STEPS:
            log.end(stop)
    return scheduler
