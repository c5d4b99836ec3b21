"""The method on DistributedDataParallel, with 1 to 4 real processes."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from hdet_scale import AutoLR, ConvergePolicy, FusedAdamW, HDETConfig, OneCycleAutoLR
from hdet_scale.converge.pipeline import NoHealthyReplicaError
from hdet_scale.method.paper import PaperRule
from hdet_scale.method.spread import assignment, multipliers
from tests.converge.test_pipeline import nearest_mean, ulps
from tests.support.fleet import Fleet
from tests.support.rng import rng_states
from tests.support.toy import buffers, learn, moments, parameters, same, toy
from tests.support.traffic import traffic

T, S = 4, 24
NAN = math.nan


def _sgd(params: Any, **extra: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9, **extra)


def _one_cycle(optimizer: Optimizer, **changes: Any) -> OneCycleAutoLR:
    chosen: dict[str, Any] = {"ensemble_lr_spread_ratio": 0.4, "model_sync_interval": T}
    return OneCycleAutoLR(optimizer, 0.2, total_steps=S, **(chosen | changes))


# -- multipliers ------------------------------------------------------------------------------


def _rates(rank: int, size: int) -> list[tuple[list[Any], list[float], list[float]]]:
    model = toy(rank)
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = _sgd(groups)
    scheduler = _one_cycle(optimizer, seed=11)
    seen = []
    for step in range(S):
        used = [g["lr"] for g in optimizer.param_groups]
        seen.append((scheduler.get_last_lr(), used, scheduler.get_base_lr()))
        scheduler.step(learn(model, optimizer, step, rank))
    return seen


def test_multipliers_are_the_equation(fleet: Fleet) -> None:
    n = fleet.size
    rho = multipliers(n, 0.4)
    for rank, seen in enumerate(fleet.run(_rates)):
        for step, (reported, used, base) in enumerate(seen):
            drawn = [
                assignment(n, seed=11, round=step // T, factor=f"lr/group{g}")
                for g in range(len(used))
            ]
            expected = [b * rho[pi[rank]] for b, pi in zip(base, drawn, strict=True)]
            assert reported == used == expected


# -- shared gradients -------------------------------------------------------------------------


def _shared(rank: int, size: int, average: bool) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Parameters before and after each scheduler step."""
    model = toy(rank)
    optimizer = _sgd(model.parameters())
    scheduler = _one_cycle(optimizer, enable_auto_lr=average, auto_lr_warmup_steps=0)
    seen = []
    for step in range(S):
        loss = learn(model, optimizer, step, rank)
        before = parameters(model)
        scheduler.step(loss)
        seen.append((before, parameters(model)))
    return seen


@pytest.mark.parametrize("auto_lr", [False, True])
def test_replicas_diverge_in_the_round_and_are_equal_after_it(fleet: Fleet, auto_lr: bool) -> None:
    runs = fleet.run(_shared, auto_lr)
    for step in range(S):
        went_in = [run[step][0] for run in runs]
        came_out = [run[step][1] for run in runs]
        if fleet.size > 1:
            assert not same(*went_in)
        if (step + 1) % T:
            assert all(same(a, b) for a, b in zip(went_in, came_out, strict=True))
            continue
        assert same(*came_out)
        exact = nearest_mean(went_in, list(range(fleet.size)))
        assert all(ulps(p, e) <= 1 for p, e in zip(came_out[0], exact, strict=True))


def _update_over_rate(rank: int, size: int) -> list[Tensor]:
    """Gradients are shared: after one step the replicas differ by their learning rate alone."""
    model = toy(rank)
    start = parameters(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    _one_cycle(optimizer, cycle_momentum=False)
    learn(model, optimizer, 0, rank)
    lr = optimizer.param_groups[0]["lr"]
    return [(s.double() - p.double()) / lr for s, p in zip(start, parameters(model), strict=True)]


def test_the_gradient_is_shared(quartet: Fleet) -> None:
    steps = quartet.run(_update_over_rate)
    for other in steps[1:]:
        for a, b in zip(steps[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-5)  # fp32 subtraction over lr ~ 8e-3


def _plain(rank: int, size: int, ours: bool) -> tuple[list[Tensor], list[Tensor]]:
    model = toy(rank, norm=True)
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = (
        _one_cycle(optimizer, ensemble_lr_spread_ratio=0.0, model=model)
        if ours
        else OneCycleLR(optimizer, 0.2, total_steps=S)
    )
    for step in range(S):
        loss = learn(model, optimizer, step, rank)
        scheduler.step(loss) if ours else scheduler.step()  # type: ignore[call-arg,arg-type]
    if isinstance(scheduler, OneCycleAutoLR):
        scheduler.finalize()
    return parameters(model), moments(optimizer)


def test_spread_zero_is_plain_ddp_bit_for_bit(fleet: Fleet) -> None:
    for ours, plain in zip(fleet.run(_plain, True), fleet.run(_plain, False), strict=True):
        assert same(ours[0], plain[0])
        assert same(ours[1], plain[1])


# -- collectives ------------------------------------------------------------------------------


def _count(rank: int, size: int, gradients: str | None) -> tuple[list[dict[str, int]], ...]:
    """Collectives of each training step, and of each scheduler step, by name."""
    model = toy(rank, norm=True)
    optimizer = _sgd(model.parameters())
    scheduler: Any = OneCycleLR(optimizer, 0.2, total_steps=S)
    if gradients:
        scheduler = _one_cycle(optimizer, model=model, gradients=gradients)
    learning, stepping = [], []
    for step in range(2 * T):
        with traffic() as counts:
            loss = learn(model, optimizer, step, rank)
        learning.append(dict(counts))
        with traffic() as counts:
            scheduler.step(loss) if gradients else scheduler.step()
        stepping.append(dict(counts))
    return learning, stepping


def test_a_step_that_is_no_converge_issues_no_collective_of_ours(fleet: Fleet) -> None:
    plain = fleet.run(_count, None)
    ours = fleet.run(_count, "shared")
    for (learning, stepping), (as_plain, _) in zip(ours, plain, strict=True):
        # DDP rebuilds its buckets in the second step; otherwise every step is like the others.
        assert learning == as_plain
        assert fleet.size == 1 or all(counts for counts in learning)
        for step, counts in enumerate(stepping):
            ends_round = (step + 1) % T == 0
            assert bool(counts) == (ends_round and fleet.size > 1)


def test_local_gradients_send_nothing_between_converges(fleet: Fleet) -> None:
    for learning, stepping in fleet.run(_count, "local"):
        assert learning == [{}] * (2 * T)
        for step, counts in enumerate(stepping):
            ends_round = (step + 1) % T == 0
            assert bool(counts) == (ends_round and fleet.size > 1)


# -- local gradients --------------------------------------------------------------------------


def _local(rank: int, size: int, kind: str, averaged: bool | None) -> dict[str, Any]:
    model = toy(rank, norm=True)
    optimizer = {
        "sgd": lambda p: _sgd(p),
        "l2": lambda p: _sgd(p, weight_decay=0.1),
        "adamw": lambda p: AdamW(p, lr=0.1),
        "adam l2": lambda p: Adam(p, lr=0.1, weight_decay=0.1),
    }[kind](model.parameters())
    policy = ConvergePolicy(moments=averaged)
    scheduler = _one_cycle(optimizer, model=model, gradients="local", converge=policy)
    losses = [float(learn(model, optimizer, 0, rank))]
    scheduler.step(losses[0])
    diverged = parameters(model)
    for step in range(1, T):
        loss = learn(model, optimizer, step, rank)
        before = parameters(model) + buffers(model), moments(optimizer)
        scheduler.step(loss)
    after = parameters(model) + buffers(model), moments(optimizer)
    return {"diverged": diverged, "before": before, "after": after}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_local_gradients_leave_replicas_equal_after_the_round(fleet: Fleet, kind: str) -> None:
    runs = fleet.run(_local, kind, None)
    n = fleet.size
    if n > 1:
        assert not same(*(run["diverged"] for run in runs))
        assert not same(*(run["before"][1] for run in runs))
    for what in (0, 1):  # parameters and buffers; moments
        assert same(*(run["after"][what] for run in runs))
        exact = nearest_mean([run["before"][what] for run in runs], list(range(n)))
        for value, mean in zip(runs[0]["after"][what], exact, strict=True):
            assert ulps(value, mean) <= 1


def test_moments_are_left_alone_when_asked(pair: Fleet) -> None:
    runs = pair.run(_local, "sgd", False)
    assert same(*(run["after"][0] for run in runs))
    assert not same(*(run["after"][1] for run in runs))
    assert all(same(run["before"][1], run["after"][1]) for run in runs)


def _shared_moments(rank: int, size: int, kind: str) -> tuple[list[Tensor], list[Tensor], bool]:
    model = toy(rank)
    optimizer = {
        "l2": lambda p: _sgd(p, weight_decay=0.5),
        "adam l2": lambda p: Adam(p, lr=0.1, weight_decay=0.5),
        "adamw": lambda p: AdamW(p, lr=0.1, weight_decay=0.5),
        "sgd": lambda p: _sgd(p),
    }[kind](model.parameters())
    scheduler = _one_cycle(optimizer)
    for step in range(T):
        loss = learn(model, optimizer, step, rank)
        before = moments(optimizer)
        scheduler.step(loss)
    return before, moments(optimizer), scheduler._phase.averaging.average_moments  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["l2", "adam l2"])
def test_weight_decay_in_the_gradient_drifts_moments_and_they_are_averaged(
    trio: Fleet, kind: str
) -> None:
    runs = trio.run(_shared_moments, kind)
    assert not same(*(before for before, _, _ in runs))
    assert same(*(after for _, after, _ in runs))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_shared_gradients_keep_moments_equal_without_averaging(trio: Fleet, kind: str) -> None:
    runs = trio.run(_shared_moments, kind)
    assert same(*(before for before, _, _ in runs))
    assert [averaged for _, _, averaged in runs] == [False] * 3


def _detached(rank: int, size: int) -> list[dict[str, int]]:
    model = toy(rank)
    optimizer = _sgd(model.parameters())
    scheduler = _one_cycle(optimizer, model=model, gradients="local")
    seen = []
    for undo in (False, True):
        if undo:
            scheduler.detach()
        with traffic() as counts:
            learn(model, optimizer, 0, rank)
        seen.append(dict(counts))
    return seen


def test_detach_gives_ddp_its_all_reduce_back(pair: Fleet) -> None:
    for before, after in pair.run(_detached):
        assert before == {}
        assert after["allreduce_"] >= 1


# -- buffers ----------------------------------------------------------------------------------


def _norm(rank: int, size: int, with_model: bool, average: bool) -> tuple[list[Tensor], ...]:
    model = toy(rank, norm=True)
    optimizer = _sgd(model.parameters())
    scheduler = _one_cycle(
        optimizer,
        model=model if with_model else None,
        converge=ConvergePolicy(buffers=average),
    )
    for step in range(T):
        loss = learn(model, optimizer, step, rank)
        before = buffers(model)
        scheduler.step(loss)
    return before, buffers(model)


def test_batch_norm_statistics_are_averaged_given_the_model(fleet: Fleet) -> None:
    runs = fleet.run(_norm, True, True)
    exact = nearest_mean([before for before, _ in runs], list(range(fleet.size)))
    assert same(*(after for _, after in runs))
    for value, mean in zip(runs[0][1], exact, strict=True):
        assert ulps(value, mean) <= 1
    if fleet.size > 1:
        assert not same(*(before for before, _ in runs))


@pytest.mark.parametrize(("with_model", "average"), [(False, True), (True, False)])
def test_otherwise_buffers_are_left_to_ddp(pair: Fleet, with_model: bool, average: bool) -> None:
    for before, after in pair.run(_norm, with_model, average):
        assert same(before, after)


# -- the end of a run -------------------------------------------------------------------------


def _finish(rank: int, size: int, gradients: str, steps: int) -> dict[str, Any]:
    model = toy(rank, norm=True)
    optimizer = _sgd(model.parameters())
    scheduler = _one_cycle(optimizer, model=model, gradients=gradients)
    for step in range(steps):
        scheduler.step(learn(model, optimizer, step, rank))
    before = parameters(model) + buffers(model)
    scheduler.finalize()
    after = parameters(model) + buffers(model)
    boundary = scheduler.at_boundary
    with traffic() as counts:
        scheduler.finalize()
    again = parameters(model) + buffers(model)
    return {
        "before": before,
        "after": after,
        "again": again,
        "counts": dict(counts),
        "boundary": boundary,
    }


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("steps", [T - 1, T, T + 2])
def test_finalize_makes_the_replicas_equal(fleet: Fleet, gradients: str, steps: int) -> None:
    runs = fleet.run(_finish, gradients, steps)
    if fleet.size > 1:
        assert same(*(run["before"] for run in runs)) == (steps % T == 0)
    assert same(*(run["after"] for run in runs))
    exact = nearest_mean([run["before"] for run in runs], list(range(fleet.size)))
    for value, mean in zip(runs[0]["after"], exact, strict=True):
        assert ulps(value, mean) <= 1
    for run in runs:
        assert run["boundary"] or fleet.size == 1
        assert same(run["after"], run["again"])
        assert run["counts"] == {}  # they are equal already


# -- the user's random numbers ----------------------------------------------------------------


def _rng(rank: int, size: int, gradients: str) -> tuple[bool, Tensor]:
    model = toy(rank, norm=True)
    optimizer = _sgd(model.parameters())
    torch.manual_seed(rank + 50)
    before = rng_states()
    scheduler = _one_cycle(
        optimizer,
        model=model,
        gradients=gradients,
        enable_auto_lr=True,
        auto_lr_warmup_steps=0,
    )
    for step in range(3 * T + 1):
        scheduler.step(learn(model, optimizer, step, rank))
    scheduler.finalize()
    scheduler.load_state_dict(scheduler.state_dict())
    return rng_states() == before, torch.nn.functional.dropout(torch.ones(64))


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_the_users_random_state_is_untouched(fleet: Fleet, gradients: str) -> None:
    runs = fleet.run(_rng, gradients)
    assert [untouched for untouched, _ in runs] == [True] * fleet.size
    masks = {tuple(mask.tolist()) for _, mask in runs}
    assert len(masks) == fleet.size


# -- losses -----------------------------------------------------------------------------------


def _steered(rank: int, size: int, losses: list[Any], spoil: int | None) -> dict[str, Any]:
    """Four rounds in local mode; replica r always reports losses[r]; `spoil` gets a NaN weight."""
    model = toy(rank)
    optimizer = _sgd(model.parameters())
    scheduler = _one_cycle(
        optimizer,
        model=model,
        gradients="local",
        enable_auto_lr=True,
        auto_lr_warmup_steps=0,
        pct_start=0.1,
    )
    records: list[Any] = []
    scheduler.on_round(records.append)
    bases = []
    for step in range(4 * T):
        learn(model, optimizer, step, rank)
        if rank == spoil and step == T + 1:
            with torch.no_grad():
                next(iter(model.parameters())).view(-1)[-1] = NAN
        scheduler.step(losses[rank])
        bases.append(scheduler.get_base_lr()[0])
    return {
        "records": records,
        "bases": bases,
        "lr": scheduler.get_last_lr(),
        "parameters": parameters(model),
        "moments": moments(optimizer),
    }


def _story(runs: list[dict[str, Any]]) -> list[Any]:
    """What the rounds did, after the check that all ranks report the same, except for seconds."""

    def tell(record: Any) -> tuple[str, ...]:
        names = ("round", "step", "losses", "values", "bases", "velocities", "quarantined")
        return tuple(repr(getattr(record, n)) for n in names)

    told = [[tell(record) for record in run["records"]] for run in runs]
    assert all(story == told[0] for story in told)
    assert all(run["bases"] == runs[0]["bases"] for run in runs)
    return list(runs[0]["records"])


def test_the_base_follows_the_paper_rule(fleet: Fleet) -> None:
    n = fleet.size
    losses = [1.0 + 0.001 * r for r in range(n)]
    runs = fleet.run(_steered, losses, None)
    records = _story(runs)
    assert [(r.round, r.step) for r in records] == [(k, (k + 1) * T) for k in range(4)]
    rule: PaperRule | None = None
    for record in records:
        values = list(record.values["lr/group0"])
        assert record.losses == pytest.approx(losses, rel=1e-15)
        if rule is None:
            base = sum(values) / n
            K = (S - record.step) / T
            rule = PaperRule(decay=1 - (0.2 / 25 / 1e4 / base) ** (1 / K))
        fresh = max(rule.update(losses, values), 0.2 / 25 / 1e4)
        assert record.bases["lr/group0"] == pytest.approx(fresh, rel=1e-9)
        assert record.velocities["lr/group0"] == pytest.approx(rule.velocity, rel=1e-6, abs=1e-15)
    rho = multipliers(n, 0.4)
    for rank, run in enumerate(runs):
        pi = assignment(n, seed=0, round=4, factor="lr/group0")
        assert run["lr"] == [run["bases"][-1] * rho[pi[rank]]]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_bad_loss_is_quarantined(trio: Fleet, bad: float) -> None:
    runs = trio.run(_steered, [1.0, bad, 1.001], None)
    for record in _story(runs):
        assert record.quarantined == (1,)
        assert math.isfinite(record.bases["lr/group0"])
    assert same(*(run["parameters"] for run in runs))
    assert same(*(run["moments"] for run in runs))
    assert all(math.isfinite(b) and b > 0 for run in runs for b in run["bases"])


def test_a_bad_parameter_is_quarantined_once(trio: Fleet) -> None:
    runs = trio.run(_steered, [1.0, 1.0, 1.001], 2)
    assert [record.quarantined for record in _story(runs)] == [(), (2,), (), ()]
    assert same(*(run["parameters"] for run in runs))
    assert all(p.isfinite().all() for run in runs for p in run["parameters"] + run["moments"])


def test_losses_of_none(trio: Fleet) -> None:
    """One replica without a loss is no bad replica; without any loss the decay goes on alone."""
    silent = trio.run(_steered, [1.0, None, 1.001], None)
    for record in _story(silent):
        assert record.quarantined == ()
        assert math.isnan(record.losses[1])
    none = trio.run(_steered, [None] * 3, None)
    equal = trio.run(_steered, [2.0] * 3, None)
    assert _story(none)[-1].bases == _story(equal)[-1].bases
    assert all(same(a["parameters"], b["parameters"]) for a, b in zip(none, equal, strict=True))


def test_a_loss_is_a_loss_in_any_form(pair: Fleet) -> None:
    plain = pair.run(_steered, [1.0, 1.0009765625], None)
    for form in (
        lambda x: torch.tensor(x),
        lambda x: torch.tensor([x]),
        lambda x: torch.tensor([[x]], dtype=torch.float64),
        lambda x: torch.tensor(x, requires_grad=True),
        lambda x: torch.tensor(x, dtype=torch.float16),
    ):
        runs = pair.run(_steered, [form(1.0), form(1.0009765625)], None)
        assert [r["bases"] for r in runs] == [r["bases"] for r in plain]


def _all_bad(rank: int, size: int) -> tuple[str, bool]:
    model = toy(rank)
    optimizer = _sgd(model.parameters())
    scheduler = _one_cycle(optimizer, model=model)
    for step in range(T):
        learn(model, optimizer, step, rank)
        before = parameters(model)
        try:
            scheduler.step(NAN)
        except NoHealthyReplicaError as error:
            return str(error), same(before, parameters(model))
    return "no error", False


def test_no_finite_replica_is_an_error_everywhere(fleet: Fleet) -> None:
    for message, untouched in fleet.run(_all_bad):
        assert f"none of the {fleet.size} replicas" in message
        assert untouched


def _mask(rank: int, size: int) -> tuple[tuple[int, ...], Tensor]:
    model = toy(rank, norm=True, mask=True)
    optimizer = _sgd(model.parameters())
    scheduler = _one_cycle(optimizer, model=model)
    records: list[Any] = []
    scheduler.on_round(records.append)
    for step in range(T):
        scheduler.step(learn(model, optimizer, step, rank))
    return records[0].quarantined, dict(model.named_buffers())["module.mask"]


def test_a_mask_of_infinities_is_no_bad_replica(pair: Fleet) -> None:
    for quarantined, mask in pair.run(_mask):
        assert quarantined == ()
        assert torch.equal(mask, torch.triu(torch.full((3, 3), -torch.inf), 1))


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _logged(rank: int, size: int, losses: list[Any], spoil: int | None) -> list[str]:
    lines = _Lines()
    logger = logging.getLogger("hdet_scale")
    logger.addHandler(lines)
    try:
        _steered(rank, size, losses, spoil)
    finally:
        logger.removeHandler(lines)
    return lines.lines


def test_a_quarantine_is_reported(trio: Fleet) -> None:
    lines = [line for lines in trio.run(_logged, [1.0, 1.0, 1.0], 0) for line in lines]
    assert sum("replicas [0] left out of the mean" in line for line in lines) == 1


def test_steering_without_a_loss_is_reported_once(pair: Fleet) -> None:
    for lines in pair.run(_logged, [None, None], None):
        assert sum("call step(loss) to steer" in line for line in lines) == 1


# -- replicas out of step with each other -----------------------------------------------------


def _skipping(rank: int, size: int, rounds: int) -> tuple[list[Tensor], list[Tensor]]:
    """Replica 0 skips every optimizer step of the first `rounds` rounds, as on an overflow."""
    model = toy(rank)
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = _one_cycle(optimizer, model=model, gradients="local")
    for step in range(3 * T):
        skipped = rank == 0 and step < rounds * T
        scheduler.step(None if skipped else learn(model, optimizer, step, rank))
    return parameters(model), moments(optimizer)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_replica_that_skipped_its_steps_enters_the_converge(pair: Fleet, rounds: int) -> None:
    """It has no moments while the other has: those wait for a round in which both have them."""
    runs = pair.run(_skipping, rounds, seconds=30)
    assert same(*(p for p, _ in runs))
    assert same(*([m for m in held if m.dim()] for _, held in runs))


def _reloading(rank: int, size: int) -> list[Tensor]:
    """One replica's tensors get new memory between two rounds: its plan is made anew."""
    model = toy(rank, norm=True)
    optimizer = _sgd(model.parameters())
    scheduler = _one_cycle(optimizer, model=model, gradients="local")
    for step in range(2 * T):
        scheduler.step(learn(model, optimizer, step, rank))
        if rank == 1 and step == T:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return parameters(model) + [m for m in moments(optimizer) if m.dim()]


def test_a_replica_whose_memory_moved_enters_the_converge(trio: Fleet) -> None:
    assert same(*trio.run(_reloading, seconds=30))


# -- around another scheduler -----------------------------------------------------------------


def _around(rank: int, size: int) -> tuple[list[Any], list[Tensor]]:
    model = toy(rank)
    optimizer = _sgd(model.parameters())
    scheduler = AutoLR(
        CosineAnnealingLR(optimizer, S),
        HDETConfig(rule="paper", spread=0.4, interval=T),
        model=model,
    )
    rates = []
    for step in range(2 * T):
        rates.append((scheduler.get_last_lr()[0], scheduler.get_base_lr()[0]))
        scheduler.step(learn(model, optimizer, step, rank))
    return rates, parameters(model)


def test_auto_lr_explores_and_converges(fleet: Fleet) -> None:
    runs = fleet.run(_around)
    assert same(*(p for _, p in runs))
    n = fleet.size
    rho = multipliers(n, 0.4)
    for rank, (rates, _) in enumerate(runs):
        for step, (lr, base) in enumerate(rates):
            pi = assignment(n, seed=0, round=step // T, factor="lr/group0")
            assert lr == base * rho[pi[rank]]
    assert all([b for _, b in rates] == [b for _, b in runs[0][0]] for rates, _ in runs)


def _fused(rank: int, size: int, mode: str) -> tuple[bool, float, bool]:
    """A fused optimizer keeps the base in "lr"; replicas diverge and converge as with torch's."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5).bfloat16() if mode == "master" else torch.nn.Linear(6, 5)
    options = {"master_weights": True} if mode == "master" else {}
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, **options)
    scheduler = OneCycleAutoLR(
        optimizer,
        0.1,
        total_steps=20,
        ensemble_lr_spread_ratio=0.2,
        model_sync_interval=4,
        model=model,
        gradients="local",
    )
    for step in range(7):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(x.to(next(model.parameters()).dtype)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.float())
    group = optimizer.param_groups[0]
    product = [group["lr"] * group["lr_multiplier"]] == scheduler.get_last_lr()
    scheduler.finalize()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(rows, flat)
    masters = [optimizer.state[p].get("master", p).to(p.dtype) for p in model.parameters()]
    rounded = all(torch.equal(m, p) for m, p in zip(masters, model.parameters(), strict=True))
    return (
        product and group["lr"] == scheduler.get_base_lr()[0],
        group["lr_multiplier"],
        (all(torch.equal(r, rows[0]) for r in rows) and rounded),
    )


@pytest.mark.parametrize("mode", ["fp32", "master"])
def test_fused_optimizers_take_base_and_multiplier(trio: Fleet, mode: str) -> None:
    results = trio.run(_fused, mode)
    assert all(base for base, _, _ in results)
    assert sorted(rho for _, rho, _ in results) == pytest.approx([0.8, 1.0, 1.2])
    assert all(equal for _, _, equal in results)
