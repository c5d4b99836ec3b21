"""Where a step is carried out: by our Triton kernels, or by torch's fused kernels."""

import functools
import importlib.util
import logging

import torch

_log = logging.getLogger(__name__)


def choose_backend(wanted: str | None, device: torch.device) -> str:
    """Triton on a GPU, torch's fused kernels on a CPU; what the user asked for, where it can be.

    A GPU without Triton falls back to torch's, and a warning says so once.

    Raises:
        ModuleNotFoundError: "triton" was asked for and is not installed.
        ValueError: "triton" was asked for on a device that no kernel runs on.
    """
    if wanted == "triton":
        from hdet_scale.kernels.launch import check_device

        check_device(device)
    if wanted is not None:
        return wanted
    if device.type == "cpu":
        return "torch"
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return "triton"
    _warn_once(
        f"no Triton kernels on {device.type}: stepping with torch's fused kernels instead, one "
        "launch a group and dtype. `pip install hdet_scale[triton]` on a CUDA or ROCm device."
    )
    return "torch"


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)
