"""Problems whose answer is a number: real, or a count."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.problem import Params, Task, linear, times


@functools.cache
def _arm(joints: int, examples: int) -> tuple[Tensor, Tensor]:
    """Angles of the joints of a planar arm, and where its tip is, under a little noise."""
    g = torch.Generator().manual_seed(21)
    angles = (torch.rand(examples, joints, generator=g) * 2 - 1) * 1.6
    heading = angles.cumsum(1)
    length = 0.8 ** torch.arange(joints)
    tip = torch.stack([(heading.cos() * length).sum(1), (heading.sin() * length).sum(1)], 1)
    return angles, tip + 0.03 * torch.randn(examples, 2, generator=g)


def regress(*, name: str = "regress", batch: int = 32, around: float = 0.05) -> Task:
    """The tip of a robot arm from its angles, by an MLP; near zero at its best; AdamW."""
    joints, width, train, held_out = 6, 64, 60_000, 4096

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, joints, width, 1.4),
            "shift": torch.zeros(1, width),
            "two": linear(g, width, width, 1.4),
            "bias": torch.zeros(1, width),
            "out": linear(g, width, 2),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        angles, tip = _arm(joints, train + held_out)
        x = functional.silu(times(angles[indices], p["one"]) + p["shift"])
        x = functional.silu(times(x, p["two"]) + p["bias"])
        return (times(x, p["out"]) - tip[indices]).square().mean((1, 2))

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
def _events(inputs: int, examples: int) -> tuple[Tensor, Tensor]:
    """Rows of covariates, and counts of events whose log-rate is a smooth function of them."""
    g = torch.Generator().manual_seed(24)
    rows = torch.randn(examples, inputs, generator=g)
    hidden = torch.tanh(rows @ linear(g, inputs, 16, 1.2))
    score = (hidden @ linear(g, 16, 1)).squeeze(1) + 0.3 * rows[:, 0]
    return rows, torch.poisson((1.0 + 1.2 * score).exp(), generator=g)


def poisson(*, name: str = "poisson", batch: int = 64, around: float = 0.06) -> Task:
    """Counts of events from covariates, by an MLP for the log-rate; well above zero at its best;
    SGD with Nesterov momentum."""
    inputs, width, train, held_out = 10, 32, 60_000, 4096

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, inputs, width, 1.4),
            "shift": torch.zeros(1, width),
            "two": linear(g, width, width, 1.4),
            "out": linear(g, width, 1, 0.5),
            "level": torch.zeros(1, 1),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        rows, count = (v[indices] for v in _events(inputs, train + held_out))
        x = functional.relu(times(rows, p["one"]) + p["shift"])
        x = functional.relu(times(x, p["two"]))
        score = (times(x, p["out"]) + p["level"]).squeeze(-1)
        return (score.exp() - count * score + torch.lgamma(count + 1)).mean(1)

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
