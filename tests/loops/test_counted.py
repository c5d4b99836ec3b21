"""A trainer's own scheduler counts once an optimizer step, and what does not fit is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdet_scale.config import HDETConfig
from hdet_scale.loops.counted import Counted


def test_only_a_step_of_the_optimizer_counts() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    counted = Counted(optimizer, schedule, HDETConfig(rule="paper", spread=0.0, interval=2))
    schedule.step()
    assert schedule.last_epoch == 0
    weight.grad = torch.ones(2)
    for expected in (1, 2):
        optimizer.step()
        for _ in range(3):
            schedule.step()
        assert schedule.last_epoch == expected
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**expected
    counted.detach()
    schedule.step()
    assert schedule.last_epoch == 3


def test_what_does_not_fit_is_refused() -> None:
    paper = HDETConfig(rule="paper")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match="made for another optimizer"):
        Counted(other, schedule, paper)
    with pytest.raises(TypeError, match="is not a torch scheduler"):
        Counted(optimizer, object(), paper)
    with pytest.raises(ValueError, match="use rule='paper' or 'slope', or a loop of your own"):
        Counted(optimizer, schedule, HDETConfig())
    assert type(schedule) is torch.optim.lr_scheduler.LambdaLR
