"""Checkpoint and resume: one file for all ranks, any order, the same bits, any kill."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet_scale import AutoLR, HDETConfig, OneCycleAutoLR, Replicas
from hdet_scale.method.records import RoundRecord
from hdet_scale.method.spread import assignment, multipliers
from tests.support.fleet import Fleet
from tests.support.long_run import STEPS, LongRun, random_kill, train
from tests.support.toy import bits, learn, parameters, toy

T, S = 4, 40
logger = logging.getLogger(__name__)


class Run:
    """Everything a script builds, and its two kinds of checkpoint."""

    def __init__(self, rank: int, kind: str = "one cycle", gradients: str = "shared") -> None:
        self.rank = rank
        self.model = toy(rank, norm=True, rebuild=False)
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)
        self.scheduler: Any
        if kind == "one cycle":
            self.scheduler = OneCycleAutoLR(
                self.optimizer,
                0.05,
                total_steps=S,
                ensemble_lr_spread_ratio=0.4,
                model_sync_interval=T,
                enable_auto_lr=True,
                auto_lr_warmup_steps=0,
                model=self.model,
                gradients=gradients,
                seed=3,
            )
        else:
            config = HDETConfig(rule="paper", spread=0.4, interval=T, gradients=gradients, seed=3)
            inner = CosineAnnealingLR(self.optimizer, S)
            self.scheduler = AutoLR(inner, config, model=self.model)
        self.step = 0
        self.records: list[RoundRecord] = []
        self.scheduler.on_round(self.records.append)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.scheduler.step(learn(self.model, self.optimizer, self.step, self.rank))
            self.step += 1

    def save(self) -> bytes:
        state = [x.state_dict() for x in (self.model, self.optimizer, self.scheduler)]
        return pickle.dumps([*state, self.scheduler.replica_state_dict(), self.step])

    def load(self, file: bytes, order: str = "optimizer first") -> None:
        model, optimizer, scheduler, _, self.step = pickle.loads(file)
        self.model.load_state_dict(model)
        if order == "optimizer first":
            self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)
        if order == "scheduler first":
            self.optimizer.load_state_dict(optimizer)

    def load_own(self, file: bytes) -> None:
        self.load(file)
        self.scheduler.load_replica_state_dict(pickle.loads(file)[3])

    def ends(self) -> Any:
        """All that a run leaves behind, and the losses of its last rounds, comparable."""
        state = [x.state_dict() for x in (self.model, self.optimizer, self.scheduler)]
        rates = self.scheduler.get_last_lr(), self.scheduler.get_base_lr()
        return bits([*state, *rates, [record.losses for record in self.records[-2:]]])


KINDS = [(k, g) for k in ("one cycle", "around cosine") for g in ("shared", "local")]


# -- one state for all ------------------------------------------------------------------------


def _state(rank: int, size: int, kind: str, gradients: str, steps: int) -> Any:
    run = Run(rank, kind, gradients)
    run.train(steps)
    return run.scheduler.state_dict()


def _keys(state: Any) -> set[str]:
    if isinstance(state, dict):
        return set(state) | {k for v in state.values() for k in _keys(v)}
    if isinstance(state, list | tuple):
        return {k for v in state for k in _keys(v)}
    return set()


@pytest.mark.parametrize(("kind", "gradients"), KINDS)
@pytest.mark.parametrize("steps", [0, 3 * T, 3 * T + 2])
def test_the_state_is_the_same_on_every_rank(
    trio: Fleet, kind: str, gradients: str, steps: int
) -> None:
    states = trio.run(_state, kind, gradients, steps)
    assert states[0] == states[1] == states[2]
    assert not {k for k in _keys(states[0]) if "rank" in str(k)}
    assert states[0]["hdet"]["round"] == steps // T
    assert states[0]["hdet"]["round_step"] == steps % T


# -- resume at a converge ---------------------------------------------------------------------


def _first_half(rank: int, size: int, kind: str, gradients: str) -> tuple[bytes, Any]:
    run = Run(rank, kind, gradients)
    run.train(5 * T)
    file = run.save()
    run.train(3 * T + 2)
    return file, run.ends()


def _second_half(
    rank: int, size: int, kind: str, gradients: str, file: bytes, order: str
) -> tuple[Any, list[Any]]:
    run = Run(rank, kind, gradients)
    run.load(file, order)
    rates = run.scheduler.get_last_lr(), [g["lr"] for g in run.optimizer.param_groups]
    run.train(3 * T + 2)
    return run.ends(), list(rates)


@pytest.mark.parametrize("order", ["optimizer first", "scheduler first"])
@pytest.mark.parametrize(("kind", "gradients"), KINDS)
def test_rank_zeros_file_is_right_everywhere(
    trio: Fleet, kind: str, gradients: str, order: str
) -> None:
    whole = trio.run(_first_half, kind, gradients)
    resumed = trio.run(_second_half, kind, gradients, whole[0][0], order)
    for (_, unbroken), (again, _) in zip(whole, resumed, strict=True):
        assert again == unbroken
    saved = pickle.loads(whole[0][0])[2]["hdet"]
    assert saved["round"] == 5
    pi = assignment(3, seed=3, round=5, factor="lr/group0")
    rho = multipliers(3, 0.4)
    rates = [r for _, r in resumed]
    assert all(reported == used for reported, used in rates)
    assert len({reported[0] for reported, _ in rates}) == 3
    middle = next(reported[0] for rank, (reported, _) in enumerate(rates) if rho[pi[rank]] == 1.0)
    for rank, (reported, _) in enumerate(rates):
        assert reported == [middle * rho[pi[rank]]]


# -- resume between converges -----------------------------------------------------------------


def _between(rank: int, size: int, kind: str, gradients: str) -> tuple[bytes, Any]:
    run = Run(rank, kind, gradients)
    run.train(5 * T + 3)
    file = run.save()
    run.train(2 * T)
    return file, run.ends()


def _go_on(
    rank: int, size: int, kind: str, gradients: str, files: list[bytes], own_losses: bool
) -> Any:
    run = Run(rank, kind, gradients)
    if own_losses:
        run.load_own(files[rank])
    else:
        run.load(files[rank])
    run.train(2 * T)
    return run.ends()


@pytest.mark.parametrize(("kind", "gradients"), KINDS)
def test_every_replica_resumes_between_converges(pair: Fleet, kind: str, gradients: str) -> None:
    whole = pair.run(_between, kind, gradients)
    files = [file for file, _ in whole]
    assert pair.run(_go_on, kind, gradients, files, True) == [end for _, end in whole]


def test_the_losses_of_the_round_belong_to_such_a_checkpoint(pair: Fleet) -> None:
    """Without them the round's mean loss is another one."""
    whole = pair.run(_between, "one cycle", "shared")
    files = [file for file, _ in whole]
    lost = pair.run(_go_on, "one cycle", "shared", files, False)
    for broken, (_, unbroken) in zip(lost, whole, strict=True):
        first, second = broken[-1]
        assert first != unbroken[-1][0]
        assert second == unbroken[-1][1]


# -- another number of replicas ---------------------------------------------------------------


def _save_after(rank: int, size: int, steps: int, finalize: bool) -> bytes:
    run = Run(rank)
    run.train(steps)
    if finalize:
        run.scheduler.finalize()
    return run.save()


def _take_up(rank: int, size: int, file: bytes) -> tuple[Any, Any, Any]:
    run = Run(rank)
    run.load(file)
    rates = run.scheduler.get_last_lr()[0], run.scheduler.get_base_lr()[0]
    run.train(T - run.scheduler.state_dict()["hdet"]["round_step"])  # what is left of the round
    return rates, bits(parameters(run.model)), run.scheduler.state_dict()["hdet"]


@pytest.mark.parametrize("finalize", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 3), (3, 1), (1, 2)])
def test_replicas_may_change_at_a_converge(
    fleets: Any, before: int, after: int, finalize: bool
) -> None:
    steps = 5 * T + (2 if finalize and before > 1 else 0)
    file = fleets(before).run(_save_after, steps, finalize)[0]
    saved_round = pickle.loads(file)[2]["hdet"]["round"]
    results = fleets(after).run(_take_up, file)
    rho = multipliers(after, 0.4)
    pi = assignment(after, seed=3, round=saved_round, factor="lr/group0")
    for rank, ((lr, base), params, state) in enumerate(results):
        assert lr == base * rho[pi[rank]]
        assert base == results[0][0][1]
        assert params == results[0][1]
        assert state["replicas"] == after
        assert state["round"] == saved_round + 1


def _refuse(rank: int, size: int, file: bytes) -> tuple[str, bool]:
    run = Run(rank)
    before = copy.deepcopy(run.scheduler.state_dict()), run.scheduler.get_last_lr()
    try:
        run.scheduler.load_state_dict(pickle.loads(file)[2])
    except ValueError as error:
        after = run.scheduler.state_dict(), run.scheduler.get_last_lr()
        return str(error), after == before
    return "no error", False


def test_replicas_may_not_change_within_a_round(fleets: Any) -> None:
    file = fleets(2).run(_save_after, 5 * T + 2, False)[0]
    for message, untouched in fleets(3).run(_refuse, file):
        assert "saved by 2 replicas, 2 steps into a round, and there are 3 now" in message
        assert "call finalize() first" in message
        assert untouched


# -- states that cannot be continued ----------------------------------------------------------


def _scheduler(groups: int) -> OneCycleAutoLR:
    params = [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(groups)]
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    return OneCycleAutoLR(
        optimizer, 0.1, 20, ensemble_lr_spread_ratio=0.2, replicas=Replicas(rank=1, size=2)
    )


def test_another_number_of_groups_is_refused() -> None:
    one, two = _scheduler(1), _scheduler(2)
    before = copy.deepcopy(two.state_dict())
    with pytest.raises(ValueError, match=r"explores \['lr/group0'\] and this run \['lr/group0', "):
        two.load_state_dict(one.state_dict())
    assert two.state_dict() == before


def test_another_version_is_refused() -> None:
    one = _scheduler(1)
    state = one.state_dict()
    state["hdet"]["version"] = 99
    before = copy.deepcopy(one.state_dict())
    with pytest.raises(ValueError, match=r"has version 99 and this version of .* reads 3"):
        one.load_state_dict(state)
    assert one.state_dict() == before


def test_loading_does_not_alias_the_state() -> None:
    one = _scheduler(1)
    state = one.state_dict()
    kept = copy.deepcopy(state)
    one.load_state_dict(state)
    one.optimizer.step()
    one.step(1.0)
    assert state == kept


# -- SIGKILL ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared", "local", "between"])
def test_a_killed_run_ends_with_the_bits_of_the_unbroken(
    tmp_path: Path, pair: Fleet, kind: str
) -> None:
    unbroken = pair.run(train, tmp_path / "unbroken", kind)
    killed = LongRun(tmp_path / "killed", kind, 2)
    step, rank = random_kill(kind)
    logger.info("%s: SIGKILL to rank %d after step %d", kind, rank, step)
    killed.kill_at(step, rank)
    resumed = killed.finish()
    for again, whole in zip(resumed, unbroken, strict=True):
        assert 0 < again["began"] < STEPS  # from a checkpoint, and not after the end
        for part in ("model", "optimizer", "scheduler", "lr"):
            assert bits(again[part]) == bits(whole[part]), part
    assert resumed[0]["lr"] != resumed[1]["lr"]
