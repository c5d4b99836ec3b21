"""The schedulers: OneCycleAutoLR, AutoLR around any torch scheduler, and ReplayLR.

    scheduler = OneCycleAutoLR(optimizer, 3e-4, total_steps=10_000, rule="auto", model=ddp_model,
                               probe=lambda: (loss_of(batch) for batch in held_out))
    ...
    optimizer.step()
    scheduler.step(loss)

Both find the learning rate in a short search at the start of the run (rule="auto"), or explore
around the schedule as published (rule="paper"). The learning rate of the next step on this replica
is base x multiplier. With spread 0 and no search the base is the schedule's and the multiplier is
exactly 1.0: plain training, bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from hdet_scale.config import HDETConfig, with_authors_names
from hdet_scale.ddp import engine_for
from hdet_scale.engines.protocol import Engine
from hdet_scale.factors.learning_rate import learning_rates
from hdet_scale.factors.space import Factor, check_factors
from hdet_scale.method.losses import check_loss
from hdet_scale.method.paper import Descent
from hdet_scale.phases.arguments import (
    check_groups,
    check_inner,
    check_takeover,
    length_of,
    with_length,
    with_passes,
)
from hdet_scale.phases.build import check_search, make_run
from hdet_scale.phases.phased import PhasedScheduler
from hdet_scale.runs.replay import ReplayLR
from hdet_scale.search.probe import Losses
from hdet_scale.search.schedule import ScheduleShape, shape_of
from hdet_scale.topology import Replicas

__all__ = ["AutoLR", "OneCycleAutoLR", "ReplayLR"]

PRIVATE = {"optimizer", "_run", "_phases", "_phase", "_undo"}
"""Attributes that are no part of a scheduler's state."""


class OneCycleAutoLR(PhasedScheduler, OneCycleLR):
    """OneCycleLR that searches its learning rate, or explores around it; the authors' signature.

    Args:
        optimizer: the optimizer whose learning rates are scheduled.
        max_lr: the peak, one for each param group or one for all.
        total_steps, epochs, steps_per_epoch, pct_start, anneal_strategy, cycle_momentum,
            base_momentum, max_momentum, div_factor, final_div_factor, three_phase, last_epoch:
            as in torch's OneCycleLR, with its defaults.
        auto_lr_warmup_steps, ensemble_lr_spread_ratio, model_sync_interval, enable_auto_lr,
            loss_scale, lr_of_lr, momentum_of_lr: the authors' names for the keys warmup_steps,
            spread, interval, rule, loss_scale, step_size and momentum of HDETConfig, with the
            authors' defaults. With these alone it does what the authors' scheduler does.
        rank, world_size: this process's place; needed only before init_process_group.
        config: an HDETConfig in place of the authors' names.
        model: plain or wrapped; its float buffers are averaged, and it goes to eval mode for the
            probe. Needed by rule="auto" on DDP.
        replicas: this rank's place where ranks are not simply replicas.
        probe: yields losses on held-out batches that all replicas have in common; see
            hdet_scale.search.Probe.
        rule: "auto", "paper", "slope" or "none"; over enable_auto_lr.
        engine: set by hdet_scale.fsdp and hdet_scale.deepspeed; leave it out.
        options: any further key of HDETConfig.

    Raises:
        ValueError, TypeError: for arguments that contradict each other or are out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
        auto_lr_warmup_steps: int = 100000,
        ensemble_lr_spread_ratio: float = 0.0,
        model_sync_interval: int = 1000,
        rank: int = 0,
        world_size: int = 1,
        enable_auto_lr: bool = False,
        loss_scale: float = 0.002,
        lr_of_lr: float = 0.5,
        momentum_of_lr: float = 0.9,
        *,
        config: HDETConfig | None = None,
        model: nn.Module | None = None,
        replicas: Replicas | None = None,
        probe: Losses | None = None,
        rule: str | None = None,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        config = with_authors_names(
            config,
            options if rule is None else {**options, "rule": rule},
            auto_lr_warmup_steps=auto_lr_warmup_steps,
            ensemble_lr_spread_ratio=ensemble_lr_spread_ratio,
            model_sync_interval=model_sync_interval,
            enable_auto_lr=enable_auto_lr,
            loss_scale=loss_scale,
            lr_of_lr=lr_of_lr,
            momentum_of_lr=momentum_of_lr,
        )
        config = with_passes(config, epochs)
        steps = length_of(total_steps, epochs, steps_per_epoch)
        check_takeover(config, steps)
        engine = engine or engine_for(
            optimizer, model, replicas, rank, world_size, buffers=config.converge.buffers
        )
        momenta = {"base_momentum": base_momentum, "max_momentum": max_momentum}
        check_groups(optimizer, {"max_lr": max_lr} | (momenta if cycle_momentum else {}))
        super().__init__(
            optimizer,
            max_lr,
            total_steps=total_steps,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            three_phase=three_phase,
            last_epoch=last_epoch,
        )
        descent = Descent(
            kind="floor" if config.decay == "auto" else config.decay,
            # The first phase ends with the step that is made at the peak.
            start=max(config.warmup_steps, math.ceil(self._schedule_phases[0]["end_step"]) + 1),
            total_steps=self.total_steps,
            interval=config.interval,
            floors=tuple(float(g["min_lr"]) for g in optimizer.param_groups),
        )
        run = make_run(
            engine,
            learning_rates(optimizer),
            config,
            descent,
            total_steps=self.total_steps,
            step=self.last_epoch,
        )
        run.schedule = self._schedule
        self._begin(run, self._shape, probe)

    def _shape(self) -> ScheduleShape:
        peaks = tuple(float(g["max_lr"]) for g in self.optimizer.param_groups)
        return ScheduleShape(peaks, math.ceil(self._schedule_phases[0]["end_step"]))

    def get_lr(self) -> list[float | Tensor]:
        """The schedule's own values, as torch computes them: the base before any steering."""
        values = super().get_lr()
        self._schedule = [float(v) for v in values]
        if "_run" in self.__dict__:
            self._run.schedule = self._schedule
        return values

    def step(self, loss: Tensor | float | None = None) -> None:
        """After optimizer.step(), on every rank at every step.

        Args:
            loss: this rank's training loss. None is a step without one; it counts all the same,
                so that every rank enters the converge at the same step.
        """
        if self._is_initial:
            super().step()
            return
        checked = check_loss(loss)
        if self.last_epoch >= self.total_steps:
            raise ValueError(
                f"Tried to step {self.last_epoch + 1} times. The specified number of total steps "
                f"is {self.total_steps}: raise total_steps, or stop here and call finalize()"
            )
        turn = self._phase.count(checked)
        if self._phase.successor is not None:
            self._change()
        for _ in range(turn.steps):
            super().step()
        self._write()

    def _write(self) -> None:
        if "_phase" in self.__dict__:
            super()._write()
            self._last_lr = [f.read() for f in self._run.factors]

    def state_dict(self) -> dict[str, Any]:
        """torch's keys, with the shared base for `_last_lr`, and "hdet" for the run."""
        state = {k: v for k, v in self.__dict__.items() if k not in PRIVATE}
        hdet = self._hdet_state()
        return {**copy.deepcopy(state), "_last_lr": self.get_base_lr(), "hdet": hdet}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Any rank's state is right for every rank; so is that of a plain OneCycleLR."""
        hdet = state_dict.get("hdet")
        self._check_hdet(hdet)
        state = copy.deepcopy({k: v for k, v in state_dict.items() if k != "hdet"})
        super().load_state_dict(state)
        if hdet is None:
            self._schedule = [float(x) for x in self._last_lr]
        self._run.schedule = self._schedule
        self._load_hdet(hdet, self.last_epoch)
        self._write()


class AutoLR(PhasedScheduler, LRScheduler):
    """Searches or explores the learning rate around any torch scheduler: cosine, WSD, LambdaLR.

    base(t) = scheduler(t) x scale; the search or the rule moves the scale. The inner scheduler
    always reads back its own value from the optimizer, so that those which compute the next
    learning rate from the last one stay right.

    Args:
        scheduler: a torch scheduler of the step count. Step this one instead of it.
        config: what is searched or explored, and how; HDETConfig() where it is None.
        model: plain or wrapped; its float buffers are averaged, and it goes to eval mode for the
            probe. Needed by rule="auto" on DDP.
        replicas: this rank's place where ranks are not simply replicas.
        factors: what is explored instead of the learning rates; see hdet_scale.factors.
        probe: yields losses on held-out batches that all replicas have in common; see
            hdet_scale.search.Probe.
        engine: set by hdet_scale.fsdp and hdet_scale.deepspeed; leave it out.

    Raises:
        ValueError, TypeError: for arguments that contradict each other or are out of range.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        config: HDETConfig | None = None,
        *,
        model: nn.Module | None = None,
        replicas: Replicas | None = None,
        factors: Sequence[Factor] | None = None,
        probe: Losses | None = None,
        engine: Engine | None = None,
    ) -> None:
        # LRScheduler.__init__ would reset the optimizer's learning rates: not called on purpose.
        self.scheduler = check_inner(scheduler)
        self.optimizer = scheduler.optimizer
        config = config or HDETConfig()
        if config.decay == "floor":
            raise ValueError(
                "decay='floor' needs a schedule with a known floor: AutoLR follows the scheduler "
                "it is given; use decay='schedule', or OneCycleAutoLR"
            )
        config = with_length(config, scheduler)
        check_search(config, factors)
        engine = engine or engine_for(
            self.optimizer, model, replicas, buffers=config.converge.buffers
        )
        chosen = check_factors(
            learning_rates(self.optimizer) if factors is None else factors, config.gradients
        )
        run = make_run(
            engine,
            chosen,
            config,
            Descent(kind="schedule", start=config.warmup_steps, interval=config.interval),
            total_steps=config.total_steps or 0,
            step=max(0, int(getattr(scheduler, "last_epoch", 0))),
        )
        run.schedule = [f.scheduled() for f in chosen]
        self._begin(run, lambda: shape_of(self.scheduler, config.total_steps or 0), probe)

    def _write_schedule(self) -> None:
        """The inner scheduler's own values, for it to read back."""
        for factor, value in zip(self._run.factors, self._run.schedule, strict=True):
            factor.write(value, 1.0)

    def step(self, loss: Tensor | float | None = None) -> None:
        """After optimizer.step(), on every rank at every step.

        Args:
            loss: this rank's training loss, or None where there is none.
        """
        turn = self._phase.count(check_loss(loss))
        if self._phase.successor is not None:
            self._change()
        try:
            if turn.steps:
                self._write_schedule()
            for _ in range(turn.steps):
                self.scheduler.step()
            if turn.steps:
                self._run.schedule = [f.scheduled() for f in self._run.factors]
        finally:
            self._write()

    @property
    def base_lrs(self) -> list[float | Tensor]:  # type: ignore[override]
        """The inner scheduler's."""
        return self.scheduler.base_lrs

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Steps done, as the inner scheduler counts them."""
        return int(self.scheduler.last_epoch)

    def get_last_lr(self) -> list[float | Tensor]:
        """What the next step uses on this replica, for each param group."""
        return [f.read() for f in learning_rates(self.optimizer)]

    def get_lr(self) -> list[float | Tensor]:
        """The same: the inner scheduler computes, nothing is recomputed here."""
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank: the inner scheduler's state, the schedule, the run."""
        hdet = self._hdet_state()
        # The inner scheduler's view of the last learning rate is the schedule's own.
        state = {"scheduler": self.scheduler.state_dict(), "schedule": list(self._run.schedule)}
        return {**copy.deepcopy(state), "hdet": hdet}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Any rank's state is right for every rank."""
        self._check_hdet(state_dict["hdet"])
        state = copy.deepcopy({k: v for k, v in state_dict.items() if k != "hdet"})
        self.scheduler.load_state_dict(state["scheduler"])
        self._run.schedule = [float(x) for x in state["schedule"]]
        self._load_hdet(state_dict["hdet"], self.last_epoch)
        self._write()
