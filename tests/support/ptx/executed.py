"""Every variant of some kernels, on every NVIDIA target that is executed, aligned and not.

    python -m tests.support.ptx.executed [KERNEL ...]

prints what was executed and the bytes that each kernel moved.
"""

import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator

from hdet_scale.kernels.cases import Case, cases
from tests.support.ptx.executions import run

TARGETS = ("sm_80", "sm_90", "sm_100")
ALONE = ("adamw", "lion", "sgd")
"""Kernels whose variants have a test file of their own; all others share one."""

Variant = tuple[Case, str, bool]


def variants(kernels: Collection[str]) -> list[Variant]:
    """(case, target, whether every tensor is shifted off its alignment) of these kernels."""
    return [
        (case, target, shift)
        for case in cases()
        if case.kernel in kernels
        for target in TARGETS
        for shift in (False, True)
    ]


def name_of(variant: Variant) -> str:
    """As a test's name."""
    case, target, shift = variant
    return f"{case.kernel} {case.variant} {target} {'shifted' if shift else 'aligned'}"


def others() -> list[str]:
    """The kernels without a test file of their own: a new one is among them."""
    return sorted({case.kernel for case in cases()} - set(ALONE))


def executed(kernels: Collection[str]) -> Iterator[tuple[Variant, str]]:
    """Each variant, and what went wrong with it, if anything."""
    for variant in variants(kernels):
        case, target, shift = variant
        try:
            run(case, target, shift=shift)
            yield variant, ""
        except Exception as error:
            yield variant, f"{type(error).__name__}: {error}"


def main(kernels: list[str]) -> int:
    """Print a line for each kernel and target; 1 if anything went wrong."""
    start, total, wrong = time.process_time(), Counter[str](), Counter[str]()
    for variant, fault in executed(kernels or {case.kernel for case in cases()}):
        place = f"{variant[0].kernel:8} {variant[1]:7}"
        total[place] += 1
        wrong[place] += bool(fault)
        if fault:
            print(f"{name_of(variant)}: {fault}")
    for place, count in total.items():
        print(f"{place} {count - wrong[place]} of {count} variants executed and compared")
    seconds = time.process_time() - start
    print(f"{total.total() - wrong.total()} of {total.total()}, {seconds:.0f} s of one core")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
