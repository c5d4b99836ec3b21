"""The small fp32 table of what a step needs to know of each param group.

A controller changes two numbers of a row (base LR and multiplier); nothing is recompiled, and a
captured graph reads the new values at its next replay because the table stays where it is. The
rates 1 - beta and the logarithms of beta are columns of their own: computed on the host in double
precision, they keep the seven digits that 1 - fp32(0.999) would lose.
"""

import math
from collections.abc import Sequence

import torch

LR, MULTIPLIER, DECAY, SIGN = range(4)
WIDTH = 10
# AdamW and Lion
FIRST_BETA, FIRST_RATE, SECOND_BETA, SECOND_RATE, EPS = range(4, 9)
# SGD
MOMENTUM, DAMPENING, NESTEROV = range(4, 7)

Number = float | torch.Tensor


def betas_row(
    lr: Number,
    multiplier: Number,
    decay: float,
    maximize: bool,
    betas: tuple[float, float],
    eps: float = 0.0,
) -> list[Number]:
    """A row for AdamW (`eps`) or Lion."""
    first, second = betas
    sign = -1.0 if maximize else 1.0
    return [lr, multiplier, decay, sign, first, 1 - first, second, 1 - second, eps, 0.0]


def sgd_row(
    lr: Number,
    multiplier: Number,
    decay: float,
    maximize: bool,
    momentum: float,
    dampening: float,
    nesterov: bool,
) -> list[Number]:
    """A row for SGD."""
    sign = -1.0 if maximize else 1.0
    row: list[Number] = [lr, multiplier, decay, sign, momentum, dampening, float(nesterov)]
    return row + [0.0] * (WIDTH - len(row))


def log_betas(betas: Sequence[float]) -> list[float]:
    """ln(beta) in double precision; -inf for 0, whose correction 1 - 0^t is 1."""
    return [math.log(beta) if beta > 0 else -math.inf for beta in betas]


class ScalarTable:
    """[groups, WIDTH + 2] fp32 on the device: the rows above, then ln(beta1) and ln(beta2).

    `write` copies only when a number changed. An entry that is a tensor (a capturable LR) is
    copied on the device at every step, inside a captured graph too.
    """

    def __init__(self, groups: int, device: torch.device) -> None:
        self.values = torch.zeros(groups, WIDTH + 2, dtype=torch.float32, device=device)
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
                    "CUDA graph capture, where the new value would be frozen. Call "
                    "optimizer.write_scalars() before the capture, and again before a replay that "
                    "must see new values."
                )
            host = host.pin_memory()
        self.values.copy_(host, non_blocking=True)
        self._written = plain
