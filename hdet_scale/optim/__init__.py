"""Optimizers that take the replica's learning rate as two numbers: FusedAdamW, FusedSGD, FusedLion.

`group["lr"]` is the shared base, which a scheduler writes on every replica alike;
`group["lr_multiplier"]` is this replica's factor. The step uses lr * lr_multiplier. With any other
torch optimizer there is no second number, and the product goes to `group["lr"]`. In reading order:

    rates                how a base and a multiplier reach a param group of any optimizer
    shared_options       the options that every fused optimizer takes
    fused_adamw,         the optimizers: own arguments, checks, and torch's step where it serves
    fused_sgd,
    fused_lion
    fused                their base: groups, state, and a step that checks before it writes
    batches, shards      the tensors of a group that are stepped, and what this rank holds of them
    listings             what was listed for a set of tensors, kept between steps
    precision            in what precision a state is kept, whatever a checkpoint holds it in
    controls, backends   what a step is told beside its gradients, and where it is carried out
    uncompiled           a step that torch.compile leaves alone
    kernel_step,         the two ways to carry it out: our kernels, or torch
    torch_step

`FusedX` is the class of that name in `fused_x.py`, imported when it is first asked for, since it
brings Triton. A new optimizer is one file in `kernels/` and one here; it is exported by its name.
Type checkers see it as Any until it is listed below.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from hdet_scale.optim.rates import effective_lr, write_lr

if TYPE_CHECKING:
    from hdet_scale.optim.fused_adamw import FusedAdamW
    from hdet_scale.optim.fused_lion import FusedLion
    from hdet_scale.optim.fused_sgd import FusedSGD

__all__ = ["FusedAdamW", "FusedLion", "FusedSGD", "effective_lr", "write_lr"]


def __getattr__(name: str) -> Any:
    file = f"{__name__}.fused_{name.removeprefix('Fused').lower()}"
    if name.startswith("Fused") and importlib.util.find_spec(file) is not None:
        return getattr(importlib.import_module(file), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
