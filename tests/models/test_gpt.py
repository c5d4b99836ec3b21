"""The GPT: shape, causality, weights that depend on the seed alone."""

import math

import pytest
import torch
from torch import Tensor, nn

from hdet_scale.models.gpt import GPT, SIZES, Attention, GPTConfig

SMALL = GPTConfig(layers=2, width=32, heads=4, context=16)


def some_tokens(count: int = 3, length: int = 16) -> Tensor:
    return torch.randint(256, (count, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", SIZES)
def test_the_count_of_parameters_is_what_is_built(size: str) -> None:
    config = GPTConfig.named(size)
    with torch.device("meta"):
        model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters


def test_sizes_are_named_by_their_parameters_with_a_large_vocabulary() -> None:
    units = {"m": 1e6, "b": 1e9}
    for size in [s for s in SIZES if s[0].isdigit()]:
        named = float(size[:-1]) * units[size[-1]]
        assert GPTConfig.named(size, vocabulary=50257).parameters == pytest.approx(named, rel=0.05)


def test_a_token_changes_nothing_before_it() -> None:
    model = GPT(SMALL)
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-3)


def test_attention_is_softmax_of_scaled_products_in_lockstep_with_the_equation() -> None:
    torch.manual_seed(0)
    attention = Attention(SMALL)
    for p in attention.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 16, 32)
    q, k, v = attention.qkv(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(
        torch.ones(16, 16).triu(1).bool(), -math.inf
    )
    expected = attention.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 16, 32))
    torch.testing.assert_close(attention(x), expected, rtol=1e-5, atol=1e-5)


def test_an_untrained_model_knows_nothing() -> None:
    tokens = some_tokens(8)
    assert GPT(SMALL)(tokens, tokens.roll(1)).item() == pytest.approx(math.log(256), abs=0.05)


def test_the_output_layer_is_the_token_embedding() -> None:
    model = GPT(SMALL)
    names = [name for name, p in model.named_parameters() if p.shape[0] == SMALL.vocabulary]
    assert names == ["tokens.weight"]
    unused = torch.full((1, 4), 7)
    model(unused, unused).backward()
    # Token 8 is no input; its row gets a gradient as an output.
    assert model.tokens.weight.grad is not None
    assert float(model.tokens.weight.grad[8].abs().sum()) > 0


def test_weights_are_a_function_of_the_seed_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = GPT(SMALL, seed=3), GPT(SMALL, seed=3), GPT(SMALL, seed=4)
    assert torch.equal(before, torch.get_rng_state())
    for (name, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert "norm" in name or not torch.equal(a, c)


def test_a_model_made_on_meta_gets_the_same_weights() -> None:
    with torch.device("meta"):
        model = GPT(SMALL)
    model.to_empty(device="cpu").init_weights(5)
    for a, b in zip(model.parameters(), GPT(SMALL, seed=5).parameters(), strict=True):
        assert torch.equal(a, b)


def test_it_learns() -> None:
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = some_tokens(2, 17)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'gigantic'.*'tiny'.*'1.3b'"):
        GPTConfig.named("gigantic")
    with pytest.raises(ValueError, match=r"heads=5 do not divide width=32.*\[1, 2, 4, 8, 16, 32\]"):
        GPTConfig(layers=1, width=32, heads=5)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        GPTConfig(layers=0, width=32, heads=4)
    with pytest.raises(TypeError, match=r"width must be an int, got 32\.0"):
        GPTConfig(layers=1, width=32.0, heads=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"17 tokens is longer than context=16"):
        GPT(SMALL)(some_tokens(1, 17))
