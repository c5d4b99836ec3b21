"""What a report of a fault has to name: versions, GPUs and driver."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

import torch

from hdet_scale.acceptance.driver import driver_version
from hdet_scale.acceptance.findings import WrongResultError

PACKAGES = ("hdet_scale", "torch", "triton", "deepspeed", "numpy")


def describe_machine() -> list[str]:
    """The lines at the head of `hdet doctor`."""
    system = f"Python {platform.python_version()}, {platform.platform()}, {platform.machine()}"
    return [", ".join(_versions()), system, *_devices()]


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"no {name}"


def _devices() -> Iterator[str]:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    if not torch.cuda.is_available():
        where = built if torch.version.cuda or torch.version.hip else "CPUs"
        yield f"no GPU, torch for {where}"
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield (
            f"GPU {index}: {found.name}, compute capability {found.major}.{found.minor}, "
            f"{found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} multiprocessors"
        )
    yield f"torch for {built}, {_driver()}, NCCL {_nccl()}"


def _driver() -> str:
    if torch.version.cuda is None:
        return "driver not asked"
    try:
        return f"driver of CUDA {'.'.join(map(str, driver_version()))}"
    except (OSError, WrongResultError) as error:
        return f"driver unknown ({error})"


def _nccl() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # a build without NCCL: the name itself may be missing
        return "missing"
