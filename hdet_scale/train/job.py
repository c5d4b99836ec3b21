"""TrainingJob: what the training loop asks of an engine, and how the command line chooses one.

`torch_job` (DDP, FSDP2) and `deepspeed_job` implement it. The options of the command line replace
those of the config file. The engine's module is imported only when it is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hdet_scale.config import HDETConfig
from hdet_scale.converge.checks import read
from hdet_scale.models.gpt import GPT, GPTConfig

if TYPE_CHECKING:
    from hdet_scale.train.torch_job import Recipe

ENGINES = ("ddp", "fsdp", "deepspeed")
HDET_KEYS = tuple(
    f.name for f in dataclasses.fields(HDETConfig) if f.name not in ("total_steps", "seed")
)
"""Keys of HDETConfig that are options of `hdet train`; its --steps and --seed are the run's own."""


class TrainingJob(Protocol):
    """One engine's run. Every rank calls every method."""

    scheduler: Any
    device: torch.device

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def total_steps(self) -> int | None:
        """The last step of the schedule; None if the schedule has no end."""
        ...

    @property
    def sequences(self) -> int:
        """How many sequences a rank draws for an optimizer step."""
        ...

    def train_step(self, draw: Callable[[int, int], Any]) -> Tensor:
        """Do one optimizer step.

        Args:
            draw: `draw(size, index)` returns the inputs and targets of micro-batch `index`.

        Returns:
            The mean loss of this rank's micro-batches, on the device.
        """
        ...

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of this replica's weights on a batch, for a probe."""
        ...

    def save(self, run: Path) -> None:
        """Write a checkpoint to a folder of the run. In the middle of a round every replica
        writes its own state. Collective."""
        ...

    def resume(self, folder: Path) -> None:
        """Load a checkpoint. Collective."""
        ...


def build_job(args: argparse.Namespace, shape: GPTConfig) -> TrainingJob:
    """Build the model and the engine that the command line and its config file ask for.

    Args:
        args: what `command.parse` returns.
        shape: of the GPT.

    Raises:
        ValueError, TypeError: if an option cannot be used with the engine.
        FileNotFoundError: if the config file does not exist.
    """
    path = args.deepspeed_config or args.config
    values = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    build = _deepspeed_job if args.engine == "deepspeed" else _torch_job
    return build(args, values, shape)


def hdet_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the command line that replace those of the config's "hdet" block."""
    return {key: getattr(args, key) for key in HDET_KEYS if hasattr(args, key)}


def _deepspeed_job(
    args: argparse.Namespace, values: dict[str, Any], shape: GPTConfig
) -> TrainingJob:
    from hdet_scale.train.deepspeed_job import DeepSpeedJob, with_overrides

    config = with_overrides(values, hdet_overrides(args), args)
    return DeepSpeedJob(config, GPT(shape, seed=args.seed))


def _torch_job(args: argparse.Namespace, values: dict[str, Any], shape: GPTConfig) -> TrainingJob:
    from hdet_scale.train.torch_job import Recipe, TorchJob

    from_file = read(Recipe, {k: v for k, v in values.items() if k != "hdet"}, str(args.config))
    recipe = _recipe(args, from_file)
    options = {**values.get("hdet", {}), **hdet_overrides(args)}
    if options.get("rule", "auto") == "auto":  # a search takes a share of the run
        options.setdefault("total_steps", recipe.schedule.get("total_steps"))
    hdet = HDETConfig.from_dict(options)
    return TorchJob(args.engine, GPT(shape, seed=args.seed), recipe, hdet)


def _recipe(args: argparse.Namespace, recipe: Recipe) -> Recipe:
    """The recipe with the options of the command line in place of its own."""
    schedule = dict(recipe.schedule)
    schedule |= {} if args.steps is None else {"total_steps": args.steps}
    schedule |= {} if args.lr is None else {"max_lr": args.lr}
    if args.replay is not None:
        schedule = {"replay": str(args.replay)}
    changes: dict[str, Any] = {"schedule": schedule}
    changes |= {"dtype": "bf16"} if args.bf16 else {}
    changes |= {} if args.accumulation is None else {"accumulation": args.accumulation}
    return dataclasses.replace(recipe, **changes)
