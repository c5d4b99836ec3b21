"""Searching: the trials before a run, inside its steps.

    trial        the first team goes on with the run at a quarter of its rate; each other team
                 trains h steps at its own peak rate, from the snapshot
    judge        weights are evaluated on the probe's batches, which the members of a team split;
                 one all-reduce of two numbers for each rate and batch
    go back      to the snapshot, all but the first team; then the next trial
    the run      begins with the weights of the first team, or with the snapshot

During the search gradients stay within a team and the user's schedule stands still. Then the
schedule is played from its start in the steps that are left, times the scale of the search. The
rule is in hdet_scale.search.decision.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hdet_scale.engines.replica_state import adopt
from hdet_scale.phases.plain import equalize
from hdet_scale.phases.run import STAY, Phase, Run, Turn
from hdet_scale.phases.search_news import SearchNews
from hdet_scale.phases.watched import Watched
from hdet_scale.search.decision import RateSearch
from hdet_scale.search.probe import NO_LOSS
from hdet_scale.search.schedule import ScheduleShape
from hdet_scale.search.snapshot import Snapshot
from hdet_scale.search.trials import Trial, head_start, shape
from hdet_scale.search.watch import Watch


class Searching(Phase):
    """Runs the trials of a search on this replica.

    Args:
        run: the run.
        rule: decides which rates are tried and what they mean.
        schedule: the shape of the user's schedule.
        after: makes the phase of the run where no watch follows.
    """

    name = "searching"

    def __init__(
        self, run: Run, rule: RateSearch, *, schedule: ScheduleShape, after: Callable[[], Phase]
    ) -> None:
        super().__init__(run)
        self.rule, self.schedule, self.after = rule, schedule, after
        self.step = 0
        """Of the trial."""
        self.head_steps = 0
        """Steps of the team that goes on with the run."""
        self.snapshot: Snapshot | None = None
        self._told: dict[int, Tensor | float] = {}
        """Without a probe: this replica's training losses in the last third of the trial, by
        step."""
        self._start: dict[int, float] = {}
        """Losses of the initial weights on this replica's part of the probe's batches."""
        self._orphan = False
        self._prepared = False
        """True when the snapshot is taken and the initial weights are evaluated."""
        self._news = SearchNews(run, rule, schedule.peaks)
        self._hooks: list[Callable[[], None]] = []
        self._begin_trial()

    @property
    def team(self) -> int:
        return self.rule.team

    @property
    def equal(self) -> bool:
        """Before the first step, and between two trials if no team goes on with the run."""
        return self.step == 0 and self.head_steps == 0

    @property
    def stride(self) -> int:
        return self.rule.last_trial if self.step == 0 and self.rule.trials_run else 0

    def bases(self) -> list[float]:
        return list(self.schedule.peaks)

    def enter(self) -> None:
        super().enter()
        self._hook()

    def leave(self) -> None:
        while self._hooks:
            self._hooks.pop()()

    def _begin_trial(self) -> None:
        """What this replica runs next, looked up once."""
        self.trial: Trial = self.rule.trial
        rank = self.run.engine.replicas.rank
        self._multiplier, self._goes_on = self.trial.multiplier(rank), self.trial.goes_on(rank)

    def write(self) -> None:
        """Give the next step peak x multiplier x s(i, h) on this replica."""
        warm = self.schedule.warm
        if self._goes_on:
            value = self._multiplier * head_start(self.head_steps, warm)
        else:
            value = self._multiplier * shape(self.step, self.trial.steps, warm)
        for factor, peak in zip(self.run.factors, self.schedule.peaks, strict=True):
            factor.write(peak * value, 1.0)

    # -- the snapshot ---------------------------------------------------------------------------

    def _hook(self) -> None:
        """Take the snapshot before the first forward, which moves BatchNorm's statistics, or at
        least before the first step."""
        self.leave()
        self._prepared = False
        engine = self.run.engine
        self._hooks = [engine.optimizer.register_step_pre_hook(self._stepping).remove]
        if engine.model is not None:
            hook = engine.model.register_forward_pre_hook(
                lambda module, _: self.take_snapshot() if module.training else None
            )
            self._hooks.append(hook.remove)

    def _stepping(self, *_: object) -> None:
        self.before_step()

    def before_step(self) -> None:
        """Before the first step: take the snapshot if that has not happened, and evaluate the
        initial weights once."""
        if self._prepared or not self._hooks:
            return
        groups = self.run.engine.optimizer.param_groups
        if self.snapshot is None and all(float(g["lr"]) == 0.0 for g in groups):
            return  # how torch.distributed.checkpoint makes an optimizer's state, before it loads
        self.take_snapshot()
        self._evaluate_start()
        self._prepared = True

    def _evaluate_start(self) -> None:
        """The initial weights, which this replica holds until its first step: they are the same on
        all, and each takes its part of the batches."""
        run, known = self.run, self.rule.start or self._start
        if run.probe is not None and not (known or self._prepared or self._orphan):
            self._start = run.probe.parts(run.replicas.rank, run.replicas.size)

    def take_snapshot(self) -> None:
        """Keep the weights before anything of the search changes them."""
        if self.snapshot is not None:
            return
        run = self.run
        if self._orphan:
            raise RuntimeError(
                f"this state was saved {self.rule.steps + self.step} steps into a search, where "
                "every replica has weights of its own: call load_replica_state_dict() too, or save "
                "after equalize(), which starts the trial again"
            )
        free = run.config.gradients == "local" or run.engine.separable
        if run.replicas.size > 1 and not free:
            raise RuntimeError(
                "a search trains teams of replicas on their own gradients, and nothing here can "
                "stop the all-reduce over all of them: pass model= (the DistributedDataParallel "
                "module) to the scheduler, attach the engine (hdet_scale.fsdp, "
                "hdet_scale.deepspeed), or use gradients='local'"
            )
        self.snapshot = Snapshot(run.engine)

    def check_move(self, moved: bool) -> None:
        if not self.equal:
            raise RuntimeError(
                f"{self.rule.steps + self.step} steps into the search the replicas differ: attach "
                "the engine before the run"
            )

    def on_new_engine(self) -> Phase:
        if self.equal:
            self.snapshot = None  # taken again, of the new engine's tensors
        return self

    # -- a trial --------------------------------------------------------------------------------

    def count(self, loss: Tensor | float | None) -> Turn:
        run = self.run
        if run.engine.replicas.group is None:
            run.engine.connect()
        self._news.announce(self.trial)
        if self._prepared and self._hooks:
            self.leave()  # not from within a hook: the optimizer is going through its hooks there
        third = self.step - self.trial.steps * 2 // 3
        if run.probe is None and loss is not None and third >= 0:
            self._told[third] = loss.detach() if isinstance(loss, Tensor) else loss
        self.step += 1
        self.head_steps += self.trial.has_head_start
        run.step += 1
        run.lost += 1
        if self.step >= self.trial.steps:
            self._judge()
        return STAY

    def _judge(self) -> None:
        """The end of a trial: evaluate, go back, decide, publish."""
        rule, run, begun = self.rule, self.run, time.perf_counter()
        arms, start, head = self._losses()
        seconds, trial, before = time.perf_counter() - begun, self.trial, len(rule.arms)
        verdict = rule.close(arms, start, head)
        run.verdict = rule.verdict
        self._go_back()
        self._news.round(trial, rule.arms[before:], verdict, seconds)
        if rule.over:
            self._end(completed=True)
        else:
            self._begin_trial()
            if self.trial.head < trial.head:
                self._lower_head_start()

    def _lower_head_start(self) -> None:
        """The initial rate is too high: what went on with the run begins again, at a lower rate."""
        self.head_steps = 0
        if self._goes_on and self.snapshot is not None:
            self.snapshot.restore()

    def _losses(self) -> tuple[dict[int, list[float]], list[float], list[float]]:
        """For each rate its losses by batch, those of the initial weights where they were not yet
        known, and those of the weights that go on with the run. Collective."""
        self._evaluate_start()  # where all steps were skipped
        run, trial = self.run, self.trial
        where, device, limit = run.engine.replicas, run.engine.device, self._limit
        parts, arm, rows = self._own_losses(), trial.arm(where.rank), len(trial.offsets) + 2
        row = len(trial.offsets) + 1 if trial.goes_on(where.rank) else arm
        count, total = [0.0] * (rows * limit), [0.0] * (rows * limit)
        for at, drawn in ((row, parts), (len(trial.offsets), self._start)):
            means = where.shard_means(list(drawn.values()), device) if drawn else []
            for batch, value in zip(drawn, means, strict=True):
                if at is not None:
                    count[at * limit + batch], total[at * limit + batch] = 1.0, value
        self._start = {}
        sums = where.sum(count + total, device)
        pairs = list(zip(sums[: rows * limit], sums[rows * limit :], strict=True))
        means_of = [
            [t / n for n, t in pairs[at * limit : (at + 1) * limit] if n] for at in range(rows)
        ]
        *arms, start, head = means_of
        if run.probe is not None and not (head or any(arms)):
            raise ValueError(NO_LOSS)
        return {at: losses for at, losses in enumerate(arms) if losses}, start, head

    @property
    def _limit(self) -> int:
        """Losses of one rate at most."""
        probe = self.run.probe
        return self.trial.steps - self.trial.steps * 2 // 3 if probe is None else probe.limit

    def _own_losses(self) -> dict[int, float]:
        """On this replica's part of the probe's batches; without a probe its training losses in
        the last third of the trial, which its team has in common by step."""
        probe, sharers = self.run.probe, self.run.engine.sharers
        if probe is None:
            return {step: float(loss) for step, loss in self._told.items()}
        return probe.parts(sharers.rank, sharers.size)

    def _go_back(self) -> None:
        """To the snapshot, unless this replica goes on with the run."""
        if not self._goes_on and self.snapshot is not None:
            self.snapshot.restore()
        self.step = 0
        self._told = {}

    def _start_again(self) -> None:
        """All replicas to the snapshot: the trial, and what went on with the run, begin again."""
        if self.snapshot is not None:  # a replica that skipped all its steps is still there
            self.snapshot.restore()
        self.step = self.head_steps = 0
        self._told, self._start = {}, {}

    # -- the end --------------------------------------------------------------------------------

    @property
    def _watchable(self) -> bool:
        """Whether a watch can follow: there is a probe, and replicas stay equal."""
        return self.run.config.gradients == "shared" and self.run.probe is not None

    def _end(self, *, completed: bool) -> None:
        run, rule = self.run, self.rule
        if rule.keeps_head_start:
            adopt(run.engine)
        else:
            self._start_again()
        self._news.end(completed=completed)
        self.successor = self._watched() or self.after()
        run.steering.scale = rule.scale
        self.snapshot = None

    def _watched(self) -> Watched | None:
        """The watch of the run, also if the initial rate stays: a run may degrade at any."""
        run, rule = self.run, self.rule
        if not (self._watchable and rule.ran and rule.start):
            return None
        budget = run.config.restart_budget
        watch = Watch(
            total_steps=rule.total_steps,
            begun=run.lost,
            scale=rule.scale,
            start=rule.start,
            budget=budget,
        )
        return Watched(run, watch, Snapshot(run.engine, host=True) if budget else None)

    # -- checkpoints ----------------------------------------------------------------------------

    def finalize(self, *, moments: bool = False) -> None:
        """Start the trial again, on every rank: replicas are equal where it began. Where
        checkpoints come more often than trials end, the search is given up."""
        restarts = not self.equal
        if restarts:
            self._start_again()
            if not self.rule.start:
                self._hook()  # the initial weights are evaluated again
        if equalize(self.run, moments=moments):
            # They began with noise (`warm_init`): trials start from the mean from now on.
            self.snapshot = None
            self._hook()
        if restarts and self.run.lost < 2 * self.rule.longest:
            self._news.log(
                logging.INFO,
                "the trial and the head start begin again from the snapshot: a checkpoint needs "
                "equal replicas",
            )
        elif restarts:
            self._give_up()

    def _give_up(self) -> None:
        self._news.log(
            logging.WARNING,
            f"the search is given up after {self.run.lost} steps: checkpoints came more often than "
            f"trials of {self.trial.steps} steps end; save less often, or save "
            "replica_state_dict() on each replica",
        )
        self.rule.skip()
        self.run.verdict = self.rule.verdict = (
            "given up: checkpoints came more often than trials end"
        )
        self._end(completed=False)

    def state_dict(self) -> dict[str, Any]:
        return {"rule": self.rule.state_dict(), "step": self.step, "head_steps": self.head_steps}

    def load_state_dict(self, state: Mapping[str, Any], *, replicas: int) -> None:
        self.rule.load_state_dict(state["rule"])
        self.step, self.head_steps = int(state["step"]), int(state["head_steps"])
        self.snapshot, self._orphan = None, not self.equal
        self._start, self._told = {}, {}
        self._begin_trial()

    def replica_state_dict(self) -> dict[str, Any]:
        """This replica's snapshot and losses."""
        kept = None if self.snapshot is None or self.equal else self.snapshot.state_dict()
        return {
            "snapshot": kept,
            "told": {step: float(loss) for step, loss in self._told.items()},
            "start": dict(self._start),
            "prepared": self._prepared,
        }

    def load_replica_state_dict(self, state: Mapping[str, Any]) -> None:
        self._told = {int(k): float(v) for k, v in state["told"].items()}
        self._start = {int(k): float(v) for k, v in state["start"].items()}
        self._orphan = False  # without a snapshot: a replica that skipped all its steps
        if state["snapshot"] is not None:
            self.snapshot = Snapshot(self.run.engine, state["snapshot"])
            self._prepared = bool(state["prepared"])
        if self._prepared:
            self.leave()
