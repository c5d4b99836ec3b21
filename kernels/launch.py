"""How a kernel is started: block sizes by rule, on a GPU or in Triton's interpreter.

There is no autotuning: these kernels update in place, so that every tuning run would apply the
update once more. The rule is the memory's: a thread takes eight elements, which is one 128-bit
access to a 16-bit array and two to an fp32 array, and a program takes four warps of threads.

This is the one file that imports Triton. Where Triton is missing the kernels are still defined,
so that the torch references beside them can be used; starting one names the extra to install.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from hdet_scale.kernels.choice import interpreting

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:

    class _NoTriton:
        """Stands for `triton` and `tl` where Triton is missing: enough to define a kernel."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

        @staticmethod
        def jit(function: Callable[..., Any], repr: object = None) -> "_Unlaunchable":
            return _Unlaunchable(function)

    class _Unlaunchable:
        """A kernel that can be named but not started."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self.fn = function

        def __getitem__(self, grid: object) -> NoReturn:
            require_triton()
            raise RuntimeError(f"kernel {self.fn.__name__} was defined before Triton was installed")

    triton = tl = _NoTriton()

__all__ = [
    "ELEMENTS_PER_THREAD",
    "NUM_WARPS",
    "SPAN",
    "block_size",
    "check_device",
    "constant",
    "device_block_size",
    "interpreting",
    "jit",
    "launch",
    "require_triton",
    "tl",
    "tl_dtype",
    "triton",
]


def jit(function: Callable[..., Any], *, name: Callable[[Any], str] | None = None) -> Any:
    """`triton.jit` with a type: what makes a kernel of a function.

    Args:
        function: The kernel's body.
        name: Names a compiled variant from its specialization; None is the function's name.
    """
    return triton.jit(function, repr=name)


ELEMENTS_PER_THREAD = 8
NUM_WARPS = 4
SPAN = 16 * 1024
"""Elements of a program that loops over its blocks: a table of programs is then short, and a
multiple of every block size."""


def require_triton() -> None:
    """Raise an error that names the extra to install if Triton is missing."""
    try:
        import triton as _  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "Triton is not installed, and this path runs Triton kernels. "
            "Install it with `pip install hdet_scale[triton]`, or use backend='torch'."
        ) from missing


def block_size(warp_size: int = 32) -> int:
    """Elements of a program: 1024 with warps of 32 threads, 2048 with AMD's wavefronts of 64."""
    if warp_size not in (32, 64):
        raise ValueError(f"warp_size={warp_size}: GPUs have 32 (NVIDIA) or 64 (AMD CDNA)")
    return ELEMENTS_PER_THREAD * NUM_WARPS * warp_size


@functools.lru_cache(maxsize=64)
def device_block_size(device: torch.device) -> int:
    """`block_size` for the device at hand; the interpreter takes the NVIDIA size."""
    return block_size(64 if device.type == "cuda" and torch.version.hip else 32)


def check_device(device: torch.device) -> None:
    """Refuse, before anything is written, a device on which no kernel can be started."""
    require_triton()
    if device.type == "cuda" or (device.type == "cpu" and interpreting()):
        return
    raise ValueError(
        f"Triton kernels were asked for on device {device}: they need a CUDA or ROCm device, or "
        "TRITON_INTERPRET=1 in the environment before the first import (slow, for tests). "
        "Use backend='torch' here."
    )


def tl_dtype(dtype: torch.dtype) -> Any:
    """The Triton dtype of a torch dtype that the kernels know."""
    known = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    if dtype not in known:
        raise ValueError(f"dtype {dtype} has no kernel; valid: {[str(d) for d in known]}")
    return getattr(tl, known[dtype])


@functools.lru_cache(maxsize=64)
def constant(value: float, device: torch.device) -> torch.Tensor:
    """A one-element fp32 tensor that stands for a device scalar which the caller left out."""
    return torch.full((1,), value, dtype=torch.float32, device=device)


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launch(kernel: Any, programs: int, device: torch.device, *args: Any, **constants: Any) -> None:
    """Start `programs` programs of a kernel on a device; nothing to do when there are none.

    Multiply-add contraction is asked for, as every CUDA compiler does by default, so that it does
    not depend on an environment variable.
    """
    if programs == 0:
        return
    check_device(device)
    options = {} if interpreting() else {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
    with _on(device):
        kernel[(programs,)](*args, **constants, **options)
