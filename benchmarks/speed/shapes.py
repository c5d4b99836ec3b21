"""Shapes of models that are measured."""

from __future__ import annotations


def gpt2_small(scale: int = 1) -> list[tuple[int, ...]]:
    """The shapes of GPT-2 small, 124 M parameters in 148 tensors; width divided by `scale`."""
    d = 768 // scale
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,)]
    block += [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d), *(block * 12), (d,), (d,)]
