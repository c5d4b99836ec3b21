"""Modes: ways to train the same GPT that take turns in one process group.

ddp             DistributedDataParallel, AdamW(fused), OneCycleLR
shared          the same with OneCycleAutoLR: shared gradients, a blocking converge
overlap         the converge in the background
local           local gradients; parameters and moments are averaged
local-own       local gradients; each replica keeps its own moments
hsdp            fully_shard over replicas x shards, OneCycleLR
hsdp-hdet       the same with OneCycleAutoLR attached
zero2, zero3    DeepSpeed over all ranks, OneCycleLR
zero2-hdet ..   DeepSpeed with replicas, HDETOneCycle
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet_scale import ConvergePolicy, OneCycleAutoLR, fsdp
from hdet_scale.models.gpt import GPT, GPTConfig
from hdet_scale.topology import local

GPT2_VOCABULARY = 50257
SIZES = {
    "tiny": GPTConfig.named("tiny"),
    "mini": GPTConfig.named("mini"),
    "124m": GPTConfig.named("125m", vocabulary=GPT2_VOCABULARY),
    "350m": GPTConfig.named("350m", vocabulary=GPT2_VOCABULARY),
    "1.3b": GPTConfig.named("1.3b", vocabulary=GPT2_VOCABULARY),
}
ON_DDP = ("ddp", "shared", "overlap", "local", "local-own")
NAMES = (*ON_DDP, "hsdp", "hsdp-hdet", "zero2", "zero2-hdet", "zero3", "zero3-hdet")
MAX_LR, SPREAD, TOTAL = 1e-4, 1 / 9, 10**6


@dataclass
class Mode:
    """One model in training."""

    name: str
    step: Callable[[Tensor, Tensor], None]
    """A whole optimizer step on a batch."""
    model: nn.Module
    optimizer: Optimizer
    scheduler: Any

    @property
    def converges(self) -> bool:
        """Whether it is HDET."""
        return isinstance(self.scheduler, OneCycleAutoLR)

    @property
    def kept_bytes(self) -> int:
        """Parameters and what the optimizer keeps, on this rank."""
        params = [p for g in self.optimizer.param_groups for p in g["params"]]
        states = [v for p in params for v in self.optimizer.state.get(p, {}).values()]
        return sum(local(t).nbytes for t in [*params, *states] if isinstance(t, Tensor))


def build(
    name: str, config: GPTConfig, *, interval: int, batch: int, shards: int, device: torch.device
) -> Mode:
    """The mode of that name; collective."""
    if name not in NAMES:
        raise ValueError(f"no mode called {name!r}: choose among {', '.join(NAMES)}")
    model = GPT(config).to(device)
    if name in ON_DDP:
        return _on_ddp(name, model, interval)
    if name.startswith("hsdp"):
        return _on_fsdp(name, model, interval, shards)
    return _on_deepspeed(name, model, interval, batch, shards)


def _policy(name: str) -> ConvergePolicy:
    if name == "overlap":
        return ConvergePolicy(overlap=True)
    return ConvergePolicy(moments=False if name == "local-own" else None)


def _schedule(name: str, optimizer: Optimizer, interval: int, **more: Any) -> OneCycleLR:
    if name in ("ddp", "hsdp"):
        return OneCycleLR(optimizer, MAX_LR, TOTAL)
    return OneCycleAutoLR(
        optimizer,
        MAX_LR,
        TOTAL,
        auto_lr_warmup_steps=0,
        ensemble_lr_spread_ratio=SPREAD,
        model_sync_interval=interval,
        enable_auto_lr=True,
        gradients="local" if name.startswith("local") else "shared",
        converge=_policy(name),
        **more,
    )


def _torch_mode(name: str, model: nn.Module, optimizer: Optimizer, scheduler: OneCycleLR) -> Mode:
    def step(inputs: Tensor, targets: Tensor) -> None:
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, OneCycleAutoLR):
            scheduler.step(loss.detach())
        else:
            scheduler.step()

    return Mode(name, step, model, optimizer, scheduler)


def _on_ddp(name: str, model: nn.Module, interval: int) -> Mode:
    wrapped = DistributedDataParallel(model)
    optimizer = AdamW(wrapped.parameters(), lr=MAX_LR, fused=True)
    more = {} if name == "ddp" else {"model": wrapped}
    return _torch_mode(name, wrapped, optimizer, _schedule(name, optimizer, interval, **more))


def _on_fsdp(name: str, model: GPT, interval: int, shards: int) -> Mode:
    mesh = fsdp.build_mesh(shards=shards, device=next(model.parameters()).device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=MAX_LR, fused=True)
    scheduler = _schedule(name, optimizer, interval)
    if isinstance(scheduler, OneCycleAutoLR):
        fsdp.attach(model, optimizer, scheduler, mesh=mesh)
    return _torch_mode(name, model, optimizer, scheduler)


def _on_deepspeed(name: str, model: nn.Module, interval: int, batch: int, shards: int) -> Mode:
    # What DeepSpeed's launcher would have set.
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    import deepspeed
    from deepspeed.utils import groups, logger

    from hdet_scale.deepspeed import initialize

    logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of calls that are DeepSpeed's own
    groups.mpu = None  # the last engine's groups are not this one's
    adam = {"lr": MAX_LR, "torch_adam": True, "fused": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": int(name[4])},
        "optimizer": {"type": "AdamW", "params": adam},
    }
    start: Any = deepspeed.initialize
    schedule: Any = functools.partial(OneCycleLR, max_lr=MAX_LR, total_steps=TOTAL)
    if name.endswith("-hdet"):
        start, schedule = initialize, None
        cycle = {"max_lr": MAX_LR, "total_steps": TOTAL}
        settings["scheduler"] = {"type": "HDETOneCycle", "params": cycle}
        paper = {"rule": "paper", "spread": SPREAD}
        settings["hdet"] = {"shards": shards, "interval": interval, **paper}
    engine, _, _, scheduler = start(
        model=model,
        model_parameters=model.parameters(),
        config=settings,
        lr_scheduler=schedule,
        dist_init_required=False,
    )

    def step(inputs: Tensor, targets: Tensor) -> None:
        engine.backward(engine(inputs, targets))
        engine.step()

    return Mode(name, step, engine, engine.basic_optimizer, scheduler)


def draw(config: GPTConfig, *, batch: int, context: int, step: int) -> tuple[Tensor, Tensor]:
    """Random tokens of (step, rank): how fast they are learnt from does not depend on them."""
    generator = torch.Generator().manual_seed(1000003 * step + dist.get_rank())
    tokens = torch.randint(config.vocabulary, (batch, context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
