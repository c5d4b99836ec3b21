"""How many warps of a kernel a multiprocessor holds at once.

A kernel that is bound by memory is as fast as its loads in flight cover the latency of memory, and
these grow with the warps that are resident. What limits them is in the machine code: registers and
shared memory.
"""

from dataclasses import dataclass

_PARTITIONS = 4
"""Schedulers of a multiprocessor, NVIDIA's and AMD's: a warp's registers lie with one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """What a multiprocessor (NVIDIA) or compute unit (AMD) has, from the vendor's tables."""

    warps: int
    """Most warps at once, or AMD's wavefronts."""
    programs: int
    """Most thread blocks at once."""
    registers: int
    """Of 32 bits, of all threads together."""
    unit: int
    """Registers of a thread are given in multiples of this."""
    shared: int
    """Bytes of shared memory."""
    reserved: int = 0
    """Bytes of shared memory that each thread block costs beside its own."""


def occupancy(
    processor: Processor, *, registers: int, shared: int, warps: int, warp: int = 32
) -> float:
    """The share of a multiprocessor's warps that can be resident.

    Args:
        processor: The multiprocessor.
        registers: Of a thread.
        shared: Bytes of a thread block.
        warps: Of a thread block.
        warp: Threads of a warp (default: 32).

    Returns:
        Between 0, where not even one thread block fits, and 1.
    """
    each = -(-max(registers, 1) // processor.unit) * processor.unit * warp
    resident = processor.registers // _PARTITIONS // each * _PARTITIONS
    programs = min(processor.programs, min(resident, processor.warps) // warps)
    if shared:
        programs = min(programs, processor.shared // (shared + processor.reserved))
    return programs * warps / processor.warps
