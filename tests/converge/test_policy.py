"""Overlap, fragments, wires and the outer step inside a real run: DDP, a scheduler, resume."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hdet_scale import ConvergePolicy, OneCycleAutoLR
from hdet_scale.converge.outer import OuterStep

STEPS, T = 18, 6

POLICIES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "overlap": {"overlap": True, "overlap_steps": 2},
    "fragments": {"fragments": 3},
    "overlapped fragments": {"fragments": 3, "overlap": True},
    "outer": {"outer": OuterStep(lr=0.7, momentum=0.5)},
    "int8 overlap outer": {"wire": "int8", "overlap": True, "outer": OuterStep()},
}


class Run:
    """A small model, its optimizer and scheduler on this replica."""

    def __init__(self, policy: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 1))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = OneCycleAutoLR(
            self.optimizer,
            0.05,
            total_steps=STEPS + 1,
            ensemble_lr_spread_ratio=0.3,
            model_sync_interval=T,
            auto_lr_warmup_steps=1,
            enable_auto_lr=True,
            model=self.model,
            converge=ConvergePolicy(bucket_bytes=256, **policy),
        )

    def train(self, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            g = torch.Generator().manual_seed(1000 * step + rank)
            x = torch.randn(4, 8, generator=g)
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step(loss)

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def _run(rank: int, size: int, policy: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    run = Run(policy)
    run.train(rank, 0, STEPS - 1)
    diverged = run.parameters()
    run.scheduler.finalize()
    return diverged, run.parameters()


@pytest.mark.parametrize("name", POLICIES)
def test_replicas_diverge_in_a_round_and_are_equal_after_finalize(fleets: Any, name: str) -> None:
    results = fleets(3).run(_run, POLICIES[name])
    for diverged, end in results[1:]:
        assert not all(torch.equal(a, b) for a, b in zip(diverged, results[0][0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(end, results[0][1], strict=True))
    assert all(p.isfinite().all() for p in results[0][1])


def _resumed(rank: int, size: int, policy: dict[str, Any], at: int) -> tuple[bool, bool]:
    """Save at step `at` on every replica, go on; load into a fresh run, go on; compare bits."""
    run = Run(policy)
    run.train(rank, 0, at)
    # The scheduler first: it folds in an averaging that is under way.
    saved = copy.deepcopy(
        (
            run.scheduler.state_dict(),
            run.scheduler.replica_state_dict(),
            run.model.state_dict(),
            run.optimizer.state_dict(),
        )
    )
    run.train(rank, at, STEPS)
    fresh = Run(policy)
    fresh.model.load_state_dict(saved[2])
    fresh.scheduler.load_state_dict(saved[0])
    fresh.scheduler.load_replica_state_dict(saved[1])
    fresh.optimizer.load_state_dict(saved[3])
    fresh.train(rank, at, STEPS)
    same = all(torch.equal(a, b) for a, b in zip(run.parameters(), fresh.parameters(), strict=True))
    return same, run.scheduler.get_last_lr() == fresh.scheduler.get_last_lr()


@pytest.mark.parametrize("at", [7, 9, 12, 13])
@pytest.mark.parametrize("name", POLICIES)
def test_a_resumed_run_gives_the_same_bits(fleets: Any, name: str, at: int) -> None:
    for same_parameters, same_rates in fleets(2).run(_resumed, POLICIES[name], at):
        assert same_parameters
        assert same_rates


def _saved(rank: int, size: int, policy: dict[str, Any]) -> Any:
    run = Run(policy)
    run.train(rank, 0, 2 * T)
    run.scheduler.finalize()
    assert any(run.scheduler.state_dict()["hdet"]["phase_state"]["converge"].values())
    return copy.deepcopy((run.scheduler.state_dict(), run.model.state_dict()))


def _with_others(rank: int, size: int, policy: dict[str, Any], saved: Any) -> tuple[Any, ...]:
    run = Run(policy)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hdet_scale").addHandler(handler)
    run.model.load_state_dict(saved[1])
    run.scheduler.load_state_dict(saved[0])
    logging.getLogger("hdet_scale").removeHandler(handler)
    run.train(rank, 2 * T, STEPS)
    run.scheduler.finalize()
    return run.parameters(), said


@pytest.mark.parametrize("name", ["outer", "int8"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_other_replicas_drop_what_the_converge_remembered(
    fleets: Any, name: str, before: int, after: int
) -> None:
    """Its buckets were made for another number of replicas: said in the log, and no error."""
    saved = fleets(before).run(_saved, POLICIES[name])[0]
    results = fleets(after).run(_with_others, POLICIES[name], saved)
    for parameters, said in results:
        wanted = f"the state is of {before} replicas and there are {after} now"
        assert [text for text in said if wanted in text], said
        for a, b in zip(parameters, results[0][0], strict=True):
            assert torch.equal(a, b)


def _in_flight(rank: int, size: int) -> tuple[bool, bool, bool]:
    run = Run({"overlap": True, "overlap_steps": 3})
    run.train(rank, 0, T)
    before = run.parameters()
    averaging = run.scheduler._phase.averaging  # type: ignore[attr-defined]
    flying = averaging._pending is not None
    run.scheduler.state_dict()
    folded = not all(torch.equal(a, b) for a, b in zip(before, run.parameters(), strict=True))
    return flying, folded, averaging._pending is None


def test_a_state_dict_completes_an_averaging_under_way(fleets: Any) -> None:
    assert fleets(2).run(_in_flight) == [(True, True, True)] * 2


def _poisoned(rank: int, size: int, policy: dict[str, Any]) -> tuple[list[Tensor], bool]:
    run = Run(policy)
    run.train(rank, 0, T - 2)
    run.scheduler.detach()
    if rank == 1:
        with torch.no_grad():
            next(iter(run.model.parameters()))[0, 0] = float("nan")
        for state in run.optimizer.state.values():
            state["exp_avg"].fill_(float("inf"))
    for _ in range(2):  # the round ends without another backward
        run.scheduler.step(1.0)
    run.scheduler.finalize()
    moments = [s["exp_avg"] for s in run.optimizer.state.values()]
    return run.parameters() + moments, all(bool(m.isfinite().all()) for m in moments)


@pytest.mark.parametrize("name", ["blocking", "int8", "overlap", "fragments", "outer"])
def test_a_replica_gone_bad_takes_the_others_parameters_and_moments(fleets: Any, name: str) -> None:
    results = fleets(3).run(_poisoned, POLICIES[name])
    for tensors, finite in results:
        assert finite
        for a, b in zip(tensors, results[0][0], strict=True):
            assert bool(a.isfinite().all())
            assert torch.equal(a, b)


def _falling(rank: int, size: int, policy: dict[str, Any]) -> tuple[float, float]:
    """Local AdamW whose second moments fall fast within a round: gradients keep shrinking."""
    p = torch.nn.Parameter(torch.ones(300))
    optimizer = torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.9))
    scheduler = OneCycleAutoLR(
        optimizer,
        1e-3,
        total_steps=100,
        ensemble_lr_spread_ratio=0.1,
        model_sync_interval=30,
        gradients="local",
        cycle_momentum=False,
        converge=ConvergePolicy(**policy),
    )
    for step in range(90):
        g = torch.Generator().manual_seed(1000 * step + rank)
        p.grad = torch.randn(300, generator=g) * 10.0 ** (-step / 15)
        optimizer.step()
        scheduler.step(1.0)
    return float(optimizer.state[p]["exp_avg_sq"].min()), float(p.detach().abs().max())


@pytest.mark.parametrize(
    "policy", [{"outer": OuterStep()}, {"wire": "int8"}], ids=["outer", "int8"]
)
def test_second_moments_take_the_plain_mean(fleets: Any, policy: dict[str, Any]) -> None:
    """Extrapolated or quantised as a difference they would fall below zero."""
    for smallest, largest in fleets(2).run(_falling, policy):
        assert smallest >= 0
        assert largest < 10


def _saving(rank: int, size: int, every: int) -> list[int]:
    """Steps at which a round ended, with replicas made equal every few steps."""
    run = Run({})
    ended: list[int] = []
    run.scheduler.on_round(lambda record: ended.append(record.step))
    for step in range(STEPS):
        run.train(rank, step, step + 1)
        if (step + 1) % every == 0:
            run.scheduler.equalize()
    return ended


def test_a_checkpoint_more_often_than_a_round_does_not_stop_the_rounds(fleets: Any) -> None:
    assert fleets(2).run(_saving, 4) == [[6, 12, 18]] * 2


def _rolled_back(rank: int, size: int) -> bool:
    """A state loaded while an averaging is in the air: it is dropped, not folded in."""
    run = Run({"overlap": True, "overlap_steps": 3})
    run.train(rank, 0, T - 1)
    saved = copy.deepcopy((run.scheduler.state_dict(), run.model.state_dict()))
    run.train(rank, T - 1, T)
    run.scheduler.load_state_dict(saved[0])
    run.model.load_state_dict(saved[1])
    run.scheduler.state_dict()
    return all(torch.equal(a, b) for a, b in zip(run.parameters(), _params(saved[1]), strict=True))


def _params(state: dict[str, Tensor]) -> list[Tensor]:
    return [v for k, v in state.items() if k.endswith(("weight", "bias"))]


def test_a_loaded_state_drops_an_averaging_under_way(fleets: Any) -> None:
    assert fleets(2).run(_rolled_back) == [True, True]


@pytest.mark.parametrize(
    ("policy", "remembers"),
    [({}, False), ({"wire": "bf16"}, False), ({"wire": "int8"}, True), ({"outer": {}}, True)],
)
def test_a_policy_says_whether_a_converge_builds_on_the_last(
    policy: dict[str, Any], remembers: bool
) -> None:
    assert ConvergePolicy(**policy).remembers is remembers
