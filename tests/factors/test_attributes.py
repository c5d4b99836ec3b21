"""Attributes of modules and losses as factors, in eager and in compiled models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hdet_scale.factors.attributes import (
    Attribute,
    TensorDropout,
    dropout,
    label_smoothing,
    module_attribute,
    tensor_dropout,
)


class Attention(nn.Module):
    """Softmax of a scaled product, with the scale as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        q = self.proj(x)
        return torch.softmax(q @ q.mT * self.scale, -1) @ x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.first, self.drop = nn.Dropout(0.1), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.first(block(x))
        return self.drop(x)


def test_dropout_is_read_at_each_call() -> None:
    net = Net()
    one = dropout(net, "dr*")
    one.write(0.5, 1.0)
    assert (net.first.p, net.drop.p) == (0.1, 0.5)
    one.write(0.1, 1.0)
    dropout(net).write(0.2, 1.0)
    assert net.first.p == net.drop.p == 0.2
    layer = nn.Sequential(nn.Dropout(0.1))
    dropout(layer).write(0.9, 1.0)
    assert float((layer(torch.ones(20_000)) == 0).float().mean()) == pytest.approx(0.9, abs=0.01)


def test_named_modules_and_paths() -> None:
    net = Net()
    scale = module_attribute(net, "blocks.*", "scale")
    scale.write(0.5, 2.0)
    assert [b.scale for b in net.blocks] == [1.0, 1.0]
    one = Attribute(net, "blocks.1.scale")
    one.write(0.25, 1.0)
    assert [b.scale for b in net.blocks] == [1.0, 0.25]
    assert (scale.name, one.name) == ("scale/blocks.*", "blocks.1.scale")


def test_label_smoothing_reaches_the_loss() -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    label_smoothing(loss).write(0.1, 3.0)
    x, y = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
    expected = nn.functional.cross_entropy(x, y, label_smoothing=0.3 / 1.2)
    torch.testing.assert_close(loss(x, y), expected)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: dropout(nn.Linear(2, 2)), "no dropout module matches '\\*'; the model has none"),
        (lambda: dropout(Net()), r"is \[0.1, 0.3\] in its 2 places"),
        (lambda: dropout(Net(), "x*"), r"the model has \['first', 'drop'\]"),
        (lambda: module_attribute(Net(), "*", "tau"), "none has 'tau'; modules that have it: none"),
        (lambda: Attribute(Net(), "blocks.7.scale"), "ModuleList has no '7'"),
        (lambda: Attribute(Net(), "layers.scale"), "Net has no 'layers'"),
        (lambda: Attribute(nn.Linear(2, 2), "gain"), "Linear has no attribute 'gain'"),
        (lambda: Attribute(nn.Linear(1, 1), "weight"), "is a parameter, which training moves"),
        (lambda: Attribute(Net(), "blocks"), "a factor is one number"),
        (lambda: Attribute([], "scale"), "an empty list of owners"),
        (lambda: tensor_dropout(nn.Sequential(nn.AlphaDropout())), "AlphaDropout keeps its own"),
    ],
)
def test_wrong_attributes_are_refused(make: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        make()


# -- compiled models ----------------------------------------------------------------------------


def compiled(model: nn.Module) -> tuple[Any, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter), counter


@pytest.mark.slow
def test_a_tensor_attribute_is_read_anew_without_compiling_again() -> None:
    model = Attention()
    factor = Attribute(model, "scale", as_tensor=True)
    assert factor.read() == 0.5
    assert "scale" not in model.state_dict()
    fast, counter = compiled(model)
    x = torch.randn(2, 3, 4)
    for rho in (1.0, 1.1, 0.7, 3.0):
        factor.write(0.5, rho)
        plain = Attention()
        plain.load_state_dict(model.state_dict())
        plain.scale = 0.5 * rho
        torch.testing.assert_close(fast(x), plain(x))
    assert counter.frame_count == 1


def test_a_float_attribute_compiles_again() -> None:
    """What `as_tensor` is for; the results are right all the same."""
    model = Attention()
    factor = Attribute(model, "scale")
    fast, counter = compiled(model)
    x = torch.randn(2, 3, 4)
    for rho in (1.0, 1.1, 0.7):
        factor.write(0.5, rho)
        torch.testing.assert_close(fast(x), model(x))
    assert counter.frame_count > 1


def test_a_tensor_dropout_is_read_anew_without_compiling_again() -> None:
    model = nn.Sequential(nn.Linear(1, 200), nn.Dropout(0.1)).train()
    assert tensor_dropout(model) == 1
    assert isinstance(model[1], TensorDropout)
    factor = dropout(model)
    fast, counter = compiled(model)
    for p in (0.1, 0.5, 0.8):
        factor.write(p, 1.0)
        out = fast(torch.ones(100, 1))
        assert float((out == 0).float().mean()) == pytest.approx(p, abs=0.02)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.Dropout, (500, 40)), (nn.Dropout2d, (500, 40, 3, 3))]
)
def test_tensor_dropout_is_dropout(kind: Any, shape: tuple[int, ...]) -> None:
    """The same share of zeros, whole channels where torch drops them, the same mean; none in
    evaluation."""
    model = nn.Sequential(kind(0.25))
    tensor_dropout(model)
    x = torch.ones(shape)
    out = model(x)
    assert float((out == 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / 0.75))
    if len(shape) == 4:
        assert bool(((out == 0).flatten(2).float().mean(-1) % 1 == 0).all())
    assert model.eval()(x) is x
