"""The training job on torch alone: DDP, and FSDP2 over replicas x shards."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from hdet_scale import fsdp
from hdet_scale.config import HDETConfig
from hdet_scale.model import GPT, Block
from hdet_scale.optim import FusedAdamW
from hdet_scale.schedulers import AutoLR
from hdet_scale.topology import Replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a run of ours decides beside HDET."""

    batch: int = 8
    """Sequences of a rank's micro-batch."""
    accumulation: int = 1
    """Micro-batches of an optimizer step."""
    clip: float = 1.0
    """Largest norm of a replica's gradient."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Arguments of FusedAdamW."""
    schedule: dict[str, Any] = field(default_factory=lambda: {"max_lr": 1e-3, "total_steps": 1000})
    """Arguments of OneCycleLR: the base before any steering."""


class TorchJob:
    """A GPT on DDP or FSDP2; every rank calls every method."""

    def __init__(self, engine: str, model: GPT, recipe: Recipe, hdet: HDETConfig) -> None:
        self.engine, self.recipe = engine, recipe
        self._mesh: DeviceMesh | None = None
        self._replicas: Replicas | None = None
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        build = self._on_fsdp if engine == "fsdp" else self._on_ddp
        self.model: Any = build(model.to(self.device), hdet)
        self.optimizer = FusedAdamW(self.model.parameters(), **recipe.optimizer)
        schedule = OneCycleLR(self.optimizer, **recipe.schedule)
        wrapped = self.model if engine == "ddp" else None
        self.scheduler = AutoLR(schedule, hdet, model=wrapped, replicas=self._replicas)
        if engine == "fsdp":
            self.attached = fsdp.attach(
                self.model,
                self.optimizer,
                self.scheduler,
                mesh=self._mesh,
                gradients=hdet.gradients,
            )

    def _on_ddp(self, model: GPT, hdet: HDETConfig) -> nn.Module:
        for name in ("shards", "replicas"):
            value, ranks = getattr(hdet, name), 1 if name == "shards" else dist.get_world_size()
            if value not in ("auto", ranks):
                raise ValueError(
                    f"{name}={value} with --engine ddp, where every rank is a whole replica "
                    f"({name}={ranks}): leave it out, or use --engine fsdp"
                )
        return DistributedDataParallel(model)

    def _on_fsdp(self, model: GPT, hdet: HDETConfig) -> nn.Module:
        replicas, shards = hdet.replicas, hdet.shards
        if replicas == shards == "auto":
            shards = 1
        mesh = self._mesh = fsdp.build_mesh(
            replicas=None if isinstance(replicas, str) or shards != "auto" else replicas,
            shards=None if isinstance(shards, str) else shards,
            device=self.device.type,
        )
        if isinstance(replicas, int) and mesh.size(0) != replicas:
            raise ValueError(
                f"replicas={replicas} x shards={shards} is not the world of "
                f"{dist.get_world_size()} ranks: leave one of them out"
            )
        self._replicas = Replicas.from_mesh(mesh)
        over = mesh["shard"] if hdet.gradients == "local" else mesh
        for block in model.modules():
            if isinstance(block, Block):
                fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
        return model

    @property
    def step(self) -> int:
        return self.scheduler.last_epoch

    @property
    def total_steps(self) -> int | None:
        return int(self.recipe.schedule["total_steps"])

    def train_step(self, draw: Callable[[int, int], Any]) -> None:
        parts = self.recipe.accumulation
        total = torch.zeros((), device=self.device)
        for part in range(parts):
            inputs, targets = draw(self.recipe.batch, self.step * parts + part)
            self._sync(part == parts - 1)
            loss: Tensor = self.model(inputs.to(self.device), targets.to(self.device)) / parts
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step(total)

    def _sync(self, last: bool) -> None:
        """Gradients cross ranks with the last micro-batch alone."""
        if self.engine == "fsdp":
            self.model.set_requires_gradient_sync(last)
        elif self.scheduler.gradients == "shared":
            self.model.require_backward_grad_sync = last

    # -- checkpoints: a folder for each, whole once its name has no "partial" in it ---------------

    def save(self, folder: Path) -> None:
        self.scheduler.agree_for_checkpoint()
        partial, whole = folder / f"partial-{self.step}", folder / f"step-{self.step:08d}"
        if self.engine == "fsdp":
            save({"job": self.attached.checkpoint()}, checkpoint_id=str(partial))
        elif dist.get_rank() == 0:
            partial.mkdir(parents=True, exist_ok=True)
            torch.save(self._state(), partial / "job.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            partial.rename(whole)
        dist.barrier()

    def resume(self, folder: Path) -> None:
        found = sorted(folder.glob("step-*"))
        if not found:
            return
        if self.engine == "fsdp":
            load({"job": self.attached.checkpoint()}, checkpoint_id=str(found[-1]))
            return
        state = torch.load(found[-1] / "job.pt", map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def _state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: part.state_dict() for name, part in parts.items()}
