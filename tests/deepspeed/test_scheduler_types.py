"""Schedules that a DeepSpeed config or a call to initialize can name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.fleet import Fleet
from tests.support.zero_runs import MAX_LR, Run, network, on, prepare, settings


def _schedules(rank: int, size: int) -> dict[str, Any]:
    """Each way to name a schedule, and the learning rates that come of it."""
    prepare(rank, size)
    found: dict[str, Any] = {}
    quiet = {"spread": 0.0, "rule": "none"}

    def rates(name: str, scheduler: dict[str, Any] | None, **arguments: Any) -> None:
        config = settings(2, **quiet)
        config.pop("scheduler")
        if scheduler is not None:
            config["scheduler"] = scheduler
        model = network()
        groups = [
            {"params": [p for n, p in model.named_parameters() if "bias" not in n]},
            {"params": [p for n, p in model.named_parameters() if "bias" in n], "lr": MAX_LR / 4},
        ]
        run = Run(config, model=model, model_parameters=groups, **arguments)
        seen = []
        for step in range(4):
            seen.append(run.engine.get_lr())
            run.train(step, step + 1)
        found[name] = (type(run.scheduler).__name__, seen)

    warm = {"warmup_min_lr": 0.004, "warmup_max_lr": MAX_LR, "warmup_num_steps": 2}
    rates("auto warmup", {"type": "HDETAutoLR", "params": {**warm, "total_num_steps": 6}})
    rates("one cycle warmup", {"type": "HDETOneCycle", "params": {**warm, "total_num_steps": 6}})
    exponential = {"type": "ExponentialLR", "params": {"gamma": 0.5}}
    rates("named inside", {"type": "HDETAutoLR", "params": {"scheduler": exponential}})
    rates("torch's own", exponential)
    rates("a callable", None, lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    rates("none", None)
    return found


def test_schedules_by_every_name(four: Fleet) -> None:
    peak = MAX_LR
    halves = [[peak * 0.5**t, peak / 4 * 0.5**t] for t in range(4)]
    for found in on(four, _schedules):
        kind, rates = found["auto warmup"]
        factors = [0.2, 0.6, 1.0, 0.75]
        assert kind == "HDETAutoLR"
        assert rates == [pytest.approx([peak * f, peak / 4 * f]) for f in factors]
        kind, rates = found["one cycle warmup"]
        assert kind == "HDETOneCycle"
        assert rates[0] == pytest.approx([0.004, 0.001])
        assert max(r[0] for r in rates) == pytest.approx(peak)
        for name in ("named inside", "torch's own", "a callable"):
            assert found[name][1] == [pytest.approx(r) for r in halves], name
        assert found["none"][1] == [pytest.approx([peak, peak / 4])] * 4
