"""Stochastic rounding: unbiased, seeded per (seed, step, parameter, element), and nothing else."""

import pytest
import torch

from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.kernels.launch import jit, launch, tl, tl_dtype
from hdet_scale.kernels.random_words import tensor_key
from hdet_scale.kernels.rounding import round_to, stochastic_round, words_at
from hdet_scale.optim.fused_sgd import FusedSGD

MILLION = 10**6
KEY = tensor_key(3, 7)


def neighbours(x: float, dtype: torch.dtype) -> tuple[float, float]:
    """The two values of the format around x, which is not one of them."""
    nearest = torch.tensor(x, dtype=torch.float64).to(dtype)
    side = float("inf") if nearest.item() < x else -float("inf")
    other = torch.nextafter(nearest, torch.tensor(side, dtype=dtype))
    low, high = sorted((nearest.item(), other.item()))
    return low, high


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x", [1.001, -0.30007, 3.1e-6, -2.0e-7, 1000.3])
def test_mean_error_of_a_million_roundings_is_within_three_standard_errors(
    dtype: torch.dtype, x: float
) -> None:
    """The small values are subnormal in fp16, where the spacing no longer follows the value."""
    value = torch.full((MILLION,), x)
    exact = value[0].double().item()
    rounded = stochastic_round(value, dtype, key=KEY, step=5).double()
    low, high = neighbours(exact, dtype)
    assert set(rounded.unique().tolist()) == {low, high}
    share = (exact - low) / (high - low)
    error = (rounded - exact).mean().item()
    standard = (high - low) * (share * (1 - share) / MILLION) ** 0.5
    print(f"{dtype} {x}: mean error {error / standard:+.2f} standard errors")
    assert abs(error) <= 3 * standard


def test_mean_error_over_a_million_different_values() -> None:
    value = torch.randn(MILLION, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        error = stochastic_round(value, dtype, key=KEY, step=1).double() - value.double()
        assert abs(error.mean()) <= 3 * error.std() / MILLION**0.5
        assert error.std() > 0


def test_exact_values_and_values_that_are_not_finite_stay() -> None:
    inf, nan = float("inf"), float("nan")
    value = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-24, inf, -inf, nan])
    for dtype in (torch.bfloat16, torch.float16):
        for step in range(50):
            rounded = stochastic_round(value, dtype, key=KEY, step=step)
            assert torch.equal(rounded[:-1], value[:-1].to(dtype))
            assert rounded[-1].isnan()


def test_a_shard_rounds_as_the_whole_does() -> None:
    """Pieces of any length, each told the index of its first element, give the whole's bits."""
    value = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    whole = stochastic_round(value, torch.bfloat16, key=KEY, step=9)
    for cuts in ([1000], [1, 17, 4096], [2500, 2501]):
        pieces, start = [], 0
        for end in [*cuts, 5000]:
            part = value[start:end]
            pieces.append(stochastic_round(part, torch.bfloat16, key=KEY, step=9, offset=start))
            start = end
        assert torch.equal(torch.cat(pieces), whole)
    assert not torch.equal(
        stochastic_round(value, torch.bfloat16, key=KEY, step=9, offset=1), whole
    )


@jit
def _round_kernel(x, out, key, step, first, numel, D: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    words = words_at(tl.load(key), tl.load(step), tl.load(first), i)
    salted = words_of_slot(words)
    tl.store(out + i, round_to(tl.load(x + i, mask=mask), salted, D), mask=mask)


@jit
def words_of_slot(words):
    """Array 0 adds nothing before the last round."""
    words = words ^ (words >> 16)
    words = words * 0x85EBCA6B
    words = words ^ (words >> 13)
    words = words * 0xC2B2AE35
    return words ^ (words >> 16)


@interpreted
def round_in_kernel(
    x: torch.Tensor, dtype: torch.dtype, step: int, first: int, block: int
) -> torch.Tensor:
    out = torch.empty_like(x, dtype=dtype)
    key, at = torch.tensor([KEY]), torch.tensor([first])
    count = torch.tensor([step], dtype=torch.int32)
    programs = -(-x.numel() // block)
    args = (x, out, key, count, at, x.numel())
    launch(_round_kernel, programs, x.device, *args, D=tl_dtype(dtype), BLOCK=block)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_gives_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    spread = 10.0 ** (torch.rand(3000, generator=generator) * 12 - 8)
    x = torch.randn(3000, generator=generator) * spread
    x[:5] = torch.tensor([0.0, float("inf"), -float("inf"), 1e-7, -6e-5])
    for step, first, block in ((1, 0, 1024), (77, 2**33 + 5, 256)):
        ours = round_in_kernel(x, dtype, step, first, block)
        theirs = stochastic_round(x, dtype, key=KEY, step=step, offset=first)
        assert torch.equal(ours, theirs)


@interpreted
def stepped(sizes: list[int], groups: int, missing: int | None) -> list[torch.Tensor]:
    """Parameters after three stochastic steps, split over groups, one of them without gradient at
    the first step: other tables, the same parameters."""
    generator = torch.Generator().manual_seed(4)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in sizes]
    grads = [[torch.randn(n, generator=generator).bfloat16() for n in sizes] for _ in range(3)]
    share = -(-len(params) // groups)
    optimizer = FusedSGD(
        [{"params": params[i : i + share]} for i in range(0, len(params), share)],
        lr=1e-3,
        stochastic_rounding=True,
        seed=9,
        backend="triton",
    )
    for step, row in enumerate(grads):
        for i, (param, grad) in enumerate(zip(params, row, strict=True)):
            param.grad = None if step == 0 and i == missing else grad
        optimizer.step()
    return [p.detach() for p in params]


def test_the_same_bits_whatever_the_table() -> None:
    sizes = [5, 1025, 64]
    together = stepped(sizes, 1, None)
    for other in (stepped(sizes, 3, None), stepped(sizes, 2, None)):
        for a, b in zip(together, other, strict=True):
            assert torch.equal(a, b)
    without = stepped(sizes, 1, 0)
    assert torch.equal(without[1], together[1]), "another tensor's absence must not matter"
    assert not torch.equal(without[0], together[0])


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        stochastic_round(torch.ones(3), torch.float64, key=1, step=1)
