"""Schedule-Free copies: the optimizer without a schedule, with an axis for its copies.

    y = (1 - beta) z + beta x          where the gradient is taken
    z <- z - eta g(y)                  g: divided by its size for AdamW
    x <- (1 - c) x + c z               c = w / sum of w, w = (largest eta so far)^2

x is the average that counts in the end. The library's own (`schedulefree`) has one learning rate
for all its parameters; tests/benchmarks/test_simulated.py runs the two in lockstep.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.lr.problem import Params, Stacked
from benchmarks.lr.simulated import WARM

BETA = 0.9


def warmed(t: int, steps: int) -> float:
    """The schedule of Schedule-Free: a warm-up alone."""
    return min(1.0, (t + 1) / max(1, round(WARM * steps)))


class Free(Stacked):
    """R copies by AdamW or SGD without a schedule; `params` is y."""

    def reset(self) -> None:
        """Forget the average and the second moments."""
        super().reset()
        self.z = {k: v.detach().clone() for k, v in self.params.items()}
        self.largest = torch.zeros(next(iter(self.params.values())).shape[0])
        self.weights = torch.zeros_like(self.largest)

    @torch.no_grad()
    def step(self, rates: Tensor, gradients: list[Tensor]) -> None:
        """One step of every copy with its own learning rate, [R]."""
        self.count += 1
        self.largest = torch.maximum(self.largest, rates)
        weight = self.largest.square()
        self.weights = self.weights + weight
        share = torch.where(self.weights > 0, weight / self.weights, 0.0)
        for (name, y), gradient in zip(self.params.items(), gradients, strict=True):
            shape = (-1, *[1] * (y.dim() - 1))
            eta, c, z = rates.view(shape), share.view(shape), self.z[name]
            g = self._divided(name, gradient) + self.task.weight_decay * y
            y.add_(c * (z - y)).add_(eta * (BETA * (1 - c) - 1) * g)
            z.sub_(eta * g)

    def _divided(self, name: str, gradient: Tensor) -> Tensor:
        if self.task.optimizer != "adamw":
            return gradient
        beta, second = 0.999, self.second[name]
        second.mul_(beta).addcmul_(gradient, gradient, value=1 - beta)
        return gradient / (second.sqrt() / math.sqrt(1 - beta**self.count) + 1e-8)

    def judged(self) -> Params:
        """x."""
        return {k: (y - (1 - BETA) * self.z[k]) / BETA for k, y in self.params.items()}
