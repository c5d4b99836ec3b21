"""The tensors that are stepped: memory order, replaced states, and bad input, which is refused
before anything is written.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.optim.fused_lion import FusedLion
from hdet_scale.optim.fused_sgd import FusedSGD
from tests.support.stepping import LR, drive, params


def test_channels_last_parameters_and_gradients_in_another_order() -> None:
    values = torch.randn(4, 3, 2, 2)
    mine = torch.nn.Parameter(values.clone().to(memory_format=torch.channels_last))
    yours = torch.nn.Parameter(values.clone())
    ours, theirs = FusedAdamW([mine], lr=LR), torch.optim.AdamW([yours], lr=LR, fused=True)
    for step in range(4):
        grad = torch.randn(4, 3, 2, 2)
        order = torch.channels_last if step % 2 else torch.contiguous_format
        mine.grad, yours.grad = grad.clone().to(memory_format=order), grad.clone()
        ours.step()
        theirs.step()
    assert torch.equal(mine, yours)


def test_a_state_that_the_user_replaced_is_the_one_that_is_stepped() -> None:
    mine = params()
    ours = FusedAdamW(mine, lr=LR)
    drive(2, ours, mine, FusedAdamW(params(), lr=LR), params())
    fresh = torch.zeros_like(mine[3])
    ours.state[mine[3]]["exp_avg"] = fresh
    drive(1, ours, mine, FusedAdamW(params(), lr=LR), params(), first=5)
    assert fresh.abs().sum() > 0


def sparse_grad(p: torch.nn.Parameter, _: Any) -> None:
    p.grad = torch.eye(3).to_sparse()


def set_multiplier(value: Any) -> Callable[[torch.nn.Parameter, Any], None]:
    def change(_: torch.nn.Parameter, optimizer: Any) -> None:
        optimizer.param_groups[1]["lr_multiplier"] = value

    return change


def make_complex(p: torch.nn.Parameter, _: Any) -> None:
    p.grad = None
    p.data = torch.ones(3, 3, dtype=torch.complex64)
    p.grad = torch.ones(3, 3, dtype=torch.complex64)


def make_other_dtype(p: torch.nn.Parameter, _: Any) -> None:
    p.grad = None
    p.grad_dtype = None
    p.grad = torch.ones(3, 3, dtype=torch.bfloat16)


def make_strided(p: torch.nn.Parameter, _: Any) -> None:
    p.grad = None
    p.data = torch.ones(3, 6)[:, ::2]
    p.grad = torch.ones(3, 3)


@pytest.mark.parametrize("make", [FusedAdamW, FusedSGD, FusedLion])
@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (sparse_grad, TypeError, "torch.sparse_coo"),
        (make_complex, TypeError, "complex64"),
        (make_strided, ValueError, "contiguous"),
        (make_other_dtype, TypeError, "torch.bfloat16 and the parameter torch.float32"),
        (set_multiplier(-0.5), ValueError, "lr_multiplier=-0.5"),
        (set_multiplier(float("nan")), ValueError, "lr_multiplier=nan"),
        (set_multiplier(float("inf")), ValueError, "lr_multiplier=inf"),
        (set_multiplier("2"), TypeError, "lr_multiplier='2'"),
        (set_multiplier(torch.tensor(-1.0)), ValueError, "lr_multiplier=-1.0"),
        (set_multiplier(torch.ones(2)), ValueError, "one element"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    make: Any, spoil: Any, error: type[Exception], match: str
) -> None:
    """The fault is in the second group; the first must be as it was, and so its state."""
    good, bad = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(3, 3))
    optimizer = make([{"params": [good]}, {"params": [bad]}], lr=0.1)
    good.grad, bad.grad = torch.ones(4), torch.ones(3, 3)
    spoil(bad, optimizer)
    with pytest.raises(error, match=match):
        optimizer.step()
    assert torch.equal(good, torch.ones(4))
    assert len(optimizer.state) == 0


def test_tensors_on_two_devices_are_refused() -> None:
    here, there = (
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Parameter(torch.ones(3, device="meta")),
    )
    with pytest.raises(ValueError, match=r"\['cpu', 'meta'\]"):
        FusedAdamW([here, there])
    optimizer = FusedAdamW([here])
    with pytest.raises(ValueError, match="one device"):
        optimizer.add_param_group({"params": [there, torch.nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1
