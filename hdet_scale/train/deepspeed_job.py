"""DeepSpeedJob: the training job on DeepSpeed, ZeRO 0 to 3."""

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
from hdet_scale.train.saving import CheckpointInfo, writing


def with_overrides(
    config: Mapping[str, Any], hdet: Mapping[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """A copy of a DeepSpeed config with the options of the command line in place of its own.

    Args:
        config: DeepSpeed's JSON.
        hdet: options that replace those of its "hdet" block and of the scheduler's parameters.
        args: the command line, for --lr, --steps, --bf16 and --accumulation.

    Raises:
        ValueError: for --replay, since DeepSpeed's JSON names its own scheduler.
    """
    if args.replay is not None:
        raise ValueError(
            f"--replay {args.replay} with --engine deepspeed, whose JSON names its own scheduler: "
            "use --engine ddp or fsdp"
        )
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
    """A GPT in a DeepSpeed engine. Implements `TrainingJob`; every rank calls every method.

    Args:
        config: DeepSpeed's JSON with an "hdet" block. It sets everything but the model.
        model: with the same weights on every rank.
    """

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
        with writing(run, self.step, self._info()) as folder:
            self.engine.save_checkpoint(str(run), tag=folder.name, save_latest=False)
        if dist.get_rank() == 0:
            # DeepSpeed's own tools read this file. It is replaced in one move, so that a kill
            # leaves either the old one or the new one.
            fresh = run / "latest.fresh"
            fresh.write_text(f"step-{self.step:08d}", encoding="utf-8")
            os.replace(fresh, run / "latest")

    def resume(self, folder: Path) -> None:
        CheckpointInfo.read(folder).check(self._info(), folder)
        self.engine.load_checkpoint(str(folder.parent), tag=folder.name)

    def _info(self) -> CheckpointInfo:
        """`diverged` is False: in the middle of a round the engine itself writes each replica's
        own state, and checks it when it loads."""
        return CheckpointInfo(engine="deepspeed", ranks=dist.get_world_size(), diverged=False)
