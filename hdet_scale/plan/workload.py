"""Workload: what is to be trained, and on what."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hdet_scale.plan.links import PRESETS, Cluster
from hdet_scale.plan.shapes import Shapes

PARAMETER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}
"""Moments of an optimizer, fp32 each."""
TOKENS = 8192
"""Tokens that a GPU trains on in a step, where no step time is given."""
ROOM = 0.6
"""Share of a GPU for weights, gradients, moments and the converge; activations take the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, the GPUs that train it, and how."""

    model: Shapes
    """The tensors."""
    gpus: int
    """World size."""
    cluster: Cluster = PRESETS["h100"]
    """GPUs and links."""
    dtype: str = "fp32"
    """Of the parameters and gradients that are kept; 16-bit ones have an fp32 master."""
    optimizer: str = "adamw"
    """Decides the moments."""
    step_seconds: float | None = None
    """Of one optimizer step; from the parameters and `tokens` where it is not given."""
    tokens: int = TOKENS
    """Tokens of a GPU in a step."""

    def __post_init__(self) -> None:
        for name, valid in (("dtype", PARAMETER_DTYPES), ("optimizer", MOMENTS)):
            if getattr(self, name) not in valid:
                raise ValueError(
                    f"{name} must be one of {sorted(valid)}, got {getattr(self, name)!r}"
                )
        if self.gpus < 2:
            raise ValueError(f"gpus must be at least 2, got {self.gpus}: one is one replica")
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")
        if self.step_seconds is not None and not self.step_seconds > 0:
            raise ValueError(f"step_seconds must be above 0, got {self.step_seconds}")

    @property
    def seconds_a_step(self) -> float:
        """Given, or 6 x parameters x tokens of a GPU over its rate."""
        if self.step_seconds is not None:
            return self.step_seconds
        return 6 * self.model.parameters * self.tokens / self.cluster.flops

    @property
    def room(self) -> float:
        """Bytes of a GPU that are not for activations."""
        return ROOM * self.cluster.memory_bytes
