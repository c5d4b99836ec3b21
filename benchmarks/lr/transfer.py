"""Problems that adapt a trained network for digits to few images of another look."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.images import noisy_digits
from benchmarks.lr.problem import Params, Stacked, Task, cross_entropy, linear, times

HIDDEN, TRAIN, HELD_OUT, RANK = 64, 60_000, 2048, 2
LAYERS = ("one", "two", "out")
"""The weights, in the order of the network; each of them has an adapter."""


def _drawn(g: torch.Generator) -> Params:
    """Random weights of the network."""
    return {
        "one": linear(g, 64, HIDDEN, 1.4),
        "two": linear(g, HIDDEN, HIDDEN, 1.4),
        "out": linear(g, HIDDEN, 10),
    }


def _mlp(p: Params, images: Tensor, labels: Tensor) -> Tensor:
    """Loss of each copy, [R], on images [R, b, 8, 8]."""
    x = images.flatten(2)
    for kind in LAYERS[:-1]:
        x = functional.relu(times(x, p[kind]))
    return cross_entropy(times(x, p["out"]), labels)


@functools.cache
def _trained(steps: int = 1200, peak: float = 0.004) -> Params:
    """The network after a cosine run of AdamW on upright digits under noise."""
    task = Task(
        name="pre-training",
        init=_drawn,
        losses=lambda p, indices: _mlp(p, *noisy_digits(indices, TRAIN)),
        train=TRAIN,
        held_out=HELD_OUT,
        batch=64,
        optimizer="adamw",
        around=peak,
        weight_decay=0.1,
    )
    start = task.init(torch.Generator().manual_seed(33))
    model = Stacked(task, {k: v[None] for k, v in start.items()})
    for t, batch in enumerate(task.draw(33, steps)):
        _, gradients = model.gradients(batch[None])
        model.step(torch.tensor([peak * (1 + math.cos(math.pi * t / steps)) / 2]), gradients)
    return {k: v[0] for k, v in model.copies().items()}


def lora_few(*, name: str = "lora-few", batch: int = 16, around: float = 0.003) -> Task:
    """Adapters of rank 2 on a network trained on upright digits, for 150 slanted ones; AdamW."""
    train = 150

    def init(g: torch.Generator) -> Params:
        params = {}
        for kind in LAYERS:
            fan_in, fan_out = _trained()[kind].shape
            params[f"{kind}_a"] = linear(g, fan_in, RANK)
            params[f"{kind}_b"] = torch.zeros(RANK, fan_out)
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        held = TRAIN + indices - train
        images, labels = noisy_digits(torch.where(indices < train, indices, held), TRAIN)
        rows = [row.roll(i // 2 - 2, -1) for i, row in enumerate(images.unbind(-2))]
        whole = {
            kind: v + torch.bmm(p[f"{kind}_a"], p[f"{kind}_b"]) for kind, v in _trained().items()
        }
        return _mlp(whole, torch.stack(rows, -2), labels)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=HELD_OUT,
        batch=batch,
        optimizer="adamw",
        around=around,
    )
