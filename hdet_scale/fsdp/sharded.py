"""Replicas that fully_shard has sharded: what every engine is asked, and how FSDP2 answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from hdet_scale.engines.protocol import Engine
from hdet_scale.topology import Replicas


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
        self.sharded_model, self.modules = model, modules
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
            keep_until_reduced(gradient)
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


def keep_until_reduced(gradient: Tensor) -> None:
    """Keep a buffer's memory for the stream that reduces it, which is the current one.

    fully_shard allocates the buffer on another stream, and with a reduce dtype of its own it lets
    go of it right after the cast has been queued: the next reduce-scatter would be given the
    memory while this all-reduce still runs.
    """
    if gradient.device.type == "cuda":
        gradient.record_stream(torch.cuda.current_stream(gradient.device))


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The FSDP2 modules of a model, or an error where there are none."""
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


def _dtensors(model: nn.Module) -> Iterator[Any]:
    return (p for p in model.parameters() if hasattr(p, "device_mesh"))
