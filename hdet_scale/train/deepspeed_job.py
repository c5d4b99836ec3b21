"""The training job on DeepSpeed."""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale import deepspeed
from hdet_scale.models.gpt import GPT
from hdet_scale.train.saving import Kept, writing


def with_asked(
    config: Mapping[str, Any], hdet: Mapping[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """The DeepSpeed config with what the command line says over it."""
    if args.replay is not None:
        raise ValueError("--replay goes with --engine ddp or fsdp; DeepSpeed's JSON names its own")
    made = copy.deepcopy(dict(config))
    params = made.get("scheduler", {}).get("params", {})
    made["hdet"] = {**made.get("hdet", {}), **hdet}
    for name in hdet:
        params.pop(name, None)
    params |= {} if args.lr is None else {"max_lr": args.lr}
    params |= {} if args.steps is None else {"total_steps": args.steps}
    if args.bf16:
        made["bf16"] = {"enabled": True}
    if args.accumulation is not None:
        made["gradient_accumulation_steps"] = args.accumulation
        made.pop("train_batch_size", None)
    return made


class DeepSpeedJob:
    """A GPT in a DeepSpeed engine; the JSON says everything else."""

    def __init__(self, config: dict[str, Any], model: GPT) -> None:
        self.engine, _, _, self.scheduler = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        self.device: torch.device = self.engine.device

    @property
    def step(self) -> int:
        return int(self.engine.global_steps)

    @property
    def total_steps(self) -> int | None:
        return getattr(self.scheduler, "total_steps", None)

    @property
    def sequences(self) -> int:
        micro = self.engine.train_micro_batch_size_per_gpu()
        return int(micro * self.engine.gradient_accumulation_steps())

    def train_step(self, draw: Callable[[int, int], Any]) -> Tensor:
        parts = self.engine.gradient_accumulation_steps()
        first = self.step * parts
        total = torch.zeros((), device=self.device)
        for part in range(parts):
            inputs, targets = draw(self.engine.train_micro_batch_size_per_gpu(), first + part)
            loss = self.engine(inputs.to(self.device), targets.to(self.device))
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / parts
        return total

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine.module(inputs.to(self.device), targets.to(self.device))
        return loss

    def save(self, run: Path) -> None:
        kept = Kept(engine="deepspeed", ranks=dist.get_world_size(), apart=False)
        with writing(run, self.step, kept) as folder:
            self.engine.save_checkpoint(str(run), tag=folder.name, save_latest=False)
        if dist.get_rank() == 0:
            # What DeepSpeed's own tools read, in one move: a kill leaves the old one or the new.
            fresh = run / "latest.fresh"
            fresh.write_text(f"step-{self.step:08d}", encoding="utf-8")
            os.replace(fresh, run / "latest")

    def resume(self, folder: Path) -> None:
        now = Kept(engine="deepspeed", ranks=dist.get_world_size(), apart=False)
        Kept.read(folder).check(now, folder)
        self.engine.load_checkpoint(str(folder.parent), tag=folder.name)
