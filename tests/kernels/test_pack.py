"""Packing to int8: kernel against reference, and nothing is lost over rounds."""

import pytest
import torch

from hdet_scale.kernels.int8_format import QUANTUM, packed_blocks
from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.kernels.pack import pack
from hdet_scale.kernels.unpack import unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Codes, scales and error after packing twice the same values, with feedback."""
    generator = torch.Generator().manual_seed(numel)
    point = torch.randn(numel, generator=generator)
    x = (torch.randn(numel, generator=generator) * 3).to(dtype)
    x[: numel // 3] = point[: numel // 3] = 0
    error = torch.zeros(numel)
    codes = torch.empty(numel, dtype=torch.int8)
    scales = torch.empty(packed_blocks(numel))
    for _ in range(2):
        pack(x, point, error, codes, scales)
    return [x, point, codes, scales, error]


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
        pack(x, torch.zeros(1000), error, codes, scales)
        unpack(codes[None], scales[None], torch.ones(1), out)
        sent += out.double()
        limit = scales.repeat_interleave(QUANTUM)[:1000] * 0.5001
        assert (error.abs() <= limit).all()
        # Twenty rounds in, the sum of what was sent is still within one rounding of the sum of x.
        gap = (sent - rounds * x.double()).abs()
        assert (gap <= limit.double() + 1e-4).all()
    plain = (out.double() - x.double()).abs().max()
    assert plain > 0, "the format is coarse: without feedback this error would add up"


def test_bad_input_is_refused() -> None:
    x, codes, scales = torch.zeros(4), torch.zeros(4, dtype=torch.int8), torch.zeros(1)
    with pytest.raises(ValueError, match=r"error is torch.float16.*float32"):
        pack(x, x, x.half(), codes, scales)
    with pytest.raises(ValueError, match=r"point is torch.float32 \(3,\)"):
        pack(x, x[:3], x, codes, scales)
    with pytest.raises(ValueError, match="codes and scales"):
        pack(x, x, x, codes, torch.zeros(2))
