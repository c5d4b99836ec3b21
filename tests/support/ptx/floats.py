"""Floating point arithmetic of a GPU that numpy lacks, on arrays, with the rounding of the manual.

A fused multiply-add is rounded once. In fp32 the product is exact in fp64, and the sum is rounded
to odd before it is rounded to fp32; in fp64 the errors of product and sum are computed exactly
(Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums").
"""

import numpy as np

_F32, _F64 = np.dtype("f4"), np.dtype("f8")


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _odd(s: np.ndarray, error: np.ndarray) -> np.ndarray:
    """fp64 s + error rounded to odd: towards the error where the last bit of s is even."""
    bits = np.ascontiguousarray(s).view("i8")
    move = (error != 0) & np.isfinite(s) & (bits & 1 == 0)
    outwards = (error > 0) == (s > 0)
    return np.where(move, bits + np.where(outwards, 1, -1), bits).view("f8")


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c in fp32, rounded once."""
    product = a.astype(_F64) * b.astype(_F64)
    total, error = _two_sum(product, c.astype(_F64))
    # An infinite sum has no error; 0 + 0 keeps the sign that fp64 gives it.
    return _odd(total, error).astype(_F32)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c in fp64, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    plain = a * b + c
    upper, lower = _two_product(a, b)
    high, low = _two_sum(c, lower)
    total, rest = _two_sum(upper, high)
    result = total + _odd(*_two_sum(low, rest))
    return np.where(np.isfinite(plain) & np.isfinite(result), result, plain)


def _two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    product = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scaled = x * 134217729.0
    upper = scaled - (scaled - x)
    return upper, x - upper


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits of fp32 x as bfloat16, to nearest, ties to even."""
    bits = np.ascontiguousarray(x).view("u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype("u2")


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("u4") << np.uint32(16)).view(_F32)


def to_f16(x: np.ndarray) -> np.ndarray:
    """The bits of fp32 x as fp16, to nearest, ties to even."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype("f2").view("u2"))


def flush(x: np.ndarray) -> np.ndarray:
    """`.ftz`: a subnormal counts as a zero of its sign."""
    tiny = np.abs(x) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), x), x)


def to_integer(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """An integral float as an integer: clamped to its range, and 0 for what is not a number."""
    limits = np.iinfo(dtype)
    inside = (x > float(limits.min)) & (x < float(limits.max))
    plain = np.where(inside, x, 0).astype(dtype)
    clamped = np.where(x > 0, limits.max, limits.min).astype(dtype)
    return np.where(np.isnan(x), dtype.type(0), np.where(inside, plain, clamped))


def larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`max`: the other where one is not a number, and +0 above -0."""
    same = (a == b) & (a == 0)
    return np.where(same, np.where(np.signbit(a), b, a), np.fmax(a, b))


def smaller(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`min`: the other where one is not a number, and -0 below +0."""
    same = (a == b) & (a == 0)
    return np.where(same, np.where(np.signbit(a), a, b), np.fmin(a, b))
