"""Gather, scatter, scale, pack and unpack: kernel against reference, and what they promise."""

import pytest
import torch

from hdet_scale.kernels import pieces
from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.kernels.pieces import QUANTUM, Pieces

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


def scaled(dtype: torch.dtype, shift: int) -> torch.Tensor:
    bucket = torch.randn(2100, generator=torch.Generator().manual_seed(3)).to(dtype)[shift:]
    pieces.scale(bucket, torch.tensor([0.3]))
    return bucket


@interpreted
def kernel_scaled(dtype: torch.dtype, shift: int) -> torch.Tensor:
    return scaled(dtype, shift)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_rounds_once(dtype: torch.dtype) -> None:
    original = torch.randn(2100, generator=torch.Generator().manual_seed(3)).to(dtype)
    for shift in (0, 1):
        expected = (original[shift:].float() * 0.3).to(dtype)
        assert torch.equal(scaled(dtype, shift), expected)
        assert torch.equal(kernel_scaled(dtype, shift), expected)


def packed(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Codes, scales and error after packing twice the same values, with feedback."""
    generator = torch.Generator().manual_seed(numel)
    x = (torch.randn(numel, generator=generator) * 3).to(dtype)
    x[: numel // 3] = 0
    error = torch.zeros(numel)
    codes = torch.empty(numel, dtype=torch.int8)
    scales = torch.empty(pieces.packed_blocks(numel))
    for _ in range(2):
        pieces.pack(x, error, codes, scales)
    return [x, codes, scales, error]


@interpreted
def kernel_packed(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return packed(numel, dtype)


@pytest.mark.parametrize("numel", [0, 1, 17, 1024, 1025])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_is_that_of_the_reference(numel: int, dtype: torch.dtype) -> None:
    for ours, theirs in zip(kernel_packed(numel, dtype), packed(numel, dtype), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_what_is_sent_and_what_is_kept_are_the_value() -> None:
    """s q + e is x + the error before: nothing is lost; and no code is off by more than half."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 5
    error = torch.zeros(1000)
    codes, scales = torch.empty(1000, dtype=torch.int8), torch.empty(4)
    sent = torch.zeros(1000, dtype=torch.float64)
    out = torch.empty(1000)
    for rounds in range(1, 21):
        pieces.pack(x, error, codes, scales)
        pieces.unpack(codes[None], scales[None], torch.ones(1), out)
        sent += out.double()
        limit = scales.repeat_interleave(QUANTUM)[:1000] * 0.5001
        assert (error.abs() <= limit).all()
        # Twenty rounds in, the sum of what was sent is still within one rounding of the sum of x.
        gap = (sent - rounds * x.double()).abs()
        assert (gap <= limit.double() + 1e-4).all()
    plain = (out.double() - x.double()).abs().max()
    assert plain > 0, "the format is coarse: without feedback this error would add up"


def unpacked(replicas: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-127, 128, (replicas, numel), generator=generator).to(torch.int8)
    scales = torch.rand(replicas, pieces.packed_blocks(numel), generator=generator)
    weights = torch.rand(replicas, generator=generator)
    out = torch.empty(numel, dtype=dtype)
    pieces.unpack(codes, scales, weights, out)
    return out


@interpreted
def kernel_unpacked(replicas: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return unpacked(replicas, numel, dtype)


@pytest.mark.parametrize(("replicas", "numel"), [(1, 17), (3, 1024), (2, 1025)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unpack_is_that_of_the_reference(replicas: int, numel: int, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        kernel_unpacked(replicas, numel, dtype), unpacked(replicas, numel, dtype)
    )


def test_unpack_is_the_weighted_sum() -> None:
    codes = torch.tensor([[1, -2, 3], [10, 20, -30]], dtype=torch.int8)
    scales, weights = torch.tensor([[0.5], [0.25]]), torch.tensor([0.75, 0.25])
    out = torch.empty(3)
    pieces.unpack(codes, scales, weights, out)
    assert torch.equal(out, torch.tensor([1.0, 0.5, -0.75]))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        Pieces([torch.zeros(4, 4).t()])
    with pytest.raises(ValueError, match="2 offsets for 1 tensors"):
        Pieces([torch.zeros(4)], [0, 4])
    with pytest.raises(ValueError, match="at least 4 elements"):
        Pieces([torch.zeros(4)]).gather(torch.zeros(3))
    with pytest.raises(ValueError, match="one bucket for each device"):
        Pieces([torch.zeros(4, device="meta")]).gather(torch.zeros(4))
    with pytest.raises(ValueError, match="float32"):
        pieces.pack(
            torch.zeros(4), torch.zeros(4).half(), torch.zeros(4, dtype=torch.int8), torch.zeros(1)
        )
    with pytest.raises(ValueError, match="codes and scales"):
        pieces.pack(
            torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.int8), torch.zeros(2)
        )
    with pytest.raises(ValueError, match="replicas"):
        pieces.unpack(
            torch.zeros(4, dtype=torch.int8), torch.zeros(1), torch.ones(1), torch.zeros(4)
        )
