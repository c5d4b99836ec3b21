"""Arguments of the schedulers: what is refused before anything is written to the optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hdet_scale.config import HDETConfig
from hdet_scale.phases.phased import PhasedScheduler


def check_inner(scheduler: object) -> LRScheduler:
    """The scheduler that AutoLR wraps, or an error."""
    if isinstance(scheduler, PhasedScheduler):
        raise TypeError(f"{type(scheduler).__name__} explores already: do not wrap it again")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau follows each rank's own metric, so that there is no shared base: "
            "wrap a scheduler of the step count instead (cosine, LambdaLR, SequentialLR, ...)"
        )
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"AutoLR wraps a torch LRScheduler, got {type(scheduler).__name__}: pass e.g. "
            "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)"
        )
    return scheduler


def length_of(total: int | None, epochs: int | None, per_epoch: int | None) -> int | None:
    """As torch infers it; None where torch itself will refuse."""
    if total is not None:
        return total
    if isinstance(epochs, int) and isinstance(per_epoch, int):
        return epochs * per_epoch
    return None


def check_takeover(config: HDETConfig, steps: int | None) -> None:
    """Refuse a rule that would take over after the end of the run."""
    if config.rule == "paper" and steps is not None and config.warmup_steps >= steps:
        raise ValueError(
            f"auto_lr_warmup_steps={config.warmup_steps} (the key warmup_steps) leaves nothing of "
            f"total_steps={steps} to steer: choose a smaller one, or enable_auto_lr=False "
            "(rule='none')"
        )


def check_groups(optimizer: Optimizer, given: Mapping[str, object]) -> None:
    """What torch would refuse only after it has written to the param groups."""
    n = len(optimizer.param_groups)
    for name, value in given.items():
        if isinstance(value, list | tuple) and len(value) != n:
            raise ValueError(
                f"{name} has {len(value)} values for {n} param groups, got {value}: give one for "
                "each param group, or a single number for all"
            )
    if "max_momentum" in given and not {"momentum", "betas"} & set(optimizer.defaults):
        raise ValueError(
            f"{type(optimizer).__name__} has no momentum and no betas to cycle, got "
            "cycle_momentum=True: pass cycle_momentum=False"
        )


def with_length(config: HDETConfig, scheduler: object) -> HDETConfig:
    """The config with the length of the run, where the scheduler knows it and the config does not.

    Args:
        config: the user's.
        scheduler: a torch scheduler; OneCycleLR has `total_steps`.
    """
    known = getattr(scheduler, "total_steps", None)
    if config.total_steps is not None or not isinstance(known, int):
        return config
    return dataclasses.replace(config, total_steps=known)


def with_passes(config: HDETConfig, epochs: object) -> HDETConfig:
    """The config with the passes over the data, where the epochs are given and it has none.

    Args:
        config: the user's.
        epochs: OneCycleLR's argument; torch itself refuses what is not valid.
    """
    if config.passes is not None or not isinstance(epochs, int) or epochs < 1:
        return config
    return dataclasses.replace(config, passes=float(epochs))
