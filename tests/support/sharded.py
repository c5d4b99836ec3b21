"""A small model that is trained on any layout of replicas x shards, and on DDP beside it.

World rank w of R x S belongs to replica w // S. A DDP run of R ranks in which replica r takes
the batches of all its S shards is the same computation: that is the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hdet_scale import OneCycleAutoLR, Replicas, fsdp

WIDTH, BATCH = 12, 4


def build_model() -> nn.Sequential:
    """Odd sizes: rows do not divide by the shards, and a bias of one leaves shards empty."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 17), nn.Tanh(), nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, 1)
    )


def batch(step: int, rank: int) -> Tensor:
    g = torch.Generator().manual_seed(10_000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=g)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def scheduler_of(optimizer: Any, steps: int, **options: Any) -> OneCycleAutoLR:
    chosen: dict[str, Any] = {
        "ensemble_lr_spread_ratio": 0.2,
        "model_sync_interval": 8,
        "auto_lr_warmup_steps": 1,
        "enable_auto_lr": True,
        "loss_scale": 0.1,
    }
    return OneCycleAutoLR(optimizer, 0.02, total_steps=2 * steps, **{**chosen, **options})


class Sharded:
    """The model under fully_shard, attached."""

    def __init__(
        self,
        shards: int,
        gradients: str = "shared",
        *,
        steps: int = 50,
        native: bool | None = None,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        self.mesh = fsdp.build_mesh(shards=shards, device="cpu")
        native = gradients == "shared" if native is None else native
        over = self.mesh if native else self.mesh["shard"]
        self.model = build_model()
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=over)
        fully_shard(self.model, mesh=over)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)  # type: ignore[call-arg]
        place = Replicas.from_mesh(self.mesh)
        self.scheduler = scheduler_of(self.optimizer, steps, replicas=place, **options)
        self.hdet = fsdp.attach(
            self.model, self.optimizer, self.scheduler, mesh=self.mesh, gradients=gradients
        )

    def train(self, rank: int, first: int, last: int, clip: float | None = 1.0) -> None:
        for step in range(first, last):
            loss = loss_of(self.model, batch(step, rank))
            self.optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.scheduler.step(loss)

    def full(self) -> list[Tensor]:
        """Whole parameters and moments; collective over the shards of a replica."""
        states = [self.optimizer.state[p] for p in self.model.parameters()]
        tensors = [*self.model.parameters(), *(s["exp_avg"] for s in states if "exp_avg" in s)]
        return [t.full_tensor().detach().clone() for t in tensors]  # type: ignore[attr-defined]

    def local(self) -> list[Tensor]:
        return [p.to_local().detach().clone() for p in self.model.parameters()]  # type: ignore[operator]


def on_ddp(
    rank: int, size: int, shards: int, gradients: str, steps: int
) -> tuple[list[Tensor], list[float], list[Tensor]]:
    """The reference: replica `rank` takes the batches of its shards."""
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = scheduler_of(optimizer, steps, model=model, gradients=gradients)
    for step in range(steps):
        x = torch.cat([batch(step, rank * shards + s) for s in range(shards)])
        loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step(loss)
    diverged = [p.detach().clone() for p in model.parameters()]
    scheduler.finalize()
    return diverged, scheduler.get_base_lr(), [p.detach().clone() for p in model.parameters()]


def on_fsdp(
    rank: int, size: int, shards: int, gradients: str, steps: int, native: bool | None
) -> tuple[list[Tensor], list[float], list[Tensor]]:
    run = Sharded(shards, gradients, steps=steps, native=native)
    run.train(rank, 0, steps)
    count = len(list(run.model.parameters()))
    diverged = run.full()[:count]
    run.hdet.finalize()
    return diverged, run.scheduler.get_base_lr(), run.full()[:count]
