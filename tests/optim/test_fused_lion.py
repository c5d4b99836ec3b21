"""Lion on a CPU: its equation, and its reference."""

import torch

from hdet_scale.kernels.lion import lion_reference
from hdet_scale.optim.fused_lion import FusedLion
from tests.support.stepping import LR, RHO, params


def test_lion_is_its_equation() -> None:
    """Against the three lines of the paper, written out in fp64."""
    mine = params()
    ours = FusedLion(mine, lr=LR, lr_multiplier=RHO, betas=(0.9, 0.99), weight_decay=0.1)
    values = [p.detach().double() for p in mine]
    moments = [torch.zeros_like(v) for v in values]
    for step in range(100):
        generator = torch.Generator().manual_seed(step)
        for i, param in enumerate(mine):
            g = torch.randn(param.shape, generator=generator)
            param.grad = g.clone()
            direction = (0.9 * moments[i] + 0.1 * g.double()).sign()
            values[i] -= LR * RHO * (direction + 0.1 * values[i])
            moments[i] = 0.99 * moments[i] + 0.01 * g.double()
        ours.step()
    limit = 100 * 2.0**-24 * max(v.abs().max().item() for v in values if v.numel())
    for a, b in zip(mine, values, strict=True):
        torch.testing.assert_close(a.detach().double(), b, rtol=0, atol=limit)
    assert ours.state[mine[1]]["step"].item() == 100


def test_lion_reference_is_the_foreach_step() -> None:
    mine = params()
    ours = FusedLion(mine, lr=LR, weight_decay=0.1)
    values = [p.detach().clone() for p in mine]
    moments = [torch.zeros_like(v) for v in values]
    for step in range(1, 101):
        generator = torch.Generator().manual_seed(step)
        for v, m, param in zip(values, moments, mine, strict=True):
            param.grad = torch.randn(param.shape, generator=generator)
            lion_reference(v, param.grad, m, step=step, lr=LR, weight_decay=0.1)
        ours.step()
    limit = 100 * 2.0**-24 * max(v.abs().max().item() for v in values if v.numel())
    for a, b in zip(mine, values, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=0, atol=limit)
