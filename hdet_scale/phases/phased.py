"""What both schedulers offer on top of a torch scheduler.

A scheduler holds the present phase of its run (hdet_scale.phases.run) and delegates to it: what is
written to the optimizer, how a step is counted, what a checkpoint holds.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from hdet_scale.config import HDETConfig
from hdet_scale.engines.protocol import Engine
from hdet_scale.method.records import Record, RoundRecord
from hdet_scale.optim.fused import FusedOptimizer
from hdet_scale.phases import snapshot_files
from hdet_scale.phases.build import Phases
from hdet_scale.phases.run import Phase, Run
from hdet_scale.phases.searching import Searching
from hdet_scale.phases.watched import Watched
from hdet_scale.search.probe import Losses, Probe
from hdet_scale.search.result import SearchResult
from hdet_scale.search.schedule import ScheduleShape
from hdet_scale.search.snapshot import Snapshot
from hdet_scale.topology import Replicas


class PhasedScheduler:
    """The phases of a run behind a torch scheduler's interface."""

    optimizer: Optimizer
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
    _run: Run
    _phases: Phases
    _phase: Phase

    # -- where the run stands -------------------------------------------------------------------

    @property
    def replicas(self) -> Replicas:
        """This rank's place among the replicas."""
        return self._run.replicas

    @property
    def engine(self) -> Engine:
        """The engine that trains the replicas."""
        return self._run.engine

    @property
    def phase(self) -> str:
        """ "searching", "watched", "exploring" or "plain"."""
        return self._phase.name

    @property
    def steps_to_converge(self) -> int | None:
        """Steps until the next averaging of parameters; None where there is none."""
        return self._phase.steps_to_converge

    def replicas_differ(self, *, own: bool = False) -> bool:
        """Whether a checkpoint needs a place for each replica; an averaging that is under way is
        folded in first.

        Args:
            own: the engine keeps something else for each replica, such as a loss scale.
        """
        return self._phase.replicas_differ(own=own)

    @property
    def searching(self) -> bool:
        """True while the search before the run is under way."""
        return self._phase.name == Searching.name

    @property
    def watching(self) -> bool:
        """True while the run after a search is evaluated, until 75 % of it."""
        return self._phase.name == Watched.name

    @property
    def diverges(self) -> bool:
        """True while replicas come to differ between two averagings."""
        return self.searching or self._run.diverges

    @property
    def at_boundary(self) -> bool:
        """True where replicas hold equal weights: one checkpoint is right for all.

        Never with overlap or fragments, where only `finalize()` makes replicas equal.
        """
        return self._phase.equal

    @property
    def stride(self) -> int:
        """1 where replicas always hold equal weights, T at the end of a round, the length of a
        trial at its end; 0 elsewhere. With overlap or fragments the end of a round is not equal:
        see `at_boundary`."""
        return self._phase.stride

    @property
    def round(self) -> int:
        """Index of the round that is under way."""
        return self._run.round

    @property
    def steps_done(self) -> int:
        """Optimizer steps of this run so far, those of the search included."""
        return self._run.step

    @property
    def verdict(self) -> str:
        """What the search decided last, in words; empty where there was none."""
        return self._run.verdict

    @property
    def search_result(self) -> SearchResult | None:
        """What the search found: initial, proposed and taken rates, the loss curve with its errors,
        the cost. None until a search is over, and in a run that was resumed after it."""
        return self._run.search_result

    @property
    def config(self) -> HDETConfig:
        """What is searched or explored, and how replicas converge."""
        return self._run.config

    @property
    def gradients(self) -> str:
        """ "shared" or "local" at the next step: local while a search is under way."""
        return "local" if self.searching else self._run.config.gradients

    @property
    def factor_names(self) -> list[str]:
        """Of the factors, in their order."""
        return self._run.names

    def get_base_lr(self) -> list[float]:
        """The shared base of each factor, beside `get_last_lr()` which is this replica's."""
        return self._phase.bases()

    def get_schedule(self) -> list[float]:
        """What the schedule says for the next step, one value a factor."""
        return list(self._run.schedule)

    # -- listening and evaluating ---------------------------------------------------------------

    def on_record(self, listener: Callable[[Record], None]) -> None:
        """Call `listener` with each record (hdet_scale.method.records), on every rank: a round, a
        trial, the end of a search, an evaluation."""
        self._run.listeners.append(listener)

    def on_round(self, listener: Callable[[RoundRecord], None]) -> None:
        """Call `listener` with a RoundRecord after each converge, on every rank."""

        def rounds(record: Record) -> None:
            if isinstance(record, RoundRecord):
                listener(record)

        self.on_record(rounds)

    def probe_with(self, losses: Losses) -> None:
        """Evaluate replicas by these losses; for an engine that made the scheduler from a config.

        Args:
            losses: see hdet_scale.search.Probe.
        """
        run = self._run
        if run.config.rule not in ("auto", "slope"):
            raise ValueError(
                f"rule={run.config.rule!r} asks for no probe: leave it out, or use rule='auto' or "
                "'slope'"
            )
        run.probe = Probe(losses, run.engine, run.config.probe_batches)
        run.steering.probe = run.probe

    # -- a step ---------------------------------------------------------------------------------

    def _begin(
        self,
        run: Run,
        shape: Callable[[], ScheduleShape],
        probe: Losses | None,
    ) -> None:
        """The first phase; called once, at the end of a scheduler's construction."""
        self._run = run
        self._phases = Phases(run, shape)
        self._phase = self._phases.first()
        if probe is not None:
            self.probe_with(probe)
        self._phase.enter()
        self._write()
        # A loaded optimizer brings the learning rate of the rank that saved it: write ours.
        hook = self.optimizer.register_load_state_dict_post_hook(lambda _: self._write())
        self._undo: list[Callable[[], None]] = [hook.remove]

    def _change(self) -> None:
        """Go on with the phase that follows, where the present one is over."""
        successor = self._phase.successor
        if successor is not None:
            self._phase.leave()
            self._phase = successor
            successor.enter()

    def _write(self) -> None:
        self._phase.write()
        # A CUDA graph is replayed without a call of `step`, which would do this.
        if isinstance(self.optimizer, FusedOptimizer):
            self.optimizer.write_scalars()

    def rewrite(self) -> None:
        """Write this replica's values again, after an engine has loaded an optimizer's state."""
        self._write()

    def before_step(self) -> None:
        """An engine that does not call the optimizer's step hooks in time calls this before each
        step."""
        self._phase.before_step()

    def finalize(self) -> None:
        """Make the replicas equal now; call it at the end of a run, on every rank.

        In the middle of a trial they go back to where it began.
        """
        self._finalize(moments=False)

    def equalize(self) -> None:
        """Make parameters, buffers and moments equal on all replicas; collective. A trial of a
        search starts again."""
        self._finalize(moments=True)

    def _finalize(self, *, moments: bool) -> None:
        self._phase.finalize(moments=moments)
        self._change()
        self._write()

    # -- engines --------------------------------------------------------------------------------

    def attach_engine(self, engine: Engine, gradients: str | None = None) -> None:
        """Train on this engine from now on; an engine's `attach` calls it between two rounds.

        Args:
            engine: with its replicas.
            gradients: "shared" or "local"; the config's where it is None.
        """
        run = self._run
        old, new = run.replicas, engine.replicas
        moved = (old.rank, old.size, old.shard_size) != (new.rank, new.size, new.shard_size)
        self._phase.check_move(moved)
        self._phase.leave()
        run.engine.stop_sharing()
        run.engine = engine
        if gradients is not None:
            run.config = dataclasses.replace(run.config, gradients=gradients)
        if run.probe is not None:
            run.probe.engine = engine
        if moved and self.searching:
            self._phase = self._phases.first()
        else:
            self._phase = self._phase.on_new_engine()
            self._phase = self._phases.after_search() if self._misplaced() else self._phase
        self._phase.enter()
        self._write()

    def _misplaced(self) -> bool:
        """Whether the engine's gradients ask for another phase than the present one."""
        return self._phase.name in ("plain", "exploring") and (
            (self._phase.name == "exploring") != self._run.diverges
        )

    def detach(self) -> None:
        """Remove every hook; the learning rates stay as they are."""
        self._phase.leave()
        self._run.engine.stop_sharing()
        while self._undo:
            self._undo.pop()()

    # -- state ----------------------------------------------------------------------------------

    def _hdet_state(self) -> dict[str, Any]:
        """The run and its phase, the same on every rank. A snapshot is not copied."""
        phase = self._phase
        kept = phase.state_dict()  # folds in an averaging that is under way
        state = {
            **self._run.state_dict(equal=phase.equal),
            "phase": phase.name,
            "phase_state": kept,
        }
        state = copy.deepcopy(state)
        snapshot = self.snapshot
        whole = snapshot is not None and self.replicas.shard_size == 1
        state["snapshot"] = snapshot.state_dict() if snapshot is not None and whole else None
        return state

    def _check_hdet(self, state: Mapping[str, Any] | None) -> None:
        """Refuse a state that cannot be continued, before anything is changed."""
        if state is not None:
            self._run.check_state(state)
            self._phases.check_state(state["phase"], state["phase_state"])

    def _load_hdet(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Go on where a state was taken; None: that of a plain scheduler after `step` steps."""
        self._phase.discard()
        if state is None:
            self._run.start_at(step)
            self._phase = self._phases.after_search()
        else:
            own = {k: copy.deepcopy(v) for k, v in state.items() if k != "snapshot"}
            self._run.load_state_dict(own)
            self._phase = self._phases.of_state(
                own["phase"],
                own["phase_state"],
                replicas=int(own["replicas"]),
                present=self._phase,
            )
            if state["snapshot"] is not None:
                self.restore_snapshot(state["snapshot"])
        self._phase.enter()

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot that the watch may go back to, equal on all replicas; None without one."""
        return self._phase.kept

    def restore_snapshot(self, state: Mapping[str, Any]) -> None:
        """Continue with a snapshot's `state_dict`; ignored where no watch is under way."""
        self._phase.keep(Snapshot(self._run.engine, state))

    def save_snapshot(self, folder: str | Path) -> None:
        """Save the snapshot of the watch beside a checkpoint; every rank calls it.

        Needed where replicas are sharded, so that no rank holds all of it. Does nothing where
        there is no snapshot, or where `state_dict()` already holds it. FSDP2's snapshots can be
        loaded by another number of shards.

        Args:
            folder: the checkpoint's folder; the snapshot goes to `folder/snapshot`.
        """
        snapshot_files.save(Path(folder), self.snapshot)

    def load_snapshot(self, folder: str | Path) -> None:
        """Load what `save_snapshot` saved, after `load_state_dict`; every rank calls it.

        Does nothing where the state itself held the snapshot: whole replicas saved it.
        """
        if self.watching and self.snapshot is None:
            found = snapshot_files.load(Path(folder), self._run.engine)
            if found is not None:
                self.restore_snapshot(found)

    def replica_state_dict(self) -> dict[str, Any]:
        """What is this replica's own: for a checkpoint between converges, where each replica
        saves its own parameters too."""
        state: dict[str, Any] = {"phase": self._phase.replica_state_dict()}
        if self.snapshot is not None and self.replicas.shard_size > 1:
            state["snapshot"] = self.snapshot.state_dict()
        return state

    def load_replica_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `replica_state_dict` saved, after `load_state_dict`."""
        if state["phase"]:
            self._phase.load_replica_state_dict(state["phase"])
        if "snapshot" in state:
            self.restore_snapshot(state["snapshot"])
