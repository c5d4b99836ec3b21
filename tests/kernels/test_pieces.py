"""Gather and scatter: kernel against reference, the finite flag, and what is refused."""

import pytest
import torch

from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.kernels.pieces import Pieces

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 17, 1023, 1024, 1025]


def tensors(dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Odd sizes, the last one a view that is not aligned; dtypes taken in turn."""
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(n, generator=generator).to(dtypes[i % len(dtypes)])
        for i, n in enumerate([*SIZES, 1100])
    ]
    made[-1] = made[-1][3:]
    return made


def round_trip(
    dtypes: list[torch.dtype], bucket_dtype: torch.dtype, gap: int
) -> tuple[torch.Tensor, int, list[torch.Tensor]]:
    """A gather with scale 1/4, then a scatter with scale 4; elements between pieces stay -1."""
    made = tensors(dtypes)
    offsets, end = [], 0
    for t in made:
        offsets.append(end)
        end += t.numel() + gap
    bucket = torch.full((end,), -1.0, dtype=bucket_dtype)
    pieces = Pieces(made, offsets)
    flag = pieces.gather(bucket, torch.tensor(0.25))
    back = [t.fill_(7.0) for t in made]
    pieces.scatter(bucket, torch.tensor(4.0))
    return bucket, int(flag), back


@interpreted
def kernel_round_trip(
    dtypes: list[torch.dtype], bucket_dtype: torch.dtype, gap: int
) -> tuple[torch.Tensor, int, list[torch.Tensor]]:
    return round_trip(dtypes, bucket_dtype, gap)


@pytest.mark.parametrize("bucket_dtype", DTYPES)
@pytest.mark.parametrize("gap", [0, 8])
def test_gather_and_scatter_are_those_of_the_reference(bucket_dtype: torch.dtype, gap: int) -> None:
    """Three dtypes in one bucket, packed tightly (most places unaligned) or with gaps."""
    ours = kernel_round_trip(DTYPES, bucket_dtype, gap)
    theirs = round_trip(DTYPES, bucket_dtype, gap)
    assert torch.equal(ours[0], theirs[0])
    assert ours[1] == theirs[1] == 0
    for original, a, b in zip(tensors(DTYPES), ours[2], theirs[2], strict=True):
        assert torch.equal(a, b)
        # A power of two scales without loss: what came back is the original, rounded once to the
        # bucket's dtype and once to its own.
        expected = (original.float() * 0.25).to(bucket_dtype).float() * 4.0
        assert torch.equal(b, expected.to(original.dtype))
    if gap:
        assert (theirs[0] == -1.0).sum() >= gap * len(ours[2])


def check_flag(value: float, bucket_dtype: torch.dtype, at: int) -> int:
    made = [torch.zeros(1500), torch.zeros(40)]
    made[at // 1500][at % 1500] = value
    return int(Pieces(made).gather(torch.empty(1540, dtype=bucket_dtype)))


@interpreted
def kernel_flag(value: float, bucket_dtype: torch.dtype, at: int) -> int:
    return check_flag(value, bucket_dtype, at)


@pytest.mark.parametrize("at", [0, 1499, 1539])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_element_that_is_not_finite_raises_the_flag(value: float, at: int) -> None:
    for check in (check_flag, kernel_flag):
        assert check(value, torch.float32, at) == 1
        assert check(3e38, torch.float32, at) == 0


def test_an_overflow_of_the_cast_raises_the_flag() -> None:
    """1e5 is finite in fp32 and in bf16, and infinite in fp16."""
    for check in (check_flag, kernel_flag):
        assert check(1e5, torch.float16, 3) == 1
        assert check(1e5, torch.bfloat16, 3) == 0


def test_finite_values_whose_sum_overflows_do_not_raise_the_flag() -> None:
    assert int(Pieces([torch.full((10,), 3e38)]).gather(torch.empty(10))) == 0


def added(bucket_dtype: torch.dtype) -> list[torch.Tensor]:
    """Half of a bucket added to tensors of three dtypes."""
    made = tensors(DTYPES)
    numel = sum(t.numel() for t in made)
    bucket = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(bucket_dtype)
    Pieces(made).scatter(bucket, torch.tensor(0.5), add=True)
    return [bucket, *made]


kernel_added = interpreted(added)


@pytest.mark.parametrize("bucket_dtype", DTYPES)
def test_what_is_added_is_summed_in_fp32_and_rounded_once(bucket_dtype: torch.dtype) -> None:
    ours, theirs = kernel_added(bucket_dtype), added(bucket_dtype)
    before, at = tensors(DTYPES), 0
    for a, b, old in zip(ours[1:], theirs[1:], before, strict=True):
        part = theirs[0][at : at + old.numel()].double() * 0.5
        at += old.numel()
        assert torch.equal(a, b)
        assert torch.equal(b, (old.double() + part).float().to(old.dtype))


def skipped(skip: int) -> torch.Tensor:
    made = torch.ones(1030)
    flag = torch.tensor([skip], dtype=torch.int32)
    Pieces([made]).scatter(torch.full((1030,), 5.0), skip=flag)
    return made


@interpreted
def kernel_skipped(skip: int) -> torch.Tensor:
    return skipped(skip)


def test_a_raised_flag_keeps_every_tensor() -> None:
    for scatter in (skipped, kernel_skipped):
        assert torch.equal(scatter(1), torch.ones(1030))
        assert torch.equal(scatter(0), torch.full((1030,), 5.0))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        Pieces([torch.zeros(4, 4).t()])
    with pytest.raises(ValueError, match="2 offsets for 1 tensors"):
        Pieces([torch.zeros(4)], [0, 4])
    with pytest.raises(ValueError, match="at least 4 elements"):
        Pieces([torch.zeros(4)]).gather(torch.zeros(3))
    with pytest.raises(ValueError, match="one bucket for each device"):
        Pieces([torch.zeros(4, device="meta")]).gather(torch.zeros(4))
