"""A step on our kernels: all tensors of all groups that share a dtype combination in one launch.

The only file of the room, beside the optimizers themselves, that imports Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hdet_scale.kernels.advance import CORRECTIONS, advance
from hdet_scale.kernels.launch import SPAN, constant
from hdet_scale.kernels.table import Row, TensorTable
from hdet_scale.kernels.update import Update
from hdet_scale.optim.batches import Batch
from hdet_scale.optim.controls import Controls
from hdet_scale.optim.shards import shard_offset


@dataclass(slots=True)
class Launches:
    """What the kernels read of all batches of one device: built once, kept between steps."""

    update: Update
    table: TensorTable
    corrections: torch.Tensor

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph reads this table."""
        return self.table.grads.captured

    def step(self, grads: Sequence[torch.Tensor], values: torch.Tensor, controls: Controls) -> None:
        """Advance the step counts, then one launch for each dtype combination.

        Args:
            grads: Of every tensor of the table; only their addresses are kept.
            values: The groups' numbers on the device (`ScalarTable.values`).
            controls: Skip, scale and clip.
        """
        device = self.table.device
        column = self.table.refresh(grads)
        skip = _device_scalar(controls.found_inf, 0.0, device)
        scale = _device_scalar(controls.grad_scale, 1.0, device)
        clip = _device_scalar(controls.clip_factor, 1.0, device)
        advance(self.table.tensors, values, self.corrections, skip)
        for combination in self.table.chunks:
            self.update.launch(
                self.table, column, combination, values, self.corrections, skip, scale, clip
            )


def plan_launches(update: Update, device: torch.device, batches: list[Batch]) -> Launches:
    """List every tensor of the batches in a table on their device."""
    rows = [row for batch in batches for row in _rows(batch)]
    return Launches(
        update=update,
        table=TensorTable(rows, SPAN),
        corrections=torch.zeros(len(rows), CORRECTIONS, device=device),
    )


def _rows(batch: Batch) -> list[Row]:
    rows = []
    for i, shard in enumerate(batch.locals):
        slots = [listed[i] for listed in batch.slots] + [None, None]
        scales = [listed[i] for listed in batch.scales] + [None, None]
        rows.append(
            Row(
                param=shard,
                first=slots[0],
                second=slots[1],
                master=batch.masters[i],
                scales=(scales[0], scales[1]),
                step=batch.steps[i],
                group=batch.index,
                key=batch.keys[i],
                offset=shard_offset(batch.params[i]),
                combination=batch.combinations[i],
            )
        )
    return rows


def _device_scalar(
    value: torch.Tensor | None, default: float, device: torch.device
) -> torch.Tensor:
    if value is None:
        return constant(default, device)
    return value.to(device, torch.float32, non_blocking=True)
