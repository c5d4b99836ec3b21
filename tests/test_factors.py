"""Factors: the arithmetic of their spaces, what they write to, and compiled models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hdet_scale.factors import (
    Attribute,
    GroupOption,
    LearningRate,
    Pair,
    Space,
    TensorDropout,
    beta,
    check_factors,
    dropout,
    label_smoothing,
    module_attribute,
    tensor_dropout,
    weight_decay,
)
from hdet_scale.optim.fused_adamw import FusedAdamW

RHO = st.floats(0.05, 20)


def held(value: float, **options: Any) -> Pair:
    box = [value]
    return Pair("box", lambda: box[0], lambda x: box.__setitem__(0, x), **options)


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


def adamw(**options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1, **options)


# -- spaces -------------------------------------------------------------------------------------


@given(base=st.floats(1e-6, 1e6), rho=RHO)
def test_log_space_multiplies(base: float, rho: float) -> None:
    factor = held(base)
    assert factor.at(base, rho) == base * rho
    assert factor.offset(base, rho) == math.log(rho)


@given(base=st.floats(-5, 5), rho=RHO, unit=st.floats(0.01, 10))
def test_linear_space_adds(base: float, rho: float, unit: float) -> None:
    value = held(base, space="linear", unit=unit).at(base, rho)
    assert value == pytest.approx(base + unit * math.log(rho), rel=1e-12, abs=1e-12)


@given(base=st.floats(0.001, 0.999), rho=RHO)
def test_logit_space_multiplies_the_odds(base: float, rho: float) -> None:
    value = held(base, space="logit").at(base, rho)
    assert 0 < value < 1
    assert value / (1 - value) == pytest.approx(base / (1 - base) * rho, rel=1e-9)


@given(
    space=st.sampled_from(["log", "linear", "logit"]),
    base=st.floats(0.2, 0.6),
    rho=RHO,
)
def test_bounds_hold_and_the_offset_says_what_is_left(space: str, base: float, rho: float) -> None:
    kind = Space(space, (0.2, 0.6))
    value = kind.at(base, rho)
    assert 0.2 <= value <= 0.6
    assert kind.at(base, 1.0) == base
    told = kind.offset(base, rho)
    assert abs(told) <= abs(math.log(rho)) + 1e-12
    assert kind.at(base, math.exp(told)) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: held(0.0), "box is 0.0, which a multiplier in log space can never move"),
        (lambda: held(1.0, space="logit"), "can never move"),
        (lambda: held(math.nan, space="linear"), "box is nan"),
        (lambda: held(5.0, bounds=(0.1, 1.0)), r"outside its bounds \[0.1, 1.0\]"),
        (lambda: held(0.5, space="cubic"), r"one of \['log', 'linear', 'logit'\], got 'cubic'"),
        (lambda: held(0.5, bounds=(1.0, 0.1)), "low below high, got"),
        (lambda: held(0.5, bounds=(-1.0, 1.0)), "low must be 0 or more"),
        (lambda: held(0.5, space="logit", bounds=(0.0, 2.0)), r"lie in \[0, 1\]"),
        (lambda: held(0.5, space="linear", unit=0.0), "unit must be above 0, got 0.0"),
    ],
)
def test_wrong_spaces_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# -- what is written to -------------------------------------------------------------------------


def test_learning_rate_is_as_it_was() -> None:
    optimizer = adamw()
    factor = LearningRate(optimizer, 0)
    factor.write(0.1, 1.1)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 1.1 == factor.at(0.1, 1.1)
    assert factor.offset(0.1, 1.1) == math.log(1.1)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdamW])
def test_weight_decay_reaches_the_step(kind: Any) -> None:
    """Without a gradient's pull the step shrinks the weights by lr x decay alone."""
    param = nn.Parameter(torch.ones(3))
    optimizer = kind([param], lr=0.1, weight_decay=0.5)
    factor = weight_decay(optimizer)
    factor.write(0.5, 0.2)
    param.grad = torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 0.1 * 0.1))
    assert factor.read() == 0.5 * 0.2
    assert factor.scheduled() == 0.5
    assert factor.name == "weight_decay/group0"


def test_beta_reaches_the_step() -> None:
    optimizer = adamw(betas=(0.9, 0.99))
    factor = beta(optimizer, 1)
    factor.write(0.99, 0.5)
    assert optimizer.param_groups[0]["betas"] == (0.9, pytest.approx(0.495 / 0.505))
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.full((3,), 2.0)
    optimizer.step()
    expected = 4 * (1 - 0.495 / 0.505)
    torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], torch.full((3,), expected))


def test_options_held_as_tensors_are_filled() -> None:
    optimizer = adamw()
    decay = torch.tensor(0.01)
    optimizer.param_groups[0]["weight_decay"] = decay
    weight_decay(optimizer).write(0.02, 1.0)
    assert optimizer.param_groups[0]["weight_decay"] is decay
    assert float(decay) == pytest.approx(0.02)


def test_a_loaded_optimizer_is_still_written_to() -> None:
    optimizer = adamw(weight_decay=0.5)
    factor = weight_decay(optimizer)
    optimizer.load_state_dict(adamw(weight_decay=0.1).state_dict())
    factor.write(0.5, 1.0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


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


def test_the_base_is_the_last_one_written() -> None:
    """A schedule may move it, and a resumed run brings its own."""
    factor = held(0.5)
    factor.write(0.4, 1.1)
    assert factor.scheduled() == 0.4


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: weight_decay(adamw(), 3), "has 1 param groups, got index 3"),
        (lambda: weight_decay(adamw(weight_decay=0.0)), "weight_decay/group0 is 0.0"),
        (lambda: GroupOption(adamw(), "dampening"), "no option 'dampening': choose one of"),
        (lambda: beta(adamw(), 2), "has no position 2"),
        (lambda: GroupOption(adamw(), "betas"), "a factor is one number"),
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
        (lambda: check_factors([3]), "3 is no factor, it lacks"),  # type: ignore[list-item]
        (lambda: check_factors([held(1.0), held(1.0)]), "factors need different names"),
        (lambda: tensor_dropout(nn.Sequential(nn.AlphaDropout())), "AlphaDropout keeps its own"),
    ],
)
def test_wrong_factors_are_refused(make: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        make()


# -- compiled models ----------------------------------------------------------------------------


def compiled(model: nn.Module) -> tuple[Any, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter), counter


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
