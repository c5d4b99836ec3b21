"""Exploring: what both schedulers offer on top of a torch scheduler.

It holds a Round, and a Search where a race comes first, and decides between them: whose step it is,
what is written to the optimizer, what a checkpoint needs, and what an engine must obey.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet_scale import ddp
from hdet_scale.engines.averaged import trained
from hdet_scale.method.records import RoundRecord
from hdet_scale.method.round import Round
from hdet_scale.phases.assembly import GUIDED
from hdet_scale.search.driver import Search
from hdet_scale.search.probe import Losses, Probe
from hdet_scale.topology import Replicas


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
        """The race's: DDP's own all-reduce off or on; other engines ask `sharers`."""
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
        """True when a converge builds on the last one: a wire that remembers, an outer step."""
        return self._round.config.converge.remembers

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
