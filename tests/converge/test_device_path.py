"""What a GPU runs, in Triton's interpreter, against what a CPU runs: the same bits.

The parts first, then whole converges: two real processes whose Converge takes the device path.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hdet_scale import Replicas
from hdet_scale.converge.int8 import CACHED, Codec, message_bytes
from hdet_scale.converge.pipeline import Converge
from hdet_scale.converge.remembered import Memory
from hdet_scale.converge.staging import StagedBucket
from hdet_scale.kernels.choice import interpreting
from hdet_scale.kernels.int8_format import QUANTUM, packed_blocks
from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.kernels.pack import pack_reference
from tests.conftest import uses_kernels
from tests.support.fleet import Fleet

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- the int8 message ------------------------------------------------------------------------------


def messages(numel: int) -> list[Tensor]:
    """Two replicas' messages, what they left out, and the mean; a faint and an empty run too."""
    flats, points, residuals = draw(3, 2, numel, seed=numel)
    # A tie: the second element is 0.5 of a scale of exactly 1.
    flats[:, :2] = torch.tensor([127.0, 0.5])[: min(2, numel)]
    points[:, :2] = residuals[:, :2] = 0.0
    for tiny, at in ((0.0, QUANTUM), (1e-40, 2 * QUANTUM)):
        for t in (flats, points, residuals):
            t[:, at : at + QUANTUM] *= tiny
    rows = torch.zeros(2, message_bytes(numel), dtype=torch.uint8)
    codec = Codec()
    for flat, point, residual, row in zip(flats, points, residuals, rows, strict=True):
        codec.pack(flat.clone(), Memory(point, residual), row)
    sent, mean, moved = rows.clone(), torch.empty(numel), torch.empty(numel)
    codec.mean(rows.clone(), [0.25, 0.75], mean)
    codec.mean(rows.clone(), [0.25, 0.75], moved, points[0])
    assert torch.equal(moved, mean + points[0])
    codec.mean(rows, [0.25, 0.75], mean, points[1], move=True)
    assert torch.equal(points[1], mean)
    return [sent, residuals, mean, moved]


device_messages = interpreted(messages)


@pytest.mark.slow
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 1025, CACHED + 300])
def test_int8_messages_are_those_of_the_kernels(numel: int) -> None:
    for ours, theirs in zip(messages(numel), device_messages(numel), strict=True):
        assert torch.equal(ours, theirs)


def test_int8_messages_are_those_of_the_reference() -> None:
    flat, point, residual = draw(3, 1000, seed=1)
    error, codes = residual.clone(), torch.empty(1000, dtype=torch.int8)
    scales = torch.empty(packed_blocks(1000))
    pack_reference(flat, point, error, codes, scales)
    message = torch.empty(message_bytes(1000), dtype=torch.uint8)
    Codec().pack(flat, Memory(point, residual), message)
    assert torch.equal(message[:1000].view(torch.int8), codes)
    assert torch.equal(message[1008:1024].view(torch.float32), scales)
    assert torch.equal(residual, error)


@interpreted
def faint(value: float) -> list[Tensor]:
    return packed_faint(value)


def packed_faint(value: float) -> list[Tensor]:
    flat, residual = torch.zeros(300), torch.zeros(300)
    flat[::2] = value
    message = torch.zeros(message_bytes(300), dtype=torch.uint8)
    Codec().pack(flat, Memory(torch.zeros(300), residual), message)
    return [message[:300].view(torch.int8), residual]


@pytest.mark.parametrize("value", [1e-45, 1.8e-43, 1e-38, 1e-29])
def test_a_faint_difference_stays_in_the_residual(value: float) -> None:
    """Its scale would have an infinite inverse, or wrap a code past 127."""
    for codes, residual in (packed_faint(value), faint(value)):
        assert residual.isfinite().all()
        assert not codes.any()
        assert torch.equal(residual[::2], torch.full((150,), value))


# -- staging ---------------------------------------------------------------------------------------


def staged(wide: torch.dtype, bad: float | None) -> list[Tensor]:
    """A bucket of several dtypes, one view unaligned: gathered, its verdict, scattered."""
    kinds = DTYPES if wide == torch.float32 else (torch.float64,)
    views = [draw(n, seed=n).to(kinds[n % len(kinds)])[n % 2 :] for n in (1, 7, 1024, 3001)]
    if bad is not None:
        views[-1][-1] = bad
    bucket, numel = StagedBucket(views), sum(v.numel() for v in views)
    flat = bucket.gather(torch.empty(numel, dtype=wide))
    checked = torch.empty(numel, dtype=wide)
    verdict = bucket.gather_checked(checked).isfinite()
    back = draw(numel, seed=9).to(wide)
    bucket.scatter(back)
    return [flat, checked, verdict, *views]


device_staged = interpreted(staged)


@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_staging_is_that_of_the_kernels(wide: torch.dtype, bad: float | None) -> None:
    ours, theirs = staged(wide, bad), device_staged(wide, bad)
    assert bool(ours[2]) is (bad is None)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


# -- whole converges -------------------------------------------------------------------------------


def _converged(rank: int, size: int, wire: str, overlap: bool) -> list[Tensor]:
    """Three rounds over several buckets of fp32 and bf16, a replica bad in the last but one."""
    tensors = [draw(*s, seed=1).to(d) for s in ((50, 70), (9,), (2000,)) for d in DTYPES[:2]]
    converge = Converge(tensors, Replicas.world(), 8192, wire=wire, background=overlap)
    for turn in range(3):
        for i, t in enumerate(tensors):
            t.add_(draw(*t.shape, seed=100 * turn + 10 * rank + i).to(t.dtype), alpha=0.01)
        if turn == 1 and rank == 0:
            tensors[1][0, 0] = torch.inf
        fine = converge.healthy(snapshot=overlap)
        assert fine is (turn != 1 or rank != 0)
        included = [turn != 1, True]
        if overlap:
            pending = converge.start(included)
            for t in tensors:
                t.add_(0.125)
            pending.finish()
        else:
            converge.average(included)
    return tensors


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlap"])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_a_converge_has_the_same_bits_on_the_device_path(
    fleets: Any, device_pair: Fleet, wire: str, overlap: bool
) -> None:
    assert fleets(2).run(uses_kernels) == [interpreting()] * 2
    plain = fleets(2).run(_converged, wire, overlap)
    device = device_pair.run(_converged, wire, overlap)
    for ours, theirs in zip(plain, device, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert bool(a.isfinite().all())
            assert torch.equal(a, b)
