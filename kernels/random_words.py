"""The random word of an element: 32 bits that seed its stochastic rounding, in Python and torch.

It is a hash of (seed, step, parameter index, element index within the parameter): it does not
depend on the table, the block size, the bucket or the shard that the element happens to be in, and
no global generator is touched. The hash is two rounds of a 32-bit finaliser (multiply, xor-shift)
keyed per tensor and step, and one more round for each array of the element: about thirty integer
instructions, below what the memory traffic hides, where ten rounds of a counter-based generator
would be about a hundred. `rounding.py` has the same in a kernel.
"""

import torch

WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def _mix_int(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & WORD
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & WORD
    return x ^ (x >> 16)


def tensor_key(seed: int, index: int) -> int:
    """The 63-bit key of parameter `index`: what the table carries of seed and index."""
    low, high = _mix_int(seed & WORD), _mix_int((seed >> 32 ^ _GOLDEN) & WORD)
    low = _mix_int((low + index * _GOLDEN) & WORD)
    high = _mix_int(high ^ _mix_int((index + low) & WORD))
    return (high & 0x7FFFFFFF) << 32 | low


def _mix(x: torch.Tensor) -> torch.Tensor:
    """`_mix_int` on an int64 tensor of 32-bit words; products wrap, and the mask repairs them."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & WORD
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & WORD
    return x ^ (x >> 16)


def random_words(numel: int, *, key: int, step: int, offset: int, slot: int) -> torch.Tensor:
    """The 32-bit words (in int64) of elements offset .. offset + numel; a slot is an array."""
    at_step = _mix_int(step & WORD)
    low_key = _mix_int((key & WORD) ^ at_step)
    high_key = _mix_int(((key >> 32) + at_step) & WORD)
    index = torch.arange(offset, offset + numel, dtype=torch.int64)
    low, high = index & WORD, index >> 32
    words = _mix(_mix((low + low_key) & WORD) ^ ((high * _GOLDEN + high_key) & WORD))
    return _mix((words + slot * _GOLDEN) & WORD)
