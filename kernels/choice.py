"""Whether and how the kernels run where a tensor lies, asked without importing Triton."""

import functools
import importlib.util
import os

import torch


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels: on the CPU, for correctness only."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def capturing(device: torch.device) -> bool:
    """Whether what is started now is recorded into a CUDA graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def on_kernels(tensor: torch.Tensor) -> bool:
    """True on CUDA and ROCm where Triton is installed, and on a CPU under its interpreter.

    Elsewhere the caller's torch code, which gives the same bits, does the work in more passes.
    """
    wanted = tensor.device.type == "cuda" or (tensor.device.type == "cpu" and interpreting())
    return wanted and _has_triton()
