"""Schedules that a DeepSpeed config can name: HDETOneCycle and HDETAutoLR.

    "scheduler": {"type": "HDETOneCycle", "params": {"max_lr": 3e-4, "total_steps": 10000}}

DeepSpeed looks a scheduler's type up as an attribute of deepspeed.runtime.lr_schedules and calls
it with its own optimizer. Where the replicas are and what is averaged is known to
`hdet_scale.deepspeed.initialize`, which leaves it in `building` meanwhile.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from hdet_scale.config import HDETConfig
from hdet_scale.deepspeed.partitions import ZeroEngine, engine_of
from hdet_scale.deepspeed.settings import KEYS
from hdet_scale.phases.phased import PhasedScheduler
from hdet_scale.schedulers import AutoLR, OneCycleAutoLR
from hdet_scale.topology import Replicas

WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
"""The names that DeepSpeed's own schedules have, which the HF integration fills in."""


@dataclass(frozen=True, slots=True)
class Building:
    """What a scheduler needs to know while an engine is built."""

    config: HDETConfig
    replicas: Replicas
    model: nn.Module

    def engine(self, optimizer: Any) -> ZeroEngine:
        """Where DeepSpeed keeps what is averaged."""
        return engine_of(optimizer, self.model, self.replicas, buffers=self.config.converge.buffers)


building: ContextVar[Building] = ContextVar("building")


class HDETOneCycle(OneCycleAutoLR):
    """OneCycleAutoLR from a config: OneCycleLR's names, or DeepSpeed's warmup names.

    A number for max_lr is that of the optimizer's own "lr"; a param group with another "lr" keeps
    its ratio to it.

    Args:
        optimizer: DeepSpeed's; it makes the scheduler while the engine is initialized.
        params: OneCycleLR's arguments, or warmup_min_lr, warmup_max_lr, warmup_num_steps and
            total_num_steps in their place. HDET's keys belong into the "hdet" block.

    Raises:
        ValueError: for unknown params, or two names that contradict each other.
    """

    def __init__(self, optimizer: Any, **params: Any) -> None:
        now = _building("HDETOneCycle")
        basic = torch_optimizer(optimizer)
        shape = _one_cycle(_schedule_only(params))
        max_lr = shape.pop("max_lr")
        super().__init__(
            basic,
            max_lr if isinstance(max_lr, list) else [max_lr * r for r in _ratios(basic)],
            config=now.config,
            engine=now.engine(optimizer),
            **shape,
        )


class HDETAutoLR(AutoLR):
    """AutoLR around a torch scheduler that the config names, or around a warm-up and a decay:

        {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10000}}}
        {"warmup_max_lr": 3e-4, "warmup_num_steps": 500, "total_num_steps": 10000}

    Every param group keeps its own learning rate as the peak.

    Args:
        optimizer: DeepSpeed's; it makes the scheduler while the engine is initialized.
        params: "scheduler" with the "type" and "params" of a torch scheduler, or warmup_min_lr,
            warmup_max_lr, warmup_num_steps and total_num_steps.

    Raises:
        ValueError: for unknown params, or a type that torch does not have.
    """

    def __init__(self, optimizer: Any, **params: Any) -> None:
        now = _building("HDETAutoLR")
        inner = _inner(torch_optimizer(optimizer), _schedule_only(params))
        super().__init__(inner, now.config, engine=now.engine(optimizer))


def register() -> None:
    """Make both known to DeepSpeed by name."""
    from deepspeed.runtime import lr_schedules

    for kind in (HDETOneCycle, HDETAutoLR):
        setattr(lr_schedules, kind.__name__, kind)


def explored(scheduler: Any, optimizer: Any, basic: Optimizer) -> PhasedScheduler:
    """The engine's scheduler as one that explores; a plain torch scheduler is wrapped."""
    now = _building("initialize")
    if isinstance(scheduler, HDETOneCycle | HDETAutoLR):
        return scheduler
    if isinstance(scheduler, PhasedScheduler):
        raise TypeError(
            f"the scheduler given is a {type(scheduler).__name__} that does not know ZeRO's "
            'partitions: name "HDETOneCycle" or "HDETAutoLR" in the config, or pass a plain torch '
            "scheduler, which is wrapped"
        )
    if scheduler is None:
        scheduler = LambdaLR(basic, _constant)
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"{type(scheduler).__name__} is DeepSpeed's own and sets learning rates without a base "
            'to explore around: use "HDETAutoLR", which takes the same warmup_* names, or a torch '
            "scheduler"
        )
    if scheduler.optimizer is not basic:
        raise ValueError(
            "the scheduler was made for another optimizer than the one that is trained: pass "
            "lr_scheduler=lambda optimizer: YourScheduler(optimizer, ...)"
        )
    return AutoLR(scheduler, now.config, engine=now.engine(optimizer))


def torch_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer inside DeepSpeed's wrapper."""
    inner = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} holds no torch optimizer: name one in the config or pass "
            "optimizer="
        )
    return inner


def _building(what: str) -> Building:
    try:
        return building.get()
    except LookupError:
        raise RuntimeError(
            f"{what} was made without replicas: all ranks would be ZeRO shards of one model, and "
            "HDET needs at least two replicas to compare. Start with "
            "hdet_scale.deepspeed.initialize instead of deepspeed.initialize"
        ) from None


def _schedule_only(params: Mapping[str, Any]) -> dict[str, Any]:
    """The params without HDET's own keys, which have been read into the config."""
    return {k: v for k, v in params.items() if k not in KEYS}


def _ratios(optimizer: Optimizer) -> list[float]:
    """Each group's learning rate over the optimizer's own."""
    whole = float(optimizer.defaults["lr"])
    return [float(g["lr"]) / whole if whole else 1.0 for g in optimizer.param_groups]


def _one_cycle(params: dict[str, Any]) -> dict[str, Any]:
    """OneCycleLR's arguments, with DeepSpeed's warmup names translated.

    warmup_min_lr 0 has no div_factor: the start is then OneCycleLR's own, max_lr / 25.
    """
    found = _take_warmup(params)
    given = dict(params)
    valid = [n for n in inspect.signature(OneCycleLR).parameters if n != "optimizer"]
    unknown = sorted(set(given) - set(valid))
    if unknown:
        raise ValueError(
            f"unknown params {unknown} of HDETOneCycle: it takes {valid}, {list(WARMUP)}, and "
            'HDET\'s own keys, best in the "hdet" block'
        )
    if found.max_lr is not None:
        _once(given, "max_lr", found.max_lr, "warmup_max_lr")
    if found.total is not None:
        _once(given, "total_steps", found.total, "total_num_steps")
    if "max_lr" not in given:
        raise ValueError('HDETOneCycle needs the peak: write "max_lr" (or "warmup_max_lr")')
    if found.steps is not None and isinstance(given.get("total_steps"), int):
        _once(given, "pct_start", found.steps / given["total_steps"], "warmup_num_steps")
    if found.min_lr and not isinstance(given["max_lr"], list):
        _once(given, "div_factor", given["max_lr"] / found.min_lr, "warmup_min_lr")
    return given


class _Warmup(NamedTuple):
    min_lr: float | None
    max_lr: float | None
    steps: int | None
    total: int | None


def _take_warmup(params: dict[str, Any]) -> _Warmup:
    values = [params.pop(name, None) for name in WARMUP]
    for name, value in zip(WARMUP, values, strict=True):
        if isinstance(value, str):
            raise ValueError(
                f'{name} is {value!r}: "auto" is filled in by the HF Trainer; write a number'
            )
    return _Warmup(*values)


def _once(given: dict[str, Any], name: str, value: Any, source: str) -> None:
    if name in given and given[name] != value:
        raise ValueError(
            f"{name}={given[name]!r} contradicts {source}, which makes it {value!r}: write one"
        )
    given[name] = value


def _inner(optimizer: Optimizer, params: dict[str, Any]) -> LRScheduler:
    """The torch scheduler that HDETAutoLR explores around."""
    named = params.pop("scheduler", None)
    found = _take_warmup(params)
    if params:
        raise ValueError(
            f"unknown params {sorted(params)} of HDETAutoLR: it takes "
            f'"scheduler": {{"type": ..., "params": {{...}}}}, or {list(WARMUP)}'
        )
    if named is not None:
        return _named(optimizer, named)
    if found.max_lr is not None:
        for group, ratio in zip(optimizer.param_groups, _ratios(optimizer), strict=True):
            group["lr"] = group["initial_lr"] = found.max_lr * ratio
    start = (found.min_lr or 0.0) / (found.max_lr or float(optimizer.defaults["lr"]))
    shape = functools.partial(_warm_and_decay, start, found.steps or 0, found.total)
    return LambdaLR(optimizer, shape)


def _named(optimizer: Optimizer, named: Mapping[str, Any]) -> LRScheduler:
    kind = getattr(torch.optim.lr_scheduler, str(named.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, LRScheduler)):
        raise ValueError(
            f"torch.optim.lr_scheduler has no scheduler called {named.get('type')!r}: name one of "
            'its classes, e.g. "CosineAnnealingLR"'
        )
    made: LRScheduler = kind(optimizer, **named.get("params", {}))
    return made


def _warm_and_decay(start: float, warm: int, total: int | None, step: int) -> float:
    """1 at the peak: linear from `start` over `warm` steps, then linear to 0 at `total`."""
    if step < warm:
        return start + (1 - start) * step / warm
    if total is None or total <= warm:
        return 1.0
    return max(0.0, (total - step) / (total - warm))


def _constant(step: int) -> float:
    return 1.0


__all__: Sequence[str] = ["HDETAutoLR", "HDETOneCycle", "explored", "register"]
