"""The outside: public names are where they are said to be, with their arguments described."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from inspect import Parameter
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from hdet_scale import AutoLR, HDETConfig, OneCycleAutoLR, Replicas, cli
from hdet_scale.config import described
from hdet_scale.converge import Converge
from hdet_scale.method import PaperRule, assignment, multipliers

OUTSIDE = [
    "hdet_scale.OneCycleAutoLR",
    "hdet_scale.OneCycleAutoLR.step",
    "hdet_scale.AutoLR",
    "hdet_scale.AutoLR.step",
    "hdet_scale.HDETConfig",
    "hdet_scale.HDETConfig.from_dict",
    "hdet_scale.ConvergePolicy",
    "hdet_scale.Replicas",
    "hdet_scale.Replicas.world",
    "hdet_scale.Replicas.of",
    "hdet_scale.Replicas.from_mesh",
    "hdet_scale.FusedAdamW",
    "hdet_scale.FusedSGD",
    "hdet_scale.FusedLion",
    "hdet_scale.method.PaperRule",
    "hdet_scale.method.PaperRule.update",
    "hdet_scale.method.multipliers",
    "hdet_scale.method.assignment",
    "hdet_scale.converge.Converge",
    "hdet_scale.fsdp.attach",
    "hdet_scale.fsdp.build_mesh",
    "hdet_scale.deepspeed.initialize",
    "hdet_scale.deepspeed.HDETOneCycle",
    "hdet_scale.deepspeed.HDETAutoLR",
    "hdet_scale.hf.HDETCallback",
    "hdet_scale.hf.attach",
    "hdet_scale.lightning.HDETCallback",
    "hdet_scale.ddp.warm_init",
    "hdet_scale.find_lr",
    "hdet_scale.schedulers.ReplayLR",
]
EXTRAS = {
    "hdet_scale.deepspeed": "deepspeed",
    "hdet_scale.hf": "transformers",
    "hdet_scale.lightning": "lightning",
}
"""What a module needs besides torch."""
REQUIRED = Parameter.empty
AUTHORS: list[tuple[str, Any]] = [
    ("optimizer", REQUIRED),
    ("max_lr", REQUIRED),
    ("total_steps", None),
    ("epochs", None),
    ("steps_per_epoch", None),
    ("pct_start", 0.3),
    ("anneal_strategy", "cos"),
    ("cycle_momentum", True),
    ("base_momentum", 0.85),
    ("max_momentum", 0.95),
    ("div_factor", 25.0),
    ("final_div_factor", 1e4),
    ("three_phase", False),
    ("last_epoch", -1),
    ("auto_lr_warmup_steps", 100000),
    ("ensemble_lr_spread_ratio", 0.0),
    ("model_sync_interval", 1000),
    ("rank", 0),
    ("world_size", 1),
    ("enable_auto_lr", False),
    ("loss_scale", 0.002),
    ("lr_of_lr", 0.5),
    ("momentum_of_lr", 0.9),
]
"""The arguments of the authors' scheduler, in their order, with their defaults."""


def found(name: str) -> Any:
    """The object of a dotted name: a module's, or a class's."""
    module, _, rest = name.partition(".")
    thing: Any = importlib.import_module(module)
    for part in rest.split("."):
        if not hasattr(thing, part):
            importlib.import_module(f"{thing.__name__}.{part}")
        thing = getattr(thing, part)
    return thing


def parameters(thing: Any) -> dict[str, Parameter]:
    """What a caller may pass."""
    called = thing.__init__ if inspect.isclass(thing) else thing
    listed = inspect.signature(called).parameters
    return {name: p for name, p in listed.items() if name not in ("self", "cls")}


def optimizer() -> Optimizer:
    return SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_public_name_is_where_it_is_said_to_be_and_describes_its_arguments(name: str) -> None:
    for module, needed in EXTRAS.items():
        if name.startswith(module):
            pytest.importorskip(needed, reason=f"the extra of {module} is not installed")
    thing = found(name)
    told = inspect.getdoc(thing) or ""
    assert told, f"{name} has no docstring"
    if dataclasses.is_dataclass(thing):
        fields = {f.name for f in dataclasses.fields(thing)}
        assert set(described(thing)) == fields, f"{name} does not describe its fields"
    elif parameters(thing):
        assert "Args:" in told, f"{name} does not describe its arguments"


def test_the_top_of_the_package_lists_its_names() -> None:
    package = importlib.import_module("hdet_scale")
    top = {name.split(".")[1] for name in OUTSIDE if name.split(".")[1][0].isupper()}
    assert top <= set(package.__all__)
    for name in package.__all__:
        assert hasattr(package, name)


# -- OneCycleAutoLR -------------------------------------------------------------------------------


def test_one_cycle_takes_the_authors_arguments_in_their_order() -> None:
    listed = parameters(OneCycleAutoLR)
    positional = [p for p in listed.values() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == AUTHORS
    keywords = [p for p in listed.values() if p.kind is Parameter.KEYWORD_ONLY]
    ours = ["config", "model", "replicas", "probe", "rule"]
    assert [(p.name, p.default) for p in keywords][: len(ours)] == [(name, None) for name in ours]
    assert all(p.default is None for p in keywords)


def test_one_cycle_is_torchs_with_further_arguments() -> None:
    assert issubclass(OneCycleAutoLR, OneCycleLR)
    torchs = [(p.name, p.default) for p in parameters(OneCycleLR).values()]
    assert AUTHORS[: len(torchs)] == torchs


def test_the_authors_arguments_alone_are_the_authors_scheduler() -> None:
    plain = OneCycleAutoLR(optimizer(), 0.1, 100)
    assert (plain.config.rule, plain.phase) == ("none", "plain")
    explores = OneCycleAutoLR(optimizer(), 0.1, 100, ensemble_lr_spread_ratio=0.1)
    assert (explores.config.rule, explores.phase) == ("none", "exploring")
    steers = OneCycleAutoLR(
        optimizer(),
        0.1,
        100,
        auto_lr_warmup_steps=10,
        ensemble_lr_spread_ratio=0.1,
        enable_auto_lr=True,
    )
    assert (steers.config.rule, steers.phase) == ("paper", "exploring")


def test_a_rule_or_a_config_asks_for_a_search() -> None:
    for options in ({"rule": "auto"}, {"config": HDETConfig()}):
        scheduler = OneCycleAutoLR(optimizer(), 0.1, 10_000, **options)
        assert (scheduler.config.rule, scheduler.phase) == ("auto", "searching")


# -- the others -----------------------------------------------------------------------------------


def test_auto_lr_takes_a_scheduler_and_a_config() -> None:
    listed = list(parameters(AutoLR).values())
    assert [p.name for p in listed[:2]] == ["scheduler", "config"]
    ours = ["model", "replicas", "factors", "probe"]
    assert [(p.name, p.default) for p in listed[2:6]] == [(name, None) for name in ours]
    assert all(p.kind is Parameter.KEYWORD_ONLY for p in listed[2:])
    config = HDETConfig(total_steps=10_000)
    assert AutoLR(LambdaLR(optimizer(), lambda _: 1.0), config).phase == "searching"


def test_the_default_config_searches() -> None:
    config = HDETConfig()
    assert (config.rule, config.spread, config.interval) == ("auto", 1 / 9, 1000)
    assert [p.name for p in parameters(HDETConfig).values()][:3] == ["rule", "spread", "interval"]
    assert all(p.kind is Parameter.KEYWORD_ONLY for p in parameters(HDETConfig).values())
    for rule in ("auto", "paper", "slope", "none"):
        assert HDETConfig.from_dict({"rule": rule}).rule == rule


def test_replicas_say_where_a_rank_is() -> None:
    alone = Replicas.world()
    names = ("rank", "size", "group", "shard_rank", "shard_size", "shard_group")
    assert [getattr(alone, name) for name in names] == [0, 1, None, 0, 1, None]
    assert Replicas.of(shard_size=1) == alone
    defaults = {p.name: p.default for p in parameters(Replicas.from_mesh).values()}
    assert defaults == {"mesh": REQUIRED, "replica": "replica", "shard": "shard"}


def test_the_method_can_be_called_by_itself() -> None:
    base = PaperRule(0.1, 0.9, 0.5, 0.0).update([1.0, 1.1], [0.01, 0.02])
    assert 0.01 < base < 0.015
    assert multipliers(2, 0.1) == [0.9, 1.1]
    assert sorted(assignment(4, seed=0, round=3, factor="lr/group0")) == [0, 1, 2, 3]


def test_a_converge_is_called_with_tensors_and_replicas() -> None:
    names = list(parameters(Converge))
    assert names[:3] == ["tensors", "replicas", "bucket_bytes"]
    assert "wire" in names
    weights = torch.ones(3)
    Converge([weights], Replicas.world(), bucket_bytes=1024, wire="fp32")()
    assert weights.tolist() == [1.0, 1.0, 1.0]


def test_the_commands_are_there() -> None:
    assert {"train", "report", "replay", "plan", "doctor", "kernels", "demo"} <= set(cli.COMMANDS)
