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

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet_scale.config import HDETConfig
from hdet_scale.fsdp.sharded import FSDPEngine, sharded_modules
from hdet_scale.fsdp.state import Checkpoint, load_local_state, local_state
from hdet_scale.phases.arguments import with_length
from hdet_scale.phases.build import searches
from hdet_scale.phases.phased import PhasedScheduler
from hdet_scale.schedulers import AutoLR
from hdet_scale.topology import Replicas, advise_mesh, shard_size_of

__all__ = [
    "Attached",
    "Checkpoint",
    "FSDPEngine",
    "attach",
    "build_mesh",
    "load_local_state",
    "local_state",
]

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
    modules = sharded_modules(model)
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
        return self.engine.sharded_model

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

    def checkpoint(self, *, equalize: bool = True) -> Checkpoint:
        """Model, optimizer and scheduler as one Stateful for torch.distributed.checkpoint.

        The snapshot of a watch is not part of it: `save` and `load` below do both.

        Args:
            equalize: False for a load into replicas that have gone bad: laying it out must not
                average them.
        """
        return Checkpoint(self.engine, self.scheduler, equalize=equalize)

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
