"""A training problem with a replica axis, and the pieces that its models are made of.

Every parameter has a leading axis R of independent copies of the model, and so has every batch:
one call trains R replicas, R seeds or R learning rates at once. A problem is a pure function of
its seed; nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Params = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem: a model, its data, its optimizer."""

    name: str
    init: Callable[[torch.Generator], Params]
    """Parameters of one copy."""
    losses: Callable[[Params, Tensor], Tensor]
    """Mean loss of each copy, [R], on its own examples, given by their indices [R, b]."""
    train: int
    """Number of training examples; indices below it are drawn with replacement."""
    held_out: int
    """Number of examples after them, which are not trained on."""
    batch: int
    """Examples of one step, over all replicas."""
    optimizer: str
    """"adamw" or "sgd" (Nesterov, 0.9)."""
    around: float
    """The middle of the grid of learning rates."""
    weight_decay: float = 0.0
    steps: tuple[int, int] = (800, 2000)
    """The two run lengths."""
    evaluate: Callable[[Params, Tensor], Tensor] | None = None
    """Loss in eval mode; None where it is the same as in training."""

    def evaluated(self, params: Params, indices: Tensor) -> Tensor:
        """Mean loss of each copy, [R], in eval mode, on examples given by their indices [R, b]."""
        return (self.evaluate or self.losses)(params, indices)

    def draw(self, seed: int, steps: int, batch: int | None = None) -> Tensor:
        """The examples of a whole run: indices [steps, batch]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.train, (steps, batch or self.batch), generator=generator)

    def validate(self, params: Params, examples: int = 1024, block: int = 64) -> Tensor:
        """Loss of each copy, [R], on the same held-out examples."""
        count = next(iter(params.values())).shape[0]
        total = torch.zeros(count)
        examples = min(examples, self.held_out)
        indices = torch.arange(self.train, self.train + examples)
        with torch.no_grad():
            for part in indices.split(block):
                total += self.evaluated(params, part.expand(count, -1)) * len(part)
        return total / examples


class Stacked:
    """R copies of a model and their optimizer; every copy has a learning rate of its own."""

    def __init__(self, task: Task, params: Params) -> None:
        self.task = task
        self.params = {k: v.detach().clone().requires_grad_() for k, v in params.items()}
        self.reset()

    def reset(self) -> None:
        """Forget the moments."""
        self.first = {k: torch.zeros_like(v) for k, v in self.params.items()}
        self.second = {k: torch.zeros_like(v) for k, v in self.params.items()}
        self.count = 0

    def gradients(self, indices: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Losses [R] and the gradient of each copy on its examples [R, b]."""
        losses = self.task.losses(self.params, indices)
        return losses.detach(), list(torch.autograd.grad(losses.sum(), list(self.params.values())))

    @torch.no_grad()
    def step(self, rates: Tensor, gradients: list[Tensor]) -> None:
        """One step of every copy with its own learning rate, [R]."""
        self.count += 1
        update = self._adamw if self.task.optimizer == "adamw" else self._nesterov
        for (name, weight), gradient in zip(self.params.items(), gradients, strict=True):
            update(name, weight, gradient, rates.view(-1, *[1] * (weight.dim() - 1)))

    def _adamw(self, name: str, weight: Tensor, gradient: Tensor, rate: Tensor) -> None:
        first, second = self.first[name], self.second[name]
        beta1, beta2 = 0.9, 0.99
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = math.sqrt(1 - beta2**self.count)
        if self.task.weight_decay:
            weight.mul_(1 - rate * self.task.weight_decay)
        step = rate / (1 - beta1**self.count)
        weight.sub_(step * first / (second.sqrt() / scale + 1e-8))

    def _nesterov(self, name: str, weight: Tensor, gradient: Tensor, rate: Tensor) -> None:
        if self.task.weight_decay:
            gradient = gradient + self.task.weight_decay * weight
        buffer = self.first[name]
        buffer.mul_(0.9).add_(gradient)
        weight.sub_(rate * (gradient + 0.9 * buffer))

    def judged(self) -> Params:
        """The weights that a loss is taken of outside of training."""
        return self.params

    def copies(self) -> Params:
        """Copies of the parameters, detached."""
        return {k: v.detach().clone() for k, v in self.params.items()}


# -- pieces ---------------------------------------------------------------------------------------


def normal(generator: torch.Generator, *shape: int, scale: float) -> Tensor:
    return torch.randn(*shape, generator=generator) * scale


def linear(generator: torch.Generator, fan_in: int, fan_out: int, gain: float = 1.0) -> Tensor:
    return normal(generator, fan_in, fan_out, scale=gain / math.sqrt(fan_in))


def times(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, ..., i] times weight [R, i, o]."""
    return torch.bmm(x.flatten(1, -2), weight).unflatten(1, x.shape[1:-1])


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """table [R, v, d] at index [R, ...]."""
    count, size, width = table.shape
    shift = torch.arange(count).view(-1, *[1] * (index.dim() - 1)) * size
    return functional.embedding(index + shift, table.reshape(count * size, width))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over everything but the replica axis."""
    flat = functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return flat.view(logits.shape[0], -1).mean(1)
