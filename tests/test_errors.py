"""Wrong input: refused at once, with the value, what is valid, the next move; nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet_scale import AutoLR, HDETConfig, OneCycleAutoLR, Replicas
from hdet_scale.ddp import warm_init
from tests.support.fleet import Fleet
from tests.support.toy import bits, learn, toy


def make(groups: int = 2) -> Optimizer:
    params = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(groups)]
    return SGD(params, lr=0.1, momentum=0.9)


def contents(optimizer: Optimizer) -> Any:
    """Groups, state, hooks and the step method: all that a constructor might have changed."""
    return (
        bits(copy.deepcopy(optimizer.state_dict())),
        [p.tolist() for g in optimizer.param_groups for p in g["params"]],
        len(optimizer._optimizer_load_state_dict_post_hooks),
        hasattr(optimizer.step, "_wrapped_by_lr_sched"),
    )


def refused(
    kind: type[Exception], message: str, build: Callable[[Optimizer], Any], optimizer: Optimizer
) -> None:
    before = contents(optimizer)
    with pytest.raises(kind, match=message):
        build(optimizer)
    assert contents(optimizer) == before


ONE_CYCLE: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"ensemble_lr_spread_ratio": 1.0}, r"\[0, 1\), got 1\.0.*paper uses 1/9"),
    (ValueError, {"ensemble_lr_spread_ratio": -0.1}, r"\[0, 1\), got -0\.1"),
    (ValueError, {"ensemble_lr_spread_ratio": float("nan")}, r"\[0, 1\), got nan"),
    (TypeError, {"ensemble_lr_spread_ratio": "a"}, r"number in \[0, 1\), got 'a'"),
    (ValueError, {"model_sync_interval": 0}, "at least 1, got 0"),
    (ValueError, {"model_sync_interval": -3}, "at least 1, got -3"),
    (TypeError, {"model_sync_interval": 2.5}, r"int, got 2\.5"),
    (
        ValueError,
        {"auto_lr_warmup_steps": 101, "enable_auto_lr": True, "ensemble_lr_spread_ratio": 0.1},
        r"auto_lr_warmup_steps=101 .*total_steps=100 .*smaller.*enable_auto_lr=False",
    ),
    (
        ValueError,
        {"auto_lr_warmup_steps": 100, "enable_auto_lr": True, "ensemble_lr_spread_ratio": 0.1},
        "auto_lr_warmup_steps=100",
    ),
    (
        ValueError,
        {"enable_auto_lr": True, "ensemble_lr_spread_ratio": 0.1},
        "auto_lr_warmup_steps=100000",
    ),
    (ValueError, {"decay": "none"}, r"\['auto', 'floor', 'schedule'\], got 'none'"),
    (ValueError, {"gradients": "both"}, r"\['shared', 'local'\], got 'both'"),
    (ValueError, {"loss_scale": 0.0}, r"above 0, got 0\.0"),
    (ValueError, {"momentum_of_lr": 1.0}, r"\[0, 1\), got 1\.0"),
    (ValueError, {"lr_of_lr": -1.0}, r"0 or more, got -1\.0"),
    (ValueError, {"seed": -1}, "at least 0, got -1"),
    (ValueError, {"rank": 2, "world_size": 2}, r"\[0, size\) = \[0, 2\), got 2"),
    (ValueError, {"world_size": 0}, "at least 1, got 0"),
    (TypeError, {"replicas": 4}, r"Replicas, got 4: use Replicas\.world\(\)"),
    (TypeError, {"converge": {"bucket_bytes": 1.5}}, r"int, got 1\.5"),
    (
        ValueError,
        {"max_lr": [0.1, 0.2, 0.3]},
        r"max_lr has 3 values for 2 .* got \[0\.1,.*: give one",
    ),
    (ValueError, {"max_lr": [0.1]}, "max_lr has 1 values for 2 param groups"),
    (ValueError, {"base_momentum": [0.8]}, "base_momentum has 1 values for 2 param groups"),
    (ValueError, {"max_momentum": [0.8] * 3}, "max_momentum has 3 values for 2"),
    (ValueError, {"total_steps": 0}, "0"),
    (ValueError, {"total_steps": None}, "total_steps"),
    (ValueError, {"pct_start": 1.5}, r"1\.5"),
    (ValueError, {"anneal_strategy": "poly"}, "cos.*linear.*poly"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), ONE_CYCLE, ids=lambda x: repr(x)[:60])
def test_one_cycle(kind: type[Exception], changes: dict[str, Any], message: str) -> None:
    arguments = {"max_lr": 0.1, "total_steps": 100} | changes
    refused(kind, message, lambda o: OneCycleAutoLR(o, **arguments), make())


def test_an_optimizer_without_momentum() -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    refused(
        ValueError,
        "Adagrad has no momentum.*pass cycle_momentum=False",
        lambda o: OneCycleAutoLR(o, 0.1, 100),
        Adagrad(params, lr=0.1),
    )


def test_an_unknown_argument() -> None:
    message = "unexpected keyword argument 'spread_ratio'.*did you mean 'spread'.*Valid keys"
    for value in (0.1, None):
        refused(
            TypeError,
            message,
            lambda o, x=value: OneCycleAutoLR(o, 0.1, 10, spread_ratio=x),  # type: ignore[misc]
            make(),
        )
        refused(
            TypeError,
            message,
            lambda o, x=value: OneCycleAutoLR(  # type: ignore[misc]
                o, 0.1, 10, config=HDETConfig(), spread_ratio=x
            ),
            make(),
        )


def test_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match=r"Linear is not an Optimizer: pass a torch\.optim"):
        OneCycleAutoLR(torch.nn.Linear(2, 2), 0.1, 10)  # type: ignore[arg-type]


LOSSES: list[tuple[type[Exception], Any, str]] = [
    (ValueError, torch.ones(2), r"tensor of shape \[2\]: pass loss\.mean\(\)"),
    (ValueError, torch.ones(2, 1), r"shape \[2, 1\]"),
    (ValueError, torch.ones(0), r"shape \[0\]"),
    (TypeError, 3, r"float or a tensor of one element, got int 3: pass the training loss"),
    (TypeError, True, "got bool True"),
    (TypeError, "1.0", "got str '1.0'"),
    (TypeError, [1.0], r"got list \[1\.0\]"),
    (TypeError, torch.tensor(3), r"floating-point tensor, got torch\.int64"),
]


@pytest.mark.parametrize("around", [False, True], ids=["one cycle", "around cosine"])
@pytest.mark.parametrize(("kind", "loss", "message"), LOSSES, ids=lambda x: repr(x)[:40])
def test_losses(kind: type[Exception], loss: Any, message: str, around: bool) -> None:
    optimizer = make()
    config = HDETConfig(rule="paper", spread=0.2, interval=2)
    scheduler: Any = (
        AutoLR(CosineAnnealingLR(optimizer, 10), config)
        if around
        else OneCycleAutoLR(optimizer, 0.1, 10, ensemble_lr_spread_ratio=0.2, model_sync_interval=2)
    )
    optimizer.step()
    scheduler.step(1.5)
    before = contents(optimizer), scheduler.state_dict(), scheduler.replica_state_dict()
    with pytest.raises(kind, match=message):
        scheduler.step(loss)
    assert (contents(optimizer), scheduler.state_dict(), scheduler.replica_state_dict()) == before


# -- with processes ---------------------------------------------------------------------------


def _sharded(rank: int, size: int) -> list[tuple[str, bool]]:
    """DTensor parameters given to each way into the DDP path."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    answers = []
    for use in (
        lambda o: OneCycleAutoLR(o, 0.1, 10, ensemble_lr_spread_ratio=0.1),
        lambda o: AutoLR(CosineAnnealingLR(o, 10), HDETConfig(rule="paper", spread=0.1)),
        lambda o: warm_init(model, gradients="local"),
    ):
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = model.weight.to_local().clone(), optimizer.param_groups[0]["lr"]  # type: ignore[operator]
        try:
            use(optimizer)
            text = "no error"
        except ValueError as error:
            text = str(error)
        after = model.weight.to_local(), optimizer.param_groups[0]["lr"]  # type: ignore[operator]
        answers.append((text, torch.equal(before[0], after[0]) and before[1] == after[1]))
    return answers


def test_sharded_parameters_in_the_ddp_path(pair: Fleet) -> None:
    for answers in pair.run(_sharded):
        for (text, untouched), said in zip(
            answers,
            ["no replicas to diverge"] * 2 + ["[4, 4] is a slice of the model"],
            strict=True,
        ):
            assert said in text
            assert "hdet_scale.fsdp.attach" in text
            assert untouched


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"ds_id": 7}, r"ds_id 7.*hdet_scale\.deepspeed\.initialize"),
        ({"_is_flat_param": True}, r"FlatParameter.*fully_shard"),
    ],
)
def test_slices_of_other_engines(attributes: dict[str, Any], message: str) -> None:
    optimizer = make()
    for name, value in attributes.items():
        setattr(optimizer.param_groups[0]["params"][0], name, value)
    refused(ValueError, message, lambda o: OneCycleAutoLR(o, 0.1, 10), optimizer)


def _misplaced(rank: int, size: int) -> str:
    try:
        OneCycleAutoLR(make(), 0.1, 10, rank=(rank + 1) % size, world_size=size)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_rank_that_is_another(pair: Fleet) -> None:
    for rank, text in enumerate(pair.run(_misplaced)):
        assert f"rank={1 - rank}, world_size=2 do not fit this process, rank {rank} of 2" in text
        assert "leave them out" in text


def _early(rank: int, size: int) -> str:
    """Declared as one of one, which the process group then contradicts."""
    model = toy(rank)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleAutoLR(
        optimizer, 0.1, 10, ensemble_lr_spread_ratio=0.1, replicas=Replicas()
    )
    loss = learn(model, optimizer, 0, rank)
    try:
        scheduler.step(loss)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_scheduler_made_too_early_says_so_at_the_first_step(pair: Fleet) -> None:
    for rank, text in enumerate(pair.run(_early)):
        assert "made for replica 0 of 1 before the process group existed" in text
        assert f"rank {rank} of 2" in text
        assert "after init_process_group" in text
