"""Kernel launches seen, recorded and broken, in Triton's interpreter.

Every kernel is started by `kernels.launch.launch`, which the kernels' files import by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hdet_scale.kernels import scalars
from hdet_scale.kernels.launch import jit, tl
from hdet_scale.kernels.launch import launch as start

Launch = Callable[..., None]


@contextmanager
def launched_through(replacement: Launch) -> Iterator[None]:
    """Within it every launch calls `replacement(kernel, programs, device, *args, **constants)`."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("hdet_scale.kernels.") and vars(module).get("launch") is start
    ]
    modules.remove(sys.modules["hdet_scale.kernels.launch"])
    assert len(modules) > 5
    for module in modules:
        module.launch = replacement  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.launch = start  # type: ignore[attr-defined]


def name_of(kernel: Any) -> str:
    return str(kernel.fn.__name__)


def without(name: str) -> Launch:
    """A machine on which a kernel does nothing."""

    def run(kernel: Any, programs: int, device: torch.device, *args: Any, **constants: Any) -> None:
        if name_of(kernel) != name:
            start(kernel, programs, device, *args, **constants)

    return run


def with_rule(rule: Any) -> Launch:
    """A machine whose update kernels compute another rule."""

    def run(kernel: Any, programs: int, device: torch.device, *args: Any, **constants: Any) -> None:
        if "RULE" in constants:
            constants["RULE"] = rule
        start(kernel, programs, device, *args, **constants)

    return run


def with_kernel(name: str, other: Any) -> Launch:
    """A machine that runs another kernel in place of one."""

    def run(kernel: Any, programs: int, device: torch.device, *args: Any, **constants: Any) -> None:
        chosen = other if name_of(kernel) == name else kernel
        start(chosen, programs, device, *args, **constants)

    return run


def failing(kernel: Any, *args: Any, **constants: Any) -> None:
    """A machine on which no kernel can be launched."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """What a CUDA graph does: keep the launches of a step without running them, and run them with
    the same arguments at each replay."""
    kept: list[tuple[Any, ...]] = []
    with launched_through(lambda *args, **constants: kept.append((args, constants))):
        step()
    assert kept

    def replay() -> None:
        for args, constants in kept:
            start(*args, **constants)

    return replay


_FIRST_RATE = tl.constexpr(scalars.OWN)
_SECOND_BETA = tl.constexpr(scalars.OWN + 1)
_SECOND_RATE = tl.constexpr(scalars.OWN + 2)
_EPS = tl.constexpr(scalars.OWN + 3)


@jit
def undecayed_rule(p, g, m, v, lr, group, correction, MOMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """AdamW that forgets the weight decay: 0.1 % of a parameter at a step."""
    m = m + tl.load(group + _FIRST_RATE) * (g - m)
    v = tl.load(group + _SECOND_BETA) * v + tl.load(group + _SECOND_RATE) * g * g
    root = tl.sqrt(v) / tl.load(correction + 2)
    p = p - lr / tl.load(correction + 1) * (m / (root + tl.load(group + _EPS)))
    return p, m, v


@jit
def overrunning_kernel(  # type: ignore[no-untyped-def]
    bucket, factor, numel, B: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    """bucket <- factor * bucket, and one element too many."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(bucket + i, mask=i <= numel).to(tl.float32) * tl.load(factor)
    # To nearest as the right one does, so that the element too many is the only fault.
    if tl.bfloat16 == B:
        bits = x.to(tl.uint32, bitcast=True)
        moved = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = moved.to(tl.float32, bitcast=True)
    tl.store(bucket + i, x.to(B), mask=i <= numel)
