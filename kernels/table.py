"""The table through which one launch reaches every tensor.

A row is a tensor: the addresses of its arrays and step count, its size, its param group, and what
seeds its rounding. A chunk is a program: which row it works on, and which span of it. Both live on
the device. Rows are written once, and again when an array moves; chunks are built once, and again
when a size changes. Only the column of the gradients' addresses (`addresses.py`) changes from step
to step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hdet_scale.kernels.addresses import AddressColumn, upload
from hdet_scale.kernels.choice import capturing

PARAM, FIRST, SECOND, MASTER, FIRST_SCALES, SECOND_SCALES, STEP = range(7)
NUMEL, GROUP, KEY, OFFSET = range(7, 11)
COLUMNS = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """The dtypes of a tensor's arrays: what a kernel variant is compiled for."""

    param: torch.dtype
    """Of the parameter and its gradient."""
    moment: torch.dtype | None
    """Of the moments; None where there are none (SGD without momentum), int8 for 8-bit codes."""
    master: bool = False
    """Whether an fp32 master is stepped and the parameter rounded from it. With int8 moments the
    master is split: the parameter is its upper half."""
    stochastic: bool = False
    """Whether 16-bit arrays are rounded stochastically."""


def combinations(*, momentless: bool = False, coded: bool = False) -> list[Combination]:
    """Every combination that has a kernel: moments in fp32, bf16 or the parameter's own dtype,
    16-bit parameters rounded to nearest, stochastically, or from an fp32 master. A master's
    moments are fp32 or bf16. `momentless` adds SGD without momentum, `coded` 8-bit moments of
    fp32 and bf16 parameters."""
    found = []
    for param in (torch.float32, torch.bfloat16, torch.float16):
        moments: list[torch.dtype | None] = [torch.float32, torch.bfloat16]
        moments += [torch.float16] * (param == torch.float16) + [None] * momentless
        for moment in moments:
            found.append(Combination(param=param, moment=moment))
            if {param, moment} - {torch.float32, None}:
                found.append(Combination(param=param, moment=moment, stochastic=True))
            if param != torch.float32 and moment != torch.float16:
                found.append(Combination(param=param, moment=moment, master=True))
    if coded:
        found.append(Combination(param=torch.float32, moment=torch.int8))
        for master in (False, True):
            found.append(Combination(param=torch.bfloat16, moment=torch.int8, master=master))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the kernels need to know of one tensor, except its gradient, which changes."""

    param: torch.Tensor
    """The parameter's local, contiguous storage."""
    first: torch.Tensor | None
    """The first moment, or the momentum buffer."""
    second: torch.Tensor | None
    """The second moment."""
    master: torch.Tensor | None
    """The fp32 copy that a 16-bit parameter is rounded from, or the lower half of a split one."""
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    """Of the moments' 8-bit codes."""
    step: torch.Tensor
    """A one-element fp32 tensor: how many steps this tensor has taken."""
    group: int
    """The row of the scalar table."""
    key: int
    """Seeds the stochastic rounding of this tensor (`random_words.tensor_key`)."""
    offset: int
    """Index, within the whole parameter, of the first element of this shard."""
    combination: Combination
    """The dtypes that decide which kernel variant takes this tensor."""

    @property
    def arrays(self) -> list[torch.Tensor | None]:
        """In the order of the columns from PARAM to SECOND_SCALES."""
        return [self.param, self.first, self.second, self.master, *self.scales]


class TensorTable:
    """Rows, chunks and gradients on the device for a fixed list of tensors.

    `chunks[combination]` is an int32 tensor [programs, 2]: a row, and which span of its elements.
    It depends on sizes alone. Whether a span may be accessed 128 bits at a time is seen by the
    kernel, from the addresses.

    Args:
        rows: The tensors.
        span: Elements of a program (`launch.device_span`).
    """

    def __init__(self, rows: Sequence[Row], span: int) -> None:
        if not rows:
            raise ValueError("a table needs at least one row; received none: skip the launch")
        self.rows = list(rows)
        self.span = span
        self.device = rows[0].param.device
        self.tensors = torch.zeros(len(rows), COLUMNS, dtype=torch.int64, device=self.device)
        self.grads = AddressColumn(len(rows), self.device)
        self.chunks: dict[Combination, torch.Tensor] = {}
        self._fixed = [t for row in self.rows for t in (*row.arrays, row.step) if t is not None]
        self._seen: list[int] = []
        self._sizes: list[int] = []

    def refresh(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Bring the table up to date for these gradients.

        Args:
            grads: A gradient for each row, none of which is kept.

        Returns:
            The gradients' addresses on the device, for this launch.
        """
        fixed = list(map(torch.Tensor.data_ptr, self._fixed))
        if fixed != self._seen:
            self._write_rows()
            self._seen = fixed
        return self.grads.point_to(list(map(torch.Tensor.data_ptr, grads)))

    def _write_rows(self) -> None:
        """The rows anew, since an array moved; the chunks only if a size changed."""
        if capturing(self.device):
            raise RuntimeError(
                "a parameter or its optimizer state moved inside a CUDA graph capture. Take one "
                "step with these tensors before the capture."
            )
        upload(self.tensors, torch.tensor([_row_values(row) for row in self.rows]))
        sizes = [row.param.numel() for row in self.rows]
        if sizes == self._sizes:
            return
        self._sizes = sizes
        for combination in dict.fromkeys(row.combination for row in self.rows):
            chosen = [i for i, row in enumerate(self.rows) if row.combination == combination]
            host = span_table([(i, sizes[i]) for i in chosen], self.span)
            self.chunks[combination] = host.to(self.device)


def _row_values(row: Row) -> list[int]:
    """In the order of the columns."""
    addresses = [0 if t is None else t.data_ptr() for t in (*row.arrays, row.step)]
    return [*addresses, row.param.numel(), row.group, row.key, row.offset]


def span_table(sizes: Sequence[tuple[int, int]], span: int) -> torch.Tensor:
    """[programs, 2] int32 from (row, elements): ceil(elements / span) programs a row."""
    rows, elements = torch.tensor(list(sizes), dtype=torch.int64).reshape(-1, 2).unbind(1)
    counts = (elements + span - 1) // span
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    at = torch.arange(len(first)) - first
    return torch.stack([torch.repeat_interleave(rows, counts), at], dim=1).to(torch.int32)


def chunk_table(sizes: Sequence[tuple[int, int, bool]], block: int) -> torch.Tensor:
    """[programs, 2] int32 from (row, elements, aligned): ceil(elements / block) chunks a row.

    A block that is not whole takes the masked variant: a mask that can end anywhere stops the
    compiler from using 128-bit accesses, and an unmasked access would leave the tensor.
    """
    rows, packed = [], []
    for row, numel, aligned in sizes:
        blocks = torch.arange(-(-numel // block), dtype=torch.int64)
        whole = (blocks + 1) * block <= numel
        packed.append(blocks * 2 + (whole if aligned else torch.zeros_like(whole)))
        rows.append(torch.full_like(blocks, row))
    return torch.stack([torch.cat(rows), torch.cat(packed)], dim=1).to(torch.int32)
