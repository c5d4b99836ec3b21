"""What the compiler makes of every kernel, on a machine without a GPU: `hdet kernels`.

    python -m hdet_scale.kernels.inspect [--target sm_90] [--kernel adamw] [--json]

Compiles each case (`cases.py`) ahead of time for sm_80, sm_90, sm_100 and gfx942 and reads from the
machine code (`machine_code.py`) what decides the speed of a kernel that is bound by memory:
registers and spills, the width of its accesses, and how many bytes of each parameter it moves.
`faults` is what must never come back: a spill, an access to an aligned array below 128 bits, an
array that is read or written twice. The command exits with 1 if there is one.

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

from hdet_scale.kernels.cases import Case, cases
from hdet_scale.kernels.launch import NUM_WARPS
from hdet_scale.kernels.machine_code import TARGETS, compile_case, elements_of, read

WIDE = 16
"""Bytes of a 128-bit access."""


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


def report(case: Case, target: str) -> Report:
    """Compile one case and read its machine code."""
    code = read(compile_case(case, target), target)
    to = TARGETS[target]
    elements = elements_of(case, to) / (NUM_WARPS * to.warp)
    wide = [{b: n for b, n in w.items() if b // 8 >= WIDE} for w in (code.loads, code.stores)]
    read_bytes, written = (sum(b // 8 * n for b, n in w.items()) / elements for w in wide)
    total = read_bytes + written + case.narrow
    return Report(
        kernel=case.kernel,
        variant=case.variant,
        target=target,
        registers=code.registers,
        spills=code.spills,
        shared=code.shared,
        load_widths=code.loads,
        store_widths=code.stores,
        loads_per_element=sum(wide[0].values()) / elements,
        stores_per_element=sum(wide[1].values()) / elements,
        bytes_read=read_bytes,
        bytes_written=written,
        bytes_per_parameter=total,
        seconds_1b=total * 1e9 / to.bandwidth,
        seconds_7b=total * 7e9 / to.bandwidth,
        faults=_faults(case, code.spills, read_bytes, written),
    )


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
        bounds = ", ".join(f"{t}: {v.gpu} {v.bandwidth / 1e12:g} TB/s" for t, v in TARGETS.items())
        print(f"ms: bytes over the memory bandwidth ({bounds}), a bound and not a measurement")
        print(f"{faulty} kernels with a fault")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
