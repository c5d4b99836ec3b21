"""Shapes: counts of published models, shards as fully_shard makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hdet_scale.models.gpt import GPT, GPTConfig
from hdet_scale.plan import shapes
from tests.support.fleet import Fleet

LLAMA2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
GROUPED = {"num_key_value_heads": 8, "intermediate_size": 14336}
LLAMA3_70B = {
    **LLAMA2_7B,
    **GROUPED,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12}
GPT2 |= {"vocab_size": 50257, "n_positions": 1024}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3 = {**QWEN2, "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28}
QWEN3 |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
QWEN3 |= {"intermediate_size": 3072}
GEMMA = {
    "model_type": "gemma",
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 16384,
    "vocab_size": 256000,
}
GEMMA2 = {**GEMMA, "model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26}
GEMMA2 |= {"num_key_value_heads": 4, "intermediate_size": 9216}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (GPT2, 124_439_808),
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA3_70B, 70_553_706_496),
        ({**LLAMA2_7B, **GROUPED, "model_type": "mistral"}, 7_241_732_096),
        ({**LLAMA2_7B, **GROUPED, "model_type": "mixtral", "num_local_experts": 8}, 46_702_792_704),
        (QWEN2, 494_032_768),
        (QWEN3, 596_049_920),
        (GEMMA, 2_506_172_416),
        (GEMMA2, 2_614_341_888),
    ],
    ids=lambda v: v["model_type"] if isinstance(v, dict) else None,
)
def test_published_counts(tmp_path: Path, config: dict[str, Any], parameters: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shapes.of(str(tmp_path)).parameters == parameters
    assert shapes.of(str(tmp_path / "config.json")).parameters == parameters


@pytest.mark.parametrize("asked", ["1M", "60M", "124M", "1B", "1.3b", "7B", "70B", "405B", "1T"])
def test_a_count_is_met_to_half_a_percent(asked: str) -> None:
    assert shapes.of(asked).parameters == pytest.approx(shapes.count(asked), rel=5e-3)


def test_largest_unit_is_a_block_or_the_embedding() -> None:
    seven = shapes.of("7B")
    embedding, block = 32_000 * 4352, 7e9 / 27
    assert embedding < seven.largest_unit
    assert seven.largest_unit == pytest.approx(block, rel=0.2)


def build() -> nn.Module:
    """What package.module:function names in the tests."""
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2, bias=False)).requires_grad_(True)


def not_a_module() -> str:
    return "GPT"


def test_a_function_is_called_on_the_meta_device() -> None:
    found = shapes.of(f"{__name__}:build")
    assert found.tensors == ((4, 8), (4,), (2, 4))


def test_our_own_gpt() -> None:
    assert shapes.of("gpt:125m").parameters == GPTConfig.named("125m").parameters


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("seventy", "no model called 'seventy'"),
        ("70", "too few"),
        ("gpt:9z", "no size called '9z'"),
        ("missing/config.json", "there is no missing/config.json"),
        ("nowhere.at.all:model", "cannot be built"),
        (f"{__name__}:nothing", "cannot be built"),
    ],
)
def test_what_cannot_be_read_says_what_can(asked: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shapes.of(asked)


def test_a_function_must_return_a_module() -> None:
    with pytest.raises(TypeError, match="returned a str"):
        shapes.of(f"{__name__}:not_a_module")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5"}, "model_type 't5', and known are"),
        ({"model_type": "llama", "hidden_size": 8}, "has no 'num_hidden_layers'"),
        ([], "model_type None"),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path: Path, config: Any, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        shapes.of(str(tmp_path))


def local_shapes(rank: int, size: int) -> list[tuple[int, ...]]:
    model = GPT(GPTConfig(layers=2, width=6, heads=2, context=5, vocabulary=7))
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return [tuple(p.to_local().shape) for p in model.parameters()]  # type: ignore[attr-defined]


def test_a_shard_is_what_fully_shard_gives_rank_0(trio: Fleet) -> None:
    """Seven rows over three ranks: 3, 3 and 1."""
    real = trio.run(local_shapes)
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=2, width=6, heads=2, context=5, vocabulary=7))
    planned = shapes.of_module(model).shard(3, torch.float32)
    assert [tuple(t.shape) for t in planned] == real[0]
    assert real[0][0] == (3, 6)
    assert real[2][0] == (1, 6)
