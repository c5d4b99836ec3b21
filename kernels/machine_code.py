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

from hdet_scale.kernels.cases import Case
from hdet_scale.kernels.launch import NUM_WARPS, block_size, interpreting, triton


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


TARGETS = {
    "sm_80": Target("cuda", 80, 32, "A100 80GB SXM", 2.039e12),
    "sm_90": Target("cuda", 90, 32, "H100 SXM", 3.35e12),
    "sm_100": Target("cuda", 100, 32, "B200", 8.0e12),
    "gfx942": Target("hip", "gfx942", 64, "MI300X", 5.3e12),
}


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


def elements_of(case: Case, target: Target) -> int:
    """Elements that one program of a case works on."""
    return case.elements or block_size(target.warp)


def compile_case(case: Case, target: str) -> Any:
    """The compiled kernel of a case, from Triton's cache if it has been compiled before.

    Raises:
        RuntimeError: The process interprets kernels (TRITON_INTERPRET).
    """
    if interpreting():
        raise RuntimeError("TRITON_INTERPRET is set: nothing is compiled. Unset it and start anew.")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    to = TARGETS[target]
    constants = {**case.constants, "BLOCK": elements_of(case, to)}
    names = case.function.arg_names
    signature = {n: case.signature.get(n, "constexpr") for n in names}
    # A launch marks 16-byte aligned pointers like this; a bucket that is not is ALIGNED=False.
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"}
    source = ASTSource(case.function, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget(to.backend, to.arch, to.warp), options=options)


def read(compiled: Any, target: str) -> MachineCode:
    """Count what decides the speed of a kernel that is bound by memory."""
    shared = compiled.metadata.shared
    if TARGETS[target].backend == "cuda":
        text = compiled.asm["ptx"]
        resources = _nvidia_resources(compiled.asm["cubin"])
        return MachineCode(*resources, shared, _ptx_widths(text, "ld"), _ptx_widths(text, "st"))
    text = compiled.asm["amdgcn"]
    widths = (_amd_widths(text, "load"), _amd_widths(text, "store"))
    return MachineCode(*_amd_resources(text), shared, *widths)


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
