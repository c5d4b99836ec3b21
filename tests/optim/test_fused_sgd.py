"""FusedSGD on a CPU with parameters of 16 bits, which torch's fused SGD leaves mostly unchanged."""

from typing import Any

import pytest
import torch

from hdet_scale.optim.fused_sgd import FusedSGD
from tests.support.stepping import SGD_OPTIONS

LR, RHO = 0.05, 1.1
STEPS = 5
SIZES = [1000, 1, 33]


def gradients(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for n in SIZES]


def stepped(
    param: torch.Tensor,
    grad: torch.Tensor,
    buffer: torch.Tensor | None,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A step of SGD in fp32, and its results rounded to the dtype of the parameter. `buffer` is
    None before the first step."""
    wide = param.float()
    g = (-grad if maximize else grad).float() + weight_decay * wide
    kept = None
    if momentum:
        b = g if buffer is None else momentum * buffer.float() + (1 - dampening) * g
        kept = b.to(param.dtype)
        g = g + momentum * b if nesterov else b
    return (wide - LR * RHO * g).to(param.dtype), kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", SGD_OPTIONS)
def test_a_16_bit_parameter_is_stepped_in_fp32_and_rounded(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    params = [torch.nn.Parameter(p) for p in gradients(dtype, seed=0)]
    wanted = [p.detach().clone() for p in params]
    buffers: list[torch.Tensor | None] = [None] * len(params)
    optimizer = FusedSGD(params, lr=LR, lr_multiplier=RHO, **options)
    for step in range(1, STEPS + 1):
        for i, (param, grad) in enumerate(zip(params, gradients(dtype, step), strict=True)):
            param.grad = grad
            wanted[i], buffers[i] = stepped(wanted[i], grad, buffers[i], **options)
        optimizer.step()
        for param, want, buffer in zip(params, wanted, buffers, strict=True):
            assert torch.equal(param, want), f"step {step}: {int((param != want).sum())} differ"
            if buffer is not None:
                assert torch.equal(optimizer.state[param]["momentum_buffer"], buffer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_of_torch_goes_on_with_its_momentum(dtype: torch.dtype) -> None:
    """torch counts no steps of SGD: a buffer that is there has taken its first."""
    param = torch.nn.Parameter(gradients(dtype, seed=0)[0])
    theirs = torch.optim.SGD([param], lr=LR * RHO, momentum=0.9, dampening=0.3, fused=False)
    param.grad = gradients(dtype, seed=1)[0]
    theirs.step()
    ours = FusedSGD([param], lr=LR, lr_multiplier=RHO, momentum=0.9, dampening=0.3)
    saved = theirs.state_dict()
    ours.load_state_dict(saved)
    ours.param_groups[0]["lr"] = LR
    buffer = saved["state"][0]["momentum_buffer"].clone()
    param.grad = gradients(dtype, seed=2)[0]
    wanted, kept = stepped(param.detach(), param.grad, buffer, momentum=0.9, dampening=0.3)
    ours.step()
    assert torch.equal(param, wanted)
    assert kept is not None
    assert torch.equal(ours.state[param]["momentum_buffer"], kept)
