"""The small fp32 table of what a step needs to know of each param group.

A controller changes two numbers of a row (base LR and multiplier); nothing is recompiled, and a
captured graph reads the new values at its next replay: an optimizer has one table a device, which
stays where it is, and `FusedOptimizer.write_scalars` fills it between two replays. The
rates 1 - beta and the logarithms of beta are columns of their own: computed on the host in double
precision, they keep the seven digits that 1 - fp32(0.999) would lose.
"""

import math
from collections.abc import Sequence

import torch

LR, MULTIPLIER, DECAY, SIGN, LOG_BETA1, LOG_BETA2, OWN = range(7)
"""Columns that every optimizer has. From `OWN` on they are the optimizer's: the kernel's file
names them."""
ROW_WIDTH = 12
"""Columns of a row."""

Number = float | torch.Tensor


def scalar_row(
    lr: Number,
    multiplier: Number,
    decay: float,
    maximize: bool,
    own: Sequence[float],
    corrected: Sequence[float] = (0.0, 0.0),
) -> list[Number]:
    """The row of one param group.

    Args:
        lr: The shared base LR.
        multiplier: This replica's factor of it.
        decay: The weight decay.
        maximize: Whether the step goes up the gradient.
        own: What the optimizer's rule reads from column `OWN` on; ROW_WIDTH - OWN at most.
        corrected: beta1 and beta2 of the moments whose bias is corrected; 0 for no correction.

    Raises:
        ValueError: There are more numbers in `own` than a row has room for.
    """
    if len(own) > ROW_WIDTH - OWN:
        raise ValueError(
            f"{len(own)} numbers of the optimizer's own: a row has room for {ROW_WIDTH - OWN}. "
            "Raise scalars.ROW_WIDTH."
        )
    sign = -1.0 if maximize else 1.0
    row: list[Number] = [lr, multiplier, decay, sign, *map(_log, corrected), *own]
    return row + [0.0] * (ROW_WIDTH - len(row))


def _log(beta: float) -> float:
    """ln(beta) in double precision; -inf for 0, whose correction 1 - 0^t is 1."""
    return math.log(beta) if beta > 0 else -math.inf


class ScalarTable:
    """[groups, ROW_WIDTH] fp32 on the device: the rows above.

    `write` copies only when a number changed. An entry that is a tensor (a capturable LR) is
    copied on the device at every step, inside a captured graph too.
    """

    def __init__(self, groups: int, device: torch.device) -> None:
        self.values = torch.zeros(groups, ROW_WIDTH, dtype=torch.float32, device=device)
        self._written: list[list[float]] = []

    def write(self, rows: Sequence[Sequence[Number]]) -> bool:
        """Bring the table up to date; True if a host number had changed."""
        plain = [[0.0 if isinstance(x, torch.Tensor) else float(x) for x in row] for row in rows]
        changed = plain != self._written
        if changed:
            self._copy(plain)
        for at, row in enumerate(rows):
            for column in (LR, MULTIPLIER):
                value = row[column]
                if isinstance(value, torch.Tensor):
                    self.values[at, column].copy_(value.reshape(()), non_blocking=True)
        return changed

    def _copy(self, plain: list[list[float]]) -> None:
        host = torch.tensor(plain, dtype=torch.float32)
        if self.values.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a learning rate, multiplier or other number of a param group changed inside a "
                    "CUDA graph capture, where the new value would be frozen. Take a step or call "
                    "optimizer.write_scalars() between the change and the capture."
                )
            host = host.pin_memory()
        self.values.copy_(host, non_blocking=True)
        self._written = plain
