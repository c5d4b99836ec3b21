"""The options that all fused optimizers share: refused at construction where they are wrong."""

import inspect
from typing import Any

import pytest
import torch

from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.optim.fused_lion import FusedLion
from hdet_scale.optim.fused_sgd import FusedSGD
from hdet_scale.optim.shared_options import DEFAULTS, SharedOptions
from tests.support.stepping import params


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        (FusedAdamW, {"amsgrad": True}, "amsgrad"),
        (FusedAdamW, {"differentiable": True}, "differentiable"),
        (FusedAdamW, {"fused": False}, "always fused"),
        (FusedAdamW, {"foreach": True}, "always fused"),
        (FusedAdamW, {"lr": -1.0}, "lr=-1.0"),
        (FusedAdamW, {"lr": torch.ones(2)}, "lr of shape"),
        (FusedAdamW, {"lr_multiplier": float("nan")}, "lr_multiplier"),
        (FusedAdamW, {"betas": (0.9, 1.0)}, "betas"),
        (FusedAdamW, {"eps": -1e-8}, "eps"),
        (FusedAdamW, {"weight_decay": -1.0}, "weight_decay"),
        (FusedAdamW, {"backend": "cuda"}, "backend='cuda'"),
        (FusedAdamW, {"moment_dtype": torch.int8}, "moment_dtype"),
        (FusedAdamW, {"master_weights": True, "stochastic_rounding": True}, "choose one"),
        (FusedSGD, {"momentum": -0.9}, "momentum"),
        (FusedSGD, {"nesterov": True}, "nesterov"),
        (FusedLion, {"betas": (-0.1, 0.9)}, "betas"),
    ],
)
def test_bad_options_are_refused_at_construction(make: Any, options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(params(), **options)


@pytest.mark.parametrize("make", [FusedAdamW, FusedSGD, FusedLion])
def test_signature_and_help_list_every_shared_option(make: Any) -> None:
    shown = inspect.signature(make).parameters
    for name, default in DEFAULTS.items():
        assert shown[name].default == default
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert f"\n        {name}: " in make.__doc__
    assert set(SharedOptions.__annotations__) == set(DEFAULTS)
    assert "**options" not in make.__doc__
    assert "options" not in shown


@pytest.mark.parametrize(
    ("make", "make_torch"), [(FusedAdamW, torch.optim.AdamW), (FusedSGD, torch.optim.SGD)]
)
def test_the_arguments_of_torchs_optimizer_are_taken(make: Any, make_torch: Any) -> None:
    """By name with torch's defaults, and in torch's order where torch takes them by position."""
    theirs = inspect.signature(make_torch).parameters
    ours = inspect.signature(make).parameters
    make(params(), **{n: p.default for n, p in theirs.items() if n != "params"})
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
    by_position = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(by_position)] == by_position


@pytest.mark.parametrize("make", [FusedAdamW, FusedSGD, FusedLion])
def test_an_unknown_option_is_answered_with_the_valid_ones(make: Any) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'momentun': valid are .*lr"):
        make(params(), momentun=0.9)


def test_a_subclass_of_a_user_keeps_its_own_signature() -> None:
    class Mine(FusedAdamW):
        def __init__(self, params: Any, **kwargs: Any) -> None:
            super().__init__(params, **{"lr": 0.5, **kwargs})

    assert list(inspect.signature(Mine).parameters) == ["params", "kwargs"]
    assert Mine(params(), seed=3).param_groups[0]["seed"] == 3
