"""Whether the driver can run what torch and Triton compile.

A driver runs code of its own CUDA release, of older ones, and of newer releases with the same major
number. Triton's ptxas writes the machine code, and the PTX names the release that it is of.
"""

from __future__ import annotations

import ctypes
import re

import torch

from hdet_scale.acceptance.findings import NotCheckedError, WrongResultError

_PTX_TO_CUDA = 4
"""PTX 7 is of CUDA 11, PTX 8 of CUDA 12, PTX 9 of CUDA 13."""


def check_driver(device: torch.device) -> str:
    """Compare the driver with torch's CUDA runtime and the PTX version of our kernels."""
    if device.type != "cuda":
        raise NotCheckedError("no CUDA device")
    if torch.version.cuda is None:
        raise NotCheckedError(f"this torch is for ROCm {torch.version.hip}")
    return judge_driver(driver_version(), torch.version.cuda, _compiled_ptx(device))


def driver_version() -> tuple[int, int]:
    """The CUDA release of the installed driver, by the driver's own function."""
    found = ctypes.c_int()
    error = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    if error:
        raise WrongResultError(f"cuDriverGetVersion failed with error {error}")
    return found.value // 1000, found.value % 1000 // 10


def _compiled_ptx(device: torch.device) -> str:
    """The PTX of the first case, for the newest target that is not newer than this GPU: its ptxas
    is the one that compiles for this GPU too."""
    from hdet_scale.kernels import cases, machine_code  # not at the top: they bring Triton

    major, minor = torch.cuda.get_device_capability(device)
    named = {int(t.arch): n for n, t in machine_code.TARGETS.items() if t.backend == "cuda"}
    older = [arch for arch in named if arch <= 10 * major + minor]
    if not older:
        raise WrongResultError(
            f"compute capability {major}.{minor}: the kernels are for {min(named) / 10} or newer"
        )
    text: str = machine_code.compile_case(cases.cases()[0], named[max(older)]).asm["ptx"]
    return text


def judge_driver(driver: tuple[int, int], runtime: str, ptx: str) -> str:
    """What the three versions say.

    Args:
        driver: the CUDA release of the driver.
        runtime: `torch.version.cuda`.
        ptx: the text of a compiled kernel.

    Raises:
        WrongResultError: the driver is older than what it has to run.
    """
    found = re.search(r"^\.version (\d+)\.(\d+)", ptx, re.MULTILINE)
    if found is None:
        raise WrongResultError("the compiled kernel's PTX has no .version")
    ours = f"torch CUDA {runtime}, PTX {found[1]}.{found[2]}"
    versions = f"driver CUDA {driver[0]}.{driver[1]}, {ours}"
    needed = max(int(runtime.split(".")[0]), int(found[1]) + _PTX_TO_CUDA)
    if driver[0] < needed:
        raise WrongResultError(f"{versions}: the driver must be of CUDA {needed} or newer")
    return versions
