"""Problems that start from trained weights: fine-tuning and adapters.

A byte-level GPT of one block is trained on the top-level modules of the standard library. It is
then adapted to the source of packages of the library, which it has not seen: to much of it or to
little.
"""

from __future__ import annotations

import functools
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.problem import (
    Params,
    Stacked,
    Task,
    cross_entropy,
    linear,
    look_up,
    normal,
    times,
)
from benchmarks.lr.texts import BLOCK, VOCABULARY
from hdet_scale.models.text import Text, standard_library

WIDTH, LAYERS, HEADS, CONTEXT = 24, 1, 2, 16
TRAIN, HELD_OUT = 60_000, 2048
MODULES = (".",)
"""The top-level modules, which belong to no package: the text of the first training."""
MIXED = ("asyncio", "email", "http", "importlib", "logging", "unittest", "urllib", "xml")
"""Packages that resemble the top-level modules: the loss is nearly as low from the start."""
PARALLEL = ("asyncio", "concurrent", "multiprocessing")
"""Packages on one subject."""
DATA = ("json", "sqlite3", "dbm", "wsgiref", "html")
"""Small packages on the storage and exchange of data."""
RANK = 4
"""The rank of an adapter."""
ADAPTED = [f"{kind}{i}" for i in range(LAYERS) for kind in ("qkv", "out", "up", "down")]
"""The weights that have an adapter."""


@functools.cache
def _text(packages: tuple[str, ...]) -> Tensor:
    """Windows of the source of packages, [examples, CONTEXT + 1]; every tenth block is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    parts = {path: path.relative_to(root).parts[:-1] for path in standard_library()}
    paths = [path for path, folders in parts.items() if (*folders, ".")[0] in packages]
    data = Text.read(paths, held_out=0.0).train.clamp(max=VOCABULARY - 1).long()
    blocks = data[: len(data) // BLOCK * BLOCK].view(-1, BLOCK)
    generator = torch.Generator().manual_seed(5)
    held = torch.arange(len(blocks)) % 10 == 9

    def draw(source: Tensor, count: int) -> Tensor:
        row = torch.randint(len(source), (count,), generator=generator)
        start = torch.randint(BLOCK - CONTEXT, (count,), generator=generator)
        return source[row[:, None], start[:, None] + torch.arange(CONTEXT + 1)]

    return torch.cat([draw(blocks[~held], TRAIN), draw(blocks[held], HELD_OUT)])


def _drawn(g: torch.Generator) -> Params:
    """Random weights of the GPT."""
    params = {
        "embed": normal(g, VOCABULARY, WIDTH, scale=0.1),
        "place": normal(g, CONTEXT, WIDTH, scale=0.1),
        "head": linear(g, WIDTH, VOCABULARY, 0.5),
    }
    for i in range(LAYERS):
        params |= {
            f"qkv{i}": linear(g, WIDTH, 3 * WIDTH),
            f"out{i}": linear(g, WIDTH, WIDTH, 0.5),
            f"up{i}": linear(g, WIDTH, 4 * WIDTH),
            f"down{i}": linear(g, 4 * WIDTH, WIDTH, 0.5),
        }
    return params


def _gpt(p: Params, windows: Tensor) -> Tensor:
    """Loss of each copy, [R], on windows [R, b, CONTEXT + 1]; a decoder with pre-norm blocks."""
    tokens, target = windows[..., :-1], windows[..., 1:]
    x = look_up(p["embed"], tokens) + p["place"][:, None]
    count, examples = tokens.shape[:2]
    for i in range(LAYERS):
        qkv = times(functional.layer_norm(x, (WIDTH,)), p[f"qkv{i}"])
        q, k, v = (
            qkv.view(count * examples, CONTEXT, 3, HEADS, WIDTH // HEADS)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(count, examples, CONTEXT, WIDTH)
        x = x + times(mixed, p[f"out{i}"])
        hidden = functional.gelu(times(functional.layer_norm(x, (WIDTH,)), p[f"up{i}"]))
        x = x + times(hidden, p[f"down{i}"])
    return cross_entropy(times(functional.layer_norm(x, (WIDTH,)), p["head"]), target)


@functools.cache
def _trained(steps: int = 1600, peak: float = 0.008) -> Params:
    """The GPT after a cosine run of AdamW on the top-level modules."""
    task = Task(
        name="pre-training",
        init=_drawn,
        losses=lambda p, indices: _gpt(p, _text(MODULES)[indices]),
        train=TRAIN,
        held_out=HELD_OUT,
        batch=64,
        optimizer="adamw",
        around=peak,
        weight_decay=0.1,
    )
    start = task.init(torch.Generator().manual_seed(5))
    model = Stacked(task, {k: v[None] for k, v in start.items()})
    for t, batch in enumerate(task.draw(5, steps)):
        _, gradients = model.gradients(batch[None])
        rate = peak * min(1.0, (t + 1) / 50) * (1 + math.cos(math.pi * t / steps)) / 2
        model.step(torch.tensor([rate]), gradients)
    return {k: v[0] for k, v in model.copies().items()}


def finetune(*, name: str = "finetune", batch: int = 24, around: float = 0.004) -> Task:
    """All weights of a trained byte-level GPT, on the source of other packages; AdamW."""

    def init(g: torch.Generator) -> Params:
        return dict(_trained())

    def losses(p: Params, indices: Tensor) -> Tensor:
        return _gpt(p, _text(MIXED)[indices])

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=TRAIN,
        held_out=HELD_OUT,
        batch=batch,
        optimizer="adamw",
        around=around,
        weight_decay=0.01,
    )


def adapters(*, name: str = "adapters", batch: int = 24, around: float = 0.02) -> Task:
    """Adapters of rank 4 on a trained byte-level GPT, whose own weights are constant; AdamW."""

    def init(g: torch.Generator) -> Params:
        params = {}
        for kind in ADAPTED:
            fan_in, fan_out = _trained()[kind].shape
            params[f"{kind}_a"] = linear(g, fan_in, RANK)
            params[f"{kind}_b"] = torch.zeros(RANK, fan_out)
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        whole = {k: v.expand(len(indices), *v.shape) for k, v in _trained().items()}
        for kind in ADAPTED:
            whole[kind] = whole[kind] + torch.bmm(p[f"{kind}_a"], p[f"{kind}_b"])
        return _gpt(whole, _text(PARALLEL)[indices])

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=TRAIN,
        held_out=HELD_OUT,
        batch=batch,
        optimizer="adamw",
        around=around,
    )


def finetune_few(*, name: str = "finetune-few", batch: int = 16, around: float = 0.00015) -> Task:
    """All weights of a trained byte-level GPT, on 200 windows of other source: it overfits;
    AdamW."""
    train = 200

    def init(g: torch.Generator) -> Params:
        return dict(_trained())

    def losses(p: Params, indices: Tensor) -> Tensor:
        held = TRAIN + indices - train
        return _gpt(p, _text(DATA)[torch.where(indices < train, indices, held)])

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=HELD_OUT,
        batch=batch,
        optimizer="adamw",
        around=around,
        weight_decay=0.01,
    )
