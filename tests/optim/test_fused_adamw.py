"""What is AdamW's alone: its dtypes, tensor learning rates, states that are refused."""

import pytest
import torch

from hdet_scale.optim.fused_adamw import FusedAdamW
from tests.support.stepping import LR, RHO, drive, params, same


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_torchs_too(dtype: torch.dtype) -> None:
    mine, yours = params(dtype), params(dtype)
    ours = FusedAdamW(mine, lr=LR, lr_multiplier=RHO)
    theirs = torch.optim.AdamW(yours, lr=LR * RHO, fused=True)
    drive(30, ours, mine, theirs, yours)
    assert same(mine, yours)
    assert ours.state[mine[3]]["exp_avg"].dtype == dtype


def test_tensor_lr_and_multiplier() -> None:
    mine, yours = params(), params()
    ours = FusedAdamW(mine, lr=torch.tensor(LR), lr_multiplier=torch.tensor(2.0), capturable=True)
    theirs = torch.optim.AdamW(yours, lr=torch.tensor(LR) * 2.0, fused=True)
    drive(5, ours, mine, theirs, yours)
    assert same(mine, yours)


def test_a_state_that_no_kernel_steps_is_refused() -> None:
    amsgrad = torch.optim.AdamW(params(), amsgrad=True).state_dict()
    ours = FusedAdamW(params(), lr=LR)
    with pytest.raises(ValueError, match="amsgrad"):
        ours.load_state_dict(amsgrad)
    assert ours.param_groups[0]["lr"] == LR
    adam = torch.optim.Adam(params()).state_dict()
    with pytest.raises(ValueError, match="AdamW"):
        ours.load_state_dict(adam)
