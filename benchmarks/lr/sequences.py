"""Problems for transformers on short sequences."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.problem import Params, Task, cross_entropy, linear, look_up, normal, times
from benchmarks.lr.texts import VOCABULARY, windows


@functools.cache
def _unsorted(length: int, examples: int) -> Tensor:
    """Sequences of random digits, [examples, length]."""
    return torch.randint(10, (examples, length), generator=torch.Generator().manual_seed(22))


def sort(*, name: str = "sort", batch: int = 32, around: float = 0.025) -> Task:
    """The digits of a sequence in order, by an encoder of two blocks; near zero at its best;
    AdamW."""
    length, width, layers, train, held_out = 8, 24, 2, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        params = {
            "embed": normal(g, 10, width, scale=0.5),
            "place": normal(g, length, width, scale=0.5),
            "head": linear(g, width, 10, 0.5),
        }
        for i in range(layers):
            params |= {
                f"qkv{i}": linear(g, width, 3 * width),
                f"mix{i}": linear(g, width, width, 0.5),
                f"up{i}": linear(g, width, 2 * width, 1.4),
                f"down{i}": linear(g, 2 * width, width, 0.5),
            }
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens = _unsorted(length, train + held_out)[indices]
        x = look_up(p["embed"], tokens) + p["place"][:, None]
        for i in range(layers):
            q, k, v = times(functional.layer_norm(x, (width,)), p[f"qkv{i}"]).chunk(3, -1)
            x = x + times(functional.scaled_dot_product_attention(q, k, v), p[f"mix{i}"])
            hidden = functional.gelu(times(functional.layer_norm(x, (width,)), p[f"up{i}"]))
            x = x + times(hidden, p[f"down{i}"])
        guess = times(functional.layer_norm(x, (width,)), p["head"])
        return cross_entropy(guess, tokens.sort(-1).values)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
        weight_decay=0.01,
    )


def post_norm(*, name: str = "post-norm", batch: int = 24, around: float = 0.004) -> Task:
    """A byte-level decoder of four blocks, each with LayerNorm after its sum, as the first
    transformers had it: large rates need a warm-up; AdamW."""
    width, layers, context, train, held_out = 24, 4, 16, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        params = {
            "embed": normal(g, VOCABULARY, width, scale=1.0),
            "place": normal(g, context, width, scale=0.3),
            "head": linear(g, width, VOCABULARY, 0.5),
        }
        for i in range(layers):
            params |= {
                f"qkv{i}": linear(g, width, 3 * width),
                f"mix{i}": linear(g, width, width),
                f"up{i}": linear(g, width, 4 * width, 1.4),
                f"down{i}": linear(g, 4 * width, width),
                f"gain{i}": torch.ones(2, width),
                f"shift{i}": torch.zeros(2, width),
            }
        return params

    def normed(p: Params, x: Tensor, block: int, place: int) -> Tensor:
        """LayerNorm after the attention (place 0) or the MLP (place 1) of a block."""
        gain, shift = (p[f"{kind}{block}"][:, place, None, None] for kind in ("gain", "shift"))
        return functional.layer_norm(x, (width,)) * gain + shift

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, target = windows(context, indices, train, held_out)
        x = look_up(p["embed"], tokens) + p["place"][:, None]
        for i in range(layers):
            q, k, v = times(x, p[f"qkv{i}"]).chunk(3, -1)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = normed(p, x + times(mixed, p[f"mix{i}"]), i, 0)
            hidden = functional.relu(times(x, p[f"up{i}"]))
            x = normed(p, x + times(hidden, p[f"down{i}"]), i, 1)
        return cross_entropy(times(x, p["head"]), target)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
        weight_decay=0.01,
    )
