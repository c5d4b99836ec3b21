"""A GPU that is not there: launches of our kernels are compiled for a target and interpreted.

Inside `with Device("sm_90") as gpu:` every tensor that torch makes lies in the interpreter's
memory, and a kernel that is started there is compiled as Triton's launcher would compile it for
that target, with the specializations that these very arguments have, and its PTX is executed. So
the code around a kernel (its tables, its grid, its choice of a variant) is executed as well.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from hdet_scale.kernels import choice, launch
from hdet_scale.kernels.machine_code import TARGETS
from tests.support.ptx.machine import execute
from tests.support.ptx.memory import Memory
from tests.support.ptx.parse import Program, parse

_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided")


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Program:
    return parse(text)


@functools.cache
def _backend(target: str) -> Any:
    to = TARGETS[target]
    return make_backend(GPUTarget(to.backend, to.arch, to.warp))


@functools.cache
def _binder(kernel: Any, target: str) -> Callable[..., Any]:
    return create_function_from_signature(kernel.signature, kernel.params, _backend(target))


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel that was executed, and as what it was compiled."""

    kernel: Any
    constants: dict[str, Any]
    """By the names of the arguments, those included whose value 1 became a constant."""
    signature: dict[str, str]
    divisible: frozenset[str]
    """Arguments that the compiler took for multiples of 16."""
    blocks: int
    ptx: str


class Device(TorchFunctionMode):
    """Where kernels run.

    Args:
        target: As in `machine_code.TARGETS`: an NVIDIA one.
        shift: Place every tensor one element behind a 16-byte boundary (default: False).
        edit: Changes the PTX before it runs, to see whether a fault is found (default: None).
        types: Types of integer arguments, by name, instead of the launch's own specialization
            (default: None).
    """

    def __init__(
        self,
        target: str,
        *,
        shift: bool = False,
        edit: Callable[[str], str] | None = None,
        types: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.target = target
        self.memory = Memory(shift=shift)
        self.launches: list[Launch] = []
        self._edit = edit
        self._types = types or {}
        self._patches = ExitStack()

    def __enter__(self) -> "Device":
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._run(kernel, grid, args, kwargs)

        # A scalar that an earlier device kept lies in that device's memory.
        launch.constant.cache_clear()
        for place, name, value in (
            (JITFunction, "run", run),
            (launch, "check_device", lambda device: None),
            (choice, "interpreting", lambda: True),
        ):
            self._patches.enter_context(mock.patch.object(place, name, value))
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patches.close()
        launch.constant.cache_clear()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if type(made) is not torch.Tensor or made.device.type != "cpu" or made.numel() == 0:
            return made
        given = [a for a in args if isinstance(a, torch.Tensor)]
        storage = made.untyped_storage().data_ptr()
        if any(a.untyped_storage().data_ptr() == storage for a in given):
            return made
        placed = self.memory.place(made)
        if getattr(function, "__name__", "") in _EMPTY and placed.is_contiguous():
            # What was not written must not pass for a zero.
            placed.view(-1).view(torch.uint8).fill_(0xFF)
        return placed

    def _run(self, kernel: Any, grid: Any, args: Any, kwargs: dict[str, Any]) -> None:
        backend = _backend(self.target)
        bound, specialization, options = _binder(kernel, self.target)(*args, **kwargs)
        names = [p.name for p in kernel.params]
        for at, name in enumerate(names):
            if name in self._types and specialization[at][0] != "*":
                specialization[at] = (self._types[name], "")
        _, signature, constants, attrs = kernel._pack_args(
            backend, kwargs, bound, specialization, options
        )
        # Said as `compile_case` says it, so that both find it in Triton's cache.
        attrs = {path: found for path, found in attrs.items() if found}
        said = {name: value for name, value in kwargs.items() if name not in names}
        source = ASTSource(kernel, signature, constants, attrs)
        to = _backend(self.target).target
        compiled = triton.compile(source, target=to, options=said)
        self._check_places(bound)
        text = compiled.asm["ptx"]
        text = self._edit(text) if self._edit else text
        taken = [bound[n] for n in names if signature[n] != "constexpr"]
        execute(_parsed(text), grid[0], [_bits(v) for v in taken], self.memory, _shared(compiled))
        self.launches.append(
            Launch(
                kernel=kernel,
                constants={names[path[0]]: value for path, value in constants.items()},
                signature=signature,
                divisible=frozenset(names[path[0]] for path, found in attrs.items() if found),
                blocks=grid[0],
                ptx=text,
            )
        )

    def _check_places(self, bound: dict[str, Any]) -> None:
        for name, value in bound.items():
            if isinstance(value, torch.Tensor) and value.numel() and not self.memory.holds(value):
                raise ValueError(
                    f"argument {name} {tuple(value.shape)} was made outside of the device: make it "
                    "inside of `with Device(...)`, or hand in device.memory.place(tensor)"
                )


def _shared(compiled: Any) -> int:
    return int(compiled.metadata.shared)


def _bits(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, int):
        return value
    raise TypeError(f"{value!r} of {type(value)}: a kernel's argument is a tensor or an integer")
