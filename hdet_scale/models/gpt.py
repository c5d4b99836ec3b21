"""A GPT: pre-norm blocks, causal attention, an output layer tied to the token embedding.

    x   = E[tokens] + P[0 .. t-1]
    x  <- x + attention(norm(x));  x <- x + mlp(norm(x))          in each layer
    out = norm(x) E'

E is the token embedding and P the position embedding. Attention is torch's
scaled_dot_product_attention, which uses a flash kernel if there is one. Weights are a pure function
of (seed, name): every rank builds the same model on any device, and the global random generators
are not touched.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hdet_scale.method.spread import stream_seed

BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT."""

    layers: int
    """Blocks."""
    width: int
    """Size of the residual stream."""
    heads: int
    """Attention heads; they share the width."""
    context: int = 1024
    """Longest sequence."""
    vocabulary: int = BYTES
    """Tokens; 256 for bytes."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{field.name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        if self.width % self.heads:
            valid = [h for h in range(1, self.width + 1) if self.width % h == 0]
            raise ValueError(
                f"heads={self.heads} do not divide width={self.width}: choose one of {valid}"
            )

    @classmethod
    def named(cls, size: str, **changes: int) -> GPTConfig:
        """A size by its name, with changes: `GPTConfig.named("125m", context=2048)`.

        Raises:
            ValueError: if there is no such size.
        """
        if size not in SIZES:
            raise ValueError(f"no size called {size!r}: choose one of {list(SIZES)}")
        return dataclasses.replace(SIZES[size], **changes)

    @property
    def parameters(self) -> int:
        """The number of parameters: embeddings, 12 width^2 a layer, norms."""
        blocks = self.layers * (12 * self.width**2 + 2 * self.width)
        return (self.vocabulary + self.context) * self.width + blocks + self.width


SIZES = {
    "tiny": GPTConfig(layers=2, width=64, heads=2, context=64),
    "mini": GPTConfig(layers=4, width=128, heads=4, context=256),
    "60m": GPTConfig(layers=6, width=640, heads=10),
    "125m": GPTConfig(layers=12, width=768, heads=12),
    "350m": GPTConfig(layers=24, width=1024, heads=16),
    "760m": GPTConfig(layers=24, width=1536, heads=16),
    "1.3b": GPTConfig(layers=24, width=2048, heads=16, context=2048),
}
"""From one that a laptop trains in a minute to the sizes of the GPT-3 family. The names give the
number of parameters with that family's vocabulary of 50 k tokens; with bytes it is smaller."""


class Linear(nn.Linear):
    """Without a bias, and without torch's own initialisation: GPT.init_weights does it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """Without torch's own initialisation: GPT.init_weights does it."""

    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values come out of one product."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, bias=False)
        self.up = Linear(config.width, 4 * config.width)
        self.down = Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """The model.

    Args:
        config: its shape.
        seed: of the weights. Default 0.

    Limitations:
        On the meta device no weights are drawn: call `init_weights` after `to_empty`.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocabulary, config.width)
        self.positions = Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        if not self.tokens.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Draw the weights from N(0, 0.02^2) and set norms to 1.

        Weights that write to the residual stream are smaller by 1 / sqrt(2 layers), so that its
        variance does not grow with the depth.
        """
        into_residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                p.fill_(1.0)
                continue
            generator = torch.Generator().manual_seed(stream_seed(seed, name))
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            residual = name.endswith(("attention.out.weight", "down.weight"))
            p.copy_(drawn * (into_residual if residual else 0.02))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or with targets the mean cross-entropy in nats a token.

        Args:
            tokens: int64 [batch, length], at most `config.context` long.
            targets: the same shape. Default None.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"a sequence of {length} tokens is longer than context={self.config.context}: cut "
                "it, or build the model with a longer context"
            )
        x = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
