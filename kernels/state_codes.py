"""8-bit moments and split masters in a kernel: what `int8_state.py` does in torch."""

from hdet_scale.kernels.int8_state import FAINT, RUN
from hdet_scale.kernels.launch import jit, tl

_RUN = tl.constexpr(RUN)
_FAINT = tl.constexpr(FAINT)
_LINEAR = tl.constexpr(1.0 / 127.0)
_ROOT = tl.constexpr(1.0 / 255.0)
_WHOLE = tl.constexpr(1.5 * 2.0**23)


@jit
def runs_of(BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The places of a block's elements, a run in each row."""
    return tl.arange(0, BLOCK // _RUN)[:, None] * _RUN + tl.arange(0, _RUN)[None, :]


@jit
def load_codes(  # type: ignore[no-untyped-def]
    at, i, scales, left, root: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr
):
    """A moment from its codes at `at + i` and their runs' scales; beyond `left`, 0."""
    r = tl.arange(0, BLOCK // _RUN)
    if VECTOR:
        q = tl.load(at + i).to(tl.float32)
        s = tl.load(scales + r)
    else:
        q = tl.load(at + i, mask=i < left, other=0).to(tl.float32)
        s = tl.load(scales + r, mask=r * _RUN < left, other=0.0)
    if root:
        u = q * _ROOT * s[:, None]
        x = u * u
    else:
        x = q * _LINEAR * s[:, None]
    return x


@jit
def store_codes(  # type: ignore[no-untyped-def]
    at, x, i, scales, left, root: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr
):
    """Store a moment as codes and scales."""
    r = tl.arange(0, BLOCK // _RUN)
    mask = None
    filled = None
    if root:
        x = tl.sqrt(x)
    if not VECTOR:
        mask = i < left
        filled = r * _RUN < left
        x = tl.where(mask, x, 0.0)
    s = tl.max(tl.abs(x), axis=1)
    most: tl.constexpr = 255.0 if root else 127.0
    inverse = tl.where(s >= _FAINT, most / tl.where(s >= _FAINT, s, 1.0), 0.0)
    # Below 2^22 this sum has no bits left for a fraction: to nearest, ties to even.
    q = (x * inverse[:, None] + _WHOLE) - _WHOLE
    if root:
        q = tl.minimum(tl.maximum(q, tl.where(x > 0.0, 1.0, 0.0)), 255.0)
        tl.store(at + i, q.to(tl.int32).to(tl.uint8), mask=mask)
    else:
        q = tl.minimum(tl.maximum(q, -127.0), 127.0)
        tl.store(at + i, q.to(tl.int8), mask=mask)
    tl.store(scales + r, s, mask=filled)


@jit
def load_joined(p_at, low_at, mask):  # type: ignore[no-untyped-def]
    """The fp32 master of a bf16 parameter and its lower half."""
    upper = tl.load(p_at, mask=mask).to(tl.float32).to(tl.int32, bitcast=True)
    return (upper + tl.load(low_at, mask=mask).to(tl.int32)).to(tl.float32, bitcast=True)


@jit
def store_split(p_at, low_at, x, mask):  # type: ignore[no-untyped-def]
    """Store an fp32 master as a bf16 parameter and its lower half."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(x == x, bits, 0x7FC00000)
    upper = (bits + 0x8000) & 0xFFFF0000
    tl.store(low_at, (bits - upper).to(tl.int32, bitcast=True).to(tl.int16), mask=mask)
    tl.store(p_at, upper.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=mask)
