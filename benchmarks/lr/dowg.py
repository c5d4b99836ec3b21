"""DoWG (distance over weighted gradients, arXiv 2305.16284) as a torch optimizer.

    r_t = max(r_{t-1}, |x_t - x_0|)          r_{-1} = 0.01
    v_t = v_{t-1} + r_t^2 |g_t|^2
    x  <- x - r_t^2 / sqrt(v_t) g_t

The norms are over all parameters. The authors' code starts from a squared distance of 1e-4.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class DoWG(torch.optim.Optimizer):
    """Gradient descent with the step size of DoWG.

    Args:
        params: what is optimized; one group.
        lr: a factor on the step size; the method itself has none. Default 1.
        distance: r_{-1}, the first estimate of the distance. Default 0.01.

    `param_groups[0]["d"]` is the step size of the last step.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1.0, distance: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "d": 0.0})
        self.begun = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.squared = torch.tensor(distance**2)
        self.weighted = torch.zeros(())

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step."""
        group = self.param_groups[0]
        params, gradients = group["params"], [p.grad for p in group["params"]]
        moved = sum((p - x).square().sum() for p, x in zip(params, self.begun, strict=True))
        self.squared = torch.maximum(self.squared, torch.as_tensor(moved))
        self.weighted = self.weighted + self.squared * sum(g.square().sum() for g in gradients)
        size = self.squared / self.weighted.sqrt()
        group["d"] = float(size)
        for p, g in zip(params, gradients, strict=True):
            p.sub_(group["lr"] * size * g)
