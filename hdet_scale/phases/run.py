"""Run: what the phases of a run share, and the interface of a phase.

A run is in one phase at a time:

    Searching   trials before the run                       (hdet_scale.phases.searching)
    Watched     training, evaluated on held-out batches     (hdet_scale.phases.watched)
    Exploring   fan-out, converge, steering                 (hdet_scale.phases.exploring)
    Plain       training as without HDET, bit for bit       (hdet_scale.phases.plain)

The scheduler holds the present phase and delegates: `write` gives the next step its values on this
replica, `count` is told that a step is done and says how the schedule moves, `successor` is the
phase that follows once this one is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from hdet_scale.config import HDETConfig
from hdet_scale.engines.protocol import Engine
from hdet_scale.factors.space import Factor
from hdet_scale.method.records import ProbeRecord, Record
from hdet_scale.search.probe import Probe
from hdet_scale.search.result import SearchResult
from hdet_scale.search.snapshot import Snapshot
from hdet_scale.topology import Replicas

STATE_VERSION = 3


class Steering(Protocol):
    """The shared base of each factor, and what moves it: the paper's rule or one with a probe."""

    @property
    def spread(self) -> float:
        """a of the round under way."""
        ...

    def bases(self, schedule: Sequence[float]) -> list[float]: ...

    def fans(self, replicas: int, round: int) -> list[list[float]]: ...

    def ask(
        self,
        schedule: Sequence[float],
        multipliers: Sequence[float],
        replicas: Replicas,
        device: torch.device,
        step: int,
    ) -> ProbeRecord | None:
        """Before the averaging: evaluate the replicas, where the rule does so."""
        ...

    def update(
        self,
        step: int,
        schedule: Sequence[float],
        losses: Sequence[float],
        values: Sequence[Sequence[float]],
    ) -> None:
        """After the averaging: steer by the losses of the round."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """How the schedule moves after a step."""

    steps: int = 1
    """Steps forward; 0 during a search."""


STAY, FORWARD = Turn(0), Turn(1)


class Run:
    """The engine, the factors, the steering, and the counts that every phase needs.

    Args:
        engine: the engine that trains the replicas.
        factors: what is explored or searched.
        config: the user's choices.
        steering: the shared bases.
        total_steps: S, of the whole run; 0 where it is not known.
        step: optimizer steps that are done already.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        factors: Sequence[Factor],
        config: HDETConfig,
        steering: Any,
        total_steps: int,
        step: int = 0,
    ) -> None:
        self.engine, self.factors, self.config = engine, list(factors), config
        self.steering, self.total_steps = steering, total_steps
        self.schedule: list[float] = []
        """What the schedule says for the next step, one value a factor."""
        self.probe: Probe | None = None
        self.verdict = ""
        """What the search decided last, in words."""
        self.search_result: SearchResult | None = None
        self.listeners: list[Callable[[Record], None]] = []
        self.start_at(step)

    def start_at(self, step: int) -> None:
        """Count from here: a scheduler that starts late, or the state of a plain one."""
        self.step = step
        """Optimizer steps done, those of the search included."""
        self.round, self.round_step = divmod(step, self.config.interval)
        self.lost = self.played = 0
        """Steps of the search; steps of the schedule's run since."""

    @property
    def replicas(self) -> Replicas:
        """This rank's place among the replicas."""
        return self.engine.replicas

    @property
    def diverges(self) -> bool:
        """True when replicas come to differ in a round, so that there is something to average."""
        return self.steering.spread > 0 or self.config.gradients == "local"

    @property
    def names(self) -> list[str]:
        """Of the factors."""
        return [f.name for f in self.factors]

    @property
    def writes_log(self) -> bool:
        """True on the one rank that writes messages."""
        return self.replicas.rank == self.replicas.shard_rank == 0

    def publish(self, record: Record) -> None:
        """Give a record to every listener."""
        for listener in self.listeners:
            listener(record)

    def advance(self) -> Turn:
        """Count one step of a run whose replicas stay equal; how the schedule moves."""
        self.step += 1
        self.round_step += 1
        if self.round_step >= self.config.interval:
            self.next_round()
        return self.turn()

    def next_round(self) -> None:
        """The round is over."""
        self.round, self.round_step = self.round + 1, 0

    def turn(self) -> Turn:
        """Steps of the schedule for this step of the run: u(t) = t S / (S - R), rounded down, with
        R steps of the search, so that the whole schedule fits into the rest.
        """
        if not self.lost:
            return FORWARD
        total, t = self.total_steps, self.played
        left = max(1, total - self.lost)
        self.played += 1
        if t >= left:
            return FORWARD
        return Turn((t + 1) * total // left - t * total // left)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self, *, equal: bool) -> dict[str, Any]:
        """The same on every rank: no rank, no multiplier, no replica's loss."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "round": self.round,
            "round_step": self.round_step,
            "lost": self.lost,
            "played": self.played,
            "replicas": self.replicas.size,
            "equal": equal,
            "verdict": self.verdict,
            "factors": self.names,
            "steering": self.steering.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken, after `check_state`."""
        self.step = int(state["step"])
        self.round, self.round_step = int(state["round"]), int(state["round_step"])
        self.lost, self.played = int(state["lost"]), int(state["played"])
        self.verdict = str(state["verdict"])
        self.steering.load_state_dict(state["steering"])

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that cannot be continued, before anything is changed."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"the state has version {state.get('version')!r} and this version of hdet_scale "
                f"reads {STATE_VERSION}: resume with the version that wrote it"
            )
        if list(state["factors"]) != self.names:
            raise ValueError(
                f"the state explores {list(state['factors'])} and this run {self.names}: use the "
                "same param groups and factors"
            )
        if state["steering"].keys() != self.steering.state_dict().keys():
            raise ValueError(
                f"the state is of another kind of rule than rule={self.config.rule!r}: resume with "
                "the rule that the run was started with"
            )
        # One replica is equal to itself at every step.
        if state["replicas"] not in (1, self.replicas.size) and not state["equal"]:
            raise ValueError(
                f"the state was saved by {state['replicas']} replicas, {state['round_step']} steps "
                f"into a round, and there are {self.replicas.size} now: the number of replicas can "
                "change only at a converge; save right after one, or call finalize() first"
            )


class Phase:
    """One phase of a run; the defaults are those of replicas that stay equal."""

    name: ClassVar[str]

    def __init__(self, run: Run) -> None:
        self.run = run
        self.successor: Phase | None = None
        """The phase that follows; None while this one goes on."""

    @property
    def team(self) -> int | None:
        """Replicas that share gradients with each other; None where all do."""
        return None if self.run.config.gradients == "shared" else 1

    @property
    def equal(self) -> bool:
        """True where replicas hold equal weights: one checkpoint is right for all."""
        return True

    @property
    def stride(self) -> int:
        """1 where replicas always hold equal weights, T at the end of a round, the length of a
        trial at its end; 0 elsewhere."""
        return 1

    @property
    def steps_to_converge(self) -> int | None:
        """Steps until the next averaging of parameters; None where there is none."""
        return None

    def replicas_differ(self, *, own: bool) -> bool:
        """Whether one replica's state would be wrong for another.

        Args:
            own: the engine keeps something else for each replica, such as a loss scale.
        """
        return False

    @property
    def kept(self) -> Snapshot | None:
        """The snapshot that a restart goes back to, equal on all replicas; None without one."""
        return None

    def keep(self, snapshot: Snapshot) -> None:
        """Restart from this snapshot from now on; ignored by a phase that does not restart."""

    def bases(self) -> list[float]:
        """The shared base of each factor for the next step."""
        bases: list[float] = self.run.steering.bases(self.run.schedule)
        return bases

    def enter(self) -> None:
        """The phase begins: tell the engine whose gradients are averaged with whose."""
        self.run.engine.share_within(self.team, self.run.config.converge.bucket_bytes)

    def write(self) -> None:
        """Give the next step its values on this replica."""
        run = self.run
        for factor, base in zip(run.factors, run.steering.bases(run.schedule), strict=True):
            factor.write(base, 1.0)

    def before_step(self) -> None:
        """An optimizer step is about to be made."""

    def count(self, loss: Tensor | float | None) -> Turn:
        """One optimizer step is done, with this rank's loss; how the schedule moves."""
        raise NotImplementedError

    def check_move(self, moved: bool) -> None:
        """Refuse an engine that cannot take over now; `moved`: with another place for this rank."""
        if moved and self.run.round_step:
            raise ValueError(
                f"the replicas can change only at a converge, and this round is "
                f"{self.run.round_step} steps old: call finalize() first"
            )

    def on_new_engine(self) -> Phase:
        """Go on with the run's new engine."""
        return self

    def leave(self) -> None:
        """The phase is over, or the scheduler is detached: remove hooks, finish what is running."""

    def discard(self) -> None:
        """A state is loaded in place of this phase: drop what is under way."""
        self.leave()

    def finalize(self, *, moments: bool = False) -> None:
        """Make the replicas equal; collective. `moments`: the optimizer's too."""

    def state_dict(self) -> dict[str, Any]:
        """What is the same on every rank, beside the run's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, replicas: int) -> None:
        """Continue a phase of the same name that `replicas` replicas were in."""

    def replica_state_dict(self) -> dict[str, Any]:
        """What is this replica's own."""
        return {}

    def load_replica_state_dict(self, state: Mapping[str, Any]) -> None:
        """After `load_state_dict`."""
