"""Global memory: tensors between guards, and what a launch does to them.

An allocation lies between gaps that belong to nobody, so that an access past its end is found and
does not reach a neighbour. Addresses are those of the host: a tensor that is placed here has a
`data_ptr()` which the kernels' tables can hold.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from tests.support.ptx.lanes import Lanes
from tests.support.ptx.parse import PTXError
from tests.support.ptx.races import Touches

GAP = 16384
"""Bytes between allocations: more than a block of any kernel spans in one array."""
SIZE = 1 << 26
_VECTOR = 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was done to an allocation, in bytes. Threads of a warp that load one address with one
    instruction are counted once, as the hardware does."""

    loaded: int
    stored: int


class Memory:
    """Allocations with guards; loads and stores of all lanes, checked and counted.

    Args:
        shift: Place every tensor one element behind a 16-byte boundary (default: False).
        size: Bytes of everything together; pages that are not touched cost nothing.
    """

    def __init__(self, *, shift: bool = False, size: int = SIZE) -> None:
        self.shift = shift
        raw = np.zeros(size + 4096, np.uint8)
        begin = -raw.ctypes.data % 4096
        self._bytes = raw[begin : begin + size]
        self.base = self._bytes.ctypes.data
        self._as = {b: self._bytes.view(f"u{b}") for b in (1, 2, 4, 8)}
        self._next = GAP
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._names: list[str] = []
        self._spans = np.array([0]), np.array([0])
        self._touches = Touches(size)
        self._traffic: Counter[tuple[int, str]] = Counter()
        self.widths: Counter[tuple[str, int]] = Counter()
        """Accesses of a thread by ("load" or "store", bytes)."""

    # --- tensors -------------------------------------------------------------------------------

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor that kernels may access."""
        if tensor.numel() == 0 or self.holds(tensor):
            return tensor
        size, item = tensor.numel() * tensor.element_size(), tensor.element_size()
        start = self._next + (item if self.shift else 0)
        self._next = -(-(start + size + GAP) // _VECTOR) * _VECTOR
        if self._next > self._bytes.size:
            raise MemoryError(f"{len(self._starts)} tensors fill the interpreter's memory")
        self._starts.append(start)
        self._ends.append(start + size)
        self._names.append(f"{str(tensor.dtype)[6:]} {list(tensor.shape)}")
        flat = torch.from_numpy(self._bytes[start : start + size]).view(tensor.dtype)
        # Strides as a clone would have them.
        like = torch.empty_like(tensor, device="meta")
        return flat.as_strided(tensor.shape, like.stride()).copy_(tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies here."""
        return 0 <= tensor.data_ptr() - self.base < self._bytes.size

    def traffic(self, *tensors: torch.Tensor) -> Traffic:
        """What has been done to the allocations of these tensors."""
        places = {bisect_right(self._starts, t.data_ptr() - self.base) - 1 for t in tensors}
        loaded, stored = (sum(self._traffic[p, k] for p in places) for k in ("load", "store"))
        return Traffic(loaded, stored)

    def traffic_of_all(self) -> Traffic:
        """What has been done to all allocations, tables among them."""
        kinds = ("load", "store")
        return Traffic(*(sum(n for (_, k), n in self._traffic.items() if k == w) for w in kinds))

    def forget_traffic(self) -> None:
        """Count from now on."""
        self._traffic.clear()
        self.widths.clear()

    # --- accesses ------------------------------------------------------------------------------

    def begin(self, blocks: int, threads: int) -> None:
        """A launch begins: it may see everything that was stored before."""
        self._touches.begin(blocks, threads)
        self._spans = np.array(self._starts or [0]), np.array(self._ends or [0])

    def barrier(self, block: int) -> None:
        """All threads of a block have met."""
        self._touches.barrier(block)

    def load(self, lanes: Lanes, address: np.ndarray, item: int, count: int) -> list[np.ndarray]:
        """`count` elements of `item` bytes for every active lane; zeros for the others."""
        lane, offset, at = self._reach("load", lanes, address, item * count)
        race = self._touches.read(at, lane)
        if race.any():
            self._refuse(lanes, lane, offset, race, "loads what another thread stores: a race")
        found = []
        for k in range(count):
            value = np.zeros(lanes.count, f"u{item}")
            value[lane] = self._as[item][offset // item + k]
            found.append(value)
        return found

    def store(self, lanes: Lanes, address: np.ndarray, values: list[np.ndarray]) -> None:
        """Values for every active lane, one after the other from its address on."""
        item = values[0].dtype.itemsize
        lane, offset, at = self._reach("store", lanes, address, item * len(values))
        read, written = self._touches.write(at, lane)
        if read.any():
            self._refuse(lanes, lane, offset, read, "stores what another thread loads: a race")
        before = self._bytes[at]
        chosen = [np.broadcast_to(v, lanes.count)[lane] for v in values]
        for k, value in enumerate(chosen):
            self._as[item][offset // item + k] = value
        new = np.stack(chosen, 1).view(np.uint8).reshape(at.shape)
        differ = ((before != new) & written) | (self._bytes[at] != new)
        if differ.any():
            what = "and another thread store different values to one address: a race"
            self._refuse(lanes, lane, offset, differ.any(1), what)

    def _reach(
        self, kind: str, lanes: Lanes, address: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The active lanes, the offsets of what they access, and of its bytes; all of it checked
        and counted."""
        lane = lanes.lane if lanes.whole else lanes.lane[lanes.mask]
        offset = address[lane] - self.base
        starts, ends = self._spans
        place = np.searchsorted(starts, offset, side="right") - 1
        inside = (place >= 0) & (offset + width <= ends[place])
        if not inside.all():
            self._refuse(lanes, lane, offset, ~inside, f"{kind}s {width} bytes out of bounds")
        crooked = offset % width != 0
        if crooked.any():
            self._refuse(lanes, lane, offset, crooked, f"{kind}s {width} bytes, misaligned")
        self.widths[kind, width] += lane.size
        once = np.unique(lanes.warp[lane] << 40 | offset) & ((1 << 40) - 1)
        counts = np.bincount(np.searchsorted(starts, once, side="right") - 1)
        for at in np.flatnonzero(counts):
            self._traffic[int(at), kind] += int(counts[at]) * width
        return lane, offset, offset[:, None] + np.arange(width)

    def _refuse(
        self, lanes: Lanes, lane: np.ndarray, offset: np.ndarray, bad: np.ndarray, what: str
    ) -> None:
        at = int(bad.argmax())
        byte = int(offset[at])
        near = bisect_right(self._starts, byte) - 1
        where = f"at {self.base + byte:#x}, before every tensor"
        if near >= 0:
            size = self._ends[near] - self._starts[near]
            where = f"at byte {byte - self._starts[near]} of a tensor of {size} bytes"
            where += f" ({self._names[near]})"
        raise PTXError(f"{lanes.where(int(lane[at]))} {what} {where}")
