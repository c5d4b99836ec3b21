"""TorchJob: the training job on DDP, and on FSDP2 over replicas x shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from hdet_scale import fsdp
from hdet_scale.config import HDETConfig
from hdet_scale.models.gpt import GPT, Block
from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.schedulers import AutoLR, ReplayLR
from hdet_scale.topology import Replicas
from hdet_scale.train.saving import CheckpointInfo, writing

COMPUTE_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the config file of a run says beside its "hdet" block."""

    batch: int = 8
    """Sequences in a rank's micro-batch."""
    accumulation: int = 1
    """Micro-batches in an optimizer step."""
    clip: float = 1.0
    """Largest norm of a replica's gradient."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Arguments of FusedAdamW."""
    schedule: dict[str, Any] = field(
        default_factory=lambda: {"max_lr": 1e-3, "total_steps": 1000, "cycle_momentum": False}
    )
    """Arguments of OneCycleLR, the schedule that the base follows until a rule moves it. Or
    {"replay": file}: a schedule that hdet replay wrote."""
    dtype: str = "fp32"
    """What forward and backward compute in: "fp32" or "bf16"; parameters stay fp32."""

    def __post_init__(self) -> None:
        for name in ("batch", "accumulation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if self.dtype not in COMPUTE_DTYPES:
            raise ValueError(f"dtype must be one of {list(COMPUTE_DTYPES)}, got {self.dtype!r}")


class TorchJob:
    """A GPT on DDP or FSDP2. Implements `TrainingJob`; every rank calls every method.

    Args:
        engine: "ddp" or "fsdp".
        model: with the same weights on every rank.
        recipe: batches, optimizer, schedule.
        hdet: options of the replicas. On DDP every rank is a replica; on FSDP2 the default is one
            shard a replica.
    """

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
        schedule = _schedule(self.optimizer, recipe.schedule)
        self.total_steps: int | None = schedule.total_steps
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
        # A search needs local gradients for a while, which HSDP's own all-reduce rules out.
        over = mesh["shard"] if hdet.gradients == "local" or hdet.searches else mesh
        # Gradients are reduced in fp32, also when the forward computes in bf16.
        bf16 = self.recipe.dtype == "bf16"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
        )
        for block in model.modules():
            if isinstance(block, Block):
                fully_shard(block, mesh=over, mp_policy=policy)
        fully_shard(model, mesh=over, mp_policy=policy)
        return model

    @property
    def step(self) -> int:
        return self.scheduler.steps_done

    @property
    def sequences(self) -> int:
        return self.recipe.batch * self.recipe.accumulation

    def train_step(self, draw: Callable[[int, int], Any]) -> Tensor:
        parts = self.recipe.accumulation
        total = torch.zeros((), device=self.device)
        # FSDP casts by its own policy.
        casts = self.engine == "ddp" and self.recipe.dtype == "bf16"
        for part in range(parts):
            inputs, targets = draw(self.recipe.batch, self.step * parts + part)
            self._sync(part == parts - 1)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=casts):
                loss = self.model(inputs.to(self.device), targets.to(self.device)) / parts
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step(total)
        return total

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # Not through DDP's forward, which synchronises replicas: each computes its own loss.
        model = self.model.module if self.engine == "ddp" else self.model
        loss: Tensor = model(inputs.to(self.device), targets.to(self.device))
        return loss

    def _sync(self, last: bool) -> None:
        """Reduce gradients over ranks only with the last micro-batch of a step."""
        if self.engine == "fsdp":
            self.model.set_requires_gradient_sync(last)
        elif self.scheduler.gradients == "shared":
            self.model.require_backward_grad_sync = last

    # -- checkpoints ----------------------------------------------------------------------------

    def _info(self, diverged: bool = False) -> CheckpointInfo:
        return CheckpointInfo(engine=self.engine, ranks=dist.get_world_size(), diverged=diverged)

    def save(self, run: Path) -> None:
        diverged = not self.scheduler.at_boundary
        if not diverged:
            self.scheduler.equalize()
        with writing(run, self.step, self._info(diverged)) as folder:
            if diverged:
                torch.save(self._own_state(), folder / _own_file())
            elif self.engine == "fsdp":
                self.attached.save(folder)
            elif dist.get_rank() == 0:
                torch.save(self._state(), folder / "job.pt")

    def resume(self, folder: Path) -> None:
        info = CheckpointInfo.read(folder)
        info.check(self._info(), folder)
        if info.diverged:
            self._load_own(torch.load(folder / _own_file(), map_location=self.device))
        elif self.engine == "fsdp":
            self.attached.load(folder)
        else:
            self._load(torch.load(folder / "job.pt", map_location=self.device))

    def _state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: part.state_dict() for name, part in parts.items()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def _own_state(self) -> dict[str, Any]:
        """What this rank holds, for its own file in the middle of a round."""
        if self.engine == "ddp":
            state = self._state()
        else:
            slices = fsdp.local_state(self.model, self.optimizer)
            state = {**slices, "scheduler": self.scheduler.state_dict()}
        return {**state, "replica": self.scheduler.replica_state_dict()}

    def _load_own(self, state: Mapping[str, Any]) -> None:
        if self.engine == "ddp":
            self._load(state)
        else:
            fsdp.load_local_state(self.model, self.optimizer, state)
            self.scheduler.load_state_dict(state["scheduler"])
        self.scheduler.load_replica_state_dict(state["replica"])


def _schedule(optimizer: FusedAdamW, options: Mapping[str, Any]) -> OneCycleLR | ReplayLR:
    if "replay" in options:
        return ReplayLR(optimizer, options["replay"])
    return OneCycleLR(optimizer, **options)


def _own_file() -> str:
    return f"rank-{dist.get_rank():05d}.pt"
