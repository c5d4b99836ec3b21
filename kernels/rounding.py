"""Stochastic rounding from fp32 to bf16 or fp16: up with the probability that makes it unbiased.

A value x between its two neighbours a < x < b becomes b with probability (x - a) / (b - a), so
that E[round(x)] = x and an update far below the spacing of the format is not lost on average.

The random word of an element is a hash of (seed, step, parameter index, element index within the
parameter): it does not depend on the table, the block size, the bucket or the shard that the
element happens to be in, and no global generator is touched. The hash is two rounds of a 32-bit
finaliser (multiply, xor-shift) keyed per tensor and step, and one more round for each array of the
element: about thirty integer instructions, below what the memory traffic hides, where ten rounds
of a counter-based generator would be about a hundred.
"""

import torch

from hdet_scale.kernels.launch import interpreting, jit, tl

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_INTERPRETED = tl.constexpr(interpreting())


def _mix_int(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & _WORD
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def tensor_key(seed: int, index: int) -> int:
    """The 63-bit key of parameter `index`: what the table carries of seed and index."""
    low, high = _mix_int(seed & _WORD), _mix_int((seed >> 32 ^ _GOLDEN) & _WORD)
    low = _mix_int((low + index * _GOLDEN) & _WORD)
    high = _mix_int(high ^ _mix_int((index + low) & _WORD))
    return (high & 0x7FFFFFFF) << 32 | low


def _mix(x: torch.Tensor) -> torch.Tensor:
    """`_mix_int` on an int64 tensor of 32-bit words; products wrap, and the mask repairs them."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _WORD
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def random_words(numel: int, *, key: int, step: int, offset: int, slot: int) -> torch.Tensor:
    """The 32-bit words (in int64) of elements offset .. offset + numel; a slot is an array."""
    at_step = _mix_int(step & _WORD)
    low_key = _mix_int((key & _WORD) ^ at_step)
    high_key = _mix_int(((key >> 32) + at_step) & _WORD)
    index = torch.arange(offset, offset + numel, dtype=torch.int64)
    low, high = index & _WORD, index >> 32
    words = _mix(_mix((low + low_key) & _WORD) ^ ((high * _GOLDEN + high_key) & _WORD))
    return _mix((words + slot * _GOLDEN) & _WORD)


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
    bits = x.contiguous().view(torch.int32).to(torch.int64) & _WORD
    moved = ((bits + (words & dropped)) & (_WORD ^ dropped)).to(torch.int32).view(torch.float32)
    if dtype == torch.float16:
        moved = torch.where(x.abs() < 2.0**-14, _round_subnormal(x, words), moved)
    return torch.where(torch.isfinite(x), moved, x).to(dtype)


def _round_subnormal(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Below 2^-14 fp16 has the fixed spacing 2^-24: count in it, and compare the fraction."""
    count = x * 2.0**24
    below = torch.floor(count)
    up = (count - below) > (words >> 8).to(torch.float32) * 2.0**-24
    return (below + up.to(torch.float32)) * 2.0**-24


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
    index = first + offsets
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
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
        fraction = (words >> 8).to(tl.float32) * 5.9604644775390625e-08
        small = (below + tl.where(count - below > fraction, 1.0, 0.0)) * 5.9604644775390625e-08
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
