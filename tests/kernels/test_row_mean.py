"""The mean of 16-bit rows: kernel against reference, to the bit."""

import pytest
import torch

from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.kernels.row_mean import row_mean

NARROW = [torch.bfloat16, torch.float16]


def averaged(
    dtype: torch.dtype, out_dtype: torch.dtype, numel: int, stride: int, chosen: str
) -> torch.Tensor:
    """Rows with zeros of both signs, a NaN in the row that is never chosen."""
    generator = torch.Generator().manual_seed(numel)
    table = torch.randn(4, stride, generator=generator).to(dtype)
    table[:, : numel // 3] = -0.0
    table[3] = torch.nan
    out = torch.full((numel,), 7.0, dtype=out_dtype)
    row_mean(table[:, :numel], [flag == "1" for flag in chosen], out)
    return out


kernel_averaged = interpreted(averaged)


@pytest.mark.parametrize(("numel", "stride"), [(0, 8), (1, 8), (1024, 1024), (1025, 1027)])
@pytest.mark.parametrize("chosen", ["1100", "0010", "1010", "1110"])
@pytest.mark.parametrize("dtype", NARROW)
def test_the_mean_of_rows_is_that_of_the_reference(
    dtype: torch.dtype, chosen: str, numel: int, stride: int
) -> None:
    for out_dtype in (torch.float32, dtype):
        ours = kernel_averaged(dtype, out_dtype, numel, stride, chosen)
        theirs = averaged(dtype, out_dtype, numel, stride, chosen)
        assert bool(ours.isfinite().all())
        assert torch.equal(ours.signbit(), theirs.signbit())
        assert torch.equal(ours, theirs)


def test_the_mean_is_summed_in_fp32_and_may_replace_a_row() -> None:
    """256 + 1 is 256 in bf16; in fp32 the mean of both is 128.5."""
    rows = torch.tensor([[256.0, -3.0], [1.0, 5.0]], dtype=torch.bfloat16)
    row_mean(rows, [True, True], rows[1])
    assert rows.tolist() == [[256.0, -3.0], [128.0, 1.0]]  # 128.5 rounds to even
    wide = torch.empty(2)
    row_mean(torch.tensor([[256.0, -3.0], [1.0, 5.0]], dtype=torch.bfloat16), [True, True], wide)
    assert wide.tolist() == [128.5, 1.0]


def test_bad_input_is_refused() -> None:
    rows, out = torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(4)
    with pytest.raises(ValueError, match="each row contiguous"):
        row_mean(rows, [True, False], torch.zeros(3))
    with pytest.raises(ValueError, match="each row contiguous"):
        row_mean(rows.t().contiguous().t(), [True, False], out)
    with pytest.raises(ValueError, match="set at least one"):
        row_mean(rows, [False, False], out)
    with pytest.raises(ValueError, match=r"\[True\] for 2 rows: give a flag for each"):
        row_mean(rows, [True], out)
