"""OneCycleAutoLR: with spread 0 it is OneCycleLR to the last bit; with a spread, the equation."""

from __future__ import annotations

import inspect
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR

from hdet_scale import ConvergePolicy, HDETConfig, OneCycleAutoLR, Replicas
from hdet_scale.method.spread import assignment, multipliers

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: AdamW(groups, lr=0.1),
    "rmsprop": lambda groups: RMSprop(groups, lr=0.1, momentum=0.5),
}
SHAPES = list(itertools.product(["cos", "linear"], [False, True]))


def make(kind: str = "sgd", groups: int = 1) -> Optimizer:
    torch.manual_seed(0)
    params = [{"params": [torch.nn.Parameter(torch.randn(3))]} for _ in range(groups)]
    return OPTIMIZERS[kind](params)


def work(optimizer: Optimizer) -> None:
    """One optimizer step with gradients that follow from the parameters."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = p.detach().cos()
    optimizer.step()


def seen(optimizer: Optimizer, scheduler: Any) -> tuple[Any, ...]:
    """All that a schedule decides, and the parameters that come of it, exactly."""
    keys = ("lr", "momentum", "betas", "initial_lr", "max_lr", "min_lr")
    keys += ("max_momentum", "base_momentum")
    groups = [{k: g[k] for k in keys if k in g} for g in optimizer.param_groups]
    params = [p.tolist() for g in optimizer.param_groups for p in g["params"]]
    return groups, params, scheduler.get_last_lr(), scheduler.last_epoch


def lockstep(plain: tuple[Optimizer, Any], ours: tuple[Optimizer, Any], steps: int) -> None:
    for _ in range(steps):
        assert seen(*ours) == seen(*plain)
        for optimizer, _ in (plain, ours):
            work(optimizer)
        plain[1].step()
        ours[1].step(torch.tensor(1.5))
    assert seen(*ours) == seen(*plain)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("strategy", "three"), SHAPES)
@pytest.mark.parametrize("groups", [1, 3])
def test_spread_zero_is_one_cycle(kind: str, strategy: str, three: bool, groups: int) -> None:
    arguments: dict[str, Any] = {
        "max_lr": [0.3, 0.01, 1.0][:groups],
        "total_steps": 57,
        "anneal_strategy": strategy,
        "three_phase": three,
        "base_momentum": [0.8, 0.7, 0.6][:groups],
        "max_momentum": [0.9, 0.95, 0.8][:groups],
    }
    one, other = make(kind, groups), make(kind, groups)
    plain, ours = OneCycleLR(one, **arguments), OneCycleAutoLR(other, **arguments)
    lockstep((one, plain), (other, ours), 57)


@pytest.mark.parametrize(
    "arguments",
    [
        {"epochs": 4, "steps_per_epoch": 7},
        {"total_steps": 28, "pct_start": 0.0},
        {"total_steps": 28, "pct_start": 0.9},
        {"total_steps": 28, "cycle_momentum": False},
        {"total_steps": 28, "div_factor": 3.0, "final_div_factor": 7.0},
        {"total_steps": 28, "three_phase": True, "pct_start": 0.4},
    ],
    ids=repr,
)
def test_spread_zero_with_other_settings(arguments: dict[str, Any]) -> None:
    one, other = make(), make()
    plain, ours = OneCycleLR(one, 0.3, **arguments), OneCycleAutoLR(other, 0.3, **arguments)
    lockstep((one, plain), (other, ours), 28)


def test_positional_arguments_are_torchs() -> None:
    ours = list(inspect.signature(OneCycleAutoLR).parameters)
    assert ours[:14] == list(inspect.signature(OneCycleLR).parameters)


def test_spread_zero_ignores_auto_lr_and_losses() -> None:
    """Nothing to compare: the schedule stays the user's although a rule is switched on."""
    one, other = make(), make()
    plain = OneCycleLR(one, 0.3, total_steps=40)
    ours = OneCycleAutoLR(
        other,
        0.3,
        total_steps=40,
        enable_auto_lr=True,
        auto_lr_warmup_steps=0,
        model_sync_interval=4,
    )
    lockstep((one, plain), (other, ours), 40)


@pytest.mark.parametrize("at", [0, 1, 20, 39])
def test_last_epoch_resumes(at: int) -> None:
    """As torch does it: the optimizer carries initial_lr, the constructor gets last_epoch."""
    pairs: list[tuple[Optimizer, Any]] = []
    for kind in (OneCycleLR, OneCycleAutoLR):
        first = make()
        scheduler = kind(first, 0.3, total_steps=57)
        for _ in range(at):
            work(first)
            scheduler.step()
        second = make()
        second.load_state_dict(first.state_dict())
        for p, q in zip(
            second.param_groups[0]["params"], first.param_groups[0]["params"], strict=True
        ):
            p.data.copy_(q)
        pairs.append((second, kind(second, 0.3, total_steps=57, last_epoch=at - 1)))
    if at == 0:
        assert pairs[0][1].last_epoch == 0
    lockstep(pairs[0], pairs[1], 57 - at)


def test_tensor_lr_stays_a_tensor_and_a_float_a_float() -> None:
    for kind in (OneCycleLR, OneCycleAutoLR):
        p = torch.nn.Parameter(torch.zeros(2))
        lr = torch.tensor(0.1)
        optimizer = AdamW([p], lr=lr)
        scheduler = kind(optimizer, 0.3, total_steps=20)
        for _ in range(20):
            work(optimizer)
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] is lr
            assert isinstance(scheduler.get_last_lr()[0], torch.Tensor)
    one = make()
    ours = OneCycleAutoLR(one, 0.3, total_steps=20, ensemble_lr_spread_ratio=0.5)
    for _ in range(20):
        work(one)
        ours.step(1.0)
        assert type(one.param_groups[0]["lr"]) is float
        assert type(ours.get_last_lr()[0]) is float


def test_tensor_lr_takes_the_multiplier_in_place() -> None:
    p, lr = torch.nn.Parameter(torch.zeros(2)), torch.tensor(0.1)
    ours = OneCycleAutoLR(
        AdamW([p], lr=lr), 0.25, 20, div_factor=1.0, ensemble_lr_spread_ratio=0.5, world_size=2
    )
    assert ours.optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.25 * 0.5
    reported = ours.get_last_lr()[0]
    assert isinstance(reported, torch.Tensor)
    assert reported is not lr  # a copy, as torch gives one


def caught(kind: Any, use: Callable[[Optimizer, Any], None]) -> list[tuple[type, str]]:
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        optimizer = make()
        use(optimizer, kind(optimizer, 0.3, total_steps=10))
    return [(w.category, str(w.message)) for w in log]


def _right(optimizer: Optimizer, scheduler: Any) -> None:
    for _ in range(10):
        work(optimizer)
        scheduler.step()


def _scheduler_first(optimizer: Optimizer, scheduler: Any) -> None:
    scheduler.step()
    work(optimizer)


def _asks_for_lr(optimizer: Optimizer, scheduler: Any) -> None:
    scheduler.get_lr()


def _saves(optimizer: Optimizer, scheduler: Any) -> None:
    scheduler.load_state_dict(scheduler.state_dict())


@pytest.mark.parametrize(
    ("use", "count"), [(_right, 0), (_scheduler_first, 1), (_asks_for_lr, 1), (_saves, 0)]
)
def test_the_same_warnings_and_no_more(use: Any, count: int) -> None:
    plain, ours = caught(OneCycleLR, use), caught(OneCycleAutoLR, use)
    assert ours == plain
    assert len(ours) == count


def test_past_the_end_is_torchs_error() -> None:
    for kind in (OneCycleLR, OneCycleAutoLR):
        optimizer = make()
        scheduler = kind(optimizer, 0.3, total_steps=5)
        for _ in range(5):
            work(optimizer)
            scheduler.step()
        with pytest.raises(
            ValueError, match=r"Tried to step 6 times\. The specified number of total steps is 5"
        ):
            scheduler.step()


def test_past_the_end_changes_nothing_of_ours() -> None:
    optimizer = make()
    ours = OneCycleAutoLR(optimizer, 0.3, total_steps=5)
    for _ in range(5):
        work(optimizer)
        ours.step(1.0)
    before = seen(optimizer, ours), ours.state_dict()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"raise total_steps, or stop here and call finalize"):
            ours.step(1.0)
    assert (seen(optimizer, ours), ours.state_dict()) == before


def test_state_dict_has_torchs_keys_and_moves_both_ways() -> None:
    one, other = make(), make()
    plain, ours = OneCycleLR(one, 0.3, total_steps=30), OneCycleAutoLR(other, 0.3, total_steps=30)
    for _ in range(11):
        for o in (one, other):
            work(o)
        plain.step()
        ours.step()
    theirs, mine = plain.state_dict(), ours.state_dict()
    assert set(theirs) <= set(mine)
    assert {k: mine[k] for k in theirs} == theirs
    assert pickle.loads(pickle.dumps(mine)) == mine
    fresh = make()
    fresh.load_state_dict(one.state_dict())
    moved = OneCycleAutoLR(fresh, 0.3, total_steps=30)
    moved.load_state_dict(theirs)  # a run that starts to explore in mid-flight
    assert moved.get_last_lr() == plain.get_last_lr()
    back = make()
    back.load_state_dict(other.state_dict())
    returned = OneCycleLR(back, 0.3, total_steps=30)
    returned.load_state_dict(mine)
    work(back)
    work(one)
    plain.step()
    returned.step()
    assert returned.get_last_lr() == plain.get_last_lr()


# -- with a spread ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_every_replica_steps_with_base_times_multiplier(n: int, kind: str) -> None:
    """Declared places, no process group: what each rank would step with in the first round."""
    torch_one = make(kind, 2)
    plain = OneCycleLR(torch_one, [0.3, 0.01], total_steps=30)
    spread = 0.4
    ranks = []
    for rank in range(n):
        optimizer = make(kind, 2)
        ranks.append(
            OneCycleAutoLR(
                optimizer,
                [0.3, 0.01],
                total_steps=30,
                ensemble_lr_spread_ratio=spread,
                replicas=Replicas(rank=rank, size=n),
            )
        )
    rho = multipliers(n, spread)
    for _ in range(30):
        for rank, ours in enumerate(ranks):
            expected = [lr * rho[rank] for lr in plain.get_last_lr()]
            assert ours.get_last_lr() == expected
            assert [g["lr"] for g in ours.optimizer.param_groups] == expected
            assert ours.get_base_lr() == plain.get_last_lr()
            for mine, theirs in zip(
                ours.optimizer.param_groups, torch_one.param_groups, strict=True
            ):
                assert mine.get("momentum") == theirs.get("momentum")
                assert mine.get("betas") == theirs.get("betas")
        work(torch_one)
        plain.step()
        for ours in ranks:
            work(ours.optimizer)
            ours.step(1.0)


def test_groups_draw_their_own_permutations_each_round() -> None:
    """One declared replica of one, then the drawn assignments of a larger world."""
    spread, n = 0.4, 4
    rho = multipliers(n, spread)
    for k in (1, 2, 3):
        drawn = [assignment(n, seed=5, round=k, factor=f"lr/group{g}") for g in (0, 1)]
        for rank in range(n):
            optimizer = make("sgd", 2)
            ours = OneCycleAutoLR(
                optimizer,
                0.3,
                total_steps=100,
                ensemble_lr_spread_ratio=spread,
                model_sync_interval=10,
                replicas=Replicas(rank=rank, size=n),
                seed=5,
            )
            state = ours.state_dict()
            state["hdet"] |= {"round": k, "round_step": 0}
            ours.load_state_dict(state)
            expected = [b * rho[pi[rank]] for b, pi in zip(ours.get_base_lr(), drawn, strict=True)]
            assert ours.get_last_lr() == expected


def test_adam_with_beta1_cycles_too() -> None:
    optimizer = Adam([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    ours = OneCycleAutoLR(
        optimizer,
        0.3,
        total_steps=40,
        ensemble_lr_spread_ratio=0.3,
        enable_auto_lr=True,
        auto_lr_warmup_steps=8,
        model_sync_interval=4,
    )
    betas = []
    for _ in range(40):
        work(optimizer)
        ours.step(1.0)
        betas.append(optimizer.param_groups[0]["betas"][0])
    assert ours._run.steering.taken_over
    assert min(betas) == pytest.approx(0.85, abs=1e-3)
    assert betas[-2] == 0.95  # back up at the last step of the schedule, after the take-over


def test_the_warm_up_is_never_frozen() -> None:
    """S_warm before the peak: the schedule is followed to its peak, then the rule takes over."""
    one, other = make(), make()
    plain = OneCycleLR(one, 0.3, total_steps=100)
    ours = OneCycleAutoLR(
        other,
        0.3,
        total_steps=100,
        ensemble_lr_spread_ratio=0.3,
        enable_auto_lr=True,
        auto_lr_warmup_steps=5,
        model_sync_interval=5,
    )
    bases = []
    for _ in range(100):
        assert ours.last_epoch >= 30 or ours.get_base_lr() == plain.get_last_lr()
        bases.append(ours.get_base_lr()[0])
        for o in (one, other):
            work(o)
        plain.step()
        ours.step(2.0)
    assert max(bases) == 0.3
    assert ours._run.steering.taken_over
    floor = 0.3 / 25 / 1e4
    assert bases[-1] == pytest.approx(floor, rel=1e-9)
    assert min(bases) >= floor


@pytest.mark.parametrize("decay", ["floor", "schedule"])
def test_equal_losses_never_raise_the_base(decay: str) -> None:
    optimizer = make()
    ours = OneCycleAutoLR(
        optimizer,
        0.3,
        total_steps=200,
        ensemble_lr_spread_ratio=0.3,
        enable_auto_lr=True,
        auto_lr_warmup_steps=60,
        model_sync_interval=5,
        decay=decay,
    )
    bases = []
    for step in range(200):
        work(optimizer)
        ours.step(2.0)
        if step >= 60:
            bases.append(ours.get_base_lr()[0])
    assert bases[:-1] == sorted(bases[:-1], reverse=True)
    assert bases[-2] < 1e-4 < bases[0]


def test_detach_takes_the_hook_back() -> None:
    optimizer = make()
    before = len(optimizer._optimizer_load_state_dict_post_hooks)
    ours = OneCycleAutoLR(optimizer, 0.3, total_steps=9, ensemble_lr_spread_ratio=0.1)
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == before + 1
    lr = optimizer.param_groups[0]["lr"]
    ours.detach()
    ours.detach()
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == before
    assert optimizer.param_groups[0]["lr"] == lr


# -- an HDETConfig in place of the authors' names -----------------------------------------------


def test_the_authors_names_and_a_config_say_the_same() -> None:
    named = OneCycleAutoLR(
        make(),
        0.3,
        total_steps=90,
        auto_lr_warmup_steps=7,
        ensemble_lr_spread_ratio=0.2,
        model_sync_interval=5,
        enable_auto_lr=True,
        loss_scale=0.1,
        lr_of_lr=0.4,
        momentum_of_lr=0.8,
        seed=3,
        converge={"wire": "bf16"},
    )
    config = HDETConfig(
        rule="paper",
        spread=0.2,
        interval=5,
        warmup_steps=7,
        loss_scale=0.1,
        step_size=0.4,
        momentum=0.8,
        seed=3,
        converge=ConvergePolicy(wire="bf16"),
    )
    assert named.config == config
    assert OneCycleAutoLR(make(), 0.3, total_steps=90, config=config).config is config


def test_the_authors_defaults_are_plain_training() -> None:
    ours = OneCycleAutoLR(make(), 0.3, total_steps=90)
    assert ours.phase == "plain"
    assert (ours.config.rule, ours.config.spread, ours.config.interval) == ("none", 0.0, 1000)
    assert ours.config.warmup_steps == 100000
