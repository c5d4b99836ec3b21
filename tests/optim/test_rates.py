"""How a base and a multiplier reach a param group."""

import pytest
import torch

from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.optim.rates import effective_lr, write_lr
from tests.support.stepping import params


def test_one_place_decides_where_the_multiplier_goes() -> None:
    ours = FusedAdamW(params(), lr=1.0).param_groups[0]
    theirs = torch.optim.AdamW(params(), lr=1.0).param_groups[0]
    tensor = torch.optim.AdamW(params(), lr=torch.tensor(1.0)).param_groups[0]
    kept = tensor["lr"]
    for group in (ours, theirs, tensor):
        write_lr(group, 0.2, 1.5)
        assert float(effective_lr(group)) == pytest.approx(0.3)
    assert (ours["lr"], ours["lr_multiplier"]) == (0.2, 1.5)
    assert "lr_multiplier" not in theirs
    assert tensor["lr"] is kept
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="lr_multiplier"):
            write_lr(ours, 0.1, bad)
    assert ours["lr"] == 0.2


def test_schedulers_write_the_base() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    ours = FusedAdamW([param], lr=1.0, lr_multiplier=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(ours, 1, gamma=0.1)
    param.grad = torch.ones(3)
    ours.step()
    scheduler.step()
    assert ours.param_groups[0]["lr"] == pytest.approx(0.1)
    assert ours.param_groups[0]["lr_multiplier"] == 0.5
    assert effective_lr(ours.param_groups[0]) == pytest.approx(0.05)
