"""Problems with latent variables."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.images import clean_digits
from benchmarks.lr.problem import Params, Task, linear, times

LATENT = 6


@functools.cache
def _samples() -> Tensor:
    """A bank of standard normal noise; its prime size pairs each digit with each row in turn."""
    return torch.randn(1019, LATENT, generator=torch.Generator().manual_seed(23))


def vae(*, name: str = "vae", batch: int = 64, around: float = 0.02) -> Task:
    """A variational autoencoder of digits; the loss is its bound in nats per image; AdamW.

    The noise of an example follows from its index. Evaluation decodes the mean of the posterior.
    """
    hidden, train, held_out = 64, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, 64, hidden, 1.4),
            "mean": linear(g, hidden, LATENT),
            "spread": linear(g, hidden, LATENT, 0.1),
            "three": linear(g, LATENT, hidden, 1.4),
            "shift": torch.zeros(1, hidden),
            "out": linear(g, hidden, 64, 0.5),
            "level": torch.zeros(1, 64),
        }

    def loss(p: Params, indices: Tensor, *, noisy: bool) -> Tensor:
        images, _ = clean_digits(indices, train)
        x = functional.relu(times(images.flatten(2), p["one"]))
        mean, spread = times(x, p["mean"]), times(x, p["spread"])
        code = mean
        if noisy:
            code = mean + (spread / 2).exp() * _samples()[indices % len(_samples())]
        x = functional.relu(times(code, p["three"]) + p["shift"])
        logit = times(x, p["out"]) + p["level"]
        wrong = functional.binary_cross_entropy_with_logits(
            logit, (images.flatten(2) + 1) / 2, reduction="none"
        ).sum(2)
        divergence = (mean.square() + spread.exp() - 1 - spread).sum(2) / 2
        return (wrong + divergence).mean(1)

    return Task(
        name=name,
        init=init,
        losses=functools.partial(loss, noisy=True),
        evaluate=functools.partial(loss, noisy=False),
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
    )
