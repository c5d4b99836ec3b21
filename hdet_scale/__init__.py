"""Hyperparameter-divergent ensemble training: the learning-rate search inside the run.

    from hdet_scale import OneCycleAutoLR, AutoLR, HDETConfig, Replicas

Core depends on torch alone; each engine and trainer has a module of its own that imports what
it needs.
"""

from hdet_scale.config import ConvergePolicy, HDETConfig
from hdet_scale.schedulers import AutoLR, OneCycleAutoLR
from hdet_scale.topology import Replicas

__version__ = "0.1.0"
__all__ = ["AutoLR", "ConvergePolicy", "HDETConfig", "OneCycleAutoLR", "Replicas"]
