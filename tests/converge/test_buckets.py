"""The plan of buckets: every element of every tensor in exactly one place."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hdet_scale.converge.buckets import Plan, plan

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=8)


def touch(p: Plan) -> None:
    """Add one to every element that the plan reaches, as often as it reaches it."""
    for bucket in p.buckets:
        for view in p.views(bucket):
            view += 1


def check_offsets(p: Plan) -> None:
    """Pieces fill their bucket from 0 to numel without a gap, in its dtype."""
    for bucket in p.buckets:
        filled = 0
        for piece, view in zip(bucket.pieces, p.views(bucket), strict=True):
            assert piece.offset == filled
            assert view.numel() == piece.length > 0
            assert view.dtype == bucket.dtype
            filled += piece.length
        assert filled == bucket.numel


@given(
    kinds=TENSORS,
    cap=st.integers(1, 600),
    direct=st.none() | st.integers(1, 600),
    cut=st.booleans(),
)
def test_every_element_is_covered_exactly_once(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], cap: int, direct: int | None, cut: bool
) -> None:
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]
    p = plan(tensors, bucket_bytes=cap, direct_bytes=direct, cut_direct=cut)
    touch(p)
    check_offsets(p)
    for t in tensors:
        assert torch.equal(t, torch.ones_like(t))
    assert p.numel == sum(t.numel() for t in tensors)


@given(kinds=TENSORS, cap=st.integers(8, 600))
def test_staged_buckets_stay_under_the_cap(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], cap: int
) -> None:
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]
    p = plan(tensors, bucket_bytes=cap, direct_bytes=None)
    cut = plan(tensors, bucket_bytes=cap, direct_bytes=cap // 2, cut_direct=True)
    for bucket in p.buckets + cut.buckets:
        assert bucket.numel * bucket.dtype.itemsize <= cap
    staged = plan(tensors, bucket_bytes=cap, direct_bytes=None, itemsize=8)
    for bucket in staged.buckets:
        assert bucket.numel * 8 <= cap


@given(data=st.data(), n=st.integers(1, 40), cap=st.integers(1, 200))
def test_views_of_one_storage_are_covered_once(data: st.DataObject, n: int, cap: int) -> None:
    """Views that adjoin, overlap or repeat, in any order: what they cover is covered once."""
    storage = torch.zeros(n)
    cuts = st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted)
    runs = data.draw(st.lists(cuts, max_size=6))
    touch(plan([storage[a:b] for a, b in runs], bucket_bytes=cap, direct_bytes=None))
    expected = torch.zeros(n)
    for a, b in runs:
        expected[a:b] = 1
    assert torch.equal(storage, expected)


def test_a_tied_parameter_is_one_span() -> None:
    w = torch.zeros(3, 5)
    p = plan([w, w.detach(), w.view(15), w], bucket_bytes=1024)
    assert p.numel == 15
    touch(p)
    assert torch.equal(w, torch.ones(3, 5))


def test_contiguous_runs_are_merged() -> None:
    storage = torch.zeros(24)
    halves = [storage[12:].view(3, 4), storage[:12].view(4, 3)]
    p = plan(halves, bucket_bytes=1024)
    assert [s.numel() for s in p.spans] == [24]
    touch(p)
    assert torch.equal(storage, torch.ones(24))


def test_runs_with_a_gap_are_not_merged() -> None:
    storage = torch.zeros(24)
    p = plan([storage[:10], storage[11:]], bucket_bytes=1024)
    assert [s.numel() for s in p.spans] == [10, 13]
    touch(p)
    assert storage[10] == 0
    assert int(storage.sum()) == 23


def test_larger_than_the_cap_is_cut_or_goes_alone() -> None:
    big, small = torch.zeros(100), torch.zeros(3)
    cut = plan([small, big], bucket_bytes=4 * 32, direct_bytes=None)
    assert [b.numel for b in cut.buckets] == [32, 32, 32, 7]
    alone = plan([small, big], bucket_bytes=4 * 32, direct_bytes=4 * 50)
    assert sorted(b.numel for b in alone.buckets) == [3, 100]


def test_scalar_empty_and_nothing() -> None:
    scalar = torch.zeros(())
    p = plan([scalar, torch.zeros(0, 4)], bucket_bytes=1)
    touch(p)
    assert scalar == 1
    assert p.numel == 1
    assert plan([], bucket_bytes=1).buckets == ()
    assert plan([torch.zeros(0)], bucket_bytes=1).buckets == ()


def test_dtypes_do_not_share_a_bucket() -> None:
    tensors = [torch.zeros(4, dtype=d) for d in DTYPES * 2]
    p = plan(tensors, bucket_bytes=1024)
    assert [b.dtype for b in p.buckets] == DTYPES
    touch(p)
    assert all(torch.equal(t, torch.ones_like(t)) for t in tensors)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(4, 6).t(),
        torch.zeros(2, 3, 4).permute(2, 0, 1),
        torch.zeros(5, 1, 3).expand(5, 1, 3),
    ],
    ids=["channels_last", "transposed", "permuted", "size_one"],
)
def test_any_dense_layout(tensor: Tensor) -> None:
    touch(plan([tensor], bucket_bytes=32, direct_bytes=None))
    assert torch.equal(tensor, torch.ones(tensor.shape))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(6)[::2], torch.zeros(3).expand(2, 3), torch.zeros(4, 4)[:, :2]]
)
def test_gaps_and_overlaps_are_refused(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match=r"gaps or overlaps.*strides.*contiguous\(\)"):
        plan([tensor], bucket_bytes=32)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.complex64)]
)
def test_what_has_no_mean_is_refused(tensor: Tensor) -> None:
    with pytest.raises(TypeError, match=r"only dense floating-point.*\[3\]"):
        plan([tensor], bucket_bytes=32)


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        plan([torch.zeros(3)], bucket_bytes=0)


def test_meta_tensors_plan_like_real_ones() -> None:
    shapes = [(300, 7), (), (0, 3), (41,), (1000,)]
    real = plan([torch.zeros(s) for s in shapes], bucket_bytes=512, direct_bytes=2000)
    meta = plan(
        [torch.zeros(s, device="meta") for s in shapes], bucket_bytes=512, direct_bytes=2000
    )
    assert [(b.numel, b.pieces) for b in meta.buckets] == [
        (b.numel, b.pieces) for b in real.buckets
    ]
    assert meta.fingerprint == real.fingerprint


@pytest.mark.parametrize(
    "other",
    [
        [torch.zeros(3, 4), torch.zeros(6)],
        [torch.zeros(4, 3), torch.zeros(5)],
        [torch.zeros(5), torch.zeros(3, 4)],
        [torch.zeros(3, 4), torch.zeros(5, dtype=torch.float64)],
        [torch.zeros(3, 4)],
        [torch.zeros(4, 3).t(), torch.zeros(5)],
    ],
    ids=["size", "shape", "order", "dtype", "missing", "strides"],
)
def test_the_fingerprint_tells_plans_apart(other: list[Tensor]) -> None:
    mine = plan([torch.zeros(3, 4), torch.zeros(5)], bucket_bytes=64)
    assert mine.fingerprint == plan([torch.ones(3, 4), torch.ones(5)], bucket_bytes=64).fingerprint
    assert mine.fingerprint != plan(other, bucket_bytes=64).fingerprint


def test_the_fingerprint_tells_caps_apart() -> None:
    tensors = [torch.zeros(3, 4)]
    assert plan(tensors, bucket_bytes=64).fingerprint != plan(tensors, bucket_bytes=65).fingerprint


def test_a_seventy_billion_plan_is_quick_and_has_every_element() -> None:
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
