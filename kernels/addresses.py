"""The addresses of the gradients on the device, uploaded when one of them has moved.

Gradients that were set to None come back at other addresses, so that this column changes at nearly
every step while the rest of the table stays.

A CUDA graph reads what its capture recorded: the device memory, and the host memory of each copy.
So each capture gets a column and a host copy of its own, which later steps leave alone. They are
set aside before a capture, since host memory cannot be allocated inside one.
"""

from collections.abc import Sequence

import torch

from hdet_scale.kernels.choice import capturing

CAPTURES = 8
"""Captures that may follow one another without a step between them."""


class AddressColumn:
    """One int64 address for each row of a table.

    Args:
        rows: How many.
        device: Where the kernels run.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.values = torch.zeros(rows, dtype=torch.int64, device=device)
        self._seen: list[int] | None = None
        self._spares: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._captured: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._set_aside()

    @property
    def captured(self) -> bool:
        """Whether a captured graph reads one of its columns."""
        return bool(self._captured)

    def point_to(self, addresses: list[int]) -> torch.Tensor:
        """The column that holds these addresses; inside a capture, one of the capture's own.

        Raises:
            RuntimeError: More than CAPTURES captures follow one another without a step.
        """
        if capturing(self.values.device):
            return self._capture(addresses)
        if len(self._spares) < CAPTURES:
            self._set_aside()
        if addresses != self._seen:
            upload(self.values, torch.tensor(addresses, dtype=torch.int64))
            self._seen = addresses
        return self.values

    def _capture(self, addresses: Sequence[int]) -> torch.Tensor:
        if not self._spares:
            raise RuntimeError(
                f"{CAPTURES} CUDA graph captures without a step between them: take one step of "
                "the optimizer outside of a capture before the next one."
            )
        column, host = self._spares.pop()
        self._captured.append((column, host))
        host.copy_(torch.tensor(addresses, dtype=torch.int64))
        column.copy_(host, non_blocking=True)
        return column

    def _set_aside(self) -> None:
        """Only a GPU captures: nothing is set aside elsewhere."""
        if self.values.device.type != "cuda":
            return
        missing = CAPTURES - len(self._spares)
        hosts = torch.zeros(missing, len(self.values), dtype=torch.int64).pin_memory()
        columns = torch.zeros_like(hosts, device=self.values.device)
        self._spares += zip(columns, hosts, strict=True)


def upload(target: torch.Tensor, host: torch.Tensor) -> None:
    """Copy without waiting: from pinned memory, which torch keeps until the copy is done."""
    if target.device.type == "cuda":
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)
