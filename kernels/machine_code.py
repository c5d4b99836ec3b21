"""How a kernel's machine code is made and read, on a machine without a GPU.

`compile_case` compiles one case ahead of time for a target. `read` counts in the result the
registers, the spills, and the global loads and stores by their width: in PTX and the cubin for
NVIDIA, in the assembly for AMD.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from hdet_scale.kernels.cases import PLAIN, Case, Specialization
from hdet_scale.kernels.launch import NUM_WARPS, block_size, interpreting, triton
from hdet_scale.kernels.occupancy import Processor


@dataclass(frozen=True, slots=True)
class Target:
    """What to compile for."""

    backend: str
    arch: int | str
    warp: int
    """Threads of a warp, or of AMD's wavefront."""
    gpu: str
    """A GPU of that kind."""
    bandwidth: float
    """Of that GPU's memory in bytes/s (the vendor's data sheet): no kernel can be faster."""
    processor: Processor
    """What one of its multiprocessors has."""
    driver: int = 0
    """The first branch of NVIDIA's driver that knows it."""


def _nvidia(warps: int, programs: int, shared: int) -> Processor:
    """64 K registers in units of 8 a thread; a thread block costs 1 KB of shared memory."""
    return Processor(
        warps=warps,
        programs=programs,
        registers=65536,
        unit=8,
        shared=shared * 1024,
        reserved=1024,
    )


def _cdna(shared: int) -> Processor:
    """512 registers a lane on each of four units of 64 lanes, eight wavefronts on each."""
    return Processor(warps=32, programs=16, registers=131072, unit=8, shared=shared * 1024)


TARGETS = {
    "sm_80": Target("cuda", 80, 32, "A100 80GB SXM", 2.039e12, _nvidia(64, 32, 164), 450),
    "sm_89": Target("cuda", 89, 32, "L40S", 0.864e12, _nvidia(48, 24, 100), 525),
    "sm_90": Target("cuda", 90, 32, "H100 SXM", 3.35e12, _nvidia(64, 32, 228), 525),
    "sm_100": Target("cuda", 100, 32, "B200", 8.0e12, _nvidia(64, 32, 228), 570),
    "sm_103": Target("cuda", 103, 32, "B300", 8.0e12, _nvidia(64, 32, 228), 575),
    "sm_120": Target("cuda", 120, 32, "RTX PRO 6000", 1.792e12, _nvidia(48, 24, 100), 570),
    "gfx90a": Target("hip", "gfx90a", 64, "MI250X, one die", 1.638e12, _cdna(64)),
    "gfx942": Target("hip", "gfx942", 64, "MI300X", 5.3e12, _cdna(64)),
    "gfx950": Target("hip", "gfx950", 64, "MI355X", 8.0e12, _cdna(160)),
}

_DRIVERS = {7: 450, 8: 525, 9: 580}
"""By the major version of PTX: the first driver of the CUDA release (11, 12, 13) that such machine
code belongs to. Within a release a driver runs what a later compiler made."""


def driver_of(version: tuple[int, int], target: str) -> int | None:
    """The oldest driver branch that runs a kernel, or None if none is known.

    Args:
        version: Of its PTX.
        target: What it was compiled for: a GPU needs a driver that knows it.
    """
    known = _DRIVERS.get(version[0])
    return None if known is None else max(known, TARGETS[target].driver)


@dataclass(frozen=True, slots=True)
class MachineCode:
    """What was counted in the machine code of a kernel."""

    registers: int
    """Of a thread."""
    spills: int
    """Bytes (NVIDIA) or registers and bytes (AMD) that are kept in memory instead."""
    shared: int
    """Bytes of shared memory."""
    loads: dict[int, int]
    """Load instructions by their width in bits."""
    stores: dict[int, int]
    """Store instructions by their width in bits."""
    ptx: tuple[int, int] | None
    """The version of PTX; None for AMD."""


def elements_of(case: Case, target: Target) -> int:
    """Elements that one program of a case works on."""
    return case.elements or block_size(target.warp)


def compile_case(case: Case, target: str, special: Specialization = PLAIN) -> Any:
    """The compiled kernel of a case, from Triton's cache if it has been compiled before.

    Args:
        case: What to compile.
        target: A name in `TARGETS`.
        special: What the launch knows of its arguments (default: pointers are aligned).

    Raises:
        RuntimeError: The process interprets kernels (TRITON_INTERPRET).
    """
    if interpreting():
        raise RuntimeError("TRITON_INTERPRET is set: nothing is compiled. Unset it and start anew.")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    to = TARGETS[target]
    constants = {**case.constants, "BLOCK": elements_of(case, to)}
    if "ALIGNED" in constants and not special.aligned:
        constants["ALIGNED"] = False
    if special.one is not None:
        constants[special.one] = 1
    names = case.function.arg_names
    kinds = {name: kind for name, kind in case.signature.items() if name not in constants}
    signature = {name: kinds.get(name, "constexpr") for name in names}
    # A launch marks 16-byte aligned pointers like this; a bucket that is not is ALIGNED=False.
    marked = [n for n, kind in kinds.items() if _is_marked(kind, special)]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in marked}
    source = ASTSource(case.function, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget(to.backend, to.arch, to.warp), options=options)


def _is_marked(kind: str, special: Specialization) -> bool:
    return special.aligned if kind.startswith("*") else special.sixteens


def read(compiled: Any, target: str) -> MachineCode:
    """Count what decides the speed of a kernel that is bound by memory."""
    shared = compiled.metadata.shared
    if TARGETS[target].backend == "cuda":
        text = compiled.asm["ptx"]
        resources = _nvidia_resources(compiled.asm["cubin"])
        widths = (_ptx_widths(text, "ld"), _ptx_widths(text, "st"))
        return MachineCode(*resources, shared, *widths, _ptx_version(text))
    text = compiled.asm["amdgcn"]
    widths = (_amd_widths(text, "load"), _amd_widths(text, "store"))
    return MachineCode(*_amd_resources(text), shared, *widths, None)


def _ptx_version(ptx: str) -> tuple[int, int]:
    major, minor = re.findall(r"^\.version (\d+)\.(\d+)", ptx, re.MULTILINE)[0]
    return int(major), int(minor)


def _ptx_widths(ptx: str, kind: str) -> dict[int, int]:
    widths: dict[int, int] = {}
    for vector, bits in re.findall(
        rf"\b{kind}\.global(?:\.[a-z]\w*(?:::\w+)*)*?(?:\.v(\d))?\.b(\d+)", ptx
    ):
        width = int(vector or 1) * int(bits)
        widths[width] = widths.get(width, 0) + 1
    return widths


_AMD_BITS = {
    "ubyte": 8,
    "sbyte": 8,
    "byte": 8,
    "ushort": 16,
    "short": 16,
    "sshort": 16,
    "dword": 32,
}


def _amd_widths(asm: str, kind: str) -> dict[int, int]:
    """Arrays are accessed through buffer instructions and the tables through global ones; where a
    kernel has no buffer instruction its arrays are accessed through global ones too."""
    pattern = r"\b{}_{}_([a-z]+)(?:_d16(?:_hi)?)?(?:x(\d))?\b"
    found = re.findall(pattern.format("buffer", kind), asm)
    found = found or re.findall(pattern.format("global", kind), asm)
    widths: dict[int, int] = {}
    for unit, times in found:
        width = _AMD_BITS[unit] * int(times or 1)
        widths[width] = widths.get(width, 0) + 1
    return widths


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of local memory, which is where spills go."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        text = subprocess.run(
            [tool, "-res-usage", path], check=True, capture_output=True, text=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _amd_resources(asm: str) -> tuple[int, int]:
    found = dict(re.findall(r"\.(\w+_count|private_segment_fixed_size):\s+(\d+)", asm))
    spilled = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    return int(found["vgpr_count"]), sum(int(found[name]) for name in spilled)
