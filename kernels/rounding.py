"""Stochastic rounding from fp32 to bf16 or fp16: up with the probability that makes it unbiased.

A value x between its two neighbours a < x < b becomes b with probability (x - a) / (b - a), so
that E[round(x)] = x and an update far below the spacing of the format is not lost on average. The
random word that decides is a hash of the element's place (`random_words.py`).
"""

from collections.abc import Sequence

import torch

from hdet_scale.kernels.launch import interpreting, jit, tl
from hdet_scale.kernels.random_words import WORD, random_words

_INTERPRETED = tl.constexpr(interpreting())


def stochastic_round(
    x: torch.Tensor, dtype: torch.dtype, *, key: int, step: int, offset: int = 0, slot: int = 0
) -> torch.Tensor:
    """The torch reference: an fp32 tensor rounded to `dtype`. Not finite stays as it is."""
    if dtype == torch.float32:
        return x
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"stochastic rounding to {dtype}: valid are bfloat16 and float16")
    words = random_words(x.numel(), key=key, step=step, offset=offset, slot=slot)
    words = words.view(x.shape).to(x.device)
    dropped = 0xFFFF if dtype == torch.bfloat16 else 0x1FFF
    bits = x.contiguous().view(torch.int32).to(torch.int64) & WORD
    moved = ((bits + (words & dropped)) & (WORD ^ dropped)).to(torch.int32).view(torch.float32)
    if dtype == torch.float16:
        moved = torch.where(x.abs() < 2.0**-14, _round_subnormal(x, words), moved)
    return torch.where(torch.isfinite(x), moved, x).to(dtype)


def _round_subnormal(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Below 2^-14 fp16 has the fixed spacing 2^-24: count in it, and compare the fraction."""
    count = x * 2.0**24
    below = torch.floor(count)
    up = (count - below) > (words >> 8).to(torch.float32) * 2.0**-24
    return (below + up.to(torch.float32)) * 2.0**-24


def write_reference(
    arrays: Sequence[tuple[torch.Tensor, torch.Tensor]], *, key: int | None, step: int, offset: int
) -> None:
    """Write fp32 values into a tensor's arrays, as `store_rounded` does in the kernel.

    Args:
        arrays: (array, value) of the parameter, then of its moments; an array's place is its slot.
        key: Seeds the stochastic rounding of the arrays that are 16 bits wide; None: to nearest.
        step: The count of this step, from 1.
        offset: Index, within the whole parameter, of the first element.
    """
    for slot, (target, value) in enumerate(arrays):
        if key is not None:
            value = stochastic_round(
                value, target.dtype, key=key, step=step, offset=offset, slot=slot
            )
        target.copy_(value)


@jit
def mix(x):  # type: ignore[no-untyped-def]
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@jit
def words_at(key, step, first, offsets):  # type: ignore[no-untyped-def]
    """The words of elements first (int64) + offsets, before the round that tells arrays apart."""
    at_step = mix(step.to(tl.uint32))
    low_key = mix((key & 0xFFFFFFFF).to(tl.uint32) ^ at_step)
    high_key = mix((key >> 32).to(tl.uint32) + at_step)
    # In halves with a carry: indices of 64 bits take twice the registers.
    start = (first & 0xFFFFFFFF).to(tl.uint32)
    low = start + offsets.to(tl.uint32)
    high = (first >> 32).to(tl.uint32) + (low < start).to(tl.uint32)
    return mix(mix(low + low_key) ^ (high * 0x9E3779B9 + high_key))


@jit
def round_to(x, words, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """`stochastic_round` in a kernel, for bf16 and fp16."""
    bits = x.to(tl.uint32, bitcast=True)
    if dtype == tl.bfloat16:
        moved = ((bits + (words & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        moved = ((bits + (words & 0x1FFF)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        count = x * 16777216.0
        below = tl.floor(count)
        # Both sides times 2^24, which is exact and takes fewer registers.
        more = (count - below) * 16777216.0 > (words >> 8).to(tl.float32)
        small = (below + more.to(tl.float32)) * 5.9604644775390625e-08
        moved = tl.where(tl.abs(x) < 6.103515625e-05, small, moved)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, moved, x).to(dtype)


@jit
def nearest(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """x rounded to dtype, to nearest, ties to even. Triton's interpreter cuts fp32 down to bf16
    where a GPU rounds: there, and only there, the rounding is done on the bits."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        moved = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(finite, moved.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@jit
def store_rounded(  # type: ignore[no-untyped-def]
    at, x, mask, words, dtype: tl.constexpr, slot: tl.constexpr, stochastic: tl.constexpr
):
    """Store fp32 x as dtype: to nearest, or stochastically where the format is 16 bits wide."""
    if stochastic and dtype != tl.float32:
        salt: tl.constexpr = (slot * 0x9E3779B9) & 0xFFFFFFFF
        tl.store(at, round_to(x, mix(words + salt), dtype), mask=mask)
    else:
        tl.store(at, nearest(x, dtype), mask=mask)
