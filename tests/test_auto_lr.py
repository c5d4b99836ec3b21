"""AutoLR around torch's schedulers: spread 0 bit for bit, otherwise their value times rho."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from hdet_scale import AutoLR, HDETConfig, OneCycleAutoLR, Replicas
from hdet_scale.method.spread import multipliers


def _wsd(optimizer: Optimizer) -> LRScheduler:
    parts: list[LRScheduler] = [
        LinearLR(optimizer, 0.1, total_iters=5),
        ConstantLR(optimizer, 1.0, total_iters=10),
        ExponentialLR(optimizer, 0.8),
    ]
    return SequentialLR(optimizer, parts, milestones=[5, 15])


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "cosine": lambda o: CosineAnnealingLR(o, T_max=20, eta_min=1e-3),
    "exponential": lambda o: ExponentialLR(o, 0.93),
    "lambda": lambda o: LambdaLR(o, lambda t: 1 / (1 + t)),
    "sequential": _wsd,
    "multistep": lambda o: MultiStepLR(o, [5, 12], 0.3),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 7),
    "one cycle": lambda o: OneCycleLR(o, 0.3, total_steps=60),
}


def make(kind: type = SGD) -> Optimizer:
    torch.manual_seed(0)
    groups = [{"params": [torch.nn.Parameter(torch.randn(3))], "lr": lr} for lr in (0.1, 0.02)]
    return SGD(groups, lr=0.1, momentum=0.9) if kind is SGD else AdamW(groups, lr=0.1)


def work(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = p.detach().cos()
    optimizer.step()


def values(optimizer: Optimizer) -> list[Any]:
    keys = ("lr", "momentum", "betas")
    return [
        [g.get(k) for k in keys] + [p.tolist() for p in g["params"]] for g in optimizer.param_groups
    ]


PLAIN = {
    "no spread": HDETConfig(rule="paper", spread=0, interval=4),
    "too short for a search": HDETConfig(rule="auto", total_steps=60, interval=4),
}


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_without_a_spread_or_a_search_it_is_the_scheduler(
    name: str, kind: type, config: HDETConfig
) -> None:
    one, other = make(kind), make(kind)
    plain = SCHEDULERS[name](one)
    ours = AutoLR(SCHEDULERS[name](other), config)
    assert ours.phase == "plain"
    for _ in range(30):
        assert values(other) == values(one)
        assert ours.get_last_lr() == plain.get_last_lr()
        assert ours.last_epoch == plain.last_epoch
        for o in (one, other):
            work(o)
        plain.step()
        ours.step(torch.tensor(2.0))
    assert values(other) == values(one)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_product_with_the_multiplier(name: str, rank: int) -> None:
    """Recursive forms read the learning rate back: the multiplier must not pile up in it."""
    one, other = make(), make()
    plain = SCHEDULERS[name](one)
    rho = multipliers(3, 0.3)[rank]
    ours = AutoLR(
        SCHEDULERS[name](other),
        HDETConfig(rule="paper", spread=0.3, interval=1000),
        replicas=Replicas(rank=rank, size=3),
    )
    for _ in range(30):
        assert ours.get_last_lr() == [lr * rho for lr in plain.get_last_lr()]
        assert [g["lr"] for g in other.param_groups] == ours.get_last_lr()
        assert ours.get_base_lr() == plain.get_last_lr()
        for o in (one, other):
            work(o)
        plain.step()
        ours.step(2.0)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_state_continues(name: str, optimizer_first: bool) -> None:
    config = HDETConfig(rule="paper", spread=0.3, interval=4, seed=3)
    one = make()
    ours = AutoLR(SCHEDULERS[name](one), config)
    for _ in range(11):
        work(one)
        ours.step(1.0)
    other = make()
    for p, q in zip(one.param_groups, other.param_groups, strict=True):
        q["params"][0].data.copy_(p["params"][0].data)
    resumed = AutoLR(SCHEDULERS[name](other), config)
    # A copy: torch's load_state_dict would share the moments of the two optimizers.
    saved = copy.deepcopy((one.state_dict(), ours.state_dict()))
    if optimizer_first:
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
    else:
        resumed.load_state_dict(saved[1])
        other.load_state_dict(saved[0])
    for _ in range(12):
        assert values(other) == values(one)
        assert resumed.state_dict()["hdet"] == ours.state_dict()["hdet"]
        for o, s in ((one, ours), (other, resumed)):
            work(o)
            s.step(1.0)
    assert values(other) == values(one)


def test_the_rule_moves_a_scale_on_the_schedule() -> None:
    one = make()
    ours = AutoLR(SCHEDULERS["cosine"](one), HDETConfig(rule="paper", spread=0.3, interval=4))
    ours._run.steering.taken_over = True
    ours._run.steering.scales = [2.0, 0.5]
    plain = SCHEDULERS["cosine"](make())
    for _ in range(3):
        work(one)
        ours.step()
        work(plain.optimizer)
        plain.step()
        a, b = plain.get_last_lr()
        assert ours.get_base_lr() == [2.0 * a, 0.5 * b]


def test_tensor_lr_stays_the_same_tensor() -> None:
    lr = torch.tensor(0.1)
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(2))], lr=lr)
    ours = AutoLR(
        ExponentialLR(optimizer, 0.9),
        HDETConfig(rule="paper", spread=0.5),
        replicas=Replicas(rank=1, size=2),
    )
    expected = torch.tensor(0.1)
    for _ in range(5):
        assert optimizer.param_groups[0]["lr"] is lr
        torch.testing.assert_close(lr, expected * 1.5, rtol=1e-6, atol=0)
        work(optimizer)
        ours.step(1.0)
        expected *= 0.9


def test_it_is_an_lr_scheduler() -> None:
    ours = AutoLR(SCHEDULERS["cosine"](make()), HDETConfig(total_steps=60))
    assert isinstance(ours, LRScheduler)
    assert ours.get_lr() == ours.get_last_lr()


def test_the_default_is_a_search_and_must_know_the_length_of_the_run() -> None:
    optimizer = make()
    inner = SCHEDULERS["cosine"](optimizer)
    before = values(optimizer)
    with pytest.raises(ValueError, match=r"rule='auto' .* must know its length: set total_steps"):
        AutoLR(inner)
    assert values(optimizer) == before
    assert AutoLR(inner, HDETConfig(total_steps=5000)).searching


def test_a_scheduler_that_knows_its_length_says_it() -> None:
    ours = AutoLR(OneCycleLR(make(), 0.3, total_steps=5000))
    assert ours.config.total_steps == 5000
    assert ours.searching
    stated = AutoLR(OneCycleLR(make(), 0.3, total_steps=5000), HDETConfig(total_steps=50))
    assert stated.config.total_steps == 50
    assert not stated.searching


SHORT = HDETConfig(total_steps=60)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (lambda o: ReduceLROnPlateau(o), "ReduceLROnPlateau follows each rank's own metric"),
        (lambda o: AutoLR(CosineAnnealingLR(o, 9), SHORT), "AutoLR explores already"),
        (lambda o: OneCycleAutoLR(o, 0.1, 9), "OneCycleAutoLR explores already"),
        (lambda o: o, r"wraps a torch LRScheduler, got SGD: pass e\.g\."),
    ],
)
def test_what_cannot_be_wrapped(inner: Any, message: str) -> None:
    optimizer = make()
    given = inner(optimizer)
    before = values(optimizer)
    with pytest.raises(TypeError, match=message):
        AutoLR(given, SHORT)
    assert values(optimizer) == before


def test_a_decay_to_an_unknown_floor_is_refused() -> None:
    optimizer = make()
    scheduler = SCHEDULERS["cosine"](optimizer)
    before = values(optimizer)
    with pytest.raises(ValueError, match=r"decay='floor' needs.*decay='schedule'"):
        AutoLR(scheduler, HDETConfig(rule="paper", decay="floor"))
    assert values(optimizer) == before
