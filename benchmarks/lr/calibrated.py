"""Optimizers at one learning rate for all tasks, the rate being chosen over all tasks at once.

AdamW, NadamW and Schedule-Free AdamW train every task, also those whose own optimizer is SGD, at
the same rates: powers of two from 2^-13 to 2^-3. All rates of one task and seed run as one stack
of copies. `benchmarks.lr.profile.calibrate` then chooses one rate for each optimizer. The weight
decay is the task's own.

NadamW is Adam with Nesterov momentum (torch.optim.NAdam with decoupled_weight_decay=True):

    mu_t = beta1 (1 - 0.96^(t psi) / 2)                       psi = 0.004
    p   <- (1 - eta lambda) p
    p   <- p - eta ((1 - mu_t) g / (1 - prod_{i <= t} mu_i)
                    + mu_{t+1} m / (1 - prod_{i <= t+1} mu_i)) / (sqrt(v / (1 - beta2^t)) + eps)

with the moments m and v of Adam. tests/benchmarks/test_calibrated.py runs the two in lockstep.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.lr.free import Free, warmed
from benchmarks.lr.problem import Stacked, Task
from benchmarks.lr.simulated import scheduled, weights

RATES = tuple(2.0**k for k in range(-13, -2))
"""The learning rates that every task is trained at."""


class Nadam(Stacked):
    """R copies by NadamW, with the betas of `Stacked`; only for tasks of "adamw"."""

    def reset(self) -> None:
        """Forget the moments and the product of the momenta."""
        super().reset()
        self.product = 1.0
        """Product of mu_1 to mu_t."""

    @torch.no_grad()
    def step(self, rates: Tensor, gradients: list[Tensor]) -> None:
        """One step of every copy with its own learning rate, [R]."""
        self.product *= self._momentum(self.count + 1)
        super().step(rates, gradients)

    @staticmethod
    def _momentum(t: int) -> float:
        return 0.9 * (1 - 0.5 * math.pow(0.96, t * 0.004))

    def _adamw(self, name: str, weight: Tensor, gradient: Tensor, rate: Tensor) -> None:
        first, second = self.first[name], self.second[name]
        beta1, beta2 = 0.9, 0.99
        mu, following = self._momentum(self.count), self._momentum(self.count + 1)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if self.task.weight_decay:
            weight.mul_(1 - rate * self.task.weight_decay)
        ahead = gradient * ((1 - mu) / (1 - self.product))
        ahead.add_(first, alpha=following / (1 - self.product * following))
        scale = math.sqrt(1 - beta2**self.count)
        weight.sub_(rate * ahead / (second.sqrt() / scale + 1e-8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An optimizer and its schedule."""

    make: type[Stacked]
    plays: Callable[[int, int], float]
    """The learning rate over its peak, by step and length of the run."""


RECIPES: Mapping[str, Recipe] = {
    "adamw": Recipe(make=Stacked, plays=scheduled),
    "nadamw": Recipe(make=Nadam, plays=scheduled),
    "schedule-free": Recipe(make=Free, plays=warmed),
}


def grid_of(name: str) -> str:
    """The method name of the rows of a recipe at all rates; their start is the rate."""
    return f"{name} grid"


def at_rates(
    recipe: Recipe, task: Task, seed: int, steps: int, rates: tuple[float, ...] = RATES
) -> list[float]:
    """Validation losses of a task trained by a recipe at each of the rates.

    Args:
        recipe: the optimizer and schedule; replaces the task's own optimizer.
        task: what is trained, with its own batch size and weight decay.
        seed: the seed of the weights and batches, as in all other runs of the arbiter.
        steps: length of the run.
        rates: peak learning rates, one for each copy.
    """
    task = dataclasses.replace(task, optimizer="adamw")
    model = recipe.make(task, weights(task, seed, len(rates)))
    peak = torch.tensor(rates)
    for t, batch in enumerate(task.draw(seed, steps)):
        _, gradients = model.gradients(batch.expand(len(rates), -1))
        model.step(peak * recipe.plays(t, steps), gradients)
    return [float(x) for x in task.validate(model.judged())]
