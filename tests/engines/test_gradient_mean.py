"""The mean of gradients over replicas, over awkward lists of them."""

from __future__ import annotations

import time
import unittest.mock
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_scale import Replicas
from hdet_scale.engines import gradient_mean
from hdet_scale.engines.gradient_mean import GradientMean


def _gradients(rank: int) -> list[Tensor]:
    """Small and large, mixed types, an empty one, a scalar, views of one buffer, channels last."""
    g = torch.Generator().manual_seed(rank)
    flat = torch.randn(40, generator=g)
    return [
        torch.randn(7, generator=g),
        torch.randn(300_000, generator=g),
        torch.randn(33, generator=g).bfloat16(),
        torch.full((50,), 60_000.0).half(),
        torch.empty(0),
        torch.randn((), generator=g),
        flat[:10],
        flat[10:40],
        torch.randn(2, 3, 4, 4, generator=g).to(memory_format=torch.channels_last),
        torch.randn(5, generator=g).double(),
    ]


def _averaged(rank: int, size: int, bucket_bytes: int) -> list[Any]:
    mean = GradientMean(bucket_bytes)
    results = []
    for _ in range(2):  # the second time with staging that is kept
        mine = _gradients(rank)
        mean(mine, Replicas.world())
        results.append(mine)
    return results


@pytest.mark.parametrize("bucket_bytes", [16, 1000, 2**25])
def test_every_gradient_is_averaged_and_fp16_does_not_overflow(
    fleet: Any, bucket_bytes: int
) -> None:
    everyone = [_gradients(rank) for rank in range(fleet.size)]
    for results in fleet.run(_averaged, bucket_bytes):
        for mine in results:
            for i, found in enumerate(mine):
                wanted = torch.stack([g[i].double() for g in everyone]).mean(0).to(found.dtype)
                assert found.shape == wanted.shape
                torch.testing.assert_close(found, wanted, rtol=2**-7 if i == 2 else 1e-6, atol=1e-6)


def _overflowed(rank: int, size: int) -> list[bool]:
    gradients = [torch.ones(3), torch.ones(3).half()]
    if rank == 1:
        gradients[1][2] = float("inf")
    GradientMean(8)(gradients, Replicas.world())
    return [bool(g.isfinite().all()) for g in gradients]


def test_an_infinity_of_one_replica_reaches_all(trio: Any) -> None:
    assert trio.run(_overflowed) == [[True, False]] * 3


def remain(watched: list[Any], seconds: float = 10.0) -> list[bool]:
    """What is still alive. Gloo's own thread lets go of a transfer a moment after it is done."""
    deadline = time.monotonic() + seconds
    while any(w() is not None for w in watched) and time.monotonic() < deadline:
        time.sleep(0.001)
    return [w() is not None for w in watched]


def _held(rank: int, size: int) -> tuple[list[int], list[bool]]:
    """Plans made at each of four steps whose gradients move, the last of which is laid out
    otherwise; whether any gradient was alive after it had been dropped."""
    mean, made, alive, plans = GradientMean(1000), [], [], 0
    plan = gradient_mean.plan

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal plans
        plans += 1
        return plan(*args, **options)

    with unittest.mock.patch.object(gradient_mean, "plan", counting):
        earlier = []
        for turn in range(4):
            mine = _gradients(rank)
            if turn == 3:
                mine[6] = mine[6].clone()  # no longer beside the one that follows it
            mean(mine, Replicas.world())
            made.append(plans)
            watched = [weakref.ref(g.untyped_storage()) for g in mine]
            earlier.append(torch.empty(sum(g.numel() for g in mine)))  # the next ones lie elsewhere
            del mine
            alive.append(any(remain(watched)))
    return made, alive


def test_gradients_that_move_are_planned_once_and_let_go(pair: Any) -> None:
    for made, alive in pair.run(_held):
        assert made == [1, 1, 1, 2]
        assert alive == [False] * 4
