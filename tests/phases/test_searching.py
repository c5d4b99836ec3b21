"""A search on one process: what it trains, decides, says and reports, and what it leaves alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from hdet_scale import AutoLR, HDETConfig, OneCycleAutoLR, Replicas
from hdet_scale.ddp import engine_for
from hdet_scale.factors import learning_rates
from hdet_scale.search.constants import LEAST_STEPS, SECOND_SHARE, STEP
from hdet_scale.search.law import translation
from tests.support.searching import (
    BATCHES,
    BOTH,
    FIRST,
    HIGH,
    KINDS,
    LOW,
    RIGHT,
    ROUNDS,
    STEPS,
    Run,
    S,
    held_out,
    hooks_of,
    rates_of_a_search,
    scale_of,
    settled,
    whole_schedule,
)
from tests.support.toy import batch, bits, learn, parameters, same, toy

NEAR = (-1, 0, 1)
ENDS = [STEPS["first", 1] * k for k in (1, 2, 3)]
ENDS += [ENDS[-1] + STEPS["second", 1] * k for k in (1, 2, 3)]
"""Steps after which the rounds of one replica end."""


def alone(lr: float = LOW, **options: Any) -> Run:
    """A run of one replica, not wrapped, without a process group."""
    return Run(0, lr=lr, wrap=False, **options)


# -- the trials -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("lr", "second"), [(RIGHT[1], None), (LOW, (0, 1, 2)), (HIGH, (-2, -1, 0))]
)
def test_one_replica_runs_the_trials_one_after_the_other(
    lr: float, second: tuple[int, ...] | None, kind: str
) -> None:
    """Each from the initial weights, to which the run goes back: there is no head start."""
    run = alone(lr, kind=kind)
    start, begins = run.held(), []
    while run.scheduler.searching:
        assert run.scheduler.get_base_lr() == [pytest.approx(lr, rel=1e-12)]
        if run.scheduler._phase.step == 0:
            begins.append((run.step, run.held() == start, run.scheduler.at_boundary))
        run.train(run.step + 1)
    stages = {"first": NEAR} if second is None else {"first": NEAR, "second": second}
    ends = ENDS[: 3 * len(stages)]
    assert run.rates == pytest.approx(rates_of_a_search(0, 1, kind, lr, stages), rel=1e-12)
    assert begins == [(step, True, True) for step in [0, *ends[:-1]]]
    assert run.held() == start
    result = run.scheduler.search_result
    assert not result.head_start
    assert result.steps == run.step == ends[-1]
    if second is None:
        assert result.taken == result.initial
    else:
        assert math.copysign(1, result.taken[0] - lr) == math.copysign(1, sum(second))


@pytest.mark.parametrize(("how", "lr"), [("adamw", LOW), ("fused", LOW), ("sgd", 1e-4)])
def test_a_rate_that_is_far_too_low_is_moved_up_and_learns_more(how: str, lr: float) -> None:
    run = alone(lr, how=how)
    start = run.held()
    run.search()
    assert run.held() == start
    assert scale_of(run.scheduler) >= STEP * (1 - 1e-9), run.scheduler.verdict
    losses = []
    for scale in (scale_of(run.scheduler), 1.0):
        other = alone(lr * scale, how=how)
        other.scheduler.detach()
        schedule = OneCycleLR(other.optimizer, lr * scale, total_steps=S, cycle_momentum=False)
        for step in range(S):
            learn(other.model, other.optimizer, step, 0)
            schedule.step()
        with torch.no_grad():
            losses.append(float(torch.stack(held_out(other.model.eval())()).mean()))
    assert losses[0] < 0.8 * losses[1], "the rate that was taken is right for a whole run"


def test_the_first_step_after_the_search_is_the_first_step_of_a_fresh_run() -> None:
    """Also for SGD, whose first step is not that of zeroed momentum with dampening."""
    model, other = toy(wrap=False), toy(wrap=False)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9, dampening=0.5)
    schedule = LambdaLR(optimizer, lambda _: 1e-4)
    config = HDETConfig(rule="auto", total_steps=S)
    scheduler = AutoLR(schedule, config, model=model, probe=held_out(model))
    step = 0
    while scheduler.searching:
        scheduler.step(learn(model, optimizer, step, 0))
        step += 1
    assert step >= FIRST
    rate = scheduler.get_last_lr()[0]
    plain = SGD(other.parameters(), lr=rate, momentum=0.9, dampening=0.5)
    for t in range(step, step + 3):
        learn(model, optimizer, t, 0)
        learn(other, plain, t, 0)
    assert same(parameters(model), parameters(other))


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_schedule_is_played_in_the_steps_that_are_left(kind: str) -> None:
    """u(t) = t S / (S - R), rounded down, times the scale; and the schedule's end is reached."""
    run = alone(LOW, kind=kind, probed=False)
    run.search()
    searched, scale = run.step, scale_of(run.scheduler)
    assert run.scheduler.phase == "plain"
    run.train(S)
    left, whole = S - searched, whole_schedule(kind, LOW)
    assert searched == BOTH
    assert scale == pytest.approx(STEP)
    expected = [scale * whole[t * S // left] for t in range(left)]
    assert run.rates[searched:] == pytest.approx(expected, rel=1e-12)
    assert run.rates[-1] < 0.01 * max(run.rates[searched:])
    assert run.scheduler.last_epoch == S


# -- what is said and reported --------------------------------------------------------------------


def test_the_result_has_the_curve_the_cost_and_the_verdict() -> None:
    run = alone()
    assert run.scheduler.search_result is None
    run.search()
    result = run.scheduler.search_result
    assert result.initial == (LOW,)
    assert result.taken == result.proposed
    assert (result.steps, result.cost) == (BOTH, BOTH / S)
    assert result.verdict == run.scheduler.verdict
    factor = result.taken[0] / LOW
    assert result.verdict.startswith(f"{factor:g} x the initial rate: its trial is ")
    assert [p.stage for p in result.curve] == ["first"] * 3 + ["second"] * 3
    rates = [p.rates[0] / LOW for p in result.curve]
    assert rates == pytest.approx([STEP**x for x in (*NEAR, 0, 1, 2)], rel=1e-12)
    assert all(math.isfinite(p.loss) and 0 < p.error < p.loss for p in result.curve)
    best = min(result.curve[3:], key=lambda p: p.loss)
    assert result.taken[0] <= best.rates[0] * (1 + 1e-9)
    model = settled(toy(wrap=False, norm=True))
    with torch.no_grad():
        model(batch(0, 0)[0])  # the first forward, before the first step
        first = torch.stack(held_out(model.eval())()).mean()
    assert result.initial_loss == pytest.approx(float(first), rel=1e-6)
    *trials, end = run.records
    assert [r.loss for r in trials] == [p.loss for p in result.curve]
    assert [len(r.losses) for r in trials] == [BATCHES] * 6
    assert (end.kind, end.verdict, end.step) == ("search", result.verdict, BOTH)
    assert str(result).startswith(f"max_lr {LOW:.3g} -> {result.taken[0]:.3g} ({result.verdict})")


def test_the_log_has_a_line_for_the_start_each_round_and_the_end(caplog: Any) -> None:
    with caplog.at_level("INFO", "hdet_scale"):
        run = alone()
        assert not caplog.messages
        run.search()
    first, *rounds, last = caplog.messages
    assert first == (
        f"search: at most the first {BOTH} of {S} steps ({BOTH / S:.1%}) compare learning rates "
        "around 0.001; with one replica these steps are not part of the run. Then the whole "
        "schedule is played in the steps that are left."
    )
    result = run.scheduler.search_result
    assert len(rounds) == len(ENDS)
    told = zip(rounds, ENDS, run.records[:-1], strict=True)
    for text, step, record in told:
        rate = record.rates["lr/group0"] * record.translation
        begin = f"search, step {step}: {record.stage} stage, held-out loss by rate {rate:.3g}: "
        assert text.startswith(begin + f"{record.loss:.5g} +- {record.error:.1g}")
        assert text.endswith(f"; {record.verdict}") or not record.verdict
    assert rounds[2].endswith("; the second stage tries 1, 10, 100 x the initial rate")
    assert rounds[5].endswith(f"; {result.verdict}")
    assert last == f"search, step {BOTH}: {result}"


def test_a_run_that_is_too_short_is_plain_training_and_says_so(caplog: Any) -> None:
    """A warning, no search, no probe, and torch's own learning rates."""
    least = math.ceil(LEAST_STEPS * ROUNDS[1] / SECOND_SHARE)
    short = least - 1
    model, other, called = toy(wrap=False), toy(wrap=False), []
    optimizer = AdamW(model.parameters(), lr=0.1)
    plain = AdamW(other.parameters(), lr=0.1)
    with caplog.at_level("INFO", "hdet_scale"):
        scheduler = OneCycleAutoLR(
            optimizer, 0.1, total_steps=short, rule="auto", model=model, probe=called.append
        )
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "WARNING",
            f"rule='auto' runs no search: {short} steps are too few for 1 replicas, it needs "
            f"{least}; the schedule is run as it is",
        )
    ]
    assert scheduler.phase == "plain"
    assert scheduler.verdict == "no search was run: the run is too short"
    assert scheduler.search_result is None
    reference = OneCycleLR(plain, 0.1, total_steps=short)
    for step in range(5):
        assert scheduler.get_last_lr() == reference.get_last_lr()
        scheduler.step(learn(model, optimizer, step, 0))
        learn(other, plain, step, 0)
        reference.step()
    assert same(parameters(model), parameters(other))
    assert not called
    enough = OneCycleAutoLR(plain, 0.1, total_steps=least, rule="auto", model=model)
    assert enough.searching
    assert enough._phase.trial.stage == "second", "the first stage would be too short"
    assert enough._phase.trial.steps == LEAST_STEPS


@pytest.mark.parametrize("epochs", [1, 16])
def test_the_epochs_of_the_schedule_are_the_passes_of_the_law(epochs: int) -> None:
    """`epochs` of OneCycleLR says how many there are."""
    model = settled(toy(wrap=False, norm=True))
    optimizer = AdamW(model.parameters(), lr=LOW)
    scheduler = OneCycleAutoLR(
        optimizer, LOW, epochs=epochs, steps_per_epoch=S // epochs, rule="auto",
        model=model, probe=held_out(model), cycle_momentum=False,
    )  # fmt: skip
    assert scheduler.config.passes == epochs
    trial, total = scheduler._phase.trial, S // epochs * epochs
    assert trial.translation == translation(1, trial.steps, total, passes=epochs)


def test_passes_of_the_config_stand_before_the_epochs() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=LOW)
    config = HDETConfig(rule="auto", passes=2.0)
    scheduler = OneCycleAutoLR(
        optimizer, LOW, epochs=30, steps_per_epoch=S // 30, config=config, model=model
    )
    assert scheduler.config.passes == 2.0
    assert scheduler._phase.trial.offsets == NEAR


# -- without a probe, without steps ---------------------------------------------------------------


@pytest.mark.parametrize("best", NEAR)
def test_without_a_probe_the_last_third_of_each_trial_counts(best: int) -> None:
    """The first two thirds say nothing: the decay has yet to remove the noise."""
    model = toy(wrap=False)
    start, optimizer = parameters(model), AdamW(model.parameters(), lr=LOW)
    scheduler = OneCycleAutoLR(
        optimizer, LOW, total_steps=S, rule="auto", model=model, cycle_momentum=False
    )
    search, step = scheduler._phase, 0
    while scheduler.searching:
        trial = search.trial
        offset = trial.offsets[trial.arm(0)]
        late = search.step >= trial.steps * 2 // 3
        learn(model, optimizer, step, 0)
        noise = 0.01 * (step % 3)
        scheduler.step(1.0 + (offset - best) ** 2 + noise if late else -1e3 * offset)
        step += 1
    assert scale_of(scheduler) == pytest.approx(STEP**best, rel=1e-9)
    assert scheduler.phase == "plain", "there is nothing to watch with"
    result = scheduler.search_result
    assert result is not None
    assert math.isnan(result.initial_loss)
    assert {len(a.losses) for a in search.rule.arms} == {
        n - n * 2 // 3 for n in {STEPS[a.stage, 1] for a in search.rule.arms}
    }
    assert same(parameters(model), start)


def test_a_run_that_skips_every_step_keeps_its_schedule() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = OneCycleAutoLR(
        optimizer, 0.01, total_steps=S, rule="auto", model=model, cycle_momentum=False
    )
    start = parameters(model)
    while scheduler.searching:
        scheduler.step(None)
    assert same(parameters(model), start)
    assert scale_of(scheduler) == 1.0
    assert scheduler.verdict == "the initial rate stays: no trial stayed finite"


def test_a_probe_that_is_used_up_is_refused() -> None:
    """At the end of the first trial: otherwise all trials would pass for diverged."""
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    drawn = iter([0.5])
    scheduler = OneCycleAutoLR(
        optimizer, 0.01, total_steps=S, rule="auto", model=model, probe=lambda: drawn
    )
    for step in range(STEPS["first", 1] - 1):
        scheduler.step(learn(model, optimizer, step, 0))
    with pytest.raises(ValueError, match="give a function that starts again"):
        scheduler.step(1.0)


# -- hooks, engines and arguments -----------------------------------------------------------------


def test_hooks_are_removed_after_the_first_step_and_the_start_is_evaluated_once() -> None:
    """The first forward takes the snapshot, the first step evaluates the initial weights."""
    run, called = alone(), []
    inner = run.scheduler._run.probe.losses
    run.scheduler._run.probe.losses = lambda: called.append(run.step) or inner()
    assert hooks_of(run.model, run.optimizer) == 2
    run.scheduler.step(None)
    assert hooks_of(run.model, run.optimizer) == 2, "a step that was skipped has changed nothing"
    run.step = 1
    run.train(2)
    assert hooks_of(run.model, run.optimizer) == 0
    run.search()
    assert called == [1, *(end - 1 for end in ENDS)]
    assert len(run.scheduler._phase.watch.start) == BATCHES


def test_hooks_of_the_user_are_called_beside_those_of_the_search() -> None:
    """Also those that were registered later: torch goes through all of them in a step."""
    model, called = toy(wrap=False), []
    optimizer = AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    scheduler = OneCycleAutoLR(optimizer, 0.01, total_steps=S, rule="auto", model=model)
    optimizer.register_step_pre_hook(lambda *_: called.append("after"))
    for step in range(2):
        scheduler.step(learn(model, optimizer, step, 0))
    assert called == ["before", "after"] * 2


def test_an_evaluation_leaves_modes_and_random_numbers_as_they_were() -> None:
    """A trial ends with an evaluation in eval mode; the user's model trains on."""
    run = alone()
    torch.manual_seed(3)
    before = bits(torch.get_rng_state())
    run.search()
    assert run.model.training
    assert bits(torch.get_rng_state()) == before


def test_an_engine_is_refused_within_a_trial_and_taken_between_two() -> None:
    run = alone()
    other = engine_for(run.optimizer, run.model)
    run.train(STEPS["first", 1] + 3)
    before = run.scheduler.engine
    with pytest.raises(RuntimeError, match=f"{run.step} steps into the search the replicas differ"):
        run.scheduler.attach_engine(other)
    assert run.scheduler.engine is before
    run.train(2 * STEPS["first", 1])
    run.scheduler.attach_engine(other)
    assert run.scheduler.engine is other
    whole = alone()
    whole.search()
    run.search()
    assert run.scheduler.search_result == whole.scheduler.search_result


def test_nothing_is_left_behind_when_detached() -> None:
    model = toy(wrap=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    where = Replicas(rank=0, size=16)
    scheduler = OneCycleAutoLR(
        optimizer, 0.01, total_steps=S, rule="auto", model=model, replicas=where, gradients="local"
    )
    hooked = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    assert hooked == [1] * len(hooked), "a team of four shares its gradients"
    assert hooks_of(model, optimizer) == 2
    scheduler.detach()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert hooks_of(model, optimizer) == 0


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
    with pytest.raises(ValueError, match="restart_budget must be a share"):
        HDETConfig(rule="auto", restart_budget=1.0)
