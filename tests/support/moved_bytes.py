"""MovedBytes: the bytes of memory that a piece of work reads and writes, counted while it runs.

Kernels are counted in Triton's interpreter: each element of each load and store that its mask lets
through. What torch does beside them is counted operation by operation: all of each tensor that goes
in and of each that is written, once. Collectives, views and allocations count as nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OVERWRITES = ("copy_", "fill_", "zero_")
"""Operations that do not read the tensor that they change."""
ALLOCATES = ("empty", "empty_strided", "empty_like", "new_empty")


class MovedBytes(TorchDispatchMode):
    """Counts while it is entered; in a process that interprets the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = self.launches = 0
        self._in_kernel = False

    @property
    def total(self) -> int:
        return self.read + self.written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.namespace == "aten" and name not in ALLOCATES and not self._in_kernel:
            self._count(func._schema, name, [*args], kwargs or {}, result)
        return result

    def _count(self, schema: Any, name: str, args: list[Any], given: Any, result: Any) -> None:
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return  # a view
        for at, argument in enumerate(schema.arguments):
            value = args[at] if at < len(args) else given.get(argument.name)
            size = nbytes(value)
            changed = argument.alias_info is not None and argument.alias_info.is_write
            self.written += size if changed else 0
            overwritten = name.endswith("_like") or (
                changed and (name in OVERWRITES or argument.is_out)
            )
            self.read += 0 if overwritten else size
        if all(r.alias_info is None for r in schema.returns):
            self.written += nbytes(result)


def nbytes(value: Any) -> int:
    """Of a tensor, or of all tensors of a list."""
    if isinstance(value, Tensor):
        return value.numel() * value.itemsize
    if isinstance(value, list | tuple):
        return sum(map(nbytes, value))
    return 0


@contextmanager
def moved_bytes() -> Iterator[MovedBytes]:
    """Inside, everything is counted."""
    from triton.runtime import interpreter

    builder, counted = interpreter.interpreter_builder, MovedBytes()
    load, store, call = (
        builder.create_masked_load,
        builder.create_masked_store,
        interpreter.GridExecutor.__call__,
    )

    def size(pointers: Any, mask: Any) -> int:
        return int(mask.data.sum()) * int(pointers.get_element_ty().primitive_bitwidth) // 8

    def counting_load(pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        counted.read += size(pointers, mask)
        return load(pointers, mask, *rest, **options)

    def counting_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counted.written += size(pointers, mask)
        return store(pointers, value, mask, *rest)

    def counting_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted.launches += 1
        counted._in_kernel = True
        try:
            return call(self, *args, **kwargs)
        finally:
            counted._in_kernel = False

    with (
        patch.object(builder, "create_masked_load", counting_load),
        patch.object(builder, "create_masked_store", counting_store),
        patch.object(interpreter.GridExecutor, "__call__", counting_call),
        counted,
    ):
        yield counted
