"""Shapes: the tensors of a model, known without making it.

From a parameter count, from the config.json that a published model comes with (read as plain
JSON), or from a module that is built on the meta device. What a rank holds of them after
fully_shard: rows of dimension 0, cut as torch.chunk cuts them; rank 0 holds the most.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdet_scale.models.gpt import GPT, GPTConfig

Shape = tuple[int, ...]

SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
FEWEST = 1_000_000
VOCABULARY = 32_000
ASPECT = 128
"""Width over layers of the decoder that stands for a parameter count."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The parameters of a model."""

    name: str
    """What the user asked for."""
    tensors: tuple[Shape, ...]
    """Each trained tensor once, in the order of the model."""
    largest_unit: int
    """Elements of the largest part that fully_shard gathers at once: a block or an embedding."""

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(math.prod(s) for s in self.tensors)

    def shard(self, shards: int, dtype: torch.dtype) -> list[Tensor]:
        """What rank 0 of a replica holds, as meta tensors; empty shards are left out."""
        if shards < 1:
            raise ValueError(f"shards must be at least 1, got {shards}")
        cut = [(-(-s[0] // shards), *s[1:]) for s in self.tensors]
        return [torch.empty(s, dtype=dtype, device="meta") for s in cut]


def of(text: str) -> Shapes:
    """The model that a word names: a count, gpt:SIZE, a config.json, or package.module:function."""
    if Path(text).suffix == ".json" or Path(text).is_dir():
        return of_config(text)
    if text.startswith("gpt:"):
        config = GPTConfig.named(text.removeprefix("gpt:"))
        with torch.device("meta"):
            return of_module(GPT(config), text)
    if ":" in text:
        return of_function(text)
    return of_count(count(text), text)


def count(text: str) -> int:
    """A parameter count as people write it: 70B, 1.3b, 350M, 124439808."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)([KMBT]?)", text.strip().upper())
    if found is None:
        raise ValueError(
            f"no model called {text!r}: give a parameter count (70B, 350M), the path of a "
            "config.json, gpt:SIZE, or package.module:function that builds the module"
        )
    return round(float(found[1]) * SUFFIXES[found[2]])


def of_count(parameters: int, name: str | None = None) -> Shapes:
    """A dense decoder of about that many parameters, to half a percent.

    Width 128 a layer, as published models have it: 12 layers width^2 = 12 x 128^2 layers^3; the
    width of the perceptron takes up what rounding leaves.
    """
    if parameters < FEWEST:
        raise ValueError(
            f"{parameters} parameters are too few to plan for: give at least {FEWEST}, or a number "
            "with its unit (70B, 350M)"
        )
    layers = max(1, round((parameters / (12 * ASPECT**2)) ** (1 / 3)))
    width = max(64, 64 * round(math.sqrt(parameters / (12 * layers)) / 64))
    # A small model's vocabulary is not most of it.
    vocabulary = min(VOCABULARY, max(256, parameters // (4 * width)))
    left = (parameters - vocabulary * width - width) // layers - 4 * width**2 - 2 * width
    hidden = max(1, round(left / (2 * width)))
    block = [(width,), (3 * width, width), (width, width), (width,)]
    block += [(hidden, width), (width, hidden)]
    return _shapes(name or str(parameters), [[(vocabulary, width)], *([block] * layers)], width)


def of_module(module: nn.Module, name: str | None = None) -> Shapes:
    """Of any module; tied and frozen parameters as training sees them."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(f"{type(module).__name__} has no parameter that is trained")
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    units = [sum(p.numel() for p in block.parameters()) for m in lists for block in m]
    alone = [p.numel() for p in trained]
    return Shapes(
        name or type(module).__name__,
        tuple(tuple(p.shape) or (1,) for p in trained),
        max([*units, *alone]),
    )


def of_function(place: str) -> Shapes:
    """Of the module that package.module:function returns; it is called on the meta device."""
    where, _, function = place.partition(":")
    try:
        build: Callable[[], Any] = getattr(importlib.import_module(where), function)
    except (ImportError, AttributeError) as missing:
        raise ValueError(
            f"{place!r} cannot be built ({missing}): give package.module:function of a function "
            "without arguments that returns an nn.Module"
        ) from missing
    with torch.device("meta"):
        built = build()
    if not isinstance(built, nn.Module):
        raise TypeError(f"{place} returned a {type(built).__name__}: it must return an nn.Module")
    return of_module(built, place)


# -- published configs ---------------------------------------------------------------------------


def of_config(path: str | Path) -> Shapes:
    """Of a config.json, or of the folder that it lies in."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.exists():
        raise ValueError(f"there is no {file}: give the config.json of a model")
    values = json.loads(file.read_text(encoding="utf-8"))
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in FAMILIES:
        raise ValueError(
            f"{file} has model_type {kind!r}, and known are {sorted(FAMILIES)}: give the parameter "
            "count, or package.module:function that builds the module"
        )
    reader, traits = FAMILIES[kind]
    try:
        return reader(values, traits, f"{kind} {file.parent.name}")
    except KeyError as missing:
        raise ValueError(f"{file} (model_type {kind!r}) has no {missing}") from missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """In what a family differs from Llama."""

    qkv_bias: bool = False
    """Biases on queries, keys and values."""
    head_norms: bool = False
    """A norm on the queries and one on the keys."""
    tied: bool = False
    """The output layer is the embedding, unless the config says otherwise."""
    norms: int = 2
    """Norms of a block."""


def _gpt2(values: Mapping[str, Any], _: Traits, name: str) -> Shapes:
    d, layers = values["n_embd"], values["n_layer"]
    hidden = values.get("n_inner") or 4 * d
    block: list[Shape] = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,)]
    block += [(d,), (d,), (d, hidden), (hidden,), (hidden, d), (d,)]
    first: list[list[Shape]] = [[(values["vocab_size"], d)], [(values["n_positions"], d)]]
    made = _shapes(name, [*first, *([block] * layers)], d)
    return dataclasses.replace(made, tensors=(*made.tensors, (d,)))  # the bias of the last norm


def _llama(values: Mapping[str, Any], traits: Traits, name: str) -> Shapes:
    d, layers, heads = (
        values["hidden_size"],
        values["num_hidden_layers"],
        values["num_attention_heads"],
    )
    head = values.get("head_dim") or d // heads
    q, kv = heads * head, (values.get("num_key_value_heads") or heads) * head
    hidden, vocabulary = values["intermediate_size"], values["vocab_size"]
    block: list[Shape] = [(q, d), (kv, d), (kv, d), (d, q)]
    if traits.qkv_bias or values.get("attention_bias"):
        block += [(q,), (kv,), (kv,)]
    if values.get("attention_bias"):
        block += [(d,)]
    if traits.head_norms:
        block += [(head,), (head,)]
    experts = values.get("num_local_experts", 1)
    if experts > 1:
        block += [(experts, d)]
    block += [(hidden, d), (hidden, d), (d, hidden)] * experts
    if values.get("mlp_bias"):
        block += [(hidden,), (hidden,), (d,)]
    block += [(d,)] * traits.norms
    ends: list[list[Shape]] = [[(vocabulary, d)]]
    if not values.get("tie_word_embeddings", traits.tied):
        ends.append([(vocabulary, d)])
    return _shapes(name, [*ends, *([block] * layers)], d)


FAMILIES: dict[str, tuple[Callable[[Mapping[str, Any], Traits, str], Shapes], Traits]] = {
    "gpt2": (_gpt2, Traits()),
    "llama": (_llama, Traits()),
    "mistral": (_llama, Traits()),
    "mixtral": (_llama, Traits()),
    "qwen2": (_llama, Traits(qkv_bias=True)),
    "qwen3": (_llama, Traits(head_norms=True)),
    "gemma": (_llama, Traits(tied=True)),
    "gemma2": (_llama, Traits(tied=True, norms=4)),
}


def _shapes(name: str, units: list[list[Shape]], width: int) -> Shapes:
    """Units in their order, and the norm at the end."""
    tensors = [t for unit in units for t in unit]
    largest = max(sum(math.prod(t) for t in unit) for unit in units)
    return Shapes(name, (*tensors, (width,)), largest)
