"""Who touched a byte last: what finds two threads that meet at an address without an order.

Between two threads of a launch nothing is ordered but by a barrier of their block. So a byte that
one thread stores may be neither loaded nor stored by another until then, and never by a thread of
another block. One thing is allowed: all store the same value, in which case the order does not
matter (a flag that any thread may raise).
"""

import numpy as np

_LANE, _PHASE = 24, 16
"""Bits of a mark: launch, then the barriers that its block had passed, then the lane + 1."""


class Touches:
    """The last writer and two different readers of every byte."""

    def __init__(self, size: int) -> None:
        self._launch = 0
        self._threads = 1
        self._phase = np.zeros(1, np.int64)
        self._writer = np.zeros(size, np.int64)
        self._reader = np.zeros(size, np.int64)
        self._second = np.zeros(size, np.int64)

    def begin(self, blocks: int, threads: int) -> None:
        """A launch begins: everything before it is ordered."""
        self._launch += 1
        self._threads = threads
        self._phase = np.zeros(blocks, np.int64)

    def barrier(self, block: int) -> None:
        """The threads of a block have met: what they did before is ordered among them."""
        self._phase[block] += 1

    def read(self, at: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """Lanes [n] read bytes [n, width]; which of them race with an earlier store."""
        me = self._mark(lane)
        race = self._meets(self._writer, at, lane)
        known = self._meets(self._reader, at, lane)
        spread = np.broadcast_to(me, at.shape)
        self._second[at[known]] = spread[known]
        self._reader[at[~known]] = spread[~known]
        # Of several lanes that read a byte at once one is kept; any of the others is a second.
        lost = self._reader[at] != me
        self._second[at[lost]] = spread[lost]
        return race.any(1)

    def write(self, at: np.ndarray, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lanes [n] write bytes [n, width]: which race with an earlier load, and [n, width] which
        bytes another thread has stored to before."""
        read = self._meets(self._reader, at, lane) | self._meets(self._second, at, lane)
        written = self._meets(self._writer, at, lane)
        self._writer[at] = self._mark(lane)
        return read.any(1), written

    def _mark(self, lane: np.ndarray) -> np.ndarray:
        phase = self._phase[lane // self._threads]
        return (self._launch << _LANE + _PHASE | phase << _LANE | lane + 1)[:, None]

    def _meets(self, kept: np.ndarray, at: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """Which bytes were touched by another thread of this launch without a barrier since."""
        mark = kept[at]
        other = (mark & (1 << _LANE) - 1) - 1
        found = (mark >> _LANE + _PHASE == self._launch) & (other != lane[:, None])
        if not found.any():
            return found
        block = (lane // self._threads)[:, None]
        passed = (mark >> _LANE & (1 << _PHASE) - 1) < self._phase[block]
        return found & ~((other // self._threads == block) & passed)
