"""A search in real processes: trials, going back, resume, and the run afterwards."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
)

from hdet_scale import (
    AutoLR,
    FusedAdamW,
    HDETConfig,
    OneCycleAutoLR,
    Replicas,
    fsdp,
)
from hdet_scale.ddp import warm_init
from hdet_scale.factors import learning_rates
from hdet_scale.search.trials import STAGES
from hdet_scale.topology import local
from tests.support.fleet import Fleet
from tests.support.toy import batch, bits, buffers, learn, moments, parameters, same, toy
from tests.support.traffic import traffic
from tests.support.trials import long_stage, short_trials, without_long_stage

S = 600
KINDS = ("one cycle", "cosine")


def optimizer_for(model: nn.Module, kind: str = "adamw", lr: float = 3e-5) -> Optimizer:
    if kind == "sgd":
        return SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01)
    return {"adamw": AdamW, "fused": FusedAdamW}[kind](model.parameters(), lr=lr)


def common(model: nn.Module) -> Any:
    """The same four batches on every rank."""

    def losses() -> Any:
        for i in range(4):
            x, y = batch(10_000 + i, 0)
            yield (model(x) - y).square().mean()

    return losses


class Run:
    """Everything a script builds."""

    def __init__(
        self,
        rank: int,
        kind: str = "one cycle",
        lr: float = 3e-5,
        *,
        how: str = "adamw",
        total: int = S,
        probed: bool = True,
    ) -> None:
        self.rank, self.probed = rank, probed
        self.model = toy(rank, norm=True, rebuild=False)
        self.optimizer = optimizer_for(self.model, how, lr)
        probe = common(self.model) if probed else None
        with short_trials(4):
            if kind == "one cycle":
                self.scheduler: Any = OneCycleAutoLR(
                    self.optimizer, lr, total_steps=total, rule="auto", model=self.model,
                    probe=probe, cycle_momentum=False,
                )  # fmt: skip
            else:
                config = HDETConfig(rule="auto", total_steps=total)
                inner = CosineAnnealingLR(self.optimizer, total)
                self.scheduler = AutoLR(inner, config, model=self.model, probe=probe)
        self.step = 0
        self.rates: list[float] = []
        self.records: list[Any] = []
        self.scheduler.on_record(self.records.append)
        self.rounds: list[Any] = []
        self.scheduler.on_round(self.rounds.append)

    def train(self, until: int) -> None:
        while self.step < until:
            self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
            loss = learn(self.model, self.optimizer, self.step, self.rank)
            self.scheduler.step(self.told(loss))
            self.step += 1

    def told(self, loss: Tensor) -> Tensor | float:
        """The training loss of a step: without a probe a trial of four steps would compare noise,
        and is told a loss that is lowest at 20 times the initial rate."""
        if self.probed or not self.scheduler.searching:
            return loss
        trial = self.scheduler._phase.trial
        return 1.0 + math.log(trial.multiplier(self.rank) * trial.translation / 20.0) ** 2

    def search(self) -> None:
        """To the first step of the run."""
        while self.scheduler.searching:
            self.train(self.step + 1)

    def save(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "own": self.scheduler.replica_state_dict(),
                "step": self.step,
            }
        )

    def load(self, saved: dict[str, Any], *, own: bool = True) -> None:
        saved = copy.deepcopy(saved)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        if own:
            self.scheduler.load_replica_state_dict(saved["own"])
        self.step = saved["step"]

    def everything(self) -> Any:
        return bits(
            [
                parameters(self.model),
                buffers(self.model),
                moments(self.optimizer),
                self.scheduler.state_dict()["hdet"],
                self.scheduler.get_last_lr(),
            ]
        )


def scale_of(scheduler: Any) -> float:
    """What the schedule is multiplied with."""
    return float(scheduler.get_base_lr()[0] / scheduler.get_schedule()[0])


# -- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["adamw", "sgd", "fused"])
@without_long_stage
def test_one_replica_proposes_a_better_rate_and_goes_back_to_its_start(how: str) -> None:
    torch.manual_seed(0)
    model = toy(wrap=False, norm=True)
    start, before = parameters(model), buffers(model)
    optimizer = optimizer_for(model, how, 1e-5)
    scheduler = OneCycleAutoLR(
        optimizer, 1e-5, total_steps=4000, rule="auto", model=model, probe=common(model),
        cycle_momentum=False,
    )  # fmt: skip
    step, budget = 0, scheduler._phase.rule.budget
    while scheduler.searching:
        assert scheduler.get_base_lr() == [1e-5]
        scheduler.step(learn(model, optimizer, step, 0))
        step += 1
    assert same(parameters(model), start)
    assert same(buffers(model), before)
    assert not any(optimizer.state.values())
    assert step == budget
    assert scale_of(scheduler) > 10, scheduler.verdict


def test_the_first_step_after_the_search_is_the_first_step_of_a_fresh_run() -> None:
    """Also for SGD, whose first step is not that of zeroed momentum with dampening."""
    model, other = toy(wrap=False), toy(wrap=False)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9, dampening=0.5)
    schedule = LambdaLR(optimizer, lambda _: 1e-4)
    config = HDETConfig(rule="auto", total_steps=2 * S)
    with short_trials(4):
        scheduler = AutoLR(schedule, config, model=model, probe=common(model))
    assert scheduler.searching
    step = 0
    while scheduler.searching:
        scheduler.step(learn(model, optimizer, step, 0))
        step += 1
    rate = scheduler.get_last_lr()[0]
    plain = SGD(other.parameters(), lr=rate, momentum=0.9, dampening=0.5)
    for t in range(step, step + 3):
        learn(model, optimizer, t, 0)
        learn(other, plain, t, 0)
    assert same(parameters(model), parameters(other))


def test_without_a_probe_the_end_of_each_trial_counts() -> None:
    """The first two thirds of a trial say nothing: its decay has yet to remove the noise."""
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=1e-5)
    scheduler = OneCycleAutoLR(
        optimizer, 1e-5, total_steps=4000, rule="auto", model=model, cycle_momentum=False
    )
    search, step = scheduler._phase, 0
    while scheduler.searching:
        trial = search.trial
        rate = trial.multiplier(0) * trial.translation
        late = search.step >= trial.steps * 2 // 3
        learn(model, optimizer, step, 0)
        scheduler.step(1.0 + math.log(rate / 20.0) ** 2 if late else 1e6 * rate)
        step += 1
    assert scale_of(scheduler) == pytest.approx(20.0, rel=1e-6)
    assert scheduler.phase == "plain", "there is nothing to watch with"


def test_a_run_that_skips_every_step_keeps_its_schedule() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = OneCycleAutoLR(
        optimizer, 0.01, total_steps=S * 10, rule="auto", model=model, cycle_momentum=False
    )
    start = parameters(model)
    while scheduler.searching:
        scheduler.step(None)
    assert same(parameters(model), start)
    assert scale_of(scheduler) == 1.0
    assert "stays" in scheduler.verdict


def hooks_of(model: nn.Module, optimizer: Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(model._forward_pre_hooks)


def test_hooks_are_removed_after_the_first_step() -> None:
    """The first forward takes the snapshot, the first step evaluates the initial weights."""
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = OneCycleAutoLR(
        optimizer, 0.01, total_steps=5000, rule="auto", model=model, probe=common(model)
    )
    assert hooks_of(model, optimizer) == 2
    scheduler.step(None)
    assert hooks_of(model, optimizer) == 2, "a step that was skipped has changed nothing"
    scheduler.step(learn(model, optimizer, 0, 0))
    assert hooks_of(model, optimizer) == 0


def test_hooks_of_the_user_are_called_beside_those_of_the_search() -> None:
    """Also those that were registered later: torch goes through all of them in a step."""
    model, called = toy(wrap=False), []
    optimizer = AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    scheduler = OneCycleAutoLR(optimizer, 0.01, total_steps=5000, rule="auto", model=model)
    optimizer.register_step_pre_hook(lambda *_: called.append("after"))
    for step in range(2):
        scheduler.step(learn(model, optimizer, step, 0))
    assert called == ["before", "after"] * 2


def test_auto_leaves_a_run_that_is_too_short_alone(caplog: Any) -> None:
    """No search, no probe, and torch's own learning rates."""
    model, other, called = toy(wrap=False), toy(wrap=False), []
    optimizer = AdamW(model.parameters(), lr=0.1)
    plain = AdamW(other.parameters(), lr=0.1)
    with caplog.at_level("INFO", "hdet_scale"):
        scheduler = OneCycleAutoLR(
            optimizer, 0.1, total_steps=3000, rule="auto", model=model, probe=called.append
        )
    assert "3000 steps are too few for 1 replicas, it needs 3429" in caplog.text
    assert scheduler.phase == "plain"
    assert scheduler.verdict == "no search was run: the run is too short"
    reference = OneCycleLR(plain, 0.1, total_steps=3000)
    for step in range(5):
        assert scheduler.get_last_lr() == reference.get_last_lr()
        scheduler.step(learn(model, optimizer, step, 0))
        learn(other, plain, step, 0)
        reference.step()
    assert same(parameters(model), parameters(other))
    assert not called
    assert OneCycleAutoLR(plain, 0.1, total_steps=3429, rule="auto", model=model).searching


def test_wrong_use_is_refused_at_once() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.1)
    inner = CosineAnnealingLR(optimizer, 100)
    with pytest.raises(ValueError, match="must know its length: set total_steps"):
        AutoLR(inner, HDETConfig(rule="auto"))
    with pytest.raises(ValueError, match="moves the learning rates of all param groups together"):
        AutoLR(inner, HDETConfig(total_steps=5000), factors=learning_rates(optimizer))
    with pytest.raises(ValueError, match="rule='paper' asks for no probe"):
        AutoLR(inner, HDETConfig(rule="paper"), probe=list)
    with pytest.raises(TypeError, match="callable that yields losses"):
        AutoLR(inner, HDETConfig(rule="auto", total_steps=5000), probe=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="total_steps must be at least 1"):
        HDETConfig(rule="auto", total_steps=0)


# -- processes ------------------------------------------------------------------------------------


@without_long_stage
def _a_whole_run(rank: int, size: int, kind: str, lr: float, probed: bool) -> Any:
    """The search, then the run; the same rates on every rank once the search is over."""
    run = Run(rank, kind, lr, probed=probed)
    start = parameters(run.model)
    with traffic() as during:
        run.search()
        searched = run.step
        back = same(parameters(run.model), start)
    with traffic() as after:
        run.train(searched + 20)
    scale = scale_of(run.scheduler)
    run.train(S)
    assert not any(r.restart for r in run.records if r.kind == "evaluation")
    return {
        "searched": searched, "back": back, "during": during, "after": after, "scale": scale,
        "rates": run.rates, "parameters": parameters(run.model), "records": run.records,
        "rounds": run.rounds,
    }  # fmt: skip


def _plain(rank: int, size: int, first: int, rates: list[float]) -> tuple[list[Tensor], Any]:
    """Plain DDP at the rates of the run, from the end of the search on."""
    model = toy(rank, norm=True, rebuild=False)
    optimizer = optimizer_for(model)

    def train(begin: int, end: int) -> None:
        for step in range(begin, end):
            optimizer.param_groups[0]["lr"] = rates[step - first]
            learn(model, optimizer, step, rank)

    with traffic() as counted:
        train(first, first + 20)
    train(first + 20, S)
    return parameters(model), counted


@pytest.mark.parametrize("probed", [False, True], ids=["no probe", "watched"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_the_search_the_run_is_plain_ddp_bit_for_bit(
    pair: Fleet, kind: str, probed: bool
) -> None:
    one, two = pair.run(_a_whole_run, kind, 3e-5, probed)
    searched = one["searched"]
    assert searched == two["searched"] <= 0.085 * S
    assert one["back"]
    assert two["back"]
    assert one["scale"] == two["scale"] > 4
    # One all-reduce a trial, four trials for two replicas in each stage; one for the watch.
    assert one["during"] == {"allreduce_": 8 + probed}
    assert one["rates"][searched:] == two["rates"][searched:]
    assert one["rates"][:searched] != two["rates"][:searched]
    plain = pair.run(_plain, searched, one["rates"][searched:])
    assert same(one["parameters"], two["parameters"], *(weights for weights, _ in plain))
    assert one["rounds"] == [], "on_round gives rounds only"
    trials, end, evaluations = one["records"][:8], one["records"][8], one["records"][9:]
    early = sum(record.step <= searched + 20 for record in evaluations)
    assert one["after"] - plain[0][1] == ({"allreduce_": early} if probed else {})
    assert [r.kind for r in trials] == ["trial"] * 8
    assert [r.kind for r in evaluations] == ["evaluation"] * len(evaluations)
    assert bool(evaluations) is (early > 0) is probed
    assert [r.trial for r in trials] == list(range(8))
    assert [r.stage for r in trials] == ["coarse"] * 4 + ["fine"] * 4
    assert [bool(r.verdict) for r in trials] == [False, False, False, True] * 2
    assert (end.kind, end.trials, end.completed) == ("search", 8, True)
    assert end.step == trials[-1].step == searched
    assert end.verdict == trials[-1].verdict
    assert end.verdict.startswith("proposed")
    assert end.initial == {"lr/group0": 3e-5}
    assert end.taken == {"lr/group0": pytest.approx(3e-5 * one["scale"], rel=1e-12)}
    begin = 0
    for record in trials:
        for rank, run in enumerate((one, two)):
            used = max(run["rates"][begin : record.step])
            assert record.rates["lr/group0"][rank] == pytest.approx(used, rel=1e-12)
        begin = record.step


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_schedule_is_played_in_the_steps_that_are_left(pair: Fleet, kind: str) -> None:
    got = pair.run(_a_whole_run, kind, 0.01, False)[0]
    rates = [x / got["scale"] for x in got["rates"][got["searched"] :]]
    optimizer = AdamW(toy(wrap=False).parameters(), lr=0.01)
    inner: Any = CosineAnnealingLR(optimizer, S)
    if kind == "one cycle":
        inner = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.01, total_steps=S, cycle_momentum=False
        )
    whole = []
    for _ in range(S):
        whole.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        inner.step()
    left = S - got["searched"]
    expected = [whole[t * S // left] for t in range(left)]
    assert rates == pytest.approx(expected, rel=1e-12)


def _interrupted(rank: int, size: int, kind: str, moment: int, probed: bool) -> Any:
    whole = Run(rank, kind, probed=probed)
    whole.train(moment)
    saved, phase = whole.save(), whole.scheduler.phase
    whole.train(moment + 60)
    again = Run(rank, kind, probed=probed)
    again.load(saved)
    assert again.scheduler.phase == phase
    again.train(moment + 60)
    return whole.everything(), again.everything(), phase


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", [1, 4, 5, 16, 30, 44, 200])
@pytest.mark.parametrize("probed", [False, True], ids=["no probe", "probe"])
def test_resume_is_bit_for_bit_in_every_phase(
    pair: Fleet, kind: str, moment: int, probed: bool
) -> None:
    for whole, again, phase in pair.run(_interrupted, kind, moment, probed):
        assert whole == again
        if moment != 44:
            assert phase == ("searching" if moment < 44 else "watched" if probed else "plain")


def _agreed(rank: int, size: int, moment: int) -> Any:
    """One checkpoint for all ranks, made in the middle of a trial."""
    run = Run(rank)
    start = parameters(run.model)
    run.train(moment)
    run.scheduler.equalize()
    agreed = same(parameters(run.model), start)
    saved = run.save()
    run.train(S // 2)
    again = Run(rank)
    again.load(saved, own=False)
    again.train(S // 2)
    return agreed, run.everything(), again.everything()


@pytest.mark.parametrize("moment", [2, 20, 35])
def test_a_checkpoint_for_all_starts_the_trial_again(pair: Fleet, moment: int) -> None:
    for agreed, whole, again in pair.run(_agreed, moment):
        assert agreed
        assert whole == again


def _orphan(rank: int, size: int) -> str:
    run = Run(rank)
    run.train(2)
    again = Run(rank)
    again.load(run.save(), own=False)
    try:
        again.train(3)
    except RuntimeError as error:
        return str(error)
    return ""


def _saves_too_often(rank: int, size: int) -> Any:
    """One checkpoint for all every third step, where trials have four and more."""
    run = Run(rank)
    start, longest = parameters(run.model), run.scheduler._phase.rule.longest
    while run.scheduler.searching and run.step < S:
        run.train(run.step + 1)
        if run.step % 3 == 0:
            run.scheduler.equalize()
    hooks, back = hooks_of(run.model, run.optimizer), same(parameters(run.model), start)
    return run.step, longest, back, hooks, run.records[-1], run.scheduler.phase


def test_a_search_that_never_ends_is_given_up(pair: Fleet) -> None:
    for steps, longest, back, hooks, record, phase in pair.run(_saves_too_often):
        assert 2 * longest <= steps < 2 * longest + 3
        assert back
        assert hooks == 0
        assert record.verdict.startswith("given up")
        assert (record.kind, record.completed) == ("search", False)
        assert record.step == steps, "a reader of the log knows where the run begins"
        assert record.taken == record.initial
        assert phase == "plain"


def _noisy(rank: int, size: int, moment: int) -> Any:
    """Replicas that begin with noise of their own, and one checkpoint for all of them."""
    run = Run(rank)
    warm_init(run.model)
    seen = [parameters(run.model)]
    run.train(moment)
    run.scheduler.equalize()
    seen.append(parameters(run.model))
    saved = run.save()
    run.search()
    seen.append(parameters(run.model))
    run.train(run.step + 10)
    again = Run(rank)
    again.load(saved, own=False)
    again.train(run.step)
    return seen, run.everything() == again.everything()


@pytest.mark.parametrize("moment", [0, 2, 4])
def test_a_checkpoint_for_all_makes_noisy_replicas_equal(pair: Fleet, moment: int) -> None:
    """Before the first step, within a trial and between two; the search goes on from there."""
    (one, alike), (two, alike_too) = pair.run(_noisy, moment)
    assert alike
    assert alike_too
    assert not same(one[0], two[0])
    assert same(one[1], two[1], one[2], two[2])


def test_a_finished_search_is_carried_into_a_run_that_runs_none() -> None:
    """Resumed where auto leaves the search out: the schedule stays compressed, no hook is left."""
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)

    def scheduler(total: int) -> Any:
        return OneCycleAutoLR(
            optimizer, 0.01, total_steps=total, rule="auto", model=model, probe=common(model)
        )

    first = scheduler(3500)
    while first.searching:
        first.step(learn(model, optimizer, first.steps_done, 0))
    state = copy.deepcopy(first.state_dict())
    first.detach()
    with short_trials(100):
        other = scheduler(3500)
    assert not other.searching
    other.load_state_dict(state)
    assert other.steps_done == first.steps_done > 0
    assert other.phase == first.phase == "watched"
    turns = [[s._run.turn() for _ in range(50)] for s in (first, other)]
    assert turns[0] == turns[1]
    assert sum(turn.steps for turn in turns[0]) > 50
    other.detach()
    assert hooks_of(model, optimizer) == 0


@pytest.mark.parametrize("total", [100, 5000])
def test_a_state_from_within_a_search_of_another_length_is_refused(total: int) -> None:
    """Before anything is changed; also by a run that is too short for a search."""

    def scheduler(total: int) -> Any:
        model = toy(wrap=False)
        optimizer = AdamW(model.parameters(), lr=0.01)
        return OneCycleAutoLR(optimizer, 0.01, total_steps=total, rule="auto", model=model)

    state, other = scheduler(4000).state_dict(), scheduler(total)
    before = other.state_dict()
    with pytest.raises(ValueError, match=f"4000 steps, and this run has 1 and {total}: resume"):
        other.load_state_dict(state)
    assert other.state_dict() == before


def test_a_search_is_left_out_by_a_run_with_another_rule() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    first = OneCycleAutoLR(optimizer, 0.01, total_steps=4000, rule="auto", model=model)
    state = first.state_dict()
    first.detach()
    for rule, spread, phase in (("none", 0.0, "plain"), ("paper", 0.1, "exploring")):
        other = OneCycleAutoLR(
            optimizer, 0.01, total_steps=4000, config=HDETConfig(rule=rule, spread=spread)
        )
        other.load_state_dict(state)
        assert other.phase == phase
        other.detach()


def test_teams_leave_nothing_behind_when_detached() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    where = Replicas(rank=0, size=16)
    scheduler = OneCycleAutoLR(
        optimizer, 0.01, total_steps=S, rule="auto", model=model, replicas=where, gradients="local"
    )
    hooked = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    assert hooked == [1] * len(hooked)
    scheduler.detach()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_state_from_within_a_trial_needs_each_replicas_own(pair: Fleet) -> None:
    for said in pair.run(_orphan):
        assert "call load_replica_state_dict() too" in said


def _not_finite(rank: int, size: int, bad: tuple[int, ...]) -> Any:
    """The weights of some replicas are NaN after each step of the search."""
    run = Run(rank)
    start = parameters(run.model), buffers(run.model)
    while run.scheduler.searching:
        loss = learn(run.model, run.optimizer, run.step, rank)
        if rank in bad:
            with torch.no_grad():
                for tensor in (*run.model.parameters(), *run.model.buffers()):
                    if tensor.is_floating_point():
                        tensor.fill_(math.nan)
        run.scheduler.step(loss)
        run.step += 1
    fresh = not any(run.optimizer.state.values())
    back = fresh and same(parameters(run.model), start[0]) and same(buffers(run.model), start[1])
    scale, verdict = scale_of(run.scheduler), run.scheduler.verdict
    run.train(S // 4)
    return back, scale, verdict, parameters(run.model)


@pytest.mark.parametrize("bad", [(1,), (0, 1)])
def test_replicas_of_nans_are_left_out_and_go_back_whole(pair: Fleet, bad: tuple[int, ...]) -> None:
    one, two = pair.run(_not_finite, bad)
    assert one[0]
    assert two[0]
    assert one[1:3] == two[1:3]
    if len(bad) == 2:
        assert one[1] == 1.0
        assert one[2] == "no trial of the fine stage stayed finite: the initial rate stays"
    assert same(one[3], two[3])
    assert all(bool(w.isfinite().all()) for w in one[3]), one[2]


def _unwrapped(rank: int, size: int) -> str:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.1)
    with short_trials(4):
        scheduler = OneCycleAutoLR(optimizer, 0.1, total_steps=S, rule="auto", cycle_momentum=False)
    try:
        scheduler.step(learn(model, optimizer, 0, rank))
    except RuntimeError as error:
        return str(error)
    return ""


def test_replicas_whose_gradients_cannot_stay_local_are_refused(pair: Fleet) -> None:
    for said in pair.run(_unwrapped):
        assert "pass model=" in said


def _gradients(rank: int, size: int) -> list[list[Tensor]]:
    run = Run(rank)
    out = []
    for _ in range(2):
        x, y = batch(run.step, rank)
        run.optimizer.zero_grad()
        (run.model(x) - y).square().mean().backward()
        out.append([p.grad.clone() for p in run.model.parameters() if p.grad is not None])
        run.search()
    return out


def test_gradients_stay_local_in_the_search_and_are_shared_after_it(pair: Fleet) -> None:
    one, two = pair.run(_gradients)
    assert not same(one[0], two[0])
    assert same(one[1], two[1])


@without_long_stage
def _wide(rank: int, size: int, lr: float) -> Any:
    """The proposed rate; from far too high it is contested, and the run begins with the initial."""
    run = Run(rank, lr=lr, how="sgd", total=8 * S)
    rule = run.scheduler._phase.rule
    run.search()
    run.train(run.step + 3)
    return rule.scale * lr, parameters(run.model)


def test_four_replicas_from_far_below_and_far_above_meet(quartet: Fleet) -> None:
    low, high = (quartet.run(_wide, lr) for lr in (3e-4, 3.0))
    assert same(*[p for _, p in low])
    assert same(*[p for _, p in high])
    assert abs(math.log2(low[0][0] / high[0][0])) < 2.5, (low[0][0], high[0][0])


@without_long_stage
def _sharded(rank: int, size: int) -> Any:
    """Two replicas of two shards search, go back, and train on with shared gradients."""
    mesh = fsdp.build_mesh(shards=2, device="cpu")
    torch.manual_seed(0)
    model = toy(wrap=False)
    fully_shard(model.inner, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    start = [p.to_local().clone() for p in model.parameters()]
    optimizer = AdamW(model.parameters(), lr=3e-5)
    config = HDETConfig(rule="auto", total_steps=S)
    inner = CosineAnnealingLR(optimizer, S)
    where = Replicas.from_mesh(mesh)
    with short_trials(4):
        scheduler = AutoLR(inner, config, replicas=where, probe=common(model))
    with fsdp.attach(model, optimizer, scheduler, mesh=mesh) as hdet:
        step, gradients = 0, []
        while scheduler.searching:
            scheduler.step(learn(model, optimizer, step, rank))
            gradients.append(model.inner.weight.grad.to_local().clone())
            step += 1
        back = same([p.to_local().clone() for p in model.parameters()], start)
        for _ in range(3):
            scheduler.step(learn(model, optimizer, step, rank))
            gradients.append(model.inner.weight.grad.to_local().clone())
            step += 1
        mine = [p.to_local().clone() for p in model.parameters()]
        return (
            back,
            scale_of(scheduler),
            mine,
            gradients[0],
            gradients[-1],
            hdet.replicas.shard_rank,
        )


def test_sharded_replicas_search_and_go_back(quartet: Fleet) -> None:
    out = quartet.run(_sharded)
    assert all(back for back, *_ in out)
    assert len({scale for _, scale, *_ in out}) == 1
    assert out[0][1] > 4
    for shard in (0, 1):
        one, two = (o for o in out if o[5] == shard)
        assert same(one[2], two[2])
        assert not torch.equal(one[3], two[3])
        assert torch.equal(one[4], two[4])


def _native(rank: int, size: int) -> str:
    mesh = fsdp.build_mesh(shards=2, device="cpu")
    model = toy(wrap=False)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=3e-5)
    inner, config = CosineAnnealingLR(optimizer, S), HDETConfig(rule="auto", total_steps=S)
    try:
        with short_trials(4):
            fsdp.attach(model, optimizer, inner, config=config)
    except ValueError as error:
        return str(error)
    return ""


def test_replicas_whose_gradients_hsdp_averages_are_refused(quartet: Fleet) -> None:
    for said in quartet.run(_native):
        assert "mesh=mesh['shard']" in said


class Team:
    """Plain training on the batches of some ranks, beside the first steps of a trial."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.model = ranks, toy(wrap=False)
        self.optimizer = AdamW(self.model.parameters())

    def step(self, step: int, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        drawn = [batch(step, rank) for rank in self.ranks]
        losses = [(self.model(x) - y).square().mean() for x, y in drawn]
        torch.stack(losses).mean().backward()
        self.optimizer.step()


def _teams(rank: int, size: int, engine: str) -> Any:
    """Four replicas: each a team in the coarse stage; in the long one ranks 0 and 1, 2 and 3."""
    model, mesh = toy(wrap=False), None
    if engine == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = fsdp.build_mesh(shards=1, device="cpu")
        fully_shard(model, mesh=mesh["shard"])
    optimizer = AdamW(model.parameters(), lr=3e-3)
    config = HDETConfig(rule="auto", total_steps=2 * S)
    where = Replicas.world() if mesh is None else Replicas.from_mesh(mesh)
    scheduler = AutoLR(
        CosineAnnealingLR(optimizer, 2 * S), config,
        model=model if mesh is None else None, replicas=where, probe=common(model),
    )  # fmt: skip
    if mesh is not None:
        fsdp.attach(model, optimizer, scheduler, mesh=mesh)
    search, step, seen = scheduler._phase, 0, {}
    assert scheduler.searching

    def whole() -> list[Tensor]:
        return [local(p).detach().clone() for p in model.parameters()]

    with long_stage(parts=2):
        while scheduler.searching:
            if search.step == 0:
                mates = [rank] if search.rule.team == 1 else [rank // 2 * 2, rank // 2 * 2 + 1]
                beside, stage = Team(mates), STAGES[search.rule.stage].name
            if search.step < 5:
                beside.step(step, optimizer.param_groups[0]["lr"])
            scheduler.step(learn(model, optimizer, step, rank))
            step += 1
            if search.step == 5:
                seen[stage] = whole(), parameters(beside.model)
    for after in range(3):
        scheduler.step(learn(model, optimizer, step + after, rank))
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return seen, whole(), hooks


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_replicas_of_a_team_run_a_level_as_one(quartet: Fleet, engine: str) -> None:
    """And are regrouped between two stages."""
    out = quartet.run(_teams, engine)
    for seen, *_ in out:
        assert list(seen) == ["coarse", "long"]
        for got, wanted in seen.values():
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    coarse, long = ([seen[name][0] for seen, *_ in out] for name in ("coarse", "long"))
    assert not any(same(coarse[0], other) for other in coarse[1:])
    assert same(long[0], long[1])
    assert same(long[2], long[3])
    assert not same(long[0], long[2])
    assert same(*[end for _, end, _ in out]), "after the search gradients are shared by all"
    if engine == "ddp":
        assert [hooks for *_, hooks in out] == [0] * 4


def _interrupted_team(rank: int, size: int, moment: int) -> tuple[int, Any, Any]:
    """A checkpoint of the long stage, where replicas share gradients by two."""
    with long_stage(parts=2):
        whole = Run(rank, total=2 * S)
        while whole.scheduler._phase.team == 1:
            whole.train(whole.step + 1)
        whole.train(whole.step + moment)
        saved, team = whole.save(), whole.scheduler._phase.team
        whole.train(end := whole.step + 60)
        again = Run(rank, total=2 * S)
        again.load(saved)
        again.train(end)
    return team, whole.everything(), again.everything()


@pytest.mark.parametrize("moment", [0, 7])
def test_a_search_in_teams_goes_on_where_it_was_interrupted(quartet: Fleet, moment: int) -> None:
    for team, whole, again in quartet.run(_interrupted_team, moment):
        assert team == 2
        assert whole == again
