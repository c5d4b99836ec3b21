"""Toy: a small network and its batches, the same on every machine; enough to train with DDP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class Toy(nn.Module):
    """Two layers, a BatchNorm between them, and a mask with an infinity when asked."""

    def __init__(self, *, norm: bool = False, mask: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.outer = nn.Linear(6, 1)
        if mask:
            self.register_buffer("mask", torch.triu(torch.full((3, 3), -torch.inf), 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.norm(self.inner(x))))


def toy(rank: int = 0, *, wrap: bool = True, rebuild: bool = True, **features: bool) -> nn.Module:
    """Different on every rank until DDP's broadcast, like a model in a careless script.

    rebuild=False: DDP keeps the buckets it starts with. Otherwise it orders them anew after the
    first step, so that with three ranks or more the first gradient after a resume is summed in
    another order than in the unbroken run, HDET or not.
    """
    torch.manual_seed(rank if wrap else 0)
    model = Toy(**features)
    if not wrap:
        return model
    return DistributedDataParallel(model, find_unused_parameters=not rebuild)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A pure function of the step and the rank."""
    g = torch.Generator().manual_seed(7919 * step + rank)
    x = torch.randn(8, 4, generator=g)
    return x, (x.sum(1, keepdim=True) + 0.1 * torch.randn(8, 1, generator=g)).sin()


def learn(model: nn.Module, optimizer: Optimizer, step: int, rank: int) -> Tensor:
    """Forward, backward, optimizer step; the loss."""
    x, y = batch(step, rank)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def parameters(model: nn.Module) -> list[Tensor]:
    """Copies that later steps do not change."""
    return [p.detach().clone() for p in model.parameters()]


def buffers(model: nn.Module) -> list[Tensor]:
    return [b.detach().clone() for b in model.buffers() if b.is_floating_point()]


def moments(optimizer: Optimizer) -> list[Tensor]:
    """Everything the optimizer remembers, in the order of its parameters."""
    return [
        value.clone()
        for group in optimizer.param_groups
        for p in group["params"]
        for _, value in sorted(optimizer.state[p].items())
        if isinstance(value, Tensor)
    ]


def same(*lists: list[Tensor]) -> bool:
    """True when all lists hold the same bits."""
    return all(
        len(one) == len(lists[0])
        and all(torch.equal(a, b) for a, b in zip(one, lists[0], strict=True))
        for one in lists
    )


def bits(value: Any) -> Any:
    """A nested state with tensors turned into bytes, to be compared with ==."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [bits(v) for v in value]
    return value
