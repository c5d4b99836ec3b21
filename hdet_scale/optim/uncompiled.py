"""A function that `torch.compile` leaves alone.

A compiled step would freeze the LR into its graph as a number, and trace one operation for each
tensor that the kernels update together.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, applied at the first call: it imports the compiler, and that
    Triton."""

    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call
