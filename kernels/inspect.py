"""What the compiler makes of every kernel, on a machine without a GPU: `hdet kernels`.

    python -m hdet_scale.kernels.inspect [--target sm_90] [--kernel adamw] [--launches] [--json]

Compiles each case (`cases.py`) ahead of time for NVIDIA's and AMD's GPUs (`machine_code.TARGETS`)
and reads from the machine code what decides the speed of a kernel that is bound by memory:
registers, spills and the occupancy that they leave, the width of its accesses, and how many bytes
of each parameter it moves. `--launches` adds the variants that a launch asks for when it knows
other things of its arguments: buckets that are not aligned, integers that are 1 or divisible by 16.

`faults` is what must never come back: a spill, an access to an aligned array below 128 bits, an
array that is read or written twice, a wide access to an array that is not aligned, PTX of a version
for which no driver is known, a target that the installed Triton does not know. The command exits
with 1 if there is one.

A kernel has two paths: whole aligned blocks, whose accesses are 128 bits wide, and the masked rest.
Wide accesses belong to the first alone, so that their bytes divided by the elements of a thread
are the bytes that an element moves.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

from hdet_scale.kernels.cases import PLAIN, Case, Specialization, cases
from hdet_scale.kernels.launch import NUM_WARPS, interpreting, triton
from hdet_scale.kernels.machine_code import (
    TARGETS,
    MachineCode,
    compile_case,
    driver_of,
    elements_of,
    read,
)
from hdet_scale.kernels.occupancy import occupancy

WIDE = 16
"""Bytes of a 128-bit access."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found in the machine code of one case on one target."""

    kernel: str
    variant: str
    launch: str
    """What the launch knows of its arguments; empty for aligned pointers and no more."""
    target: str
    registers: int
    spills: int
    shared: int
    occupancy: float
    """Share of a multiprocessor's warps that are resident at once."""
    ptx: str
    """Its version; empty for AMD."""
    driver: int | None
    """The oldest branch of NVIDIA's driver that runs it."""
    load_widths: dict[int, int]
    """Instructions by width in bits, of both paths."""
    store_widths: dict[int, int]
    loads_per_element: float
    """Wide load instructions an element."""
    stores_per_element: float
    bytes_read: float
    """Bytes an element that wide loads move; of both paths, where integers are multiples of 16."""
    bytes_written: float
    bytes_per_parameter: float
    seconds_1b: float
    """At the bandwidth of the target's GPU, for 1 B parameters."""
    seconds_7b: float
    faults: list[str]


def report(case: Case, target: str, special: Specialization = PLAIN) -> Report:
    """Compile one case and read its machine code. A target that the installed Triton does not know
    is a fault of the report."""
    try:
        compiled = compile_case(case, target, special)
    except Exception as error:
        if interpreting():
            raise
        why = str(error).strip().splitlines() or [""]
        fault = f"Triton {triton.__version__} does not compile it: {type(error).__name__} {why[0]}"
        nothing = MachineCode(0, 0, 0, {}, {}, None)
        return _report(case, target, special, nothing, [fault])
    code = read(compiled, target)
    return _report(case, target, special, code, _faults(case, target, special, code))


def _report(
    case: Case, target: str, special: Specialization, code: MachineCode, faults: list[str]
) -> Report:
    to = TARGETS[target]
    elements = elements_of(case, to) / (NUM_WARPS * to.warp)
    wide = [_wide(code.loads), _wide(code.stores)]
    read_bytes, written = _bytes(case, target, code)
    total = read_bytes + written + case.narrow
    return Report(
        kernel=case.kernel,
        variant=case.variant,
        launch=special.name,
        target=target,
        registers=code.registers,
        spills=code.spills,
        shared=code.shared,
        occupancy=_occupancy(target, code),
        ptx=".".join(map(str, code.ptx or ())),
        driver=driver_of(code.ptx, target) if code.ptx else None,
        load_widths=code.loads,
        store_widths=code.stores,
        loads_per_element=sum(wide[0].values()) / elements,
        stores_per_element=sum(wide[1].values()) / elements,
        bytes_read=read_bytes,
        bytes_written=written,
        bytes_per_parameter=total,
        seconds_1b=total * 1e9 / to.bandwidth,
        seconds_7b=total * 7e9 / to.bandwidth,
        faults=faults,
    )


def _wide(widths: dict[int, int]) -> dict[int, int]:
    return {bits: n for bits, n in widths.items() if bits // 8 >= WIDE}


def _bytes(case: Case, target: str, code: MachineCode) -> tuple[float, float]:
    """Bytes of an element that wide accesses read, and write."""
    to = TARGETS[target]
    elements = elements_of(case, to) / (NUM_WARPS * to.warp)
    read_bytes, written = (
        sum(bits // 8 * n for bits, n in _wide(widths).items()) / elements
        for widths in (code.loads, code.stores)
    )
    return read_bytes, written


def _occupancy(target: str, code: MachineCode) -> float:
    to = TARGETS[target]
    return occupancy(
        to.processor,
        registers=code.registers,
        shared=code.shared,
        warps=NUM_WARPS,
        warp=to.warp,
    )


def _faults(case: Case, target: str, special: Specialization, code: MachineCode) -> list[str]:
    faults = []
    if code.spills:
        faults.append(f"{code.spills} spills")
    if code.ptx and driver_of(code.ptx, target) is None:
        faults.append(f"PTX {code.ptx[0]}.{code.ptx[1]}: no driver is known for it")
    moved = _bytes(case, target, code)
    for name, got, wanted in zip(
        ("read", "written"), moved, (case.reads, case.writes), strict=True
    ):
        # A bucket of one element has no whole block, and its path may be gone.
        if got < wanted and special.aligned and special.one is None:
            faults.append(f"{got:g} of {wanted:g} bytes an element are {name} 128 bits at a time")
        # A rest that is a multiple of 16 elements is accessed 128 bits at a time too.
        if got > wanted * (2 if special.sixteens else 1):
            faults.append(f"{got:g} bytes an element are {name}, once is {wanted:g}")
        if got and not special.aligned:
            faults.append(f"{got:g} bytes an element are {name} 128 bits at a time, unaligned")
    return faults


Place = tuple[int, str, Specialization]


def _report_at(place: Place) -> Report:
    """In a worker process, where a compiled function cannot be sent but its place can."""
    at, target, special = place
    return report(cases()[at], target, special)


def places(
    targets: Iterable[str], kernels: Iterable[str] | None = None, *, launches: bool = False
) -> list[Place]:
    """What is compiled: cases by their place in `cases()`, targets, and specializations."""
    chosen = None if kernels is None else set(kernels)
    targets = list(targets)
    return [
        (at, target, special)
        for at, case in enumerate(cases())
        if chosen is None or case.kernel in chosen
        for target in targets
        for special in (case.specializations if launches else [PLAIN])
    ]


def reports(
    targets: Iterable[str] = tuple(TARGETS),
    kernels: Iterable[str] | None = None,
    jobs: int | None = None,
    *,
    launches: bool = False,
) -> Iterator[Report]:
    """Every case on every target, or those of some kernels on some targets, compiled by `jobs`
    processes (None: one for each core); with `launches`, every specialization too."""
    yield from reports_at(places(targets, kernels, launches=launches), jobs)


def reports_at(found: list[Place], jobs: int | None = None) -> Iterator[Report]:
    """The reports of some places, in their order."""
    jobs = min(jobs or os.cpu_count() or 1, len(found))
    if jobs <= 1:
        yield from map(_report_at, found)
        return
    # A forked child would inherit the parent's threads' locks and no thread to open them.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(_report_at, found, chunksize=4)


_HEADER = (
    f"{'kernel':8} {'variant':31} {'target':7} {'regs':>4} {'spill':>5} {'shared':>6} "
    f"{'occup':>5} "
    f"{'ld/el':>6} {'st/el':>6} {'B/param':>7} {'1B ms':>6} {'7B ms':>6}  widths (bits: number)"
)


def _line(r: Report) -> str:
    def widths(found: dict[int, int]) -> str:
        return " ".join(f"{bits}:{n}" for bits, n in sorted(found.items(), reverse=True))

    return (
        f"{r.kernel:8} {r.variant:31} {r.target:7} {r.registers:4d} {r.spills:5d} {r.shared:6d} "
        f"{r.occupancy:5.2f} "
        f"{r.loads_per_element:6.3f} {r.stores_per_element:6.3f} {r.bytes_per_parameter:7.2f} "
        f"{r.seconds_1b * 1e3:6.2f} {r.seconds_7b * 1e3:6.2f}  "
        f"ld {widths(r.load_widths)} | st {widths(r.store_widths)}"
        + f"  [{r.launch}]" * bool(r.launch)
        + "".join(f"  FAULT: {fault}" for fault in r.faults)
    )


def _print_footer(drivers: dict[str, str], faulty: int) -> None:
    bounds = ", ".join(f"{t}: {v.gpu} {v.bandwidth / 1e12:g} TB/s" for t, v in TARGETS.items())
    oldest = ", ".join(f"{target}: {text}" for target, text in drivers.items())
    print(f"oldest driver: {oldest or 'none of NVIDIA'}")
    print(f"ms: bytes over the memory bandwidth ({bounds}), a bound and not a measurement")
    print(f"{faulty} kernels with a fault")


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
    parser.add_argument(
        "--launches",
        action="store_true",
        help="also what launches make of unaligned buckets, and of integers that are 1 or n * 16",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    targets = options.target or tuple(TARGETS)
    faulty, drivers = 0, dict[str, str]()
    if not options.json:
        print(_HEADER)
    for found in reports(targets, options.kernel, options.jobs, launches=options.launches):
        faulty += bool(found.faults)
        if found.driver:
            drivers[found.target] = f"PTX {found.ptx}, driver {found.driver}"
        print(json.dumps(asdict(found)) if options.json else _line(found), flush=True)
    if not options.json:
        _print_footer(drivers, faulty)
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
