"""Numbers of a param group: weight decay and betas reach the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hdet_scale.factors.options import GroupOption, beta, weight_decay
from hdet_scale.optim.fused_adamw import FusedAdamW


def adamw(**options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1, **options)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdamW])
def test_weight_decay_reaches_the_step(kind: Any) -> None:
    """Without a gradient's pull the step shrinks the weights by lr x decay alone."""
    param = nn.Parameter(torch.ones(3))
    optimizer = kind([param], lr=0.1, weight_decay=0.5)
    factor = weight_decay(optimizer)
    factor.write(0.5, 0.2)
    param.grad = torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 0.1 * 0.1))
    assert factor.read() == 0.5 * 0.2
    assert factor.scheduled() == 0.5
    assert factor.name == "weight_decay/group0"


def test_beta_reaches_the_step() -> None:
    optimizer = adamw(betas=(0.9, 0.99))
    factor = beta(optimizer, 1)
    factor.write(0.99, 0.5)
    assert optimizer.param_groups[0]["betas"] == (0.9, pytest.approx(0.495 / 0.505))
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.full((3,), 2.0)
    optimizer.step()
    expected = 4 * (1 - 0.495 / 0.505)
    torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], torch.full((3,), expected))


def test_options_held_as_tensors_are_filled() -> None:
    optimizer = adamw()
    decay = torch.tensor(0.01)
    optimizer.param_groups[0]["weight_decay"] = decay
    weight_decay(optimizer).write(0.02, 1.0)
    assert optimizer.param_groups[0]["weight_decay"] is decay
    assert float(decay) == pytest.approx(0.02)


def test_a_loaded_optimizer_is_still_written_to() -> None:
    optimizer = adamw(weight_decay=0.5)
    factor = weight_decay(optimizer)
    optimizer.load_state_dict(adamw(weight_decay=0.1).state_dict())
    factor.write(0.5, 1.0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: weight_decay(adamw(), 3), "has 1 param groups, got index 3"),
        (lambda: weight_decay(adamw(weight_decay=0.0)), "weight_decay/group0 is 0.0"),
        (lambda: GroupOption(adamw(), "dampening"), "no option 'dampening': choose one of"),
        (lambda: beta(adamw(), 2), "has no position 2"),
        (lambda: GroupOption(adamw(), "betas"), "a factor is one number"),
    ],
)
def test_wrong_options_are_refused(make: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        make()
