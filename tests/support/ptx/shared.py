"""The shared memory of every thread block, and races between its barriers."""

import numpy as np

from tests.support.ptx.lanes import Lanes
from tests.support.ptx.parse import PTXError
from tests.support.ptx.races import Touches


class Shared:
    """`size` bytes for each of `blocks` thread blocks. What nobody has stored cannot be loaded."""

    def __init__(self, blocks: int, threads: int, size: int) -> None:
        self.size = size
        self._stride = -(-size // 16) * 16
        self._bytes = np.zeros(blocks * self._stride, np.uint8)
        self._filled = np.zeros(blocks * self._stride, bool)
        self._touches = Touches(self._bytes.size)
        self._touches.begin(blocks, threads)

    def barrier(self, block: int) -> None:
        """All threads of a block have met."""
        self._touches.barrier(block)

    def load(self, lanes: Lanes, address: np.ndarray, item: int, count: int) -> list[np.ndarray]:
        """`count` elements of `item` bytes for every active lane; zeros for the others."""
        lane, at = self._reach("load", lanes, address, item * count)
        if not self._filled[at].all():
            empty = ~self._filled[at].all(1)
            self._refuse(lanes, lane, address, empty, "loads shared memory that nobody has stored")
        race = self._touches.read(at, lane)
        if race.any():
            what = "loads shared memory that another stores without a barrier between: a race"
            self._refuse(lanes, lane, address, race, what)
        data = self._bytes[at].view(f"u{item}")
        found = []
        for k in range(count):
            value = np.zeros(lanes.count, f"u{item}")
            value[lane] = data[:, k]
            found.append(value)
        return found

    def store(self, lanes: Lanes, address: np.ndarray, values: list[np.ndarray]) -> None:
        """Values for every active lane, one after the other from its address on."""
        item = values[0].dtype.itemsize
        lane, at = self._reach("store", lanes, address, item * len(values))
        read, written = self._touches.write(at, lane)
        if read.any():
            what = "stores shared memory that another loads without a barrier between: a race"
            self._refuse(lanes, lane, address, read, what)
        chosen = [np.broadcast_to(v, lanes.count)[lane] for v in values]
        new = np.stack(chosen, 1).view(np.uint8).reshape(at.shape)
        before = self._bytes[at]
        self._bytes[at] = new
        self._filled[at] = True
        differ = ((before != new) & written) | (self._bytes[at] != new)
        if differ.any():
            what = "and another thread store different values to one shared address: a race"
            self._refuse(lanes, lane, address, differ.any(1), what)

    def _reach(
        self, kind: str, lanes: Lanes, address: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        lane = lanes.lane if lanes.whole else lanes.lane[lanes.mask]
        offset = address[lane]
        outside = (offset < 0) | (offset + width > self.size)
        if outside.any():
            what = f"{kind}s {width} bytes out of {self.size} bytes of shared memory"
            self._refuse(lanes, lane, address, outside, what)
        crooked = offset % width != 0
        if crooked.any():
            what = f"{kind}s {width} bytes of shared memory, misaligned"
            self._refuse(lanes, lane, address, crooked, what)
        begin = offset + lanes.block[lane] * self._stride
        return lane, begin[:, None] + np.arange(width)

    def _refuse(
        self, lanes: Lanes, lane: np.ndarray, address: np.ndarray, bad: np.ndarray, what: str
    ) -> None:
        at = int(lane[bad.argmax()])
        raise PTXError(f"{lanes.where(at)} {what}, at byte {int(address[at])}")
