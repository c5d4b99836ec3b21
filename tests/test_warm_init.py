"""Warm noisy initialisation: the scale of the paper, a stream for each replica, and it stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from hdet_scale import OneCycleAutoLR, Replicas
from hdet_scale.ddp import warm_init
from tests.support.fleet import Fleet
from tests.support.rng import rng_states
from tests.support.toy import learn, parameters, same, toy


def big() -> nn.Module:
    """Two tensors of very different scale, large enough for statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 300, bias=False), nn.Linear(300, 100, bias=False))
    with torch.no_grad():
        model[1].weight.mul_(50)
    return model


def noise_of(model: nn.Module, **arguments: Any) -> list[Tensor]:
    before = parameters(model)
    warm_init(model, **arguments)
    return [a.double() - b.double() for a, b in zip(parameters(model), before, strict=True)]


def test_the_whole_vector_sets_the_scale() -> None:
    """Standard deviation nu ||theta|| / sqrt(d), the same for all tensors; 5 sigma of its own."""
    model = big()
    flat = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    s = 0.01 * float(flat.norm()) / math.sqrt(flat.numel())
    for drawn in noise_of(model):
        n = drawn.numel()
        assert float(drawn.std()) == pytest.approx(s, rel=5 / math.sqrt(2 * n))
        assert abs(float(drawn.mean())) < 5 * s / math.sqrt(n)


def test_each_tensor_sets_its_own_scale() -> None:
    model = big()
    scales = [
        0.05 * float(p.detach().double().norm()) / math.sqrt(p.numel()) for p in model.parameters()
    ]
    assert scales[1] > 10 * scales[0]
    for drawn, s in zip(noise_of(model, nu=0.05, scale="tensor"), scales, strict=True):
        assert float(drawn.std()) == pytest.approx(s, rel=5 / math.sqrt(2 * drawn.numel()))


def test_replicas_seeds_and_tensors_draw_different_streams() -> None:
    streams = {
        tuple(drawn.flatten()[:4].tolist())
        for seed in (0, 1)
        for rank in (0, 1, 2)
        for drawn in noise_of(
            toy(wrap=False), replicas=Replicas(rank=rank, size=3), seed=seed, gradients="local"
        )
        if drawn.numel() >= 4
    }
    assert len(streams) == 2 * 3 * 3


def test_the_same_seed_draws_the_same_and_no_global_generator() -> None:
    one, other = toy(wrap=False), toy(wrap=False)
    before = rng_states()
    warm_init(one, seed=4)
    assert rng_states() == before
    torch.manual_seed(99)
    warm_init(other, seed=4)
    assert same(parameters(one), parameters(other))


def test_nu_zero_and_frozen_parameters_change_nothing() -> None:
    model = toy(wrap=False)
    before = parameters(model)
    warm_init(model, nu=0)
    assert same(before, parameters(model))
    model.requires_grad_(False)
    warm_init(model)
    assert same(before, parameters(model))


def _survives(rank: int, size: int) -> list[list[Tensor]]:
    """theta_0, after the noise, after building everything, and after each step of a round."""
    model = toy(rank)
    seen = [parameters(model)]
    warm_init(model)
    seen.append(parameters(model))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleAutoLR(
        optimizer,
        0.1,
        total_steps=9,
        ensemble_lr_spread_ratio=0.1,
        model_sync_interval=3,
        model=model,
    )
    seen.append(parameters(model))
    for step in range(3):
        scheduler.step(learn(model, optimizer, step, rank))
        seen.append(parameters(model))
    return seen


def test_the_noise_survives_until_the_first_converge(fleet: Fleet) -> None:
    runs = fleet.run(_survives)
    assert same(*(run[0] for run in runs))  # DDP's broadcast came first
    for run in runs:
        assert not same(run[0], run[1])
        assert same(run[1], run[2])
    if fleet.size > 1:
        for moment in (1, 2, 3, 4):
            assert not same(*(run[moment] for run in runs))
    assert same(*(run[5] for run in runs))


def _unwrapped(rank: int, size: int) -> tuple[str, bool]:
    model = toy(rank, wrap=False)
    before = parameters(model)
    try:
        warm_init(model)
    except ValueError as error:
        return str(error), same(before, parameters(model))
    return "no error", False


def test_noise_that_ddp_would_undo_is_refused(pair: Fleet) -> None:
    for message, untouched in pair.run(_unwrapped):
        assert "unwrapped Toy and 2 replicas" in message
        assert "call warm_init on the wrapped model" in message
        assert untouched


@pytest.mark.parametrize("nu", [-0.1, math.nan, math.inf])
def test_wrong_scales_are_refused(nu: float) -> None:
    model = toy(wrap=False)
    before = parameters(model)
    with pytest.raises(ValueError, match=rf"nu must be .* got {nu!r}; the paper uses 0\.01"):
        warm_init(model, nu=nu)
    with pytest.raises(ValueError, match=r"one of \['vector', 'tensor'\], got 'row'"):
        warm_init(model, scale="row")
    assert same(before, parameters(model))
