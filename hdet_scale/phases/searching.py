"""Searching: the trials before a run, inside its steps.

    trial      every team trains alone for h steps at its own peak rate, from the snapshot
    judge      its weights are evaluated on the probe's batches; one all-reduce of 2 (K + 1) sums
    go back    to the snapshot; then the next trial, or the run at the rate that won

During the search gradients stay within a team and the user's schedule stands still. Then the
schedule is played from its start in the steps that are left, times the scale of the search. The
rule is in hdet_scale.search.decision.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hdet_scale.method.losses import LossMeter
from hdet_scale.method.records import SearchRecord, TrialRecord
from hdet_scale.phases.plain import equalize
from hdet_scale.phases.run import STAY, Phase, Run, Turn
from hdet_scale.phases.watched import Watched, evaluate
from hdet_scale.search.decision import RateSearch
from hdet_scale.search.probe import mean_of
from hdet_scale.search.schedule import ScheduleShape
from hdet_scale.search.snapshot import Snapshot
from hdet_scale.search.trials import STAGES, Level, shape
from hdet_scale.search.watch import Watch

logger = logging.getLogger("hdet_scale")


class Searching(Phase):
    """Runs the trials of a search on this replica.

    Args:
        run: the run.
        rule: decides which rates are tried and what they mean.
        schedule: the shape of the user's schedule.
        position: returns the schedule's position, in its scheduler's own terms.
        after: makes the phase of the run where no watch follows.
    """

    name = "searching"

    def __init__(
        self,
        run: Run,
        rule: RateSearch,
        *,
        schedule: ScheduleShape,
        position: Callable[[], Any],
        after: Callable[[], Phase],
    ) -> None:
        super().__init__(run)
        self.rule, self.schedule, self.position, self.after = rule, schedule, position, after
        self.step = 0
        """Of the trial."""
        self.meter = LossMeter()
        self.snapshot: Snapshot | None = None
        self._first = math.nan
        """Held-out loss of the initial weights on this replica's part of the batches."""
        self._orphan = False
        self._prepared = False
        """True when the snapshot is taken and the initial weights are evaluated."""
        self._hooks: list[Callable[[], None]] = []
        self._begin_trial()

    @property
    def team(self) -> int:
        return self.rule.team

    @property
    def equal(self) -> bool:
        """Between two trials all replicas are back at the snapshot."""
        return self.step == 0

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
        self.trial = self.rule.trial
        self._multiplier = self.trial.multiplier(self.run.engine.replicas.rank)

    def write(self) -> None:
        """Give the next step peak x multiplier x s(i, h) on this replica."""
        value = self._multiplier * shape(self.step, self.trial.steps)
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
        """Before the first step of a trial: take the snapshot if that has not happened, and
        evaluate the initial weights once."""
        if self._prepared or not self._hooks:
            return
        groups = self.run.engine.optimizer.param_groups
        if self.snapshot is None and all(float(g["lr"]) == 0.0 for g in groups):
            return  # how torch.distributed.checkpoint makes an optimizer's state, before it loads
        self.take_snapshot()
        known = self.rule.start.count or not math.isnan(self._first)
        if self.run.probe is not None and self.step == 0 and not known:
            # All replicas have the same weights here: each takes its part of the batches.
            where = self.run.replicas
            self._first = mean_of(self.run.probe(where.rank, where.size))
        self._prepared = True

    def take_snapshot(self) -> None:
        """Keep the weights before anything of the search changes them."""
        if self.snapshot is not None:
            return
        run = self.run
        if self._orphan:
            raise RuntimeError(
                f"this state was saved {self.step} steps into a trial of the search, where every "
                "replica has weights of its own: call load_replica_state_dict() too, or save after "
                "equalize(), which starts the trial again"
            )
        free = run.config.gradients == "local" or run.engine.separable
        if run.replicas.size > 1 and not free:
            raise RuntimeError(
                "a search trains each replica on its own gradients, and nothing here can stop "
                "their all-reduce: pass model= (the DistributedDataParallel module) to the "
                "scheduler, attach the engine (hdet_scale.fsdp, hdet_scale.deepspeed), or use "
                "gradients='local'"
            )
        self.snapshot = Snapshot(run.engine)

    def check_move(self, moved: bool) -> None:
        if self.step:
            raise RuntimeError(
                f"{self.step} steps into a trial of the search the replicas differ: attach before "
                "the run, or between two trials"
            )

    def on_new_engine(self) -> Phase:
        if self.step == 0:
            self.snapshot = None  # taken again, of the new engine's tensors
        return self

    # -- a trial --------------------------------------------------------------------------------

    def count(self, loss: Tensor | float | None) -> Turn:
        run = self.run
        if run.engine.replicas.group is None:
            run.engine.connect()
        if self._prepared and self._hooks:
            self.leave()  # not from within a hook: the optimizer is going through its hooks there
        if self.step == self.trial.steps * 2 // 3:
            self.meter.reset()  # without a probe the end of the decay is what counts
        if loss is not None:
            self.meter.add(loss)
            if self.step == 0 and run.probe is None:
                self._first = float(loss)
        self.step += 1
        run.step += 1
        run.lost += 1
        if self.step >= self.trial.steps:
            self._judge()
        return STAY

    def _judge(self) -> None:
        """The end of a trial: evaluate, go back, decide, publish."""
        rule, team, start = self.rule, self.trial.team, time.perf_counter()
        own = self._own_losses()
        seconds = time.perf_counter() - start
        levels, first = self._sum(mean_of(own))
        self._go_back()
        rule.close(levels, first)
        over = rule.over
        if over and not self._watchable:
            rule.settle()
        self.run.verdict = rule.verdict
        verdict = "" if rule.index else rule.verdict
        if verdict and self.run.writes_log:
            logger.info("search, step %d: %s", self.run.step, verdict)
        self._publish(levels, verdict, own, seconds)
        if over:
            self._end(completed=True)
            return
        self._begin_trial()
        if self.trial.team != team:
            super().enter()  # larger teams, of replicas that share gradients

    def _own_losses(self) -> list[float]:
        """On the probe's batches; without a probe the mean training loss of the trial's end."""
        probe, sharers = self.run.probe, self.run.engine.sharers
        if probe is not None:
            return probe(sharers.rank, sharers.size)
        if not self.meter.count:
            return [math.nan]
        return [self.meter.total() / self.meter.count]

    def _sum(self, loss: float) -> tuple[list[Level], Level]:
        """Sums over all replicas at each level, and of the loss before the trial: 2 (K + 1) numbers
        whatever the number of replicas."""
        where, device = self.run.engine.replicas, self.run.engine.device
        loss, first = where.shard_means([loss, self._first], device)
        self._first = math.nan
        flat = [0.0] * (2 * self.rule.size + 2)
        if self.trial.counts(where.rank) and math.isfinite(loss):
            level = self.trial.level(where.rank)
            flat[2 * level : 2 * level + 2] = [1.0, loss]
        if math.isfinite(first):
            flat[-2:] = [1.0, first]
        summed = where.sum(flat, device)
        *levels, start = [Level(*summed[i : i + 2]) for i in range(0, len(summed), 2)]
        return levels, start

    def _go_back(self) -> None:
        if self.snapshot is not None:  # a replica that skipped all its steps is still there
            self.snapshot.restore()
        self.step = 0
        self.meter.reset()
        self._first = math.nan

    # -- the end --------------------------------------------------------------------------------

    @property
    def _watchable(self) -> bool:
        """Whether a watch can follow: there is a probe, and replicas stay equal."""
        return self.run.config.gradients == "shared" and self.run.probe is not None

    def _end(self, *, completed: bool) -> None:
        run, scale = self.run, self.rule.scale
        # A contested rate has yet to be shown: the run begins with the initial one.
        taken = 1.0 if self.rule.contested else scale
        peaks = dict(zip(run.names, self.schedule.peaks, strict=True))
        run.publish(
            SearchRecord(
                step=run.step,
                trials=self.rule.trials_run,
                initial=peaks,
                taken={name: peak * taken for name, peak in peaks.items()},
                completed=completed,
                verdict=self.rule.verdict,
            )
        )
        self.successor = self._watched(scale) or self.after()
        run.steering.scale = taken
        self.snapshot = None

    def _watched(self, scale: float) -> Watched | None:
        """The watch of the run, even if no other rate is proposed: a search does not show what
        overfits."""
        run, rule = self.run, self.rule
        if not self._watchable or run.probe is None or not rule.ran:
            return None
        snapshot = self.snapshot or Snapshot(run.engine)  # replicas are where they began
        snapshot.to_host()
        watch = Watch(
            total_steps=rule.total_steps,
            begun=run.lost,
            mean=self.schedule.mean,
            scale=scale,
            before=evaluate(run.probe, run)[0],
            target=rule.target,
            contested=rule.contested,
            duel=rule.duel,
        )
        return Watched(run, self.schedule, watch, snapshot, self.position())

    def _publish(
        self,
        levels: list[Level],
        verdict: str,
        own: list[float],
        seconds: float,
    ) -> None:
        run, trial = self.run, self.trial
        if not run.listeners:
            return
        means = [x.total / x.count if x.count else math.inf for x in levels]
        of = trial.levels(run.replicas.size)
        peaks = zip(run.names, self.schedule.peaks, strict=True)
        run.publish(
            TrialRecord(
                stage=STAGES[trial.stage].name,
                trial=self.rule.trials_run - 1,
                step=run.step,
                rates={n: tuple(p * trial.multipliers[k] for k in of) for n, p in peaks},
                losses=tuple(means[k] for k in of),
                translation=trial.translation,
                verdict=verdict,
                probe_losses=tuple(own),
                probe_seconds=seconds,
            )
        )

    def _log(self, level: int, text: str) -> None:
        if self.run.writes_log:
            logger.log(level, text)

    # -- checkpoints ----------------------------------------------------------------------------

    def finalize(self, *, moments: bool = False) -> None:
        """Start the trial again, on every rank: replicas are equal where it began. Where
        checkpoints come more often than trials end, the search is given up."""
        restarts = self.step > 0
        if restarts:
            self._go_back()
            if not self.rule.start.count:
                self._hook()  # the initial weights are evaluated again
        if equalize(self.run, moments=moments):
            # They began with noise (`warm_init`): trials start from the mean from now on.
            self.snapshot = None
            self._hook()
        if restarts and self.run.lost < 2 * self.rule.longest:
            self._log(
                logging.INFO,
                "the current trial restarts from the snapshot: a checkpoint needs equal replicas",
            )
        elif restarts:
            self._give_up()

    def _give_up(self) -> None:
        self._log(
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
        return {"rule": self.rule.state_dict(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any], *, replicas: int) -> None:
        self.rule.load_state_dict(state["rule"])
        self.step = int(state["step"])
        self.snapshot, self._orphan = None, self.step > 0
        self._first = math.nan
        self.meter.reset()
        self._begin_trial()

    def replica_state_dict(self) -> dict[str, Any]:
        """This replica's snapshot and the losses of the trial."""
        kept = self.snapshot.state_dict() if self.snapshot is not None and self.step else None
        return {"snapshot": kept, "losses": self.meter.state_dict(), "first": self._first}

    def load_replica_state_dict(self, state: Mapping[str, Any]) -> None:
        self.meter.load_state_dict(state["losses"])
        self._first = float(state["first"])
        if state["snapshot"] is not None:
            self.snapshot, self._orphan = Snapshot(self.run.engine, state["snapshot"]), False
            self._prepared = True
            self.leave()
