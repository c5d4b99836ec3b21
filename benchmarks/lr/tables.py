"""Problems on tables: made up by a formula and a seed, with noise."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.problem import Params, Task, linear, look_up, normal, times


@functools.cache
def _fields(count: int, size: int, examples: int) -> tuple[Tensor, Tensor]:
    """Categorical rows and their binary labels: main effects, pair effects and coin flips."""
    g = torch.Generator().manual_seed(1)
    frequency = 1.0 / torch.arange(1, size + 1)
    rows = torch.stack(
        [torch.multinomial(frequency, examples, True, generator=g) for _ in range(count)], 1
    )
    score = torch.zeros(examples)
    for i in range(count):
        score += torch.randn(size, generator=g)[rows[:, i]] * 0.6
    for i in range(0, count, 2):
        table = torch.randn(size, size, generator=g)
        score += table[rows[:, i], rows[:, i + 1]]
    label = torch.rand(examples, generator=g) < torch.sigmoid(score)
    return rows, label.float()


def tab(*, name: str = "tab", batch: int = 256, around: float = 0.01) -> Task:
    """Twelve categorical fields with embeddings, a small MLP, a binary label; Adam."""
    count, size, width, hidden = 12, 40, 8, 64
    train, held_out = 60_000, 8192

    def init(g: torch.Generator) -> Params:
        return {
            "embed": normal(g, count * size, width, scale=0.1),
            "one": linear(g, count * width, hidden, 1.4),
            "two": linear(g, hidden, hidden, 1.4),
            "out": linear(g, hidden, 1),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        rows, label = _fields(count, size, train + held_out)
        x = look_up(p["embed"], rows[indices] + torch.arange(count) * size).flatten(2)
        x = functional.relu(times(x, p["one"]))
        x = functional.relu(times(x, p["two"]))
        logit = times(x, p["out"]).squeeze(-1)
        wrong = functional.binary_cross_entropy_with_logits(logit, label[indices], reduction="none")
        return wrong.mean(1)

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


@functools.cache
def _ratings(users: int, items: int, rank: int, examples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Who rated what and how: low rank, popular items more often, and noise."""
    g = torch.Generator().manual_seed(4)
    who = torch.randint(users, (examples,), generator=g)
    popular = 1.0 / torch.arange(1, items + 1).float().sqrt()
    what = torch.multinomial(popular, examples, True, generator=g)
    taste, kind = (torch.randn(n, rank, generator=g) for n in (users, items))
    rating = (taste[who] * kind[what]).sum(1) / math.sqrt(rank)
    return who, what, rating + 0.3 * torch.randn(examples, generator=g)


def factor(
    *, name: str = "factor", batch: int = 256, around: float = 0.02, train: int = 60_000
) -> Task:
    """Ratings of items by users, as a product of embeddings; Adam on a squared error."""
    users, items, width, held_out = 300, 200, 12, 4096

    def init(g: torch.Generator) -> Params:
        return {
            "user": normal(g, users, width, scale=0.1),
            "item": normal(g, items, width, scale=0.1),
            "shift": torch.zeros(items, 1),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        who, what, rating = (x[indices] for x in _ratings(users, items, 4, train + held_out))
        product = (look_up(p["user"], who) * look_up(p["item"], what)).sum(-1)
        return (product + look_up(p["shift"], what).squeeze(-1) - rating).square().mean(1)

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


@functools.cache
def _surface(inputs: int, examples: int) -> tuple[Tensor, Tensor]:
    """Points and a smooth function of them, the sum of a few waves, under noise."""
    g = torch.Generator().manual_seed(5)
    points = torch.rand(examples, inputs, generator=g) * 2 - 1
    waves = torch.randn(inputs, 12, generator=g) * 1.5
    value = (points @ waves + torch.rand(12, generator=g) * 6.28).sin().mean(1) * 2
    return points, value + 0.1 * torch.randn(examples, generator=g)


def deep(*, name: str = "deep", batch: int = 64, around: float = 0.02) -> Task:
    """A residual MLP of six layers on a smooth function, by SGD with Nesterov momentum."""
    inputs, width, layers, train, held_out = 6, 48, 6, 60_000, 4096

    def init(g: torch.Generator) -> Params:
        params = {"enter": linear(g, inputs, width, 1.4), "out": linear(g, width, 1)}
        for i in range(layers):
            params[f"up{i}"] = linear(g, width, width, 1.4)
            params[f"down{i}"] = linear(g, width, width, 0.5)
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        points, value = _surface(inputs, train + held_out)
        x = times(points[indices], p["enter"])
        for i in range(layers):
            x = x + times(functional.silu(times(x, p[f"up{i}"])), p[f"down{i}"])
        return (times(x, p["out"]).squeeze(-1) - value[indices]).square().mean(1)

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


def fields(*, name: str = "fields", batch: int = 128, around: float = 0.2) -> Task:
    """The rows of `tab`, by embeddings and one normalised layer; SGD with Nesterov momentum."""
    count, size, width, hidden = 12, 40, 6, 48
    train, held_out = 60_000, 8192

    def init(g: torch.Generator) -> Params:
        return {
            "embed": normal(g, count * size, width, scale=0.3),
            "one": linear(g, count * width, hidden, 1.4),
            "out": linear(g, hidden, 1),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        rows, label = _fields(count, size, train + held_out)
        x = look_up(p["embed"], rows[indices] + torch.arange(count) * size).flatten(2)
        x = functional.relu(functional.layer_norm(times(x, p["one"]), (hidden,)))
        guess = times(x, p["out"]).squeeze(-1)
        wrong = functional.binary_cross_entropy_with_logits(guess, label[indices], reduction="none")
        return wrong.mean(1)

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


def smooth(
    *, name: str = "smooth", batch: int = 32, around: float = 0.01, train: int = 60_000
) -> Task:
    """The function of `deep`, by an MLP of three layers and AdamW on a squared error."""
    inputs, width, held_out = 6, 64, 4096

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, inputs, width, 1.4),
            "shift": torch.zeros(1, width),
            "two": linear(g, width, width, 1.4),
            "out": linear(g, width, 1),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        points, value = _surface(inputs, train + held_out)
        x = functional.gelu(times(points[indices], p["one"]) + p["shift"])
        x = functional.gelu(times(x, p["two"]))
        return (times(x, p["out"]).squeeze(-1) - value[indices]).square().mean(1)

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
