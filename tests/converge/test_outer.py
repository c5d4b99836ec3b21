"""The outer step against torch's SGD with Nesterov momentum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_scale import Replicas
from hdet_scale.converge.outer import OuterStep
from hdet_scale.converge.pipeline import Converge
from tests.support.averaging import CAP, mean_of, same_everywhere, tensors_of


def _outer(rank: int, size: int, rounds: int, resume_at: int | None) -> list[Tensor]:
    tensors = tensors_of(0)
    outer = OuterStep(lr=0.7, momentum=0.9)
    converge = Converge(tensors, Replicas.world(), CAP, outer=outer)
    for k in range(rounds):
        if k == resume_at:
            saved = converge.state_dict()
            converge = Converge(tensors, Replicas.world(), CAP, outer=outer)
            converge.load_state_dict(saved)
        for t, step in zip(tensors, tensors_of(rank, k + 1), strict=True):
            t.add_(step, alpha=0.1)
        converge()
    return tensors


@pytest.mark.parametrize("resume_at", [None, 3], ids=["unbroken", "resumed"])
@pytest.mark.parametrize("size", [2, 3])
def test_outer_step_is_torch_nesterov_on_the_difference(
    fleets: Any, size: int, resume_at: int | None
) -> None:
    """The reference: torch's SGD with nesterov, its gradient point - mean, after a first mean."""
    results = fleets(size).run(_outer, 6, resume_at)
    same_everywhere(results)
    params = [torch.nn.Parameter(t.double()) for t in tensors_of(0)]
    sgd = torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)
    for k in range(6):
        steps = mean_of([tensors_of(r, k + 1) for r in range(size)])
        for p, step in zip(params, steps, strict=True):
            if k == 0:
                p.data.add_(step, alpha=0.1)
            else:
                p.grad = -0.1 * step
        if k:
            sgd.step()
    for actual, p in zip(results[0], params, strict=True):
        torch.testing.assert_close(actual.double(), p.detach(), rtol=1e-5, atol=1e-5)
