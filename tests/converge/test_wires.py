"""Wires, overlap, fragments and the outer step, with real processes and against their equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_scale import Replicas
from hdet_scale.converge.int8 import CACHED, Codec, Memory, message_bytes
from hdet_scale.converge.pipeline import Converge, OuterStep
from tests.support.fleet import Fleet

SHAPES: list[tuple[int, ...]] = [(300, 300), (7,), (), (0,), (1000,), (33, 5)]
"""Several buckets under a cap of 64 KiB, a tensor larger than it, a scalar, an empty shard."""
CAP = 64 * 1024


def tensors_of(rank: int, turn: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 * turn + rank)
    return [torch.randn(s, generator=g).to(dtype) for s in SHAPES]


def mean_of(replicas: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack([t.double() for t in c]).mean(0) for c in zip(*replicas, strict=True)]


def distance(actual: list[Tensor], exact: list[Tensor]) -> float:
    """Relative to the norm of all."""
    a = torch.cat([t.double().flatten() for t in actual])
    b = torch.cat([t.double().flatten() for t in exact])
    return float((a - b).norm() / b.norm())


def same_everywhere(results: list[list[Tensor]]) -> None:
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def _averaged(rank: int, size: int, wire: str, bad: int | None, dtype: torch.dtype) -> list[Tensor]:
    tensors = tensors_of(rank, dtype=dtype)
    converge = Converge(tensors, Replicas.world(), CAP, wire=wire)
    if wire == "int8":  # the first mean is in full precision and sets the point
        converge()
        for t, new in zip(tensors, tensors_of(rank, 1, dtype), strict=True):
            t.copy_(new)
    if rank == bad:
        tensors[-1].view(-1)[-1] = float("nan")
    converge()
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bad", [None, 1], ids=["all", "one left out"])
@pytest.mark.parametrize(("wire", "error"), [("fp32", 6e-8), ("bf16", 3e-3), ("int8", 1.2e-2)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_wire_gives_the_mean_and_the_same_bits(
    fleets: Any, size: int, wire: str, error: float, bad: int | None, dtype: torch.dtype
) -> None:
    results = fleets(size).run(_averaged, wire, bad, dtype)
    same_everywhere(results)
    turn = 1 if wire == "int8" else 0
    wanted = [r for r in range(size) if r != bad]
    exact = mean_of([tensors_of(r, turn, dtype) for r in wanted])
    rounding = 0.0 if dtype == torch.float32 else 2e-3
    assert distance(results[0], exact) < error + rounding


def _drifting(rank: int, size: int, wire: str, rounds: int) -> list[Tensor]:
    """Every replica adds a small step of its own in each round, as training does."""
    tensors = tensors_of(0)
    converge = Converge(tensors, Replicas.world(), CAP, wire=wire)
    for k in range(rounds):
        for t, step in zip(tensors, tensors_of(rank, k + 1), strict=True):
            t.add_(step, alpha=0.01)
        converge()
    return tensors


@pytest.mark.parametrize("size", [2, 3])
def test_int8_stays_close_to_fp32_over_twenty_rounds(fleets: Any, size: int) -> None:
    fleet: Fleet = fleets(size)
    int8 = fleet.run(_drifting, "int8", 20)
    fp32 = fleet.run(_drifting, "fp32", 20)
    same_everywhere(int8)
    error = distance(int8[0], fp32[0])
    print(f"int8 after 20 rounds, {size} ranks: {error:.2e}")
    assert error < 1e-3


@pytest.mark.parametrize("numel", [1, 5, 255, 257, CACHED - 1, CACHED, CACHED + 3, 3 * CACHED])
def test_an_int8_message_and_its_residual_are_the_whole(numel: int) -> None:
    """d = s q + residual to the last bit that fp32 sums allow, and |residual| <= s / 2."""
    g = torch.Generator().manual_seed(numel)
    flat, point, before = torch.randn(3, numel, generator=g)
    residual = before.clone()
    message = torch.empty(message_bytes(numel), dtype=torch.uint8)
    codec = Codec()
    codec.pack(flat.clone(), Memory(point, residual), message)
    said = torch.empty(numel)
    codec.mean(message[None], [1.0], said)
    d = (flat - point) + before
    torch.testing.assert_close(said + residual, d, rtol=0, atol=1e-6)
    assert float(residual.abs().max()) <= float(d.abs().max()) / 127 * 0.5001


def test_an_int8_message_of_no_difference_is_zero() -> None:
    x = torch.randn(1000)
    message = torch.empty(message_bytes(1000), dtype=torch.uint8)
    memory = Memory(x.clone(), torch.zeros(1000))
    codec = Codec()
    codec.pack(x, memory, message)
    said = torch.empty(1000)
    codec.mean(message[None], [1.0], said)
    assert not said.any()
    assert not memory.residual.any()


def _overlapped(rank: int, size: int, bad: int | None) -> tuple[list[Tensor], list[Tensor]]:
    tensors = tensors_of(rank)
    if rank == bad:
        tensors[0][0, 0] = float("inf")
    converge = Converge(tensors, Replicas.world(), CAP, background=True)
    included = [r != bad for r in range(size)]
    pending = converge.start(included)
    moves = tensors_of(rank, 1)
    for t, move in zip(tensors, moves, strict=True):
        t.add_(move)
    pending.finish()
    return tensors, moves


@pytest.mark.parametrize("bad", [None, 0], ids=["all", "one left out"])
@pytest.mark.parametrize("size", [2, 3])
def test_overlap_folds_in_mean_minus_start(fleets: Any, size: int, bad: int | None) -> None:
    """theta <- theta_now + (mean - theta_at_start); a replica left out takes the mean."""
    results = fleets(size).run(_overlapped, bad)
    mean = mean_of([tensors_of(r) for r in range(size) if r != bad])
    for rank, (tensors, moves) in enumerate(results):
        moved = [torch.zeros_like(m) for m in moves] if rank == bad else moves
        exact = [m + move.double() for m, move in zip(mean, moved, strict=True)]
        for actual, wanted in zip(tensors, exact, strict=True):
            torch.testing.assert_close(actual.double(), wanted, rtol=1e-6, atol=1e-6)


def _fragmented(rank: int, size: int, parts: int) -> list[tuple[list[Tensor], int]]:
    tensors = tensors_of(rank)
    converge = Converge(tensors, Replicas.world(), CAP, fragments=parts)
    seen = []
    for part in range(parts):
        outcome = converge.average([True] * size, part)
        seen.append(([t.clone() for t in tensors], outcome.wire_bytes))
    return seen


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_fragments_average_each_element_once(fleets: Any, parts: int) -> None:
    results = fleets(2).run(_fragmented, parts)
    mean = mean_of([tensors_of(r) for r in range(2)])
    before = torch.cat([t.flatten() for t in tensors_of(0)])
    target = torch.cat([m.flatten() for m in mean]).float()
    for done in range(parts):
        now = torch.cat([t.flatten() for t in results[0][done][0]])
        averaged, untouched = now == target, now == before
        assert bool((averaged | untouched).all())
        share = float(averaged.float().mean())
        assert share == pytest.approx((done + 1) / parts, abs=0.1)
    same_everywhere([r[-1][0] for r in results])
    bytes_ = [sent for _, sent in results[0]]
    assert max(bytes_) < 1.35 * sum(bytes_) / parts


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


def test_a_seventy_billion_plan_is_quick_and_has_every_element() -> None:
    import time

    from hdet_scale.converge.buckets import plan

    d, vocabulary, layers = 8192, 128256, 80
    block = [(d, d), (1024, d), (1024, d), (d, d), (28672, d), (28672, d), (d, 28672), (d,), (d,)]
    shapes = [(vocabulary, d), *(block * layers), (d,), (vocabulary, d)]
    tensors = [torch.empty(s, device="meta", dtype=torch.bfloat16) for s in shapes]
    begin = time.perf_counter()
    made = plan(tensors, bucket_bytes=32 * 2**20, direct_bytes=None, itemsize=4)
    took = time.perf_counter() - begin
    total = sum(t.numel() for t in tensors)
    assert total > 70e9
    assert made.numel == total
    assert max(b.numel for b in made.buckets) * 4 <= 32 * 2**20
    print(f"{len(made.buckets)} buckets over {total / 1e9:.1f} B parameters in {took:.2f} s")
    assert took < 2


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fp8'.*|fp32"):
        Converge([torch.zeros(1)], Replicas(), wire="fp8")
