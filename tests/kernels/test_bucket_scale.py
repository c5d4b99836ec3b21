"""A bucket times a scalar: kernel and reference round once."""

import pytest
import torch

from hdet_scale.kernels.bucket_scale import scale
from hdet_scale.kernels.interpreter import interpreted

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def scaled(dtype: torch.dtype, shift: int) -> torch.Tensor:
    bucket = torch.randn(2100, generator=torch.Generator().manual_seed(3)).to(dtype)[shift:]
    scale(bucket, torch.tensor([0.3]))
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
