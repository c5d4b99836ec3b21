"""Problems that may explode or die in the middle of a run: recurrences and a deep network, of which
short trials say little."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.images import noisy_digits
from benchmarks.lr.problem import Params, Task, cross_entropy, linear, look_up, normal, times
from benchmarks.lr.texts import VOCABULARY, windows


def stripes(*, name: str = "stripes", batch: int = 64, around: float = 0.1) -> Task:
    """Digits under fresh noise, row after row through a plain recurrence, by SGD."""
    hidden, train, held_out = 40, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "input": linear(g, 8, hidden),
            "state": linear(g, hidden, hidden),
            "out": linear(g, hidden, 10, 0.5),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = noisy_digits(indices, train)
        state = torch.zeros(*indices.shape, hidden)
        for row in images.unbind(-2):
            state = torch.tanh(times(row, p["input"]) + times(state, p["state"]))
        return cross_entropy(times(state, p["out"]), labels)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="sgd",
        around=around,
    )


def elman(*, name: str = "elman", batch: int = 32, around: float = 0.2) -> Task:
    """The next byte, through a plain recurrence of ReLUs that begins as the identity; SGD."""
    context, width, hidden, train, held_out = 24, 16, 48, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "embed": normal(g, VOCABULARY, width, scale=0.5),
            "input": linear(g, width, hidden),
            "state": torch.eye(hidden) + normal(g, hidden, hidden, scale=0.02),
            "out": linear(g, hidden, VOCABULARY, 0.5),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, target = windows(context, indices, train, held_out)
        drive = times(look_up(p["embed"], tokens), p["input"])
        state, seen = drive.new_zeros(*indices.shape, hidden), []
        for moment in drive.unbind(2):
            state = functional.relu(moment + times(state, p["state"]))
            seen.append(state)
        return cross_entropy(times(torch.stack(seen, 2), p["out"]), target)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="sgd",
        around=around,
    )


@functools.cache
def _sums(length: int, examples: int) -> tuple[Tensor, Tensor]:
    """Numbers, two of which are marked; and their sum, not quite."""
    g = torch.Generator().manual_seed(11)
    numbers = torch.rand(examples, length, generator=g)
    order = torch.rand(examples, length, generator=g).argsort(1)
    marks = torch.zeros(examples, length).scatter_(1, order[:, :2], 1.0)
    noise = 0.1 * torch.randn(examples, generator=g)
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(1) + noise


def adding(*, name: str = "adding", batch: int = 64, around: float = 0.004) -> Task:
    """The sum of the two numbers of ten that are marked, through a plain recurrence; AdamW."""
    length, hidden, train, held_out = 10, 40, 60_000, 4096

    def init(g: torch.Generator) -> Params:
        return {
            "input": linear(g, 2, hidden),
            "state": linear(g, hidden, hidden),
            "out": linear(g, hidden, 1, 0.5),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        x, total = (v[indices] for v in _sums(length, train + held_out))
        state = torch.zeros(*indices.shape, hidden)
        for step in x.unbind(-2):
            state = torch.tanh(times(step, p["input"]) + times(state, p["state"]))
        return (times(state, p["out"]).squeeze(-1) - total).square().mean(1)

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


def relu(*, name: str = "relu", batch: int = 64, around: float = 0.1) -> Task:
    """Seven layers of ReLUs on digits under fresh noise, one label in ten wrong; SGD."""
    hidden, layers, train, held_out = 48, 6, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        sizes = [64, *[hidden] * layers]
        return {
            **{f"layer{i}": linear(g, sizes[i], hidden, 1.4) for i in range(layers)},
            "out": linear(g, hidden, 10),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = noisy_digits(indices, train)
        x = images.flatten(2)
        for i in range(layers):
            x = functional.relu(times(x, p[f"layer{i}"]))
        wrong = (indices * 2654435761 % 1000) < 100
        return cross_entropy(times(x, p["out"]), torch.where(wrong, (labels + 1) % 10, labels))

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="sgd",
        around=around,
    )
