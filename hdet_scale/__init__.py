"""Hyperparameter-divergent ensemble training: the learning-rate search inside the run.

    from hdet_scale import OneCycleAutoLR, AutoLR, HDETConfig, Replicas, FusedAdamW, find_lr

Core depends on torch alone; each engine and trainer has a module of its own that imports what
it needs. The fused optimizers are imported when they are first asked for, since they bring Triton.
"""

from typing import TYPE_CHECKING, Any

from hdet_scale.config import HDETConfig
from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.find import find_lr
from hdet_scale.schedulers import AutoLR, OneCycleAutoLR
from hdet_scale.topology import Replicas

if TYPE_CHECKING:
    from hdet_scale.optim.fused_adamw import FusedAdamW
    from hdet_scale.optim.fused_lion import FusedLion
    from hdet_scale.optim.fused_sgd import FusedSGD

__version__ = "0.1.0"
__all__ = [
    "AutoLR",
    "ConvergePolicy",
    "FusedAdamW",
    "FusedLion",
    "FusedSGD",
    "HDETConfig",
    "OneCycleAutoLR",
    "Replicas",
    "find_lr",
]


def __getattr__(name: str) -> Any:
    if name.startswith("Fused"):
        from hdet_scale import optim

        return getattr(optim, name)
    raise AttributeError(f"module 'hdet_scale' has no attribute {name!r}")
