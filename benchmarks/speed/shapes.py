"""Shapes of models that are measured."""

from __future__ import annotations


def llama_7b(scale: int = 1) -> list[tuple[int, ...]]:
    """The shapes of Llama 2 7B, 6.74 B parameters in 291 tensors; width divided by `scale`."""
    d, inner, words = 4096 // scale, 11008 // scale, 32000
    block: list[tuple[int, ...]] = [(d, d)] * 4 + [(inner, d)] * 2 + [(d, inner), (d,), (d,)]
    return [(words, d), *(block * 32), (d,), (words, d)]


def gpt2_small(scale: int = 1) -> list[tuple[int, ...]]:
    """The shapes of GPT-2 small, 124 M parameters in 148 tensors; width divided by `scale`."""
    d = 768 // scale
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,)]
    block += [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d), *(block * 12), (d,), (d,)]
