"""A step on our kernels: all tensors of all groups that share a dtype combination in one launch.

The only file of the room, beside the optimizers themselves, that imports Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch

from hdet_scale.kernels.advance import CORRECTIONS, advance
from hdet_scale.kernels.launch import constant, device_block_size
from hdet_scale.kernels.scalars import Number, ScalarTable
from hdet_scale.kernels.table import Row, TensorTable
from hdet_scale.kernels.update import Update
from hdet_scale.optim.batches import Batch
from hdet_scale.optim.controls import Controls
from hdet_scale.optim.shards import shard_offset


@dataclass(slots=True)
class Launches:
    """What the kernels read of all batches of one device: built once, kept between steps."""

    update: Update
    batches: list[Batch]
    table: TensorTable
    scalars: ScalarTable
    corrections: torch.Tensor

    def serves(self, batches: list[Batch]) -> bool:
        """Whether it was built for these batches."""
        return len(batches) == len(self.batches) and all(map(is_, batches, self.batches))

    def write(self, rows: Sequence[Sequence[Number]]) -> None:
        """Bring the device's table of the groups' numbers up to date; a row for each batch."""
        self.scalars.write(rows)

    def step(self, rows: Sequence[Sequence[Number]], controls: Controls) -> None:
        """Advance the step counts, then one launch for each dtype combination."""
        self.table.refresh([grad for batch in self.batches for grad in batch.grads])
        self.write(rows)
        device = self.table.device
        skip = _device_scalar(controls.found_inf, 0.0, device)
        scale = _device_scalar(controls.grad_scale, 1.0, device)
        clip = _device_scalar(controls.clip_factor, 1.0, device)
        values = self.scalars.values
        advance(self.table.tensors, values, self.corrections, skip)
        for combination in self.table.chunks:
            self.update.launch(self.table, combination, values, self.corrections, skip, scale, clip)


def plan_launches(update: Update, device: torch.device, batches: list[Batch]) -> Launches:
    """List every tensor of the batches in a table on their device."""
    rows = [row for at, batch in enumerate(batches) for row in _rows(batch, at)]
    return Launches(
        update=update,
        batches=batches,
        table=TensorTable(rows, device_block_size(device)),
        scalars=ScalarTable(len(batches), device),
        corrections=torch.zeros(len(rows), CORRECTIONS, device=device),
    )


def _rows(batch: Batch, group: int) -> list[Row]:
    rows = []
    for i, shard in enumerate(batch.locals):
        slots = [listed[i] for listed in batch.slots] + [None, None]
        rows.append(
            Row(
                param=shard,
                first=slots[0],
                second=slots[1],
                master=batch.masters[i],
                step=batch.steps[i],
                group=group,
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
