"""What the compiler makes of every kernel, on a machine without a GPU.

    python -m hdet_scale.kernels.inspect [--target sm_90] [--kernel adamw] [--json]

Compiles each kernel and dtype combination ahead of time for sm_80, sm_90, sm_100 and gfx942 and
reads from the machine code what decides the speed of a kernel that is bound by memory: registers
and spills, the width of its accesses, and how many bytes of each parameter it moves. `faults` is
what must never come back: a spill, an access to an aligned array below 128 bits, an array that is
read or written twice. The command exits with 1 if there is one.

A kernel has two paths: whole aligned blocks, whose accesses are 128 bits wide, and the masked rest.
Wide accesses belong to the first alone, so that their bytes divided by the elements of a thread
are the bytes that an element moves.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hdet_scale.kernels import table
from hdet_scale.kernels.adamw import adamw_kernel
from hdet_scale.kernels.advance import advance_kernel
from hdet_scale.kernels.bucket_scale import scale_kernel
from hdet_scale.kernels.int8_format import QUANTUM
from hdet_scale.kernels.launch import (
    NUM_WARPS,
    block_size,
    interpreting,
    require_triton,
    tl_dtype,
    triton,
)
from hdet_scale.kernels.lion import lion_kernel
from hdet_scale.kernels.pack import pack_kernel
from hdet_scale.kernels.pieces import gather_kernel, scatter_kernel
from hdet_scale.kernels.sgd import sgd_kernel
from hdet_scale.kernels.unpack import unpack_kernel

WIDE = 16
"""Bytes of a 128-bit access."""

TARGETS: dict[str, tuple[str, int | str, int, str, float]] = {
    "sm_80": ("cuda", 80, 32, "A100 80GB SXM", 2.039e12),
    "sm_90": ("cuda", 90, 32, "H100 SXM", 3.35e12),
    "sm_100": ("cuda", 100, 32, "B200", 8.0e12),
    "gfx942": ("hip", "gfx942", 64, "MI300X", 5.3e12),
}
"""Backend, architecture, warp size, and a GPU of that kind with its memory bandwidth in bytes/s
(the vendors' data sheets): the bound below which no kernel can be."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found in the machine code of one case on one target."""

    kernel: str
    variant: str
    target: str
    registers: int
    spills: int
    shared: int
    load_widths: dict[int, int]
    """Instructions by width in bits, of both paths."""
    store_widths: dict[int, int]
    loads_per_element: float
    """Wide load instructions an element."""
    stores_per_element: float
    bytes_read: float
    """Bytes an element that wide loads move."""
    bytes_written: float
    bytes_per_parameter: float
    seconds_1b: float
    """At the bandwidth of the target's GPU, for 1 B parameters."""
    seconds_7b: float
    faults: list[str]


def _short(dtype: torch.dtype | None) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", None: "none"}
    return names[dtype]


def _size(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else dtype.itemsize


def _optimizer_case(name: str, function: Any, moments: int, c: table.Combination) -> Case:
    signature = {
        "tensors": "*i64",
        "chunks": "*i32",
        **dict.fromkeys(("groups", "corrections", "found_inf", "grad_scale", "clip"), "*fp32"),
    }
    constants: dict[str, Any] = {
        "P": tl_dtype(c.param),
        "M": tl_dtype(c.moment or c.param),
        **({"BUFFER": c.moment is not None} if name == "sgd" else {}),
        "MASTER": c.master,
        "STOCHASTIC": c.stochastic,
    }
    state = moments * _size(c.moment) + 4 * c.master
    mode = "+master" if c.master else "+stochastic" if c.stochastic else ""
    return Case(
        kernel=name,
        variant=f"p,g {_short(c.param)} m {_short(c.moment)}{mode}",
        function=function,
        signature=signature,
        constants=constants,
        # With a master the parameter is written and not read.
        reads=state + _size(c.param) * (1 if c.master else 2),
        writes=state + _size(c.param),
    )


def _copy_cases() -> Iterator[Case]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    common = {"pieces": "*i64", "chunks": "*i32"}
    for tensor in dtypes:
        for bucket in dtypes:
            constants = {"T": tl_dtype(tensor), "B": tl_dtype(bucket)}
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
                    signature={**common, flag: "*i32", "scale": "*fp32"},
                    constants=constants,
                    reads=reads,
                    writes=writes,
                )


def _bucket_cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
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


def cases() -> list[Case]:
    """Every kernel and dtype combination."""
    require_triton()
    found = [
        _optimizer_case(name, function, moments, combination)
        for name, function, moments in (
            ("adamw", adamw_kernel, 2),
            ("sgd", sgd_kernel, 1),
            ("lion", lion_kernel, 1),
        )
        for combination in table.combinations(momentless=name == "sgd")
    ]
    pointers = dict.fromkeys(("groups", "corrections", "found_inf"), "*fp32")
    advance = Case(
        kernel="advance",
        variant="steps",
        function=advance_kernel,
        signature={"tensors": "*i64", **pointers, "count": "i32"},
        constants={},
        reads=0,
        writes=0,
        elements=128,
    )
    return [*found, *_copy_cases(), *_bucket_cases(), advance]


def compile_case(case: Case, target: str) -> Any:
    """The compiled kernel of a case, from Triton's cache if it has been compiled before."""
    if interpreting():
        raise RuntimeError("TRITON_INTERPRET is set: nothing is compiled. Unset it and start anew.")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch, warp, _, _ = TARGETS[target]
    constants = {**case.constants, "BLOCK": case.elements or block_size(warp)}
    names = case.function.arg_names
    signature = {n: case.signature.get(n, "constexpr") for n in names}
    # A launch marks 16-byte aligned pointers like this; a bucket that is not is ALIGNED=False.
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"}
    source = ASTSource(case.function, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget(backend, arch, warp), options=options)


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


def _faults(case: Case, spills: int, read: float, written: float) -> list[str]:
    faults = []
    if spills:
        faults.append(f"{spills} spills")
    for name, got, wanted in (("read", read, case.reads), ("written", written, case.writes)):
        if got < wanted:
            faults.append(f"{got:g} of {wanted:g} bytes an element are {name} 128 bits at a time")
        if got > wanted:
            faults.append(f"{got:g} bytes an element are {name}, once is {wanted:g}")
    return faults


def report(case: Case, target: str) -> Report:
    """Compile one case and read its machine code."""
    compiled = compile_case(case, target)
    backend, _, warp, _, bandwidth = TARGETS[target]
    text: str = compiled.asm["ptx" if backend == "cuda" else "amdgcn"]
    widths: Callable[[str, str], dict[int, int]]
    if backend == "cuda":
        registers, spills = _nvidia_resources(compiled.asm["cubin"])
        widths, load, store = _ptx_widths, "ld", "st"
    else:
        registers, spills = _amd_resources(text)
        widths, load, store = _amd_widths, "load", "store"
    loads, stores = widths(text, load), widths(text, store)
    elements = (case.elements or block_size(warp)) / (NUM_WARPS * warp)
    read, written = (
        sum(bits // 8 * n for bits, n in w.items() if bits // 8 >= WIDE) / elements
        for w in (loads, stores)
    )
    total = read + written + case.narrow
    return Report(
        kernel=case.kernel,
        variant=case.variant,
        target=target,
        registers=registers,
        spills=spills,
        shared=compiled.metadata.shared,
        load_widths=loads,
        store_widths=stores,
        loads_per_element=sum(n for b, n in loads.items() if b // 8 >= WIDE) / elements,
        stores_per_element=sum(n for b, n in stores.items() if b // 8 >= WIDE) / elements,
        bytes_read=read,
        bytes_written=written,
        bytes_per_parameter=total,
        seconds_1b=total * 1e9 / bandwidth,
        seconds_7b=total * 7e9 / bandwidth,
        faults=_faults(case, spills, read, written),
    )


def _report_at(place: tuple[int, str]) -> Report:
    """In a worker process, where a compiled function cannot be sent but its place can."""
    return report(cases()[place[0]], place[1])


def reports(
    targets: Iterable[str] = tuple(TARGETS),
    kernels: Iterable[str] | None = None,
    jobs: int | None = None,
) -> Iterator[Report]:
    """Every case on every target, or those of some kernels on some targets, compiled by `jobs`
    processes (None: one for each core)."""
    chosen = None if kernels is None else set(kernels)
    targets = list(targets)
    places = [
        (at, target)
        for at, case in enumerate(cases())
        if chosen is None or case.kernel in chosen
        for target in targets
    ]
    jobs = min(jobs or os.cpu_count() or 1, len(places))
    if jobs <= 1:
        yield from map(_report_at, places)
        return
    # A forked child would inherit the parent's threads' locks and no thread to open them.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(_report_at, places, chunksize=4)


_HEADER = (
    f"{'kernel':8} {'variant':31} {'target':7} {'regs':>4} {'spill':>5} {'shared':>6} "
    f"{'ld/el':>6} {'st/el':>6} {'B/param':>7} {'1B ms':>6} {'7B ms':>6}  widths (bits: number)"
)


def _line(r: Report) -> str:
    def widths(found: dict[int, int]) -> str:
        return " ".join(f"{bits}:{n}" for bits, n in sorted(found.items(), reverse=True))

    return (
        f"{r.kernel:8} {r.variant:31} {r.target:7} {r.registers:4d} {r.spills:5d} {r.shared:6d} "
        f"{r.loads_per_element:6.3f} {r.stores_per_element:6.3f} {r.bytes_per_parameter:7.2f} "
        f"{r.seconds_1b * 1e3:6.2f} {r.seconds_7b * 1e3:6.2f}  "
        f"ld {widths(r.load_widths)} | st {widths(r.store_widths)}"
        + "".join(f"  FAULT: {fault}" for fault in r.faults)
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if there is a fault."""
    parser = argparse.ArgumentParser(
        prog="hdet kernels",
        description="Compile every kernel ahead of time and inspect it.",
        epilog="example: hdet kernels --target sm_90 --kernel adamw",
    )
    parser.add_argument("--target", action="append", choices=sorted(TARGETS))
    parser.add_argument("--kernel", action="append", choices=sorted({c.kernel for c in cases()}))
    parser.add_argument("--jobs", type=int, help="processes that compile; one for each core")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    faulty = 0
    if not options.json:
        print(_HEADER)
    for found in reports(options.target or tuple(TARGETS), options.kernel, options.jobs):
        faulty += bool(found.faults)
        print(json.dumps(asdict(found)) if options.json else _line(found), flush=True)
    if not options.json:
        bounds = ", ".join(f"{t}: {v[3]} {v[4] / 1e12:g} TB/s" for t, v in TARGETS.items())
        print(f"ms: bytes over the memory bandwidth ({bounds}), a bound and not a measurement")
        print(f"{faulty} kernels with a fault")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
