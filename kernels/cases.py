"""What is inspected: every kernel and dtype combination, and the bytes that each should move.

The optimizers' updates are found in the files of this folder, so that a new one is inspected
without being listed here; the other kernels are listed.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import hdet_scale.kernels as room
from hdet_scale.kernels import int8_state
from hdet_scale.kernels.advance import advance_kernel
from hdet_scale.kernels.bucket_scale import scale_kernel
from hdet_scale.kernels.int8_format import QUANTUM
from hdet_scale.kernels.launch import SPAN, require_triton, tl_dtype
from hdet_scale.kernels.pack import pack_kernel
from hdet_scale.kernels.pieces import gather_kernel, scatter_kernel
from hdet_scale.kernels.row_mean import row_mean_kernel
from hdet_scale.kernels.table import Combination
from hdet_scale.kernels.unpack import FROM_POINT, MOVE_POINT, NO_POINT, unpack_kernel
from hdet_scale.kernels.update import Update, update_kernel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """What a launch tells the compiler of its arguments beside their types."""

    name: str = ""
    """How a report calls it; the plain one has no name."""
    aligned: bool = True
    """Whether pointers are known to be multiples of 16 bytes, and ALIGNED is said."""
    sixteens: bool = False
    """Whether integers are known to be multiples of 16."""
    one: str | None = None
    """The integer argument that is 1, which the compiler takes for a constant."""


PLAIN = Specialization()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel variant: what to compile, and the bytes that an element should move."""

    kernel: str
    variant: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    reads: float
    """Bytes of an element that wide accesses should read."""
    writes: float
    """Bytes of an element that wide accesses should write."""
    narrow: float = 0.0
    """Bytes of an element in accesses that cannot be wide: int8 codes, eight to a thread."""
    elements: int | None = None
    """Elements of a program, if not the launch rule's."""

    @property
    def integers(self) -> list[str]:
        """The arguments that are integers."""
        return [name for name, kind in self.signature.items() if not kind.startswith("*")]

    @property
    def specializations(self) -> list[Specialization]:
        """What launches make of the kernel, the plain one first. A launch that finds its pointers
        in a table decides in the kernel what is aligned, and has no variant for it."""
        found = [PLAIN]
        if "ALIGNED" in self.constants:
            found.append(Specialization(name="unaligned", aligned=False))
        if self.integers:
            found.append(Specialization(name="integers % 16", sixteens=True))
        found += [Specialization(name=f"{n} = 1", one=n) for n in self.integers]
        return found


def cases() -> list[Case]:
    """Every kernel and dtype combination, always in the same order.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    require_triton()
    found = [_update_case(update, c) for update in updates() for c in update.combinations]
    return [*found, *_copy_cases(), *_bucket_cases(), _advance_case()]


def updates() -> list[Update]:
    """The optimizers' updates that the files of this folder define, in the order of their names."""
    names = [module.name for module in pkgutil.iter_modules(room.__path__, room.__name__ + ".")]
    found = {
        value.name: value
        for name in names
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, Update)
    }
    return [found[name] for name in sorted(found)]


def _update_case(update: Update, c: Combination) -> Case:
    pointers = ("groups", "corrections", "found_inf", "grad_scale", "clip")
    coded = c.moment == torch.int8
    # The codes and the scales, read and written; a split master is half as large, and its other
    # half, the parameter, is read too.
    narrow = len(update.moments) * 2 * (1 + 4 / int8_state.RUN) if coded else 0.0
    state = 2 * c.master if coded else len(update.moments) * _size(c.moment) + 4 * c.master
    mode = "+master" if c.master else "+stochastic" if c.stochastic else ""
    return Case(
        kernel=update.name,
        variant=f"p,g {_short(c.param)} m {_short(c.moment)}{mode}",
        function=update_kernel,
        signature={
            "tensors": "*i64",
            "grads": "*i64",
            "chunks": "*i32",
            **dict.fromkeys(pointers, "*fp32"),
        },
        constants={**update.constants(c), "SPAN": SPAN},
        # With a master the parameter is written and not read.
        reads=state + _size(c.param) * (1 if c.master and not coded else 2),
        writes=state + _size(c.param),
        narrow=narrow,
    )


def _copy_cases() -> Iterator[Case]:
    for tensor in _DTYPES:
        for bucket in _DTYPES:
            there, back = _size(tensor), _size(bucket)
            yield _copy_case("gather", gather_kernel, (tensor, bucket), there, back)
            yield _copy_case("scatter", scatter_kernel, (tensor, bucket), back, there, ADD=False)
        # What an averaging in the background has found is added: the bucket is fp32 then.
        wide = (tensor, torch.float32)
        size = _size(tensor)
        yield _copy_case("scatter", scatter_kernel, wide, 4 + size, size, ADD=True)


def _copy_case(
    name: str,
    function: Any,
    dtypes: tuple[torch.dtype, torch.dtype],
    reads: float,
    writes: float,
    **mode: bool,
) -> Case:
    tensor, bucket = dtypes
    return Case(
        kernel=name,
        variant=f"tensor {_short(tensor)} bucket {_short(bucket)}{' add' * any(mode.values())}",
        function=function,
        signature={
            **dict.fromkeys(("addresses", "places"), "*i64"),
            "chunks": "*i32",
            "bucket": f"*{_short(bucket)}",
            "flag" if name == "gather" else "skip": "*i32",
            "scale": "*fp32",
        },
        constants={"T": tl_dtype(tensor), "B": tl_dtype(bucket), **mode},
        reads=reads,
        writes=writes,
    )


def _bucket_cases() -> Iterator[Case]:
    for dtype in _DTYPES:
        size, short = _size(dtype), _short(dtype)
        yield Case(
            kernel="scale",
            variant=f"bucket {short}",
            function=scale_kernel,
            signature={"bucket": f"*{short}", "factor": "*fp32", "numel": "i64"},
            constants={"B": tl_dtype(dtype), "ALIGNED": True},
            reads=size,
            writes=size,
        )
        yield from _int8_cases(dtype, size, short)
        yield from _mean_cases(dtype)


def _mean_cases(out: torch.dtype) -> Iterator[Case]:
    for rows in _DTYPES[1:]:
        if out in (rows, torch.float32):
            yield Case(
                kernel="row_mean",
                variant=f"2 rows {_short(rows)} out {_short(out)}",
                function=row_mean_kernel,
                signature={
                    "rows": f"*{_short(rows)}",
                    "factor": "*fp32",
                    "out": f"*{_short(out)}",
                    **dict.fromkeys(("stride", "numel"), "i64"),
                },
                constants={"B": tl_dtype(out), "ROWS": 2, "INCLUDED": 3, "ALIGNED": True},
                reads=2 * _size(rows),
                writes=_size(out),
            )


def _int8_cases(dtype: torch.dtype, size: int, short: str) -> Iterator[Case]:
    packed = {"codes": "*i8", "scales": "*fp32"}
    yield Case(
        kernel="pack",
        variant=f"x {short}",
        function=pack_kernel,
        signature={"x": f"*{short}", "point": "*fp32", "error": "*fp32", **packed, "numel": "i64"},
        constants={"Q": QUANTUM, "ALIGNED": True},
        reads=size + 8,
        writes=4,
        narrow=1,
    )
    for mode, name in ((NO_POINT, ""), (FROM_POINT, " from point"), (MOVE_POINT, " move point")):
        yield Case(
            kernel="unpack",
            variant=f"out {short}{name}",
            function=unpack_kernel,
            signature={
                **packed,
                "weights": "*fp32",
                # Without a point a launch hands in the bucket, which is not read.
                "point": f"*{short}" if mode == NO_POINT else "*fp32",
                "out": f"*{short}",
                **dict.fromkeys(("replicas", "code_stride", "scale_stride"), "i32"),
                "numel": "i64",
            },
            constants={"B": tl_dtype(dtype), "MODE": mode, "Q": QUANTUM, "ALIGNED": True},
            reads=4 * (mode != NO_POINT),
            writes=size + 4 * (mode == MOVE_POINT),
            narrow=1,
        )


def _advance_case() -> Case:
    pointers = dict.fromkeys(("groups", "corrections", "found_inf"), "*fp32")
    return Case(
        kernel="advance",
        variant="steps",
        function=advance_kernel,
        signature={"tensors": "*i64", **pointers, "count": "i32"},
        constants={},
        reads=0,
        writes=0,
        elements=128,
    )


def _short(dtype: torch.dtype | None) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return "none" if dtype is None else names.get(dtype, "int8")


def _size(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else dtype.itemsize
