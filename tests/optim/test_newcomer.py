"""A new optimizer is what stands at the top of this file, and nothing else.

Signed momentum: m <- m + (1 - beta) (g - m), p <- p - eta rho sgn(m). The first half would be a
file of kernels/, the second a file of optim/.
"""

from typing import Any

import pytest
import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from hdet_scale.kernels import scalars
from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.kernels.launch import jit, tl
from hdet_scale.kernels.rounding import write_reference
from hdet_scale.kernels.update import Update
from hdet_scale.optim.batches import Group
from hdet_scale.optim.fused import FusedOptimizer
from hdet_scale.optim.shared_options import SharedOptions

_RATE = tl.constexpr(scalars.OWN)


@jit
def signed_rule(p, g, m, v, lr, group, correction, MOMENTS: tl.constexpr):
    m = m + tl.load(group + _RATE) * (g - m)
    p = p - lr * tl.where(m > 0.0, 1.0, tl.where(m < 0.0, -1.0, m))
    return p, m, v


def signed_reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    *,
    master: torch.Tensor | None,
    step: int,
    lr: float,
    lr_multiplier: float,
    beta: float,
    maximize: bool,
    factor: float,
    key: int | None,
    offset: int,
) -> None:
    p = param.float() if master is None else master
    g = grad.float() * (-factor if maximize else factor)
    m = torch.lerp(exp_avg.float(), g, 1 - beta)
    p = p - lr * lr_multiplier * torch.sign(m)
    write_reference([(param, p), (exp_avg, m)], key=key, step=step, offset=offset)
    if master is not None:
        master.copy_(p)


SIGNED = Update(
    name="signed",
    rule=signed_rule,
    reference=signed_reference,
    options=("beta", "maximize"),
    moments=("exp_avg",),
)


class FusedSigned(FusedOptimizer):
    """Signed momentum.

    Args:
        params: Parameters or param groups.
        lr: The shared base LR (default: 1e-3).
        beta: Of the running mean (default: 0.9).
        **options: `SharedOptions`.
    """

    _update = SIGNED

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        beta: float = 0.9,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": 0.0}, options)

    def _own_scalars(self, group: Group) -> list[float]:
        return [1 - group["beta"]]


def stepped(dtype: torch.dtype, options: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (17, 1024)]
    optimizer = FusedSigned(params, lr=0.01, lr_multiplier=1.5, seed=3, **options)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step(clip_factor=torch.tensor(0.5))
    again = FusedSigned(params, **options)
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["beta"] == 0.9
    return [
        *(p.detach() for p in params),
        *(again.state[p]["exp_avg"] for p in params),
        *(again.state[p]["step"] for p in params),
    ]


@interpreted
def kernel_stepped(dtype: torch.dtype, options: dict[str, Any]) -> list[torch.Tensor]:
    return stepped(dtype, {**options, "backend": "triton"})


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"master_weights": True}),
        (torch.bfloat16, {"stochastic_rounding": True, "moment_dtype": torch.float32}),
        (torch.float16, {"maximize": True}),
    ],
)
def test_the_kernel_gives_what_the_reference_gives(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """On a CPU it runs the reference, since it has no step of torch's."""
    for ours, theirs in zip(kernel_stepped(dtype, options), stepped(dtype, options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(ours.dtype).eps, atol=1e-6)


def test_it_steps_by_its_equation() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedSigned([param], lr=0.1, lr_multiplier=0.5)
    for sign in (1.0, -1.0, 1.0):
        param.grad = torch.full((3,), sign)
        optimizer.step()
    # m = 0.1, -0.01, 0.091: down, up, down by 0.05.
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.95))
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], torch.full((3,), 0.091))


def test_it_has_every_shared_option() -> None:
    with pytest.raises(ValueError, match="choose one"):
        FusedSigned(
            [torch.nn.Parameter(torch.ones(3))], master_weights=True, stochastic_rounding=True
        )
    assert "seed: Of the stochastic rounding" in (FusedSigned.__doc__ or "")
