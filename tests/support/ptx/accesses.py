"""The table of opcodes, second half: memory, and what the threads of a warp exchange."""

from typing import TYPE_CHECKING

import numpy as np

from tests.support.ptx import floats
from tests.support.ptx.arithmetic import DTYPES, Operands
from tests.support.ptx.lanes import WARP, Lanes
from tests.support.ptx.parse import Address, Immediate, Operand, PTXError, Register, Vector

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.ptx.memory import Memory
    from tests.support.ptx.shared import Shared

    Access = Callable[[Lanes, Operands, Memory, Shared], None]

ACCESSES: dict[str, "Access"] = {}

# How long a line is wanted in a cache changes no value.
HINTS = (
    ".L1::evict_normal", ".L1::evict_unchanged", ".L1::evict_first", ".L1::evict_last",
    ".L1::no_allocate",
)  # fmt: skip


def _parts(operand: Operand) -> tuple[Operand | None, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


def _load(space: str, kind: str, count: int) -> "Access":
    dtype = DTYPES[kind]

    def step(x: Lanes, o: Operands, memory: "Memory", shared: "Shared") -> None:
        targets = _parts(o[0])
        if len(targets) != count:
            raise PTXError(f"{len(targets)} registers for {count} elements")
        source = memory if space == "global" else shared
        values = source.load(x, x.address(o[1]), dtype.itemsize, count)
        for target, value in zip(targets, values, strict=True):
            x.write(target, value.view(dtype))

    return step


def _store(space: str, kind: str, count: int) -> "Access":
    bits = np.dtype(f"u{DTYPES[kind].itemsize}")

    def step(x: Lanes, o: Operands, memory: "Memory", shared: "Shared") -> None:
        values = [x.read(part, bits) for part in _parts(o[1]) if part is not None]
        if len(values) != count:
            raise PTXError(f"{len(values)} values for {count} elements")
        target = memory if space == "global" else shared
        target.store(x, x.address(o[0]), values)

    return step


for _kind in (k for k in DTYPES if k != "pred"):
    for _space in ("global", "shared"):
        for _count in (1, 2, 4, 8):
            # The widest access is 16 bytes, and 32 to global memory from sm_100 on.
            if _count * DTYPES[_kind].itemsize > (32 if _space == "global" else 16):
                continue
            _vector = f".v{_count}" if _count > 1 else ""
            ACCESSES[f"ld.{_space}{_vector}.{_kind}"] = _load(_space, _kind, _count)
            ACCESSES[f"st.{_space}{_vector}.{_kind}"] = _store(_space, _kind, _count)


def _parameter(kind: str) -> "Access":
    dtype = DTYPES[kind]

    def step(x: Lanes, o: Operands, memory: "Memory", shared: "Shared") -> None:
        at = o[1]
        if not isinstance(at, Address) or isinstance(at.base, Register) or at.offset:
            raise PTXError("a parameter is read by its name")
        x.write(o[0], Immediate(x.parameters[at.base]).as_type(dtype))

    return step


for _kind in (k for k in DTYPES if k != "pred"):
    ACCESSES[f"ld.param.{_kind}"] = _parameter(_kind)


def _shuffle(lane_of: "Callable[[np.ndarray, int], np.ndarray]") -> "Access":
    """Every lane takes the value of another lane of its warp."""

    def step(x: Lanes, o: Operands, memory: "Memory", shared: "Shared") -> None:
        target, value, by, clamp, members = o
        x.need_warps("shfl.sync")
        numbers = [n.bits if isinstance(n, Immediate) else None for n in (by, clamp, members)]
        if numbers[0] is None or numbers[1:] not in ([31, -1], [31, 0xFFFFFFFF]):
            raise PTXError("shfl among other lanes than the 32 of a warp")
        lanes = lane_of(np.arange(WARP), numbers[0])
        taken = x.across(x.read(value, DTYPES["b32"]))[:, lanes]
        x.write(target, np.ascontiguousarray(taken).reshape(-1))

    return step


ACCESSES["shfl.sync.bfly.b32"] = _shuffle(lambda lane, by: lane ^ by)
ACCESSES["shfl.sync.idx.b32"] = _shuffle(lambda lane, by: np.full_like(lane, by))


def _reduce(function: "Callable[..., np.ndarray]", kind: str) -> "Access":
    def step(x: Lanes, o: Operands, memory: "Memory", shared: "Shared") -> None:
        x.need_warps("redux.sync")
        values = x.across(x.read(o[1], DTYPES[kind]))
        total = values[:, 0]
        for lane in range(1, WARP):
            total = function(total, values[:, lane])
        x.write(o[0], np.repeat(total, WARP))

    return step


for _name, _function in (("max", floats.larger), ("min", floats.smaller)):
    ACCESSES[f"redux.sync.{_name}.f32"] = _reduce(_function, "f32")
for _name, _function in (("max", np.maximum), ("min", np.minimum), ("add", np.add)):
    for _kind in ("s32", "u32"):
        ACCESSES[f"redux.sync.{_name}.{_kind}"] = _reduce(_function, _kind)
for _name, _function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
    ACCESSES[f"redux.sync.{_name}.b32"] = _reduce(_function, "b32")


def _rows(x: Lanes, o: Operand, matrix: int) -> np.ndarray:
    """[warps, 8]: the addresses of the rows of a matrix, which eight lanes of each warp give."""
    rows = x.across(x.address(o))[:, 8 * matrix : 8 * matrix + 8]
    if (rows % 16 != 0).any():
        raise PTXError("the row of a matrix begins off a 16-byte boundary: misaligned")
    return rows


def _matrix_load(count: int, turned: bool) -> "Access":
    """Matrices of 8 x 8 elements of 16 bits; lane i takes two elements of row i / 4, or of column
    i / 4 if it is turned."""

    def step(x: Lanes, o: Operands, memory: "Memory", shared: "Shared") -> None:
        x.need_warps("ldmatrix")
        lane = np.arange(WARP)
        for matrix, target in enumerate(_parts(o[0])):
            rows = _rows(x, o[1], matrix)
            if turned:
                pair = [rows[:, lane % 4 * 2 + k] + lane // 4 * 2 for k in (0, 1)]
                low, high = (shared.load(x, p.reshape(-1), 2, 1)[0].astype("u4") for p in pair)
                x.write(target, low | high << np.uint32(16))
            else:
                places = rows[:, lane // 4] + lane % 4 * 4
                x.write(target, shared.load(x, places.reshape(-1), 4, 1)[0])

    return step


def _matrix_store(count: int, turned: bool) -> "Access":
    def step(x: Lanes, o: Operands, memory: "Memory", shared: "Shared") -> None:
        x.need_warps("stmatrix")
        lane = np.arange(WARP)
        for matrix, source in enumerate(p for p in _parts(o[1]) if p is not None):
            rows, value = _rows(x, o[0], matrix), x.read(source, DTYPES["b32"])
            if turned:
                for k in (0, 1):
                    places = (rows[:, lane % 4 * 2 + k] + lane // 4 * 2).reshape(-1)
                    shared.store(x, places, [(value >> np.uint32(16 * k)).astype("u2")])
            else:
                shared.store(x, (rows[:, lane // 4] + lane % 4 * 4).reshape(-1), [value])

    return step


for _count in (1, 2, 4):
    for _turned in (False, True):
        _shape = f"sync.aligned.m8n8.x{_count}{'.trans' * _turned}.shared.b16"
        ACCESSES[f"ldmatrix.{_shape}"] = _matrix_load(_count, _turned)
        ACCESSES[f"stmatrix.{_shape}"] = _matrix_store(_count, _turned)
