"""A step without our kernels: torch's fused kernels where they know the dtypes, else a reference.

torch's fused kernels on a CPU are near the memory limit, and the result is torch's to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hdet_scale.kernels.int8_state import step_reference
from hdet_scale.optim.batches import Batch
from hdet_scale.optim.controls import Controls
from hdet_scale.optim.shards import shard_offset

if TYPE_CHECKING:
    from hdet_scale.kernels.update import Update

Plain = Callable[[Batch, list[torch.Tensor], list[torch.Tensor], Controls], None]
"""(batch, targets, grads, controls): an optimizer's step on arrays that share a dtype."""


def step_batch(
    batch: Batch,
    grads: list[torch.Tensor],
    controls: Controls,
    update: Update,
    plain: Plain | None,
    *,
    counts_steps: bool,
) -> None:
    """Step the tensors of one batch.

    Args:
        batch: The tensors with their state.
        grads: Their gradients.
        controls: Skip and scale; the clip factor is folded into the scale.
        update: Whose reference runs where `plain` does not know the dtypes.
        plain: The optimizer's step on arrays of one dtype; None if it has none.
        counts_steps: Whether `plain` counts the steps in the state.
    """
    mastered = all(c.master and c.moment in (None, torch.float32) for c in batch.combinations)
    if plain is not None and batch.plain:
        plain(batch, batch.locals, grads, controls)
    elif plain is not None and mastered:
        masters = [m for m in batch.masters if m is not None]
        plain(batch, masters, [g.float() for g in grads], controls)
        torch._foreach_copy_(batch.locals, masters)
        if not counts_steps and not controls.skips:
            torch._foreach_add_(batch.steps, 1)
    elif not controls.skips:
        _step_reference(batch, grads, controls, update)


def _step_reference(
    batch: Batch, grads: list[torch.Tensor], controls: Controls, update: Update
) -> None:
    """The reference beside the kernel, tensor by tensor."""
    group = batch.group
    scale = controls.grad_scale
    torch._foreach_add_(batch.steps, 1)
    for i, shard in enumerate(batch.locals):
        stochastic = batch.combinations[i].stochastic
        moments = [listed[i] for listed in batch.slots]
        numbers = {
            "step": int(batch.steps[i]),
            "lr": float(group["lr"]),
            "lr_multiplier": float(group["lr_multiplier"]),
            "factor": 1.0 if scale is None else 1.0 / float(scale),
            "key": batch.keys[i] if stochastic else None,
            "offset": shard_offset(batch.params[i]) if stochastic else 0,
            **{name: group[name] for name in update.options},
        }
        if batch.scales:
            scales = [listed[i] for listed in batch.scales]
            arrays = (shard, grads[i], moments, scales)
            step_reference(update.reference, *arrays, low=batch.masters[i], **numbers)
        else:
            update.reference(shard, grads[i], *moments, master=batch.masters[i], **numbers)
