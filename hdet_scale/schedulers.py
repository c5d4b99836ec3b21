"""The schedulers a user touches: OneCycleAutoLR, and AutoLR around any torch scheduler.

Both hold a Round and differ only in where the schedule's value comes from. The learning rate of
the next step on this replica is base x multiplier; the base is what the schedule says until the
rule has moved it. With spread 0 the base is the schedule's and the multiplier is exactly 1.0:
plain training, bit for bit.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from hdet_scale import ddp
from hdet_scale.config import ConvergePolicy, HDETConfig
from hdet_scale.engines.averaged import Averaged
from hdet_scale.factors.learning_rate import learning_rates
from hdet_scale.factors.space import Factor, check_factors
from hdet_scale.method.losses import check_loss
from hdet_scale.method.paper import Descent, literal_decay
from hdet_scale.phases.assembly import averaged_by, check_search, make_round, make_search
from hdet_scale.phases.exploring import Exploring
from hdet_scale.runs.replay import ReplayLR as ReplayLR
from hdet_scale.search.driver import Search
from hdet_scale.search.probe import Losses
from hdet_scale.search.schedule import Outline, outline_of, place_of, put_back
from hdet_scale.topology import Replicas, is_distributed

PRIVATE = {
    "optimizer", "engine_obeys",
    "_round", "_undo", "_search", "_wrapped", "_local", "_hooks",
}  # fmt: skip
"""Attributes that are no part of a scheduler's state."""


class OneCycleAutoLR(Exploring, OneCycleLR):
    """OneCycleLR whose replicas explore learning rates around it; the authors' signature.

    rank, world_size: this process's place, needed only before init_process_group.
    model: plain or wrapped; its float buffers are then averaged too.
    replicas: where ranks are not simply replicas.
    decay: gamma of the paper rule, "floor", "schedule" or "literal".
    gradients: "shared" or "local"; see hdet_scale.ddp for the DDP side of it.
    seed: of the assignments.
    converge: how parameters are averaged.
    averaged: what is averaged, where an engine keeps it elsewhere than in the optimizer.
    rule: "auto" or "race" finds the learning rate before the run; enable_auto_lr is "paper".
    probe: yields losses on batches that all replicas have in common; see hdet_scale.search.probe.
    patience: rounds without a move after which the slope rule halves the spread.
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
        model: nn.Module | None = None,
        replicas: Replicas | None = None,
        decay: str = "floor",
        gradients: str = "shared",
        seed: int = 0,
        converge: ConvergePolicy | None = None,
        averaged: Averaged | None = None,
        rule: str | None = None,
        probe: Losses | None = None,
        probe_batches: int = 16,
        patience: int | None = 50,
    ) -> None:
        config = HDETConfig(
            spread=ensemble_lr_spread_ratio,
            interval=model_sync_interval,
            gradients=gradients,
            rule=rule or ("paper" if enable_auto_lr else "none"),
            probe=probe_batches,
            patience=patience,
            warmup_steps=auto_lr_warmup_steps,
            loss_scale=loss_scale,
            momentum=momentum_of_lr,
            step_size=lr_of_lr,
            decay="floor" if decay == "auto" else decay,
            seed=seed,
            converge=converge or ConvergePolicy(),
        )
        steps = _total_steps(total_steps, epochs, steps_per_epoch)
        _check_takeover(config, steps, div_factor, final_div_factor)
        where = _place(optimizer, replicas, rank, world_size, averaged)
        momenta = {"base_momentum": base_momentum, "max_momentum": max_momentum}
        _check_groups(optimizer, {"max_lr": max_lr} | (momenta if cycle_momentum else {}))
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
            kind=config.decay,
            # The first phase ends with the step that is made at the peak.
            start=max(config.warmup_steps, math.ceil(self._schedule_phases[0]["end_step"]) + 1),
            total_steps=self.total_steps,
            interval=config.interval,
            floors=tuple(float(g["min_lr"]) for g in optimizer.param_groups),
            div_factor=div_factor,
            final_div_factor=final_div_factor,
        )
        self._begin(
            make_round(
                averaged or averaged_by(optimizer, model, config),
                learning_rates(optimizer),
                where,
                config,
                descent,
                self.last_epoch,
            ),
            model,
            self._race if config.searches else None,
            probe,
        )

    def _race(self, switch: Callable[[str], None]) -> Search:
        return make_search(self._round, self._outline(), self.total_steps, switch, self._stands_at)

    def _outline(self) -> Outline:
        """Of the whole cycle, which is known at every step: a thousand of them will do."""
        now, peaks = self.last_epoch, [float(g["max_lr"]) for g in self.optimizer.param_groups]
        every = max(1, self.total_steps // 1000)
        rows = []
        for step in range(0, self.total_steps, every):
            self.last_epoch = step
            rows.append([float(x) for x in self._values()])
        self.last_epoch = now
        self._values()  # a cycled momentum goes back too
        return Outline(tuple(peaks), Outline.of([*rows, peaks]).mean)

    def _values(self) -> list[float | Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wants get_lr to be called in a step only
            return self.get_lr()

    def _stands_at(self) -> int:
        return int(self.last_epoch)

    def _play_from(self, place: Any) -> None:
        self.last_epoch = int(place)
        self._step_count = self.last_epoch + 1
        self._values()

    def get_lr(self) -> list[float | Tensor]:
        """The schedule's own values, as torch computes them: the base before any steering."""
        values = super().get_lr()
        self._schedule = [float(v) for v in values]
        return values

    def step(self, loss: Tensor | float | None = None) -> None:
        """After optimizer.step(), on every rank at every step; `loss` is this rank's.

        None is a step without a loss; the step counts all the same, so that every rank enters
        the converge at the same step.
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
        if not self._searched(checked) and self._count(checked, self.last_epoch + 1):
            for _ in range(self._turns()):
                super().step()
        self._write()

    def _write(self) -> None:
        if hasattr(self, "_round"):
            super()._write()
            self._last_lr = [f.read() for f in self._round.factors]

    def state_dict(self) -> dict[str, Any]:
        """torch's keys, with the shared base for `_last_lr`, and "hdet" for the round."""
        state = {k: v for k, v in self.__dict__.items() if k not in PRIVATE}
        state |= {"_last_lr": self.get_base_lr(), "hdet": self._round.state_dict()}
        state = copy.deepcopy(state)
        if self._search is not None:  # not copied: a mark in it is as large as the model
            state["search"] = self._search.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Any rank's state is right for every rank; so is that of a plain OneCycleLR."""
        search = state_dict.get("search")
        state = copy.deepcopy({k: v for k, v in state_dict.items() if k != "search"})
        hdet = state.pop("hdet", None)
        if self._search is not None and search is not None:
            self._search.rule.check_state(search["rule"])
        if hdet is not None:
            self._round.load_state_dict(hdet)
        super().load_state_dict(state)
        if self._search is not None:
            self._search.load_state_dict(search)
        if hdet is None:
            self._schedule = [float(x) for x in self._last_lr]
        self._settle()
        self._write()


class AutoLR(Exploring, LRScheduler):
    """The same around any torch scheduler: cosine, WSD, a LambdaLR, SequentialLR.

    base(t) = scheduler(t) x scale, and the rule moves the scale. The inner scheduler always
    reads back its own value from the optimizer, so that those which compute the next learning
    rate from the last one stay right.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        config: HDETConfig | None = None,
        *,
        model: nn.Module | None = None,
        replicas: Replicas | None = None,
        factors: Sequence[Factor] | None = None,
        averaged: Averaged | None = None,
        probe: Losses | None = None,
    ) -> None:
        # LRScheduler.__init__ would reset the optimizer's learning rates: not called on purpose.
        self.scheduler = _check_inner(scheduler)
        self.optimizer = scheduler.optimizer
        config = config or HDETConfig()
        if config.decay in ("floor", "literal"):
            raise ValueError(
                f"decay={config.decay!r} needs a schedule with a known floor: AutoLR follows the "
                "scheduler it is given; use decay='schedule', or OneCycleAutoLR"
            )
        check_search(config, factors)
        where = _place(self.optimizer, replicas, 0, 1, averaged)
        chosen = check_factors(
            learning_rates(self.optimizer) if factors is None else factors, config.gradients
        )
        descent = Descent(kind="schedule", start=config.warmup_steps, interval=config.interval)
        self._steps = max(0, int(getattr(scheduler, "last_epoch", 0)))
        self._remember(chosen)
        self._begin(
            make_round(
                averaged or averaged_by(self.optimizer, model, config),
                chosen,
                where,
                config,
                descent,
                self._steps,
            ),
            model,
            self._race if config.searches else None,
            probe,
        )

    def _race(self, switch: Callable[[str], None]) -> Search:
        total = self._round.config.total_steps or 0
        outline = outline_of(self.scheduler, total)
        return make_search(self._round, outline, total, switch, self._stands_at)

    def _stands_at(self) -> dict[str, Any]:
        for factor, value in zip(self._round.factors, self._schedule, strict=True):
            factor.write(value, 1.0)
        return place_of(self.scheduler)

    def _play_from(self, place: Any) -> None:
        put_back(self.scheduler, place)
        self._remember(self._round.factors)

    def step(self, loss: Tensor | float | None = None) -> None:
        """After optimizer.step(), on every rank at every step; `loss` is this rank's or None."""
        checked = check_loss(loss)
        if self._searched(checked):
            self._write()
            return
        self._steps += 1
        if not self._count(checked, self._steps):
            self._write()
            return
        for factor, value in zip(self._round.factors, self._schedule, strict=True):
            factor.write(value, 1.0)
        try:
            for _ in range(self._turns()):
                self.scheduler.step()
            self._remember(self._round.factors)
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
        """The same on every rank: the inner scheduler's state, the schedule, the round."""
        inner = self.scheduler.state_dict()
        # The inner scheduler's view of the last learning rate is the schedule's own.
        state = {
            "scheduler": inner,
            "steps": self._steps,
            "schedule": list(self._schedule),
            "hdet": self._round.state_dict(),
        }
        # Not copied: a mark in it is as large as the model.
        search = None if self._search is None else self._search.state_dict()
        return {**copy.deepcopy(state), "search": search}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Any rank's state is right for every rank."""
        search = state_dict.get("search")
        state = copy.deepcopy({k: v for k, v in state_dict.items() if k != "search"})
        if self._search is not None and search is not None:
            self._search.rule.check_state(search["rule"])
        self._round.load_state_dict(state["hdet"])
        if self._search is not None:
            self._search.load_state_dict(search)
        self.scheduler.load_state_dict(state["scheduler"])
        self._steps = int(state["steps"])
        self._schedule = [float(x) for x in state["schedule"]]
        self._settle()
        self._write()

    def _remember(self, factors: Sequence[Factor]) -> None:
        self._schedule = [f.scheduled() for f in factors]


def _check_inner(scheduler: object) -> LRScheduler:
    if isinstance(scheduler, Exploring):
        raise TypeError(f"{type(scheduler).__name__} explores already: do not wrap it again")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau follows each rank's own metric, so that there is no shared base: "
            "wrap a scheduler of the step count instead (cosine, LambdaLR, SequentialLR, ...)"
        )
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"AutoLR wraps a torch LRScheduler, got {type(scheduler).__name__}: pass e.g. "
            "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)"
        )
    return scheduler


def _total_steps(total: int | None, epochs: int | None, per_epoch: int | None) -> int | None:
    """As torch infers it; None where torch itself will refuse."""
    if total is not None:
        return total
    if isinstance(epochs, int) and isinstance(per_epoch, int):
        return epochs * per_epoch
    return None


def _check_takeover(
    config: HDETConfig, steps: int | None, div_factor: float, final_div_factor: float
) -> None:
    if config.rule != "paper" or steps is None:
        return
    if config.warmup_steps >= steps:
        raise ValueError(
            f"auto_lr_warmup_steps={config.warmup_steps} leaves nothing of total_steps={steps} to "
            "steer: choose a smaller auto_lr_warmup_steps, or enable_auto_lr=False"
        )
    if config.decay == "literal":
        literal_decay(div_factor, final_div_factor, 1)


def _place(
    optimizer: Optimizer,
    replicas: Replicas | None,
    rank: int,
    world_size: int,
    averaged: Averaged | None,
) -> Replicas:
    """This rank's place: as given, from the mesh of sharded parameters, or a rank a replica."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is not an Optimizer: pass a torch.optim.Optimizer (for "
            "DeepSpeed use hdet_scale.deepspeed.initialize)"
        )
    params = [p for g in optimizer.param_groups for p in g["params"]]
    if replicas is None and any(hasattr(p, "device_mesh") for p in params):
        return Replicas.of_sharded(params)
    if replicas is not None:
        if not isinstance(replicas, Replicas):
            raise TypeError(f"replicas must be a Replicas, got {replicas!r}: use Replicas.world()")
        replicas.check_shards(params)
        return replicas
    if averaged is None:
        ddp.refuse_sharded(params)
    declared = Replicas(rank=rank, size=world_size)
    if not is_distributed():
        return declared
    world = Replicas.world()
    if world_size != 1 and (rank, world_size) != (world.rank, world.size):
        raise ValueError(
            f"rank={rank}, world_size={world_size} do not fit this process, rank {world.rank} of "
            f"{world.size}: leave them out, or pass replicas= for another layout"
        )
    return world


def _check_groups(optimizer: Optimizer, given: Mapping[str, object]) -> None:
    """What torch would refuse only after it has written to the param groups."""
    n = len(optimizer.param_groups)
    for name, value in given.items():
        if isinstance(value, list | tuple) and len(value) != n:
            raise ValueError(
                f"{name} has {len(value)} values for {n} param groups, got {value}: give one for "
                "each param group, or a single number for all"
            )
    if "max_momentum" in given and not {"momentum", "betas"} & set(optimizer.defaults):
        raise ValueError(
            f"{type(optimizer).__name__} has no momentum and no betas to cycle, got "
            "cycle_momentum=True: pass cycle_momentum=False"
        )
