"""The registers of all threads of a launch, and which threads are active.

A lane is a thread; lanes are numbered block after block. A register is an array of unsigned
integers with one element a lane; an array is replaced when it is written and never changed, so that
two registers may share one.
"""

from collections.abc import Sequence

import numpy as np

from tests.support.ptx.parse import Address, Immediate, Operand, PTXError, Register, Special

WARP = 32
_UNSIGNED = {1: np.dtype("?"), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4")}
_UNSIGNED[64] = np.dtype("u8")


def unsigned(bits: int) -> np.dtype:
    """The numpy type that keeps a register of so many bits; a predicate is one bit."""
    return _UNSIGNED[bits]


class Lanes:
    """Registers and masks of `blocks` thread blocks of `threads` threads."""

    def __init__(
        self, blocks: int, threads: int, registers: int, parameters: dict[str, int]
    ) -> None:
        self.count = blocks * threads
        self.blocks, self.threads = blocks, threads
        lane = np.arange(self.count, dtype=np.int64)
        self.lane = lane
        self.block = lane // threads
        self.thread = lane % threads
        self.warp = lane // WARP
        self.parameters = parameters
        self.values: list[np.ndarray | None] = [None] * registers
        self.mask = np.ones(self.count, bool)
        self.whole = True
        """Whether every lane is active."""
        self._special = {
            "%tid.x": self.thread,
            "%ctaid.x": self.block,
            "%laneid": self.thread % WARP,
            "%warpid": self.thread // WARP,
            "%ntid.x": np.full_like(lane, threads),
            "%nctaid.x": np.full_like(lane, blocks),
        }
        for axis in "yz":
            self._special |= {f"%{n}.{axis}": np.zeros_like(lane) for n in ("tid", "ctaid")}
            self._special |= {f"%{n}.{axis}": np.ones_like(lane) for n in ("ntid", "nctaid")}

    def activate(self, mask: np.ndarray) -> None:
        """Let only these lanes act."""
        self.mask = mask
        self.whole = bool(mask.all())

    def read(self, operand: Operand, dtype: np.dtype) -> np.ndarray:
        """The operand in every lane as `dtype`: the low bits of a register that is wider."""
        if type(operand) is Register:
            value = self.values[operand.index]
            if value is None:
                raise PTXError(f"{operand.name} is read before it is written")
            if dtype.itemsize * 8 < operand.bits and dtype.kind != "b":
                value = value.astype(f"u{dtype.itemsize}")
            return value.view(dtype)
        if type(operand) is Immediate:
            return operand.as_type(dtype)
        if type(operand) is Special:
            # The one shared symbol begins at address 0 of its space.
            found = self._special.get(operand.name)
            return np.zeros(1, dtype) if found is None else found.astype(dtype)
        raise PTXError(f"{operand} is not a value")

    def part(self, operand: Operand, dtype: np.dtype) -> np.ndarray:
        """As `read`, of what becomes a part of a wider register. The compiler leaves a part that
        nobody reads unwritten: it is all ones, not a number in any format."""
        if type(operand) is Register and self.values[operand.index] is None:
            return np.full(1, -1, f"i{dtype.itemsize}").view(dtype)
        return self.read(operand, dtype)

    def write(self, register: Operand | None, value: np.ndarray) -> None:
        """Set a register of the active lanes; a narrower value is extended by its sign, if it has
        one, or by zeros. None is dropped."""
        if register is None:
            return
        if type(register) is not Register:
            raise PTXError(f"{register} cannot be written")
        kept = unsigned(register.bits)
        if value.dtype != kept:
            if value.dtype.itemsize == kept.itemsize:
                value = value.view(kept)
            elif value.dtype.itemsize < kept.itemsize and value.dtype.kind in "iu":
                value = value.astype(f"{value.dtype.kind}{kept.itemsize}").view(kept)
            else:
                raise PTXError(f"{value.dtype} does not fit {register.name}")
        if value.size != self.count:
            value = np.broadcast_to(value, self.count)
        if not self.whole:
            before = self.values[register.index]
            value = np.where(self.mask, value, kept.type(0) if before is None else before)
        self.values[register.index] = value

    def address(self, operand: Operand) -> np.ndarray:
        """Of every lane, in int64: global, or within the shared memory of its block."""
        if type(operand) is not Address:
            raise PTXError(f"{operand} is not an address")
        if type(operand.base) is not Register:
            return np.full(self.count, operand.offset, np.int64)
        base = self.values[operand.base.index]
        if base is None:
            raise PTXError(f"{operand.base.name} is read before it is written")
        return base.astype(np.int64) + operand.offset

    def across(self, value: np.ndarray) -> np.ndarray:
        """A value as [warps, 32]."""
        return np.broadcast_to(value, self.count).reshape(-1, WARP)

    def need_warps(self, text: str) -> None:
        """An exchange within a warp needs all of its threads: one that is elsewhere never answers.

        Raises:
            PTXError: A warp is only partly here.
        """
        together = self.mask.reshape(-1, WARP)
        partial = together.any(1) & ~together.all(1)
        if partial.any():
            warp = int(partial.argmax())
            raise PTXError(f"{text}: of warp {warp} only {int(together[warp].sum())} threads")

    def where(self, lane: int) -> str:
        return f"thread {int(self.thread[lane])} of block {int(self.block[lane])}"


def first(mask: np.ndarray, *values: np.ndarray) -> Sequence[int]:
    """The first lane of a mask, and the values there."""
    at = int(mask.argmax())
    return [at, *(int(v[at]) for v in values)]
