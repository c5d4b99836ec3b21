"""The table of opcodes, first half: what computes on registers.

`ARITHMETIC` maps an opcode, with all its modifiers, to a function of the lanes and the operands.
What is not in it, or in the table of `accesses.py`, is not understood.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tests.support.ptx import floats
from tests.support.ptx.lanes import Lanes
from tests.support.ptx.parse import Operand, PTXError, Vector

Operands = Sequence[Operand]
Step = Callable[[Lanes, Operands], None]
Function = Callable[..., np.ndarray]

DTYPES = {"pred": np.dtype("?"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
for _width in (8, 16, 32, 64):
    DTYPES[f"s{_width}"] = np.dtype(f"i{_width // 8}")
    DTYPES[f"u{_width}"] = DTYPES[f"b{_width}"] = np.dtype(f"u{_width // 8}")
_INTEGERS = [f"{k}{w}" for k in "su" for w in (16, 32, 64)]

ARITHMETIC: dict[str, Step] = {}


def compute(function: Function, *kinds: str) -> Step:
    """A step that reads operands of these kinds and writes what the function makes of them."""
    dtypes = [DTYPES[kind] for kind in kinds]

    def step(x: Lanes, o: Operands) -> None:
        if len(o) != len(dtypes) + 1:
            raise PTXError(f"{len(o)} operands where {len(dtypes) + 1} are understood")
        x.write(o[0], function(*(x.read(a, d) for a, d in zip(o[1:], dtypes, strict=True))))

    return step


def _define(names: str, kinds: Sequence[str], function: Function, operands: int) -> None:
    """One function under several names, `{}` in them standing for each kind."""
    for name in names.split():
        for kind in kinds:
            ARITHMETIC[name.format(kind)] = compute(function, *[kind] * operands)


# --- integers ------------------------------------------------------------------------------------

_define("add.{}", _INTEGERS, np.add, 2)
_define("sub.{}", _INTEGERS, np.subtract, 2)
_define("mul.lo.{}", _INTEGERS, np.multiply, 2)
_define("mad.lo.{}", _INTEGERS, lambda a, b, c: a * b + c, 3)
_define("min.{}", _INTEGERS, np.minimum, 2)
_define("max.{}", _INTEGERS, np.maximum, 2)
_define("neg.{}", ["s16", "s32", "s64"], np.negative, 1)
_define("abs.{}", ["s16", "s32", "s64"], np.abs, 1)
_define("and.{}", ["pred", "b16", "b32", "b64"], np.bitwise_and, 2)
_define("or.{}", ["pred", "b16", "b32", "b64"], np.bitwise_or, 2)
_define("xor.{}", ["pred", "b16", "b32", "b64"], np.bitwise_xor, 2)
_define("not.{}", ["pred", "b16", "b32", "b64"], np.invert, 1)

for _narrow, _wide in ((16, 32), (32, 64)):
    for _k in "su":
        _to = DTYPES[f"{_k}{_wide}"]
        _kinds = [f"{_k}{_narrow}"] * 2
        ARITHMETIC[f"mul.wide.{_kinds[0]}"] = compute(
            lambda a, b, to=_to: a.astype(to) * b.astype(to), *_kinds
        )
        ARITHMETIC[f"mad.wide.{_kinds[0]}"] = compute(
            lambda a, b, c, to=_to: a.astype(to) * b.astype(to) + c, *_kinds, f"{_k}{_wide}"
        )
for _k in "su":
    ARITHMETIC[f"mul.hi.{_k}32"] = compute(
        lambda a, b, k=_k: (a.astype(f"{'i' if k == 's' else 'u'}8") * b >> 32).astype(a.dtype),
        f"{_k}32",
        f"{_k}32",
    )


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero; the manual leaves a division by zero open, and here it is all ones."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, np.invert(np.zeros_like(quotient)), quotient)


_define("div.{}", _INTEGERS, _divide, 2)
_define("rem.{}", _INTEGERS, lambda a, b: a - _divide(a, b) * b, 2)


def _shift(right: bool) -> Function:
    """Shifts by the width or more leave zeros, or the sign."""

    def shift(a: np.ndarray, by: np.ndarray) -> np.ndarray:
        bits = 8 * a.dtype.itemsize
        count = np.minimum(by, np.uint32(bits - 1)).astype(a.dtype)
        moved = a >> count if right else a << count
        return (
            moved if right and a.dtype.kind == "i" else np.where(by < bits, moved, a.dtype.type(0))
        )

    return shift


for _width in (16, 32, 64):
    ARITHMETIC[f"shl.b{_width}"] = compute(_shift(False), f"b{_width}", "u32")
    for _k in "sub":
        ARITHMETIC[f"shr.{_k}{_width}"] = compute(_shift(True), f"{_k}{_width}", "u32")


def _field(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Some bits of a number; those of a signed one carry on their sign, and its own behind it."""
    kind = a.dtype.kind
    start, length = ((np.minimum(v & 255, 32)).astype(f"{kind}8") for v in (start, length))
    left = 64 - length
    field = a.astype(f"{kind}8") >> start
    # numpy leaves a shift by 64 open: two shifts by half of it.
    field = field << (left // 2) << (left - left // 2) >> (left // 2) >> (left - left // 2)
    return field.astype(a.dtype)


for _k in "su":
    ARITHMETIC[f"bfe.{_k}32"] = compute(_field, f"{_k}32", "u32", "u32")


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Each nibble of the selector names one of the eight bytes of b:a, or its sign eight times."""
    pool = (b.astype("u8") << np.uint64(32)) | a.astype("u8")
    result = np.zeros(1, "u4")
    for k in range(4):
        nibble = (selector >> np.uint32(4 * k)) & np.uint32(15)
        byte = (pool >> (8 * (nibble & np.uint32(7))).astype("u8")) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        byte = np.where(nibble >= 8, sign, byte).astype("u4")
        result = result | (byte << np.uint32(8 * k))
    return result


ARITHMETIC["prmt.b32"] = compute(_permute, "b32", "b32", "b32")


def _lookup(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    result = np.zeros(1, "u4")
    for k in range(8):
        terms = [v if k >> s & 1 else ~v for v, s in ((a, 2), (b, 1), (c, 0))]
        chosen = (table >> np.uint32(k)) & np.uint32(1)
        result = result | np.where(chosen == 1, terms[0] & terms[1] & terms[2], np.uint32(0))
    return result


ARITHMETIC["lop3.b32"] = compute(_lookup, "b32", "b32", "b32", "u32")

# --- floats --------------------------------------------------------------------------------------


def _flushed(function: Function) -> Function:
    return lambda *a: floats.flush(function(*(floats.flush(v) for v in a)))


def _float(name: str, function: Function, operands: int, *, roundings: str = "") -> None:
    """In fp32, with and without .ftz, and in fp64; `roundings` are the modifiers that mean what
    numpy does."""
    for rounding in ["", *roundings.split()]:
        for kind, flush in (("f32", False), ("f32", True), ("f64", False)):
            modifiers = f".{rounding}" * bool(rounding) + ".ftz" * flush
            used = _flushed(function) if flush else function
            ARITHMETIC[f"{name}{modifiers}.{kind}"] = compute(used, *[kind] * operands)


_float("add", np.add, 2, roundings="rn")
_float("sub", np.subtract, 2, roundings="rn")
_float("mul", np.multiply, 2, roundings="rn")
_float("div", np.divide, 2, roundings="rn full approx")
_float("neg", np.negative, 1)
_float("abs", np.abs, 1)
_float("max", floats.larger, 2)
_float("min", floats.smaller, 2)
_float("sqrt", np.sqrt, 1, roundings="rn approx")
_float("rcp", np.reciprocal, 1, roundings="rn approx")
_float("rsqrt", lambda a: (1 / np.sqrt(a.astype("f8"))).astype(a.dtype), 1, roundings="approx")
_float("ex2", lambda a: np.exp2(a.astype("f8")).astype(a.dtype), 1, roundings="approx")
_float("lg2", lambda a: np.log2(a.astype("f8")).astype(a.dtype), 1, roundings="approx")
ARITHMETIC["fma.rn.f32"] = compute(floats.fma32, "f32", "f32", "f32")
ARITHMETIC["fma.rn.ftz.f32"] = compute(_flushed(floats.fma32), "f32", "f32", "f32")
ARITHMETIC["fma.rn.f64"] = compute(floats.fma64, "f64", "f64", "f64")


def _of_two_or_three(function: Function) -> Step:
    """From sm_100 on the largest and the smallest may be of three."""
    two = compute(function, "f32", "f32")
    three = compute(lambda a, b, c: function(function(a, b), c), "f32", "f32", "f32")
    return lambda x, o: (three if len(o) == 4 else two)(x, o)


ARITHMETIC["max.f32"] = _of_two_or_three(floats.larger)
ARITHMETIC["min.f32"] = _of_two_or_three(floats.smaller)

for _name, _widen in (("f16", lambda a: a.view("f2").astype("f4")), ("bf16", floats.from_bf16)):
    # From sm_100 on the first operand, or both factors, may be of 16 bits.
    ARITHMETIC[f"add.rn.f32.{_name}"] = compute(lambda a, b, w=_widen: w(a) + b, "b16", "f32")
    ARITHMETIC[f"sub.rn.f32.{_name}"] = compute(lambda a, b, w=_widen: w(a) - b, "b16", "f32")
    ARITHMETIC[f"fma.rn.f32.{_name}"] = compute(
        lambda a, b, c, w=_widen: floats.fma32(w(a), w(b), c), "b16", "b16", "f32"
    )


def _nan_or(function: Function) -> Function:
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), a + b, function(a, b))


ARITHMETIC["max.NaN.f32"] = compute(_nan_or(floats.larger), "f32", "f32")
ARITHMETIC["min.NaN.f32"] = compute(_nan_or(floats.smaller), "f32", "f32")


def _paired(function: Function, operands: int) -> Step:
    """Two fp32 in one register of 64 bits."""

    def on_pairs(*bits: np.ndarray) -> np.ndarray:
        pairs = [np.ascontiguousarray(v).view("f4").reshape(-1, 2) for v in bits]
        return np.ascontiguousarray(function(*pairs)).view("u8").reshape(-1)

    return compute(on_pairs, *["b64"] * operands)


for _rounding in ("", ".rn"):
    ARITHMETIC[f"add{_rounding}.f32x2"] = _paired(np.add, 2)
    ARITHMETIC[f"sub{_rounding}.f32x2"] = _paired(np.subtract, 2)
    ARITHMETIC[f"mul{_rounding}.f32x2"] = _paired(np.multiply, 2)
ARITHMETIC["fma.rn.f32x2"] = _paired(floats.fma32, 3)

for _name in ("f16", "bf16"):
    _sign = np.uint16(0x8000)
    ARITHMETIC[f"abs.{_name}"] = compute(lambda a: a & np.uint16(0x7FFF), "b16")
    ARITHMETIC[f"neg.{_name}"] = compute(lambda a: a ^ np.uint16(0x8000), "b16")
    ARITHMETIC[f"abs.{_name}x2"] = compute(lambda a: a & np.uint32(0x7FFF7FFF), "b32")
    ARITHMETIC[f"neg.{_name}x2"] = compute(lambda a: a ^ np.uint32(0x80008000), "b32")

# --- comparisons and choices ---------------------------------------------------------------------

_ORDERED: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _ordered(function: Function) -> Function:
    return lambda a, b: function(a, b) & ~(np.isnan(a) | np.isnan(b))


def _unordered(function: Function) -> Function:
    return lambda a, b: function(a, b) | np.isnan(a) | np.isnan(b)


for _name, _function in _ORDERED.items():
    for _kind in (*_INTEGERS, "b16", "b32", "b64"):
        ARITHMETIC[f"setp.{_name}.{_kind}"] = compute(_function, _kind, _kind)
    for _kind in ("f32", "f64"):
        ARITHMETIC[f"setp.{_name}.{_kind}"] = compute(_ordered(_function), _kind, _kind)
        ARITHMETIC[f"setp.{_name}u.{_kind}"] = compute(_unordered(_function), _kind, _kind)
for _kind in ("f32", "f64"):
    ARITHMETIC[f"setp.nan.{_kind}"] = compute(lambda a, b: np.isnan(a) | np.isnan(b), _kind, _kind)
    ARITHMETIC[f"setp.num.{_kind}"] = compute(
        lambda a, b: ~(np.isnan(a) | np.isnan(b)), _kind, _kind
    )
for _kind in (*_INTEGERS, "b16", "b32", "b64", "f32", "f64"):
    ARITHMETIC[f"selp.{_kind}"] = compute(lambda a, b, p: np.where(p, a, b), _kind, _kind, "pred")

# --- conversions ---------------------------------------------------------------------------------

_WHOLE: dict[str, Function] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
_ALL_INTEGERS = ["s8", "u8", *_INTEGERS]

for _a in _ALL_INTEGERS:
    for _d in _ALL_INTEGERS:
        ARITHMETIC[f"cvt.{_d}.{_a}"] = compute(lambda a, to=DTYPES[_d]: a.astype(to), _a)
    for _d in ("f32", "f64"):
        ARITHMETIC[f"cvt.rn.{_d}.{_a}"] = compute(lambda a, to=DTYPES[_d]: a.astype(to), _a)
for _name, _function in _WHOLE.items():
    for _a in ("f32", "f64"):
        ARITHMETIC[f"cvt.{_name}.{_a}.{_a}"] = compute(_function, _a)
        for _d in _ALL_INTEGERS:
            ARITHMETIC[f"cvt.{_name}.{_d}.{_a}"] = compute(
                lambda a, f=_function, to=DTYPES[_d]: floats.to_integer(f(a), to), _a
            )
    ARITHMETIC[f"cvt.{_name}.ftz.f32.f32"] = compute(_flushed(_function), "f32")
    for _d in _ALL_INTEGERS:
        ARITHMETIC[f"cvt.{_name}.ftz.{_d}.f32"] = compute(
            lambda a, f=_function, to=DTYPES[_d]: floats.to_integer(f(floats.flush(a)), to), "f32"
        )


def _both(narrow: Function) -> Function:
    """The first operand goes into the upper half."""
    return lambda a, b: (narrow(a).astype("u4") << np.uint32(16)) | narrow(b)


ARITHMETIC |= {
    "cvt.f64.f32": compute(lambda a: a.astype("f8"), "f32"),
    "cvt.rn.f32.f64": compute(lambda a: a.astype("f4"), "f64"),
    "cvt.f32.f16": compute(lambda a: np.ascontiguousarray(a).view("f2").astype("f4"), "b16"),
    "cvt.f32.bf16": compute(floats.from_bf16, "b16"),
    "cvt.rn.f16.f32": compute(floats.to_f16, "f32"),
    "cvt.rn.bf16.f32": compute(floats.to_bf16, "f32"),
    "cvt.rn.f16x2.f32": compute(_both(floats.to_f16), "f32", "f32"),
    "cvt.rn.bf16x2.f32": compute(_both(floats.to_bf16), "f32", "f32"),
}

# --- moves ---------------------------------------------------------------------------------------


def _move(kind: str) -> Step:
    """A copy, or registers joined into a wider one, or taken apart; the first is the lowest."""
    dtype = DTYPES[kind]

    def step(x: Lanes, o: Operands) -> None:
        target, source = o
        if isinstance(source, Vector):
            part = np.dtype(f"u{dtype.itemsize // len(source.parts)}")
            values = [np.broadcast_to(x.part(p, part), x.count) for p in source.parts if p]
            x.write(target, np.stack(values, 1).view(dtype).reshape(-1))
        elif isinstance(target, Vector):
            part = np.dtype(f"u{dtype.itemsize // len(target.parts)}")
            whole = np.ascontiguousarray(np.broadcast_to(x.read(source, dtype), x.count))
            split = whole.view(part).reshape(x.count, len(target.parts))
            for k, register in enumerate(target.parts):
                x.write(register, np.ascontiguousarray(split[:, k]))
        else:
            x.write(target, x.read(source, dtype))

    return step


for _kind in ("pred", "b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"):
    ARITHMETIC[f"mov.{_kind}"] = _move(_kind)
