"""FSDP2: replicas that are themselves sharded, over a mesh of replicas x shards.

    mesh = build_mesh(replicas=2)                       # or your own init_device_mesh
    for block in model.blocks: fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), ...)
    scheduler = OneCycleAutoLR(optimizer, ...)
    hdet = attach(model, optimizer, scheduler)

Shared gradients are HSDP as it is. For local gradients shard over mesh["shard"] and tell attach
the whole mesh: nothing then crosses replicas between converges. That layout gives shared
gradients too, through a hook behind each reduce-scatter, so that one model can be switched.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet_scale.config import HDETConfig
from hdet_scale.converge.buckets import plan
from hdet_scale.converge.pipeline import distinct
from hdet_scale.engines.averaged import trained
from hdet_scale.phases.assembly import races
from hdet_scale.phases.exploring import Exploring
from hdet_scale.schedulers import AutoLR
from hdet_scale.topology import Replicas, advise_mesh, shard_size_of

logger = logging.getLogger("hdet_scale")


def build_mesh(
    *, replicas: int | None = None, shards: int | None = None, device: str | None = None
) -> DeviceMesh:
    """A mesh of replicas x shards over the world, named "replica" and "shard".

    Consecutive ranks share a replica: its traffic stays on the fast links.
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
    """Let the replicas of a fully_shard-ed model explore; returns a handle that detaches.

    mesh: replicas x shards; found from the model's DTensors when it is not given.
    gradients: "shared" or "local"; what the scheduler says when it is not given.
    scheduler: OneCycleAutoLR or AutoLR; any other torch scheduler is wrapped in an AutoLR with
        `config`, and `handle.scheduler` is the one to step.
    """
    modules = _sharded_modules(model)
    replicas = _replicas(model, mesh, replica, shard)
    mode = gradients or _mode(scheduler, config)
    _check_layout(model, replicas, mode, _searches(scheduler, config, replicas))
    exploring = _exploring(scheduler, config, replicas)
    exploring.rehome(replicas, model, mode)
    hook = _gradient_hook(model, exploring, mode)
    if hook is not None:
        for module in modules:
            module.set_all_reduce_hook(hook)
    return Attached(model, optimizer, exploring, modules if hook is not None else [])


class Attached:
    """What `attach` did, to be used and undone."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Exploring,
        hooked: list[FSDPModule],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._hooked = hooked
        self._unseen = 0
        self._guard = optimizer.register_step_post_hook(self._after_step)
        self._steps = scheduler.steps_done

    @property
    def replicas(self) -> Replicas:
        """This rank's place among replicas x shards."""
        return self.scheduler.replicas

    def _after_step(self, *_: object) -> None:
        """Nobody steps the scheduler: the replicas would drift apart for good."""
        now = self.scheduler.steps_done
        self._unseen = 0 if now != self._steps else self._unseen + 1
        self._steps = now
        if self._unseen == max(10, self.scheduler.interval):
            logger.warning(
                "%d optimizer steps without a scheduler.step(loss): the replicas do not converge; "
                "call it after every optimizer.step()",
                self._unseen,
            )

    def traffic(self) -> Traffic:
        """Bytes that a converge moves on this rank; works on a model that is not materialised."""
        return traffic(self.scheduler, self.replicas)

    def finalize(self) -> None:
        """Make the replicas agree; at the end of a run, on every rank."""
        self.scheduler.finalize()

    def checkpoint(self, *, agree: bool = True) -> Checkpoint:
        """Model, optimizer and scheduler as one Stateful for torch.distributed.checkpoint.

        agree=False for a load into replicas that have gone bad: laying it out must not average.
        """
        return Checkpoint(self, agree=agree)

    def detach(self) -> None:
        """Take every hook back; the model stays sharded as it is."""
        self._guard.remove()
        for module in self._hooked:
            module.set_all_reduce_hook(None)  # type: ignore[arg-type]
        self._hooked = []
        self.scheduler.detach()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a converge costs on this rank."""

    elements: int
    """Elements of the local shards that are averaged."""
    bytes_kept: int
    """Their bytes."""
    wire_bytes: int
    """Bytes that this rank sends in a converge, fp32 on the wire."""
    buckets: int
    """Collectives of a converge."""


def traffic(scheduler: Exploring, replicas: Replicas) -> Traffic:
    """Planned with the real planner, on the shapes alone."""
    tensors = distinct(scheduler.averaged_tensors())
    made = plan(tensors, bucket_bytes=scheduler.bucket_bytes, itemsize=4)
    n = replicas.size
    return Traffic(
        elements=made.numel,
        bytes_kept=sum(t.nbytes for t in tensors),
        wire_bytes=made.numel * 4 * 2 * (n - 1) // n,
        buckets=len(made.buckets),
    )


@dataclass
class Kept:
    """A dict that is one value to the checkpoint, whatever is in it."""

    values: dict[str, Any]


class Checkpoint:
    """A Stateful over model, optimizer and scheduler that never writes a mixture of replicas.

    torch.distributed.checkpoint spreads the writing of what it takes for copies over the ranks:
    of replicas that are apart it would write some tensors of each. `state_dict` therefore makes
    them agree first (right after a converge that is nothing to do), moments included. It is also
    called, on every rank, to lay out a load: there the replicas of a fresh run agree already.
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
        kept = state["hdet"].pop("converge")
        # One value to the checkpoint: a run with another rule, or with none, can read it.
        whole = {"model": model, "optimizer": optimizer, "scheduler": Kept(state)}
        if attached.scheduler.converge_remembers:
            # By bucket of this rank's shards: such a checkpoint loads in the same layout alone.
            whole[self._slices("converge")] = Kept(kept)
        if attached.scheduler.goes_back and attached.replicas.shard_size > 1:
            whole[self._slices("mark")] = Kept({"mark": attached.scheduler.mark_state()})
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
        kept = state[self._slices("converge")].values if self._slices("converge") in state else {}
        scheduler["hdet"] = {**scheduler["hdet"], "converge": kept}
        attached.scheduler.load_state_dict(scheduler)
        if self._slices("mark") in state:
            attached.scheduler.load_mark(state[self._slices("mark")].values["mark"])

    def _slices(self, what: str) -> str:
        at = self.attached.replicas
        return f"{what} of shard {at.shard_rank} of {at.shard_size}"


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


def _mode(scheduler: LRScheduler, config: HDETConfig | None) -> str:
    if isinstance(scheduler, Exploring):
        return scheduler.gradients_of_the_run
    return (config or HDETConfig()).gradients


def _exploring(scheduler: LRScheduler, config: HDETConfig | None, replicas: Replicas) -> Exploring:
    if isinstance(scheduler, Exploring):
        if config is not None:
            raise ValueError(
                f"{type(scheduler).__name__} has its own settings: pass config= only with a plain "
                "torch scheduler"
            )
        return scheduler
    return AutoLR(scheduler, config, replicas=replicas)


def _check_layout(model: nn.Module, replicas: Replicas, gradients: str, searches: bool) -> None:
    if gradients not in ("shared", "local"):
        raise ValueError(f"gradients must be 'shared' or 'local', got {gradients!r}")
    if _is_native(model) and replicas.size > 1 and (gradients == "local" or searches):
        asked = "gradients='local'" if gradients == "local" else "a race, with its local gradients,"
        raise ValueError(
            f"{asked} on a model that is sharded over the whole mesh: HSDP all-reduces "
            "gradients across replicas in every backward. Shard it with fully_shard(module, "
            f"mesh=mesh['shard']) and pass attach(..., mesh=mesh, gradients={gradients!r})"
        )


def _gradient_hook(
    model: nn.Module, exploring: Exploring, gradients: str
) -> Callable[[Tensor], None] | None:
    """What runs behind each reduce-scatter; None where the layout does it already."""
    alone = gradients == "local" and not exploring.searching
    if alone or _is_native(model) or exploring.replicas.size == 1:
        return None

    def average(gradient: Tensor) -> None:
        sharers = exploring.sharers
        if sharers.size > 1:
            gradient.div_(sharers.size)  # before the sum, which could overflow in fp16
            dist.all_reduce(gradient, group=sharers.connected())

    return average


def _is_native(model: nn.Module) -> bool:
    """HSDP: a mesh of two dimensions, whose replicas fully_shard itself keeps in step."""
    return any(p.device_mesh.ndim == 2 for p in _dtensors(model))


def _searches(scheduler: LRScheduler, config: HDETConfig | None, replicas: Replicas) -> bool:
    if isinstance(scheduler, Exploring):
        return scheduler.searching
    return config is not None and races(config, replicas, config.total_steps or 0)


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
