"""FSDP2: replicas that are themselves sharded, over a mesh of replicas x shards.

    mesh = build_mesh(replicas=2)                       # or your own init_device_mesh
    for block in model.blocks: fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), ...)
    scheduler = OneCycleAutoLR(optimizer, ..., rule="auto", replicas=Replicas.from_mesh(mesh))
    hdet = attach(model, optimizer, scheduler, mesh=mesh)

Sharded over mesh["shard"], gradients cross replicas through a hook behind each reduce-scatter, so
that a search or local gradients can stop them. Sharded over the whole mesh (HSDP), FSDP2 averages
gradients over replicas itself in every backward: enough for rule="paper" with shared gradients.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet_scale.config import HDETConfig
from hdet_scale.engines.engine import Engine, trained
from hdet_scale.phases.build import searches
from hdet_scale.phases.scheduler import PhasedScheduler
from hdet_scale.phases.snapshots import Opaque
from hdet_scale.schedulers import AutoLR, with_length
from hdet_scale.topology import Replicas, advise_mesh, shard_size_of

logger = logging.getLogger("hdet_scale")


def build_mesh(
    *, replicas: int | None = None, shards: int | None = None, device: str | None = None
) -> DeviceMesh:
    """A mesh of replicas x shards over the world, named "replica" and "shard".

    Consecutive ranks share a replica: its traffic stays on the fast links.

    Args:
        replicas: how many; give this or shards.
        shards: ranks of one replica.
        device: "cuda" or "cpu"; found where it is None.
    """
    world = dist.get_world_size()
    size = shard_size_of(world, shard_size=shards, replicas=replicas)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, (world // size, size), mesh_dim_names=("replica", "shard"))


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    *,
    mesh: DeviceMesh | None = None,
    gradients: str | None = None,
    replica: str = "replica",
    shard: str = "shard",
    config: HDETConfig | None = None,
) -> Attached:
    """Let the replicas of a fully_shard-ed model search or explore; returns a handle that detaches.

    Args:
        model: sharded over the mesh, or over its "shard" dimension.
        optimizer: steps the model's parameters.
        scheduler: OneCycleAutoLR or AutoLR; any other torch scheduler is wrapped in an AutoLR with
            `config`, and `handle.scheduler` is the one to step.
        mesh: replicas x shards; found from the model's DTensors where it is None.
        gradients: "shared" or "local"; the scheduler's where it is None.
        replica, shard: names of the mesh's dimensions.
        config: for a plain torch scheduler; HDETConfig() where it is None.

    Raises:
        ValueError: where the layout has no replicas, or cannot keep gradients from crossing them.
    """
    modules = _sharded_modules(model)
    replicas = _replicas(model, mesh, replica, shard)
    settings = (
        scheduler.config
        if isinstance(scheduler, PhasedScheduler)
        else with_length(config or HDETConfig(), scheduler)
    )
    mode, buffers = gradients or settings.gradients, settings.converge.buffers
    engine = FSDPEngine(optimizer, model, replicas, modules=modules, buffers=buffers)
    _check_layout(engine, mode, _searches(scheduler, settings, replicas))
    phased = _phased(scheduler, config, replicas)
    phased.attach_engine(engine, mode)
    return Attached(engine, phased)


class FSDPEngine(Engine):
    """Replicas sharded by fully_shard.

    Args:
        optimizer, model, replicas: as for every engine.
        modules: the FSDP2 modules of the model.
        buffers: whether the model's float buffers are averaged.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        replicas: Replicas,
        *,
        modules: list[FSDPModule],
        buffers: bool = True,
    ) -> None:
        super().__init__(optimizer, model, replicas, buffers=buffers)
        self.modules = modules
        self.native = any(p.device_mesh.ndim == 2 for p in _dtensors(model))
        """HSDP: a mesh of two dimensions, whose replicas fully_shard itself keeps equal."""
        self.separable = not self.native

    def share_within(self, size: int | None, bucket_bytes: int) -> None:
        self.stop_sharing()
        self._set_team(size)
        if self.native or self._team == 1:
            return
        for module in self.modules:
            module.set_all_reduce_hook(self._average)
        self._undo.append(self._without_hooks)

    def _without_hooks(self) -> None:
        for module in self.modules:
            module.set_all_reduce_hook(None)  # type: ignore[arg-type]

    def _average(self, gradient: Tensor) -> None:
        """Runs behind each reduce-scatter."""
        sharers = self.sharers
        if sharers.size > 1:
            gradient.div_(sharers.size)  # before the sum, which could overflow in fp16
            dist.all_reduce(gradient, group=sharers.connected())

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A forward without a backward leaves the whole parameters behind, and the next one would
        use them, though their shards have moved on."""
        try:
            with super().evaluating():
                yield
        finally:
            for module in self.modules:
                module.reshard()

    def as_saved(self, param: Tensor, value: Tensor) -> Tensor:
        if not isinstance(param, DTensor):
            return value
        return DTensor.from_local(
            value.to(param.device),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )

    def part_of(self, param: Tensor, whole: Tensor) -> Tensor:
        if not isinstance(param, DTensor):
            return whole
        for dim, placement in enumerate(param.placements):
            if isinstance(placement, Shard):
                mesh, at = param.device_mesh, param.device_mesh.get_local_rank(dim)
                parts = whole.chunk(mesh.size(dim), placement.dim)
                # A tensor of fewer rows than shards leaves the last ones empty.
                rest = whole.narrow(placement.dim, 0, 0)
                whole = parts[at] if at < len(parts) else rest
        return whole.clone()


class Attached:
    """What `attach` did, to be used and undone."""

    def __init__(self, engine: FSDPEngine, scheduler: PhasedScheduler) -> None:
        self.engine, self.scheduler = engine, scheduler
        self.optimizer = engine.optimizer
        self._unseen = 0
        self._guard = engine.optimizer.register_step_post_hook(self._after_step)
        self._steps = scheduler.steps_done

    @property
    def model(self) -> nn.Module:
        """The sharded model."""
        if self.engine.model is None:
            raise RuntimeError("this engine has no model")
        return self.engine.model

    @property
    def replicas(self) -> Replicas:
        """This rank's place among replicas x shards."""
        return self.scheduler.replicas

    def _after_step(self, *_: object) -> None:
        """Warn where the scheduler is not stepped: the replicas would never be averaged."""
        now = self.scheduler.steps_done
        self._unseen = 0 if now != self._steps else self._unseen + 1
        self._steps = now
        if self._unseen == max(10, self.scheduler.config.interval):
            logger.warning(
                "%d optimizer steps without a scheduler.step(loss): the replicas are not averaged; "
                "call it after every optimizer.step()",
                self._unseen,
            )

    def finalize(self) -> None:
        """Make the replicas equal; at the end of a run, on every rank."""
        self.scheduler.finalize()

    def checkpoint(self, *, agree: bool = True) -> Checkpoint:
        """Model, optimizer and scheduler as one Stateful for torch.distributed.checkpoint.

        The snapshot of a watch is not part of it: `save` and `load` below do both.

        Args:
            agree: False for a load into replicas that have gone bad: laying it out must not
                average them.
        """
        return Checkpoint(self, agree=agree)

    def save(self, folder: str | Path) -> None:
        """A whole checkpoint, with the snapshot of a watch; every rank calls it."""
        dcp_save({"job": self.checkpoint()}, checkpoint_id=str(folder))
        self.scheduler.save_snapshot(folder)

    def load(self, folder: str | Path) -> None:
        """Continue from what `save` saved, in another layout too; every rank calls it."""
        dcp_load({"job": self.checkpoint()}, checkpoint_id=str(folder))
        self.scheduler.load_snapshot(folder)

    def detach(self) -> None:
        """Remove every hook; the model stays sharded as it is."""
        self._guard.remove()
        self.scheduler.detach()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()


class Checkpoint:
    """A Stateful over model, optimizer and scheduler that never writes a mixture of replicas.

    torch.distributed.checkpoint spreads the writing of copies over the ranks: of diverged replicas
    it would write some tensors of each. `state_dict` therefore makes them equal first (right after
    a converge that is nothing to do), moments included. It is also called, on every rank, to lay
    out a load: there the replicas of a fresh run are equal already.
    """

    def __init__(self, attached: Attached, *, agree: bool = True) -> None:
        self.attached = attached
        self.agree = agree

    def state_dict(self) -> dict[str, Any]:
        """Collective: every rank calls it, as dcp.save and dcp.async_save do."""
        attached = self.attached
        if self.agree:
            attached.scheduler.agree_for_checkpoint()
        fresh = not any(attached.optimizer.state.values())
        with _without_gradients(attached.optimizer if fresh else None):
            model, optimizer = get_state_dict(attached.model, attached.optimizer)
        state = attached.scheduler.state_dict()
        if fresh:
            # torch has made a state of zeros to have one to write; a first step is not a second.
            attached.optimizer.state.clear()
            state["fresh"] = True
        kept = state["hdet"]["phase_state"].pop("converge", {})
        # One value to the checkpoint: a run with another rule, or with none, can read it.
        whole = {"model": model, "optimizer": optimizer, "scheduler": Opaque(state)}
        if attached.scheduler.config.converge.remembers:
            # By bucket of this rank's shards: such a checkpoint loads in the same layout alone.
            whole[self._slices()] = Opaque(kept)
        return whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The order does not matter to us; torch wants the optimizer before the scheduler."""
        attached = self.attached
        set_state_dict(
            attached.model,
            attached.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        scheduler = dict(state["scheduler"].values)
        if scheduler.pop("fresh", False):
            attached.optimizer.state.clear()
        kept = state[self._slices()].values if self._slices() in state else {}
        hdet = scheduler["hdet"]
        scheduler["hdet"] = {**hdet, "phase_state": {**hdet["phase_state"], "converge": kept}}
        attached.scheduler.load_state_dict(scheduler)

    def _slices(self) -> str:
        at = self.attached.replicas
        return f"converge of shard {at.shard_rank} of {at.shard_size}"


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


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    names = {type(m).__name__ for m in model.modules()}
    if "FullyShardedDataParallel" in names:
        raise ValueError(
            "the model is wrapped in FSDP1 (FullyShardedDataParallel): shard it with "
            "torch.distributed.fsdp.fully_shard instead"
        )
    modules: list[FSDPModule] = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} is not sharded: call fully_shard(module, mesh=mesh) on its "
            "blocks and on itself first; a model that fits one device needs no attach, pass it to "
            "the scheduler as model="
        )
    return modules


def _replicas(model: nn.Module, mesh: DeviceMesh | None, replica: str, shard: str) -> Replicas:
    if mesh is None:
        return Replicas.of_sharded(model.parameters())
    if mesh.ndim == 1 and replica not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"the mesh given has one dimension, {mesh.mesh_dim_names}: there are no replicas in "
            f"it. {advise_mesh(dist.get_world_size(), mesh.device_type)}"
        )
    replicas = Replicas.from_mesh(mesh, replica, shard)
    replicas.check_shards(model.parameters())
    return replicas


def _phased(
    scheduler: LRScheduler, config: HDETConfig | None, replicas: Replicas
) -> PhasedScheduler:
    if isinstance(scheduler, PhasedScheduler):
        if config is not None:
            raise ValueError(
                f"{type(scheduler).__name__} has its own settings: pass config= only with a plain "
                "torch scheduler"
            )
        return scheduler
    return AutoLR(scheduler, config, replicas=replicas)


def _check_layout(engine: FSDPEngine, gradients: str, searching: bool) -> None:
    if gradients not in ("shared", "local"):
        raise ValueError(f"gradients must be 'shared' or 'local', got {gradients!r}")
    if engine.native and engine.replicas.size > 1 and (gradients == "local" or searching):
        asked = "gradients='local'" if gradients == "local" else "a search, with local gradients,"
        raise ValueError(
            f"{asked} on a model that is sharded over the whole mesh: HSDP all-reduces "
            "gradients across replicas in every backward. Shard it with fully_shard(module, "
            f"mesh=mesh['shard']) and pass attach(..., mesh=mesh, gradients={gradients!r})"
        )


def _searches(scheduler: LRScheduler, config: HDETConfig, replicas: Replicas) -> bool:
    if isinstance(scheduler, PhasedScheduler):
        return scheduler.searching
    return config.total_steps is not None and searches(config, replicas, config.total_steps)


def _dtensors(model: nn.Module) -> Iterator[Any]:
    return (p for p in model.parameters() if hasattr(p, "device_mesh"))


def local_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The slices of model and optimizer that this rank holds. Every rank calls.

    `Checkpoint` writes one state for all replicas. In the middle of a round the replicas have
    diverged, and each rank saves its own slices to a file of its own.

    Returns:
        {"model": ..., "optimizer": ...} with local tensors in place of DTensors. They share memory
        with the model and the optimizer: write them before the next step.

    Limitations:
        It can be loaded only with the same number of ranks and the same sharding.
    """
    states = get_state_dict(model, optimizer)
    return {k: _local(v) for k, v in zip(("model", "optimizer"), states, strict=True)}


def load_local_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `local_state` returned on this rank; other keys are ignored. Every rank calls."""
    live_model, live_optimizer = get_state_dict(model, optimizer)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=_filled(live_model, state["model"]),
        optim_state_dict=_filled(live_optimizer, state["optimizer"]),
    )


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
