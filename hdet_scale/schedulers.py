"""The schedulers a user touches: OneCycleAutoLR, and AutoLR around any torch scheduler.

Both hold a Round and differ only in where the schedule's value comes from. The learning rate of
the next step on this replica is base x multiplier; the base is what the schedule says until the
rule has moved it. With spread 0 the base is the schedule's and the multiplier is exactly 1.0:
plain training, bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from hdet_scale import ddp
from hdet_scale.averaged import Averaged, trained
from hdet_scale.climb import Climb
from hdet_scale.config import ConvergePolicy, HDETConfig
from hdet_scale.controller import Descent, PaperRule, Steering, literal_decay
from hdet_scale.designs import check_design
from hdet_scale.factors import Factor, check_factors, learning_rates
from hdet_scale.outline import Outline, outline_of, place_of, put_back
from hdet_scale.probe import Losses, Probe
from hdet_scale.race import ENOUGH, Race
from hdet_scale.replay import ReplayLR as ReplayLR
from hdet_scale.round import Round, RoundRecord, check_loss
from hdet_scale.rules import Guided
from hdet_scale.search import Search
from hdet_scale.slope import Slope, Width
from hdet_scale.topology import Replicas, is_distributed

PRIVATE = {
    "optimizer", "engine_obeys",
    "_round", "_undo", "_search", "_wrapped", "_local", "_hooks",
}  # fmt: skip
"""Attributes that are no part of a scheduler's state."""
logger = logging.getLogger("hdet_scale")
GUIDED = ("slope", "climb")
"""Rules that are fed by a probe at each converge."""


class Exploring:
    """What both schedulers offer on top of a torch scheduler; it is given a Round."""

    optimizer: Optimizer
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
    _round: Round
    _search: Search | None = None
    engine_obeys: bool = False
    """An engine asks `sharers` at each step."""
    _local: list[Callable[[], None]]
    _wrapped: list[DistributedDataParallel]
    _hooks: list[Callable[[], None]]
    _schedule: list[float]
    """What the schedule says for the next step, one value a factor."""

    @property
    def round(self) -> int:
        """Index of the round that is under way."""
        return self._round.index

    @property
    def at_boundary(self) -> bool:
        """True right after a converge: replicas agree, and one checkpoint is right for all.

        Never with overlap or fragments, where only `finalize()` makes replicas agree.
        """
        if self.searching:
            return self._search is not None and self._search.between_heats
        return self._round.replicas_agree or not self._round.diverges

    @property
    def searching(self) -> bool:
        """True while the race before the run is under way."""
        return self._search is not None and self._search.active

    @property
    def watching(self) -> bool:
        """True while the run after a race is looked at, for three quarters of it."""
        return self._search is not None and self._search.guard is not None

    @property
    def verdict(self) -> str:
        """What the race decided last, in words; empty where there was none."""
        return self._search.rule.verdict if self._search is not None else ""

    @property
    def race_told(self) -> dict[str, Any]:
        """What a run log's first line needs to say of a race, nothing where there is none: for
        each stage c, a learning rate of the run over that of the heat which stands for it."""
        if self._search is None:
            return {}
        return {"race": {"translations": [self._search.rule.translation(k) for k in (0, 1)]}}

    @property
    def replicas(self) -> Replicas:
        """This rank's place among the replicas."""
        return self._round.replicas

    def get_base_lr(self) -> list[float]:
        """The shared base of each factor, beside `get_last_lr()` which is this replica's."""
        if self._search is not None and self._search.active:
            return list(self._search.peaks)
        return self._round.steering.bases(self._schedule)

    def finalize(self) -> None:
        """Make the replicas agree now; call it at the end of a run, on every rank.

        In the middle of a race they go back to where its heat began.
        """
        self.restart_heat()
        self._round.finalize()
        self._write()

    def on_round(self, listener: Callable[[RoundRecord], None]) -> None:
        """Call `listener` with a RoundRecord after each converge, on every rank."""
        self._round.listeners.append(listener)

    def replica_state_dict(self) -> dict[str, Any]:
        """What is this replica's own: for a checkpoint between converges, where each replica
        saves its own parameters too."""
        state = self._round.replica_state_dict()
        if self._search is not None:
            state["search"] = self._search.replica_state_dict()
        return state

    def load_replica_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `replica_state_dict` saved, after `load_state_dict`."""
        self._round.load_replica_state_dict(state)
        if self._search is not None and "search" in state:
            self._search.load_replica_state_dict(state["search"])

    def probe_with(self, losses: Losses, model: nn.Module | None = None) -> None:
        """Judge replicas by these losses; for an engine that made the scheduler from a config."""
        # Without a model to put back, FSDP2 would go on with the whole parameters of the probe.
        model = self._round.averaged.model if model is None else model
        probe = Probe(losses, model, self._round.config.probe)
        if self._search is not None:
            self._search.probe = probe
        elif self._round.config.rule in GUIDED:
            self._round.probe = probe
        else:
            raise ValueError(
                f"rule={self._round.config.rule!r} asks for no probe: leave it out, or use "
                "rule='auto', 'race', 'slope' or 'climb'"
            )

    def _write(self) -> None:
        if self._search is not None and self._search.active:
            self._search.write()
        else:
            self._round.write(self._schedule)

    def _searched(self, loss: Tensor | float | None) -> bool:
        """True when the step that is done belongs to the race: the schedule stands still."""
        search = self._search
        if search is None or not search.active:
            return False
        if search.count(loss):
            self._unhook()
        return True

    def _turns(self) -> int:
        """Steps of the schedule for the next step of the run: u(t) = t S / (S - R), rounded down,
        with R steps of the search, and of a run that was taken back, so that the whole schedule
        fits into what is left of S."""
        search = self._search
        if search is None or not search.done:
            return 1
        total = search.rule.total_steps
        left = max(1, total - search.done - search.taken_back)
        t = search.played
        search.played += 1
        if t >= left:
            return 1
        return (t + 1) * total // left - t * total // left

    def restart_heat(self) -> None:
        """In the middle of a race: replicas go back to where its heat began, and agree there."""
        if self._search is not None:
            self._search.restart()
            self._settle()

    def _settle(self, model: nn.Module | None = None) -> None:
        """Hooks where there is a search, and none where there is not."""
        if not (self.searching or self._round.goes_back):
            self._unhook()
        elif not self._hooks:
            self._hook(self._round.averaged.model if model is None else model)

    def _switch_gradients(self, mode: str) -> None:
        """The race's: DDP's own all-reduce off or on; other engines read `gradients`."""
        while self._local:
            self._local.pop()()
        if mode != "local":
            return
        self._local = [ddp.keep_gradients_local(module) for module in self._wrapped]
        search = self._search
        if search is not None and search.in_teams and not self.engine_obeys:
            params = trained(self.optimizer)
            undo = ddp.share_gradients(params, lambda: self.sharers, self.bucket_bytes)
            self._local.append(undo)

    def _count(self, loss: Tensor | float | None, step: int) -> bool:
        """One step of the run is done; False when the run, and its schedule, start again."""
        if self._round.count(loss):
            self._round.close(self._schedule, step)
            if not self._round.goes_back:
                self._unhook()
        search = self._search
        if search is None or search.guard is None:
            return True
        place = search.follow(self._schedule, loss, self.steps_done)
        if place is None:
            return True
        self._play_from(place)
        return False

    def _play_from(self, place: Any) -> None:
        """Put the schedule back to what `_stands_at` saw."""
        raise NotImplementedError

    def _begin(
        self,
        cycle: Round,
        model: nn.Module | None,
        search: Callable[[Callable[[str], None]], Search] | None = None,
        probe: Losses | None = None,
    ) -> None:
        self._round = cycle
        modules = model.modules() if model is not None else ()
        self._wrapped = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self._local, self._hooks = [], []
        if search is not None:
            self._search = search(self._switch_gradients)
        self._switch_gradients(self.gradients)
        if probe is not None:
            self.probe_with(probe, model)
        self._write()
        # A loaded optimizer brings the learning rate of the rank that saved it: write ours.
        hook = self.optimizer.register_load_state_dict_post_hook(lambda _: self._write())
        self._undo: list[Callable[[], None]] = [hook.remove, lambda: self._switch_gradients("")]
        self._undo.append(self._unhook)
        self._settle(model)

    def _hook(self, model: nn.Module | None) -> None:
        """Mark where a heat or a climb begins: before the first forward, which moves BatchNorm's
        statistics, or at least before the first step."""
        self._hooks = [self.optimizer.register_step_pre_hook(self.before_step).remove]
        if model is not None:
            hook = model.register_forward_pre_hook(
                lambda module, _: self._mark_place() if module.training else None
            )
            self._hooks.append(hook.remove)

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop()()

    def before_step(self, *_: object) -> None:
        """A hook of the optimizer: a race looks at where it begins, and so does a climb."""
        search = self._search
        marked = self._round.marked if search is None else search.marked
        # Read on the host before the mark alone: a tensor learning rate would wait for the device.
        if not marked and all(float(g["lr"]) == 0.0 for g in self.optimizer.param_groups):
            return  # how torch.distributed.checkpoint makes an optimizer's state, before it loads
        self._mark_place()
        if search is not None and search.active:
            search.before_step()

    def _mark_place(self) -> None:
        search = self._search
        if search is None or not search.active:
            self._round.mark_start()
            return
        if self.replicas.size > 1 and not self._can_part:
            raise RuntimeError(
                "a race trains each replica on its own gradients, and nothing here can stop their "
                "all-reduce: pass model= (the DistributedDataParallel module) to the scheduler, "
                "attach the engine (hdet_scale.fsdp, hdet_scale.deepspeed), or use "
                "gradients='local'"
            )
        search.mark()

    @property
    def _can_part(self) -> bool:
        """Whether gradients can stay local: by DDP's switch, by the engine, or anyway."""
        wrapped = bool(self._wrapped) or self.engine_obeys
        return wrapped or self._round.config.gradients == "local"

    @property
    def interval(self) -> int:
        """T."""
        return self._round.config.interval

    @property
    def gradients(self) -> str:
        """ "shared" or "local" at the next step: local while a race is under way."""
        return "local" if self.searching else self._round.config.gradients

    @property
    def sharers(self) -> Replicas:
        """The replicas that this one's gradient is averaged with at the next step."""
        if self._search is not None and self._search.active:
            return self._search.team
        shared = self._round.config.gradients == "shared"
        return self.replicas if shared else self.replicas.team(1)

    @property
    def gradients_of_the_run(self) -> str:
        """ "shared" or "local", as configured."""
        return self._round.config.gradients

    @property
    def bucket_bytes(self) -> int:
        """Cap of a staging bucket of the converge."""
        return self._round.config.converge.bucket_bytes

    @property
    def converge_remembers(self) -> bool:
        """True when a converge builds on the last one: the int8 wire, an outer step."""
        policy = self._round.config.converge
        return policy.wire == "int8" or policy.outer is not None

    @property
    def goes_back(self) -> bool:
        """True when the rule may send the replicas back to a mark, by its kind."""
        return self._round.config.rule == "climb"

    def mark_state(self) -> dict[str, Any] | None:
        """This rank's part of the mark, for a checkpoint of shards."""
        guard = self._search.guard if self._search is not None else None
        return self._round.mark_state() if guard is None else guard.mark_state()

    def load_mark(self, state: Mapping[str, Any] | None) -> None:
        """After `load_state_dict`."""
        guard = self._search.guard if self._search is not None else None
        if guard is None:
            self._round.load_mark(state)
        else:
            guard.load_mark(state)

    @property
    def stride(self) -> int:
        """Steps since replicas last agreed, where they agree now: 1 where they always do, T at the
        end of a round, the length of a heat at its end; 0 where they are apart."""
        search = self._search
        if search is not None and search.active:
            return search.last_heat if search.between_heats and search.done else 0
        if not self._round.diverges:
            return 1
        return self.interval if self._round.steps == 0 else 0

    @property
    def steps_done(self) -> int:
        """Steps of this run so far, in whole rounds and the one under way."""
        searched = 0 if self._search is None else self._search.done
        return searched + self._round.index * self.interval + self._round.steps

    def averaged_tensors(self) -> list[Tensor]:
        """What a converge averages now."""
        return self._round.tensors()

    def agree_for_checkpoint(self) -> None:
        """Make parameters, buffers and moments the same on all replicas; collective. A heat of a
        race starts again."""
        self.restart_heat()
        self._round.finalize(moments=True)
        self._write()

    def obeyed_by_engine(self) -> None:
        """An engine asks `sharers` at each step from now on."""
        self.engine_obeys = True
        self._switch_gradients(self.gradients)

    def rehome(
        self, replicas: Replicas, model: nn.Module | None, gradients: str | None = None
    ) -> None:
        """Explore among other replicas, from a converge boundary on; an engine calls it."""
        if self.watching:
            raise ValueError(
                "rule='auto' has marked where the run began, of the model as it was: attach the "
                "engine before the first step and before a state is loaded"
            )
        self._round.rehome(replicas, model, gradients)
        self.obeyed_by_engine()
        for holder in (self._search, self._round):
            probe = getattr(holder, "probe", None)
            if isinstance(probe, Probe) and probe.model is None:
                probe.model = model
        if self._search is not None:
            self._search.rehome()
        self._unhook()
        self._settle(model)
        self._write()

    def detach(self) -> None:
        """Take back every hook; the learning rates stay as they are."""
        while self._undo:
            self._undo.pop()()


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
    probe: yields losses on batches that all replicas have in common; see hdet_scale.probe.
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
            _make_round(
                averaged or _averaged(optimizer, model, config),
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
        return _make_search(self._round, self._outline(), self.total_steps, switch, self._stands_at)

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
        _check_search(config, factors)
        where = _place(self.optimizer, replicas, 0, 1, averaged)
        chosen = check_factors(
            learning_rates(self.optimizer) if factors is None else factors, config.gradients
        )
        descent = Descent(kind="schedule", start=config.warmup_steps, interval=config.interval)
        self._steps = max(0, int(getattr(scheduler, "last_epoch", 0)))
        self._remember(chosen)
        self._begin(
            _make_round(
                averaged or _averaged(self.optimizer, model, config),
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
        return _make_search(self._round, outline, total, switch, self._stands_at)

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


def _averaged(optimizer: Optimizer, model: nn.Module | None, config: HDETConfig) -> Averaged:
    return Averaged(optimizer, model if config.converge.buffers else None)


def _make_round(
    averaged: Averaged,
    factors: Sequence[Factor],
    where: Replicas,
    config: HDETConfig,
    descent: Descent,
    step: int,
) -> Round:
    if config.searches:
        config = dataclasses.replace(config, spread=0.0)
    # With spread 0 there is nothing to compare: the schedule stays the user's.
    steers = config.rule == "paper" and config.spread > 0
    rule = functools.partial(PaperRule, config.loss_scale, config.momentum, config.step_size)
    return Round(
        factors=factors,
        replicas=where,
        config=config,
        steering=_guided(factors, where, config, descent.total_steps)
        or Steering([f.name for f in factors], rule if steers else None, descent),
        averaged=averaged,
        step=step,
    )


def races(config: HDETConfig, where: Replicas, total_steps: int) -> bool:
    """Whether a race comes before the run; "auto" leaves it out where it could not tell enough."""
    if config.rule != "auto":
        return config.searches
    least = Race.least_steps(where.size, ENOUGH)
    if total_steps < least and where.rank == where.shard_rank == 0:
        logger.info(
            "rule='auto' runs no race: %d steps are too few for %d replicas, %d would do; the "
            "schedule given is run as it is",
            total_steps,
            where.size,
            least,
        )
    return total_steps >= least


def divides_by_the_gradient(optimizer: Optimizer) -> bool:
    """Whether a step's size does not grow with the gradient's: Adam and its kin, RMSprop, Adagrad,
    Lion, Muon, and not SGD. What divides has something against a zero, or betas."""
    return not {"eps", "betas"}.isdisjoint(optimizer.defaults)


def _make_search(
    cycle: Round,
    outline: Outline,
    total_steps: int,
    switch: Callable[[str], None],
    place: Callable[[], Any],
) -> Search:
    race = Race(
        replicas=cycle.replicas.size,
        total_steps=total_steps,
        adaptive=divides_by_the_gradient(cycle.averaged.optimizer),
        idle=not races(cycle.config, cycle.replicas, total_steps),
    )
    return Search(race, cycle, outline=outline, switch=switch, place=place)


def _check_search(config: HDETConfig, factors: Sequence[Factor] | None) -> None:
    if not config.searches:
        return
    if config.total_steps is None:
        raise ValueError(
            f"rule={config.rule!r} spends a share of the run on its search and must know its "
            "length: set total_steps in the config, the number of scheduler steps you will make"
        )
    if factors is not None:
        raise ValueError(
            f"rule={config.rule!r} moves the learning rates of all param groups together: leave "
            "factors out"
        )


def _guided(
    factors: Sequence[Factor], where: Replicas, config: HDETConfig, total_steps: int
) -> Guided | None:
    """The rules that are fed by a probe; None for the others, and where nothing is explored."""
    if config.rule not in GUIDED or config.spread == 0:
        return None
    names = [f.name for f in factors]
    if config.rule == "slope":
        check_design(where.size, len(names))
        return Guided(factors, Slope(names, Width(config.spread, config.patience)))
    total_steps = config.total_steps or total_steps
    if not total_steps:
        raise ValueError(
            "rule='climb' must know how long the run is, for its grace and its end: pass "
            "total_steps in the config"
        )
    return Guided(factors, Climb(names, total_steps, spread=config.spread))
