"""Replay: a second run has, at each step, the base that the first run had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from hdet_scale import cli
from hdet_scale.config import HDETConfig
from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.runs import replay
from hdet_scale.runs.log import RunLog, read
from hdet_scale.schedulers import AutoLR, OneCycleAutoLR, ReplayLR
from tests.support.fleet import Fleet
from tests.support.toy import learn, toy

STEPS, INTERVAL = 40, 4


def explore(rank: int, size: int, folder: str) -> list[list[float]]:
    """A steered run on real ranks that writes its log; the base of each group at each step."""
    model = toy(rank)
    halves = [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:]}]
    optimizer = AdamW(halves)
    scheduler = OneCycleAutoLR(
        optimizer,
        [0.02, 0.01],
        STEPS,
        pct_start=0.1,
        ensemble_lr_spread_ratio=0.3,
        model_sync_interval=INTERVAL,
        enable_auto_lr=True,
        auto_lr_warmup_steps=0,
        decay="schedule",
    )
    log = RunLog(folder) if rank == 0 else None
    bases: list[list[float]] = []
    for step in range(STEPS):
        bases.append(scheduler.get_base_lr())
        loss = learn(model, optimizer, step, rank)
        scheduler.step(loss)
        if log is not None and ((step + 1) % 3 == 0 or step + 1 == STEPS):
            since = bases[len(bases) - 1 - step % 3 :]
            log.step(step + 1, float(loss), {f"lr/group{i}": [b[i] for b in since] for i in (0, 1)})
    return bases


def optimizer_of(groups: int, kind: type[Optimizer] = SGD) -> Any:
    return kind([{"params": [nn.Parameter(torch.ones(3))]} for _ in range(groups)], lr=0.5)


def steps(scheduler: Any, optimizer: Optimizer, count: int) -> list[list[float]]:
    found = []
    for _ in range(count):
        found.append([float(g["lr"]) for g in optimizer.param_groups])
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(3)
        optimizer.step()
        scheduler.step()
    return found


def test_the_replay_of_a_run_is_its_base_at_each_step(pair: Fleet, tmp_path: Path) -> None:
    bases = pair.run(explore, str(tmp_path))[0]
    assert cli.main(["replay", str(tmp_path)]) == 0
    path = tmp_path / "schedule.json"
    # The base was really steered: another schedule than OneCycleLR's.
    plain = torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.AdamW([nn.Parameter(torch.ones(1))]), 0.02, STEPS, pct_start=0.1
    )
    schedule = []
    for _ in range(STEPS):
        schedule.append(float(plain.get_last_lr()[0]))
        plain.optimizer.step()
        plain.step()
    assert [b[0] for b in bases] != schedule
    optimizer = optimizer_of(2)
    assert steps(ReplayLR(optimizer, path), optimizer, STEPS) == bases
    # Inside AutoLR at spread 0, on the fused optimizer as hdet train has it.
    optimizer = optimizer_of(2, FusedAdamW)
    scheduler = AutoLR(ReplayLR(optimizer, path), HDETConfig(spread=0.0, interval=INTERVAL))
    assert steps(scheduler, optimizer, STEPS) == bases


def a_schedule(**rates: list[float]) -> dict[str, Any]:
    bases = {name.replace("_", "/"): values for name, values in rates.items()}
    return {"schema": 1, "run": "x", "steps": 3, "bases": bases}


def test_a_resumed_replay_goes_on() -> None:
    schedule = a_schedule(lr_group0=[0.1, 0.2, 0.3])
    optimizer = optimizer_of(1)
    first = ReplayLR(optimizer, schedule)
    assert steps(first, optimizer, 1) == [[0.1]]
    state = first.state_dict()
    assert "rates" not in state
    fresh = optimizer_of(1)
    second = ReplayLR(fresh, schedule)
    fresh.load_state_dict(optimizer.state_dict())
    second.load_state_dict(state)
    assert steps(second, fresh, 2) == [[0.2], [0.3]]
    assert second.get_last_lr() == [0.3]
    with pytest.raises(ValueError, match="Tried to step 4 times and the schedule has 3"):
        second.step()


def test_what_stood_in_the_optimizer_before_does_not_matter() -> None:
    optimizer = optimizer_of(1)
    CosineAnnealingLR(optimizer, 10)
    ReplayLR(optimizer, a_schedule(lr_group0=[0.1, 0.2, 0.3]))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_other_factors_are_kept_apart() -> None:
    schedule = a_schedule(lr_group0=[0.1])
    schedule["bases"]["weight_decay/group0"] = [0.3]
    assert "weight_decay/group0" in ReplayLR(optimizer_of(1), schedule).others


def test_a_schedule_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="and the optimizer 2 param groups"):
        ReplayLR(optimizer_of(2), a_schedule(lr_group0=[0.1]))
    with pytest.raises(ValueError, match="hdet replay RUN -o"):
        ReplayLR(optimizer_of(1), {"lr": [0.1]})
    with pytest.raises(ValueError, match="has schema 7"):
        ReplayLR(optimizer_of(1), {**a_schedule(lr_group0=[0.1]), "schema": 7})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(tmp_path / "nowhere")]) == 1
    assert "no run log at" in capsys.readouterr().err
    with RunLog(tmp_path / "run") as log:
        log.begin({})
    assert cli.main(["replay", str(tmp_path / "run")]) == 1
    assert "has no sampled step" in capsys.readouterr().err
    with RunLog(tmp_path / "run") as log:
        log.step(2, 1.0, {"lr/group0": [0.1, 0.05]})
    out = tmp_path / "deep" / "schedule.json"
    assert cli.main(["replay", str(tmp_path / "run"), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": str(out), "steps": 2, "run": "run"}
    assert json.loads(out.read_text())["bases"] == read(tmp_path / "run").bases()
    assert replay.discovered(read(tmp_path / "run")) == json.loads(out.read_text())
