"""Problems on points in space: classes that wind as spirals, and the answers of a teacher."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.problem import Params, Task, cross_entropy, linear, times


@functools.cache
def _spirals(arms: int, examples: int) -> tuple[Tensor, Tensor]:
    """Points on the arms of a spiral, under noise, and the arm of each."""
    g = torch.Generator().manual_seed(31)
    arm = torch.randint(arms, (examples,), generator=g)
    along = torch.rand(examples, generator=g).sqrt()
    angle = 2 * math.pi * (arm / arms + along)
    points = torch.stack([angle.cos(), angle.sin()], 1) * along[:, None] * 2
    return points + 0.1 * torch.randn(examples, 2, generator=g), arm


def full_batch(*, name: str = "full-batch", batch: int = 512, around: float = 0.4) -> Task:
    """The arms of a spiral, by an MLP; every step sees all 512 training examples; SGD.

    A step with as many indices as there are training examples sees each of them once, whatever
    the indices. A replica with a part of the batch sees the examples that it has drawn, as a
    sampler that shuffles in every epoch would give it another part in every step.
    """
    arms, width, train, held_out = 3, 32, 512, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, 2, width, 1.4),
            "shift": torch.zeros(1, width),
            "two": linear(g, width, width, 1.4),
            "bias": torch.zeros(1, width),
            "out": linear(g, width, arms, 0.5),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        if indices.shape[1] == train and int(indices.max()) < train:
            indices = torch.arange(train).expand_as(indices)
        points, arm = (v[indices] for v in _spirals(arms, train + held_out))
        x = torch.tanh(times(points, p["one"]) + p["shift"])
        x = torch.tanh(times(x, p["two"]) + p["bias"])
        return cross_entropy(times(x, p["out"]), arm)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="sgd",
        around=around,
        weight_decay=1e-4,
    )


@functools.cache
def _teacher(inputs: int, classes: int, examples: int) -> tuple[Tensor, Tensor]:
    """Random points, and the log-probabilities of classes that a random network gives them."""
    g = torch.Generator().manual_seed(32)
    points = torch.randn(examples, inputs, generator=g)
    hidden = torch.tanh(points @ linear(g, inputs, 24, 1.4))
    return points, (hidden @ linear(g, 24, classes, 3.0)).log_softmax(1)


def distill(*, name: str = "distill", batch: int = 64, around: float = 0.02) -> Task:
    """A student of a random teacher's soft targets; the loss is the divergence from them, near
    zero at its best; AdamW."""
    inputs, classes, width, train, held_out = 12, 8, 64, 60_000, 4096

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, inputs, width, 1.4),
            "shift": torch.zeros(1, width),
            "two": linear(g, width, width, 1.4),
            "out": linear(g, width, classes),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        points, target = (v[indices] for v in _teacher(inputs, classes, train + held_out))
        x = functional.gelu(times(points, p["one"]) + p["shift"])
        x = functional.gelu(times(x, p["two"]))
        guess = times(x, p["out"]).log_softmax(-1)
        return (target.exp() * (target - guess)).sum(-1).mean(1)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
    )
