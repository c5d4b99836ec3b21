"""Kept: a model, its optimizer and all random generators, as they were before a search alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet_scale.engines.protocol import Engine
from hdet_scale.search.probe import same_randomness
from hdet_scale.search.snapshot import Snapshot
from hdet_scale.topology import Replicas


@contextlib.contextmanager
def kept_as_it_is(model: nn.Module, optimizer: Optimizer, batches: object) -> Iterator[None]:
    """Put everything back at the end, to the bit, after an error too.

    Args:
        model: its parameters, buffers, gradients and modes.
        optimizer: its state and the options of its groups, learning rates included.
        batches: a DataLoader's generators.
    """
    snapshot = Snapshot(Engine(optimizer, model, Replicas()))
    gradients = [(p, p.grad) for p in model.parameters()]
    for p, _ in gradients:
        p.grad = None
    modes = [(module, module.training) for module in model.modules()]
    rates = [_copy(group["lr"]) for group in optimizer.param_groups]
    tensors = [group["lr"] for group in optimizer.param_groups]
    own = dict(optimizer.__dict__)
    try:
        with _generators(batches):
            yield
    finally:
        snapshot.restore()
        for p, gradient in gradients:
            p.grad = gradient
        for module, mode in modes:
            module.training = mode
        for group, tensor, rate in zip(optimizer.param_groups, tensors, rates, strict=True):
            group["lr"] = tensor.copy_(rate) if isinstance(tensor, Tensor) else rate
        for name in [k for k in optimizer.__dict__ if k not in own]:
            del optimizer.__dict__[name]  # torch's schedulers wrap its step
        if "step" in own:
            optimizer.__dict__["step"] = own["step"]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _generators(batches: object) -> Iterator[None]:
    """Python's, numpy's and torch's generators, and those that a DataLoader has of its own."""
    loader = [getattr(batches, "generator", None)]
    loader += [getattr(getattr(batches, name, None), "generator", None) for name in SAMPLERS]
    own = {id(g): g for g in loader if isinstance(g, torch.Generator)}.values()
    states = [(g, g.get_state()) for g in own]
    try:
        with same_randomness():
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)


SAMPLERS = ("sampler", "batch_sampler")
"""Attributes of a DataLoader that may have a generator of their own."""
