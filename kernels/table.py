"""The table through which one launch reaches every tensor.

A row is a tensor: the addresses of its arrays and step count, its size, its param group, and what
seeds its rounding. A chunk is a program: which row it works on, which block of it, and whether
that block may be accessed 128 bits at a time. Both live on the device. They are built once, and
rebuilt only when an address changes (a gradient that was allocated anew).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PARAM, GRAD, FIRST, SECOND, MASTER, STEP, NUMEL, GROUP, KEY, OFFSET = range(10)
COLUMNS = 10
_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """The dtypes of a tensor's arrays: what a kernel variant is compiled for."""

    param: torch.dtype
    """Of the parameter and its gradient."""
    moment: torch.dtype | None
    """Of the moments; None where there are none (SGD without momentum)."""
    master: bool = False
    """Whether an fp32 master is stepped and the parameter rounded from it."""
    stochastic: bool = False
    """Whether 16-bit arrays are rounded stochastically."""


def combinations(*, momentless: bool = False) -> list[Combination]:
    """Every combination that has a kernel: moments in fp32, bf16 or the parameter's own dtype,
    16-bit parameters rounded to nearest, stochastically, or from an fp32 master. A master's
    moments are fp32 or bf16. `momentless` adds SGD without momentum."""
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
    """The fp32 copy that a 16-bit parameter is rounded from."""
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
        """In the order of the columns PARAM, FIRST, SECOND, MASTER."""
        return [self.param, self.first, self.second, self.master]


class TensorTable:
    """Rows and chunks on the device for a fixed list of tensors.

    `chunks[combination]` is an int32 tensor [programs, 2]: the row, and twice the block's index
    plus one if the block is whole and all its arrays are 16-byte aligned.
    """

    def __init__(self, rows: Sequence[Row], block: int) -> None:
        if not rows:
            raise ValueError("a table needs at least one row; received none: skip the launch")
        self.rows = list(rows)
        self.block = block
        self.device = rows[0].param.device
        self.chunks: dict[Combination, torch.Tensor] = {}
        self.tensors = torch.empty(len(rows), COLUMNS, dtype=torch.int64, device=self.device)
        self._fixed = [t for row in self.rows for t in (*row.arrays, row.step) if t is not None]
        self._seen: list[int] = []
        self._captured: list[torch.Tensor] = []

    def refresh(self, grads: Sequence[torch.Tensor]) -> bool:
        """Point the table at these gradients; True if an address changed and it was rebuilt."""
        now = [t.data_ptr() for t in self._fixed]
        now += [g.data_ptr() for g in grads]
        if now == self._seen:
            return False
        self._upload(self.tensors, torch.tensor(self._host_rows(grads), dtype=torch.int64))
        aligned = [_aligned([*row.arrays, g]) for row, g in zip(self.rows, grads, strict=True)]
        for combination in dict.fromkeys(row.combination for row in self.rows):
            chosen = [i for i, row in enumerate(self.rows) if row.combination == combination]
            sizes = [(i, self.rows[i].param.numel(), aligned[i]) for i in chosen]
            self._place(combination, chunk_table(sizes, self.block))
        self._seen = now
        return True

    def _host_rows(self, grads: Sequence[torch.Tensor]) -> list[list[int]]:
        def address(tensor: torch.Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        return [
            [
                address(row.param),
                address(grad),
                address(row.first),
                address(row.second),
                address(row.master),
                address(row.step),
                row.param.numel(),
                row.group,
                row.key,
                row.offset,
            ]
            for row, grad in zip(self.rows, grads, strict=True)
        ]

    def _place(self, combination: Combination, host: torch.Tensor) -> None:
        """Keep the device tensor when its size is unchanged: a captured graph points at it."""
        kept = self.chunks.get(combination)
        if kept is None or kept.shape != host.shape:
            kept = self.chunks[combination] = torch.empty_like(host, device=self.device)
        self._upload(kept, host)

    def _upload(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Copy without waiting. A captured copy reads its source again at each replay, so that the
        source has to live as long as the table."""
        if self.device.type == "cuda":
            host = host.pin_memory()
            if torch.cuda.is_current_stream_capturing():
                self._captured.append(host)
        target.copy_(host, non_blocking=True)


def _aligned(arrays: Sequence[torch.Tensor | None]) -> bool:
    return all(t is None or t.data_ptr() % _VECTOR_BYTES == 0 for t in arrays)


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
