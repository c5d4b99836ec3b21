"""What a checkpoint of an FSDP2 run holds: one state for all replicas, or each rank's own.

`Checkpoint` is for torch.distributed.checkpoint: model, optimizer and scheduler, equal on all
replicas, to be loaded in other layouts too. `local_state` is for diverged replicas, in the middle
of a round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hdet_scale.engines.protocol import trained
from hdet_scale.fsdp.sharded import FSDPEngine
from hdet_scale.phases.phased import PhasedScheduler
from hdet_scale.phases.snapshot_files import Opaque


class Checkpoint:
    """A Stateful over model, optimizer and scheduler that never writes a mixture of replicas.

    torch.distributed.checkpoint spreads the writing of copies over the ranks: of diverged replicas
    it would write some tensors of each. `state_dict` therefore makes them equal first (right after
    a converge that is nothing to do), moments included. It is also called, on every rank, to lay
    out a load: there the replicas of a fresh run are equal already.
    """

    def __init__(
        self, engine: FSDPEngine, scheduler: PhasedScheduler, *, equalize: bool = True
    ) -> None:
        self.engine, self.scheduler, self.equalize = engine, scheduler, equalize

    def state_dict(self) -> dict[str, Any]:
        """Collective: every rank calls it, as dcp.save and dcp.async_save do."""
        engine, scheduler = self.engine, self.scheduler
        if self.equalize:
            scheduler.equalize()
        model, optimizer, fresh = _states(engine.sharded_model, engine.optimizer)
        state = scheduler.state_dict()
        if fresh:
            state["fresh"] = True
        kept = state["hdet"]["phase_state"].pop("converge", {})
        # One value to the checkpoint: a run with another rule, or with none, can read it.
        whole = {"model": model, "optimizer": optimizer, "scheduler": Opaque(state)}
        if scheduler.config.converge.remembers:
            # By bucket of this rank's shards: such a checkpoint loads in the same layout alone.
            whole[self._slices()] = Opaque(kept)
        return whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load all three; torch wants the optimizer before the scheduler."""
        engine = self.engine
        set_state_dict(
            engine.sharded_model,
            engine.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        scheduler = dict(state["scheduler"].values)
        if scheduler.pop("fresh", False):
            engine.optimizer.state.clear()
        kept = state[self._slices()].values if self._slices() in state else {}
        hdet = scheduler["hdet"]
        scheduler["hdet"] = {**hdet, "phase_state": {**hdet["phase_state"], "converge": kept}}
        self.scheduler.load_state_dict(scheduler)

    def _slices(self) -> str:
        at = self.engine.replicas
        return f"converge of shard {at.shard_rank} of {at.shard_size}"


def _states(model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any, bool]:
    """The states of both, and whether the optimizer has none yet."""
    fresh = not any(optimizer.state.values())
    with _without_gradients(optimizer if fresh else None):
        states = get_state_dict(model, optimizer)
    if fresh:
        # torch has made a state of zeros to have one to write; a first step is not a second.
        optimizer.state.clear()
    return *states, fresh


@contextlib.contextmanager
def _without_gradients(optimizer: Optimizer | None) -> Iterator[None]:
    """torch makes an optimizer's state only where no gradient would be lost by it."""
    params = [] if optimizer is None else trained(optimizer)
    kept = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(params, kept, strict=True):
            p.grad = gradient


def local_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The slices of model and optimizer that this rank holds. Every rank calls.

    `Checkpoint` writes one state for all replicas. In the middle of a round the replicas have
    diverged, and each rank saves its own slices to a file of its own.

    Returns:
        {"model": ..., "optimizer": ..., "fresh": ...} with local tensors in place of DTensors. They
        share memory with the model and the optimizer: write them before the next step. "fresh":
        the optimizer has no state, as on a replica of a search between two trials.

    Limitations:
        It can be loaded only with the same number of ranks and the same sharding.
    """
    weights, state, fresh = _states(model, optimizer)
    return {"model": _local(weights), "optimizer": _local(state), "fresh": fresh}


def load_local_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `local_state` returned on this rank; other keys are ignored. Every rank calls."""
    live_model, live_optimizer = get_state_dict(model, optimizer)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=_filled(live_model, state["model"]),
        optim_state_dict=_filled(live_optimizer, state["optimizer"]),
    )
    if state.get("fresh", False):
        optimizer.state.clear()


def _local(value: Any) -> Any:
    """A state with this rank's slices in place of the sharded tensors."""
    if isinstance(value, dict):
        return {k: _local(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_local(v) for v in value]
    return value.to_local() if isinstance(value, DTensor) else value


def _filled(live: Any, saved: Any) -> Any:
    """`saved` in the shape of a live state: slices are written into its sharded tensors."""
    if isinstance(live, dict):
        return {k: _filled(v, saved[k]) for k, v in live.items()}
    if isinstance(live, DTensor):
        live.to_local().copy_(saved)
        return live
    return saved
