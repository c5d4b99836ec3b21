"""The weighted sum of int8 buckets: kernel against reference."""

import pytest
import torch

from hdet_scale.kernels.int8_format import packed_blocks
from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.kernels.unpack import unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def unpacked(replicas: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-127, 128, (replicas, numel), generator=generator).to(torch.int8)
    scales = torch.rand(replicas, packed_blocks(numel), generator=generator)
    weights = torch.rand(replicas, generator=generator)
    out = torch.empty(numel, dtype=dtype)
    unpack(codes, scales, weights, out)
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


def moved(numel: int, dtype: torch.dtype, move: bool, gap: int) -> list[torch.Tensor]:
    """Results from a last point, which may be written too, behind a gap that spoils alignment."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (2, numel), generator=generator).to(torch.int8)
    scales = torch.rand(2, packed_blocks(numel), generator=generator)
    point = torch.randn(gap + numel, generator=generator)
    out = torch.full((numel,), 7.0, dtype=dtype)
    unpack(codes, scales, torch.tensor([0.25, 0.75]), out, point[gap:], move=move)
    return [out, point]


kernel_moved = interpreted(moved)


@pytest.mark.parametrize(("numel", "gap"), [(1024, 0), (1025, 0), (2048, 1)])
@pytest.mark.parametrize("move", [False, True], ids=["from", "move"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unpack_from_a_point_is_that_of_the_reference(
    numel: int, gap: int, move: bool, dtype: torch.dtype
) -> None:
    (out, point), (wanted, kept) = (
        kernel_moved(numel, dtype, move, gap),
        moved(numel, dtype, move, gap),
    )
    assert torch.equal(out, wanted)
    assert torch.equal(point, kept)
    before = torch.randn(gap + numel, generator=drawn(numel))
    assert torch.equal(point[:gap], before[:gap])
    assert torch.equal(point, before) is not move
    if move:
        assert torch.equal(point[gap:].to(dtype), out)


def drawn(numel: int) -> torch.Generator:
    """The generator of `moved` where it draws the point."""
    generator = torch.Generator().manual_seed(3)
    torch.randint(-127, 128, (2, numel), generator=generator)
    torch.rand(2, packed_blocks(numel), generator=generator)
    return generator


def test_unpack_is_the_weighted_sum() -> None:
    codes = torch.tensor([[1, -2, 3], [10, 20, -30]], dtype=torch.int8)
    scales, weights = torch.tensor([[0.5], [0.25]]), torch.tensor([0.75, 0.25])
    out = torch.empty(3)
    unpack(codes, scales, weights, out)
    assert torch.equal(out, torch.tensor([1.0, 0.5, -0.75]))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="replicas"):
        unpack(torch.zeros(4, dtype=torch.int8), torch.zeros(1), torch.ones(1), torch.zeros(4))
    codes, scales, weights = torch.zeros(1, 4).to(torch.int8), torch.zeros(1, 1), torch.ones(1)
    with pytest.raises(ValueError, match=r"point is torch.float16.*float32"):
        unpack(codes, scales, weights, torch.zeros(4), torch.zeros(4).half())
