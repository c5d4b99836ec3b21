"""The training job on DeepSpeed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hdet_scale import deepspeed
from hdet_scale.model import GPT


class DeepSpeedJob:
    """A GPT in a DeepSpeed engine; the JSON says everything else."""

    def __init__(self, args: argparse.Namespace, model: GPT) -> None:
        self.engine, _, _, self.scheduler = deepspeed.initialize(
            args=args, model=model, model_parameters=model.parameters()
        )

    @property
    def step(self) -> int:
        return int(self.engine.global_steps)

    @property
    def total_steps(self) -> int | None:
        return getattr(self.scheduler, "total_steps", None)

    def train_step(self, draw: Callable[[int, int], Any]) -> None:
        parts = self.engine.gradient_accumulation_steps()
        first = self.step * parts
        for part in range(parts):
            inputs, targets = draw(self.engine.train_micro_batch_size_per_gpu(), first + part)
            loss = self.engine(inputs.to(self.engine.device), targets.to(self.engine.device))
            self.engine.backward(loss)
            self.engine.step()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder))

    def resume(self, folder: Path) -> None:
        if (folder / "latest").is_file():
            self.engine.load_checkpoint(str(folder))
