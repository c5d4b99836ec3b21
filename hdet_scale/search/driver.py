"""The search: a race before the run, inside its steps.

    heat     every team trains alone for h steps with its own peak learning rate, from the mark
    judge    loss of its weights on the probe's batches; one all-reduce of 2 (K + 1) sums
    rewind   back to the mark; the next heat, or the run with what was found

While it lasts, gradients stay within a team and the user's schedule stands still. Then the schedule
is played from its start in the steps that are left, times what was found. With rule="race" nothing
of the search remains: no collective, no probe, no copy. With "auto" a guard
(hdet_scale.search.guard) looks at what was found for three quarters of the run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hdet_scale.method.losses import LossMeter
from hdet_scale.method.records import Record, SearchRecord, TrialRecord
from hdet_scale.method.round import Round
from hdet_scale.search.decision import ENOUGH, Race
from hdet_scale.search.guard import Guard, look
from hdet_scale.search.probe import Probe, mean_of
from hdet_scale.search.schedule import Outline
from hdet_scale.search.snapshot import Mark
from hdet_scale.search.trials import STAGES, Heat, Level, shape
from hdet_scale.search.watch import Watch
from hdet_scale.topology import Replicas

logger = logging.getLogger("hdet_scale")


class Search:
    """Runs a race's heats on this replica; an exploring scheduler counts its steps here first."""

    def __init__(
        self,
        rule: Race,
        cycle: Round,
        *,
        outline: Outline,
        switch: Callable[[str], None],
        place: Callable[[], Any],
    ) -> None:
        self.rule, self.cycle, self.switch, self.place = rule, cycle, switch, place
        self.outline = outline
        self.guard: Guard | None = None
        self.probe: Probe | None = None
        self.step = 0
        """Of the heat."""
        self.done = 0
        """Steps of the search in all."""
        self.played = 0
        """Steps of the run since."""
        self.taken_back = 0
        """Steps of the run before it was started again."""
        self.meter = LossMeter()
        self._mark: Mark | None = None
        self._first = math.nan
        self._teams: dict[int, Replicas] = {}
        """By their size: the long stage has larger ones."""
        self._orphan = False

    @property
    def replicas(self) -> Replicas:
        """This rank's place."""
        return self.cycle.replicas

    @property
    def peaks(self) -> tuple[float, ...]:
        """The schedule's, as given."""
        return self.outline.peaks

    @property
    def active(self) -> bool:
        """False once the race is over."""
        return not self.rule.over

    @property
    def in_teams(self) -> bool:
        """True while replicas share gradients with some others."""
        return self.active and self.rule.team > 1

    @property
    def team(self) -> Replicas:
        """The replicas that run a level together with this one; collective among them at first.
        Their group stays, idle: torch would give another race's the same name after its end."""
        size = self.rule.team
        if size not in self._teams:
            self.cycle.connect()
            self._teams[size] = self.replicas.team(size)
        return self._teams[size]

    @property
    def marked(self) -> bool:
        """True when the place to go back to is known."""
        return self._mark is not None

    @property
    def last_heat(self) -> int:
        """Steps of the heat that has just ended."""
        return self.rule.last_heat

    @property
    def between_heats(self) -> bool:
        """True while replicas are where they began: one checkpoint is right for all."""
        return self.step == 0

    def write(self) -> None:
        """Give the next step peak x multiplier x s(i, h) on this replica."""
        heat = self.rule.heat()
        factor = heat.multipliers[self.replicas.rank] * shape(self.step, heat.steps)
        for target, peak in zip(self.cycle.factors, self.peaks, strict=True):
            target.write(peak * factor, 1.0)

    def mark(self) -> None:
        """Mark the place before anything of the race changes it."""
        if self._orphan:
            raise RuntimeError(
                f"this state was saved {self.step} steps into a heat of the race, where every "
                "replica has weights of its own: load replica_state_dict() too, or save after "
                "agree_for_checkpoint(), which starts the heat again"
            )
        if self.active and self._mark is None:
            self._mark = Mark(self.cycle.averaged)

    def before_step(self) -> None:
        """Mark the place at least now; before the very first step, judge it too."""
        self.mark()
        known = self.rule.start.count or not math.isnan(self._first)
        if self.probe is not None and self.step == 0 and not known:
            # All replicas have the same weights here: each takes its part of the batches.
            self._first = mean_of(self.probe(self.replicas.rank, self.replicas.size))

    def count(self, loss: Tensor | float | None) -> bool:
        """One optimizer step of a heat is done; judges and rewinds at its end. True when it was
        the last step of the race."""
        self.cycle.connect()
        heat = self.rule.heat()
        if self.step == heat.steps * 2 // 3:
            self.meter.reset()  # without a probe the end of the decay is what counts
        if loss is not None:
            self.meter.add(loss)
            if self.step == 0 and self.probe is None:
                self._first = float(loss)
        self.step += 1
        self.done += 1
        if self.step >= heat.steps:
            self._judge()
        return self.rule.over

    def follow(self, schedule: Sequence[float], loss: Tensor | float | None, step: int) -> Any:
        """One step of the run is done, the `step`-th in all; the place where the schedule starts
        again, or None."""
        guard = self.guard
        if guard is None:
            return None
        back = guard.count(self.outline.share(schedule), loss, step, self.probe)
        if guard.over:
            self.guard = None
        if not back:
            return None
        self.taken_back += self.played + 1
        self.played = 0
        return guard.place

    def rehome(self) -> None:
        """Other replicas than those the race was laid out for: a new one, from its start."""
        size, total = self.replicas.size, self.rule.total_steps
        if not self.active or self.rule.replicas == size:
            return
        if self.step:
            raise RuntimeError(
                f"{self.step} steps into a heat of the race the replicas are apart: attach before "
                "the run, or between two heats"
            )
        self._teams.clear()
        if self.cycle.config.rule == "auto" and total < Race.least_steps(size, ENOUGH):
            self.rule.skip()
            self._end()
            return
        self.rule = Race(replicas=size, total_steps=total, adaptive=self.rule.adaptive)

    def restart(self) -> None:
        """The heat from its beginning, on every rank: replicas agree where they began."""
        if not (self.active and self.step):
            return
        self._rewind()
        if self.done < 2 * self.rule.longest:
            logger.info("a heat of the race starts again: its replicas must agree now")
            return
        logger.warning(
            "the race is given up after %d steps: checkpoints came more often than heats of %d "
            "steps end; save less often, or each replica's own state",
            self.done,
            self.rule.heat().steps,
        )
        self.rule.skip()
        self._publish_search("given up: checkpoints came more often than trials end")
        self._end()

    def _rewind(self) -> None:
        if self._mark is not None:  # a replica that skipped all its steps is still there
            self._mark.restore()
        self.step = 0
        self.meter.reset()
        self._first = math.nan

    def _judge(self) -> None:
        heat, team, start = self.rule.heat(), self.rule.team, time.perf_counter()
        losses = self._own_losses()
        seconds = time.perf_counter() - start
        levels, first = self._share(heat, mean_of(losses))
        self._rewind()
        translation = self.rule.translation(heat.stage)
        self.rule.close(levels, first)
        if self.rule.over and not self._guarded:
            self.rule.settle()
        verdict = "" if self.rule.index else self.rule.verdict
        if verdict and self.replicas.rank == 0 and self.replicas.shard_rank == 0:
            logger.info("race, step %d: %s", self.done, verdict)
        self._publish(
            TrialRecord(
                stage=STAGES[heat.stage].name,
                trial=self.rule.heats_run - 1,
                step=self.done,
                rates={
                    f.name: tuple(peak * m for m in heat.multipliers)
                    for f, peak in zip(self.cycle.factors, self.peaks, strict=True)
                },
                losses=tuple(levels[k].mean for k in heat.levels),
                translation=translation,
                verdict=verdict,
                probe_losses=tuple(losses),
                probe_seconds=seconds,
            )
        )
        if self.rule.over:
            self._publish_search(verdict, completed=True)
            self._end()
        elif self.rule.team != team:
            self.switch("local")  # larger teams, of replicas that share gradients

    def _end(self) -> None:
        self.guard = self._guard()
        self.cycle.find(self._begins_with)
        self._mark = None
        self._teams.clear()
        self.switch(self.cycle.config.gradients)

    @property
    def _guarded(self) -> bool:
        """Whether somebody looks at the run: with rule="auto", a probe to look at, and replicas
        that stay equal."""
        config = self.cycle.config
        return config.rule == "auto" and config.gradients == "shared" and self.probe is not None

    @property
    def _begins_with(self) -> float:
        """The scale of the run's first step: what is contested has yet to be shown."""
        return 1.0 if self.rule.contested else self.rule.scale

    def _guard(self) -> Guard | None:
        """Of the run, whether or not something was found: a race does not see what overfits."""
        if not self._guarded or self.probe is None or not self.rule.ran:
            return None
        mark = self._mark or Mark(self.cycle.averaged)  # they are where they began
        mark.to_host()
        watch = Watch(
            total_steps=self.rule.total_steps,
            begun=self.done,
            mean=self.outline.mean,
            scale=self.rule.scale,
            before=look(self.probe, self.cycle)[0],
            promise=self.rule.promise,
            contested=self.rule.contested,
            duel=self.rule.duel,
        )
        return Guard(watch, self.cycle, mark, self.place())

    def _own_losses(self) -> list[float]:
        """On the probe's batches; without a probe the mean training loss of the heat's end."""
        if self.probe is not None:
            return self.probe(self.team.rank, self.team.size)
        if not self.meter.count:
            return [math.nan]
        return [self.meter.total() / self.meter.count]

    def _share(self, heat: Heat, loss: float) -> tuple[list[Level], Level]:
        """Sums over all replicas at each level, and of the loss before the heat: 2 (K + 1) numbers
        whatever the number of replicas."""
        device = self.cycle.averaged.parameters()[0].device
        loss, first = self.replicas.shard_means([loss, self._first], device)
        self._first = math.nan
        mine = [Level() for _ in range(self.rule.size)]
        if self.replicas.rank < heat.judged:
            mine[heat.levels[self.replicas.rank]] = Level.of(loss)
        flat = [x for item in (*mine, Level.of(first)) for x in (item.count, item.total)]
        summed = self.replicas.sum(flat, device)
        *levels, start = [Level(*summed[i : i + 2]) for i in range(0, len(summed), 2)]
        return levels, start

    def _publish_search(self, verdict: str, *, completed: bool = False) -> None:
        peaks = {f.name: p for f, p in zip(self.cycle.factors, self.peaks, strict=True)}
        self._publish(
            SearchRecord(
                step=self.done,
                trials=self.rule.heats_run,
                initial=peaks,
                taken={name: peak * self._begins_with for name, peak in peaks.items()},
                completed=completed,
                verdict=verdict,
            )
        )

    def _publish(self, record: Record) -> None:
        for listener in self.cycle.listeners:
            listener(record)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank."""
        return {
            "rule": self.rule.state_dict(),
            "step": self.step,
            "done": self.done,
            "played": self.played,
            "taken_back": self.taken_back,
            "watch": None if self.guard is None else self.guard.state_dict(),
        }

    def replica_state_dict(self) -> dict[str, Any]:
        """This replica's own: the mark and the losses of the heat; and this rank's slices of a
        mark that is guarded, where replicas are sharded."""
        kept = self._mark.state_dict() if self._mark is not None and self.step else None
        if self.guard is not None and self.replicas.shard_size > 1:
            kept = self.guard.mark_state()
        return {"mark": kept, "losses": self.meter.state_dict(), "first": self._first}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on where another search stopped; the state of a run without one has none to make."""
        if state is None:
            self.rule.skip()
            self.step = self.done = self.played = self.taken_back = 0
        else:
            self.rule.load_state_dict(state["rule"])
            self.step, self.done = int(state["step"]), int(state["done"])
            self.played, self.taken_back = int(state["played"]), int(state.get("taken_back", 0))
        watch = state.get("watch") if state is not None else None
        self.guard = None if watch is None else Guard.of_state(watch, self.cycle)
        self._mark, self._orphan = None, self.active and self.step > 0
        self._first = math.nan
        self.meter.reset()
        self.switch("local" if self.active else self.cycle.config.gradients)

    def load_replica_state_dict(self, state: Mapping[str, Any]) -> None:
        """After `load_state_dict`."""
        self.meter.load_state_dict(state["losses"])
        self._first = float(state["first"])
        if state["mark"] is None:
            return
        if self.guard is not None:
            self.guard.load_mark(state["mark"])
        else:
            self._mark, self._orphan = Mark(self.cycle.averaged, state["mark"]), False
