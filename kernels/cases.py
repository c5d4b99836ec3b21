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
from hdet_scale.kernels.table import Combination
from hdet_scale.kernels.unpack import unpack_kernel
from hdet_scale.kernels.update import Update, update_kernel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
            for name, function, flag in (
                ("gather", gather_kernel, "flag"),
                ("scatter", scatter_kernel, "skip"),
            ):
                ends = (_size(tensor), _size(bucket))
                reads, writes = ends if name == "gather" else ends[::-1]
                yield Case(
                    kernel=name,
                    variant=f"tensor {_short(tensor)} bucket {_short(bucket)}",
                    function=function,
                    signature={"pieces": "*i64", "chunks": "*i32", flag: "*i32", "scale": "*fp32"},
                    constants={"T": tl_dtype(tensor), "B": tl_dtype(bucket)},
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


def _int8_cases(dtype: torch.dtype, size: int, short: str) -> Iterator[Case]:
    packed = {"codes": "*i8", "scales": "*fp32"}
    yield Case(
        kernel="pack",
        variant=f"x {short}",
        function=pack_kernel,
        signature={"x": f"*{short}", "error": "*fp32", **packed, "numel": "i64"},
        constants={"Q": QUANTUM, "ALIGNED": True},
        reads=size + 4,
        writes=4,
        narrow=1,
    )
    yield Case(
        kernel="unpack",
        variant=f"out {short}",
        function=unpack_kernel,
        signature={
            **packed,
            "weights": "*fp32",
            "out": f"*{short}",
            **dict.fromkeys(("replicas", "code_stride", "scale_stride"), "i32"),
            "numel": "i64",
        },
        constants={"B": tl_dtype(dtype), "Q": QUANTUM, "ALIGNED": True},
        reads=0,
        writes=size,
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
