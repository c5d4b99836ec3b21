"""Parameters of odd sizes, and two optimizers driven by the same gradients."""

from typing import Any

import torch

SIZES = [0, 1, 17, 1023, 1024, 1025]
LR, RHO = 3e-3, 1.07

SGD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.01},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "maximize": True},
]


def params(dtype: torch.dtype = torch.float32, shift: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n + shift, generator=generator).to(dtype)[shift:] for n in SIZES]
    return [torch.nn.Parameter(values) for values in made]


def drive(
    steps: int, ours: Any, mine: list[Any], theirs: Any, yours: list[Any], first: int = 0
) -> None:
    """The same gradients for both; one parameter has none at the fourth step."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for i, (a, b) in enumerate(zip(mine, yours, strict=True)):
            grad = torch.randn(a.shape, generator=generator)
            none = step == 3 and i == 2
            a.grad = None if none else grad.to(a.dtype, copy=True)
            b.grad = None if none else grad.to(b.dtype, copy=True)
        ours.step()
        theirs.step()


def same(mine: list[Any], yours: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True))
