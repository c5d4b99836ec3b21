"""The machine code of every kernel, ahead of time, on a machine without a GPU.

Every kernel and dtype combination is compiled for every target, so that a change that costs a
spill, a 128-bit access or a second pass over memory fails here.
"""

import dataclasses
from collections import defaultdict

import pytest

from hdet_scale.kernels import inspect, machine_code
from hdet_scale.kernels.cases import Case, cases
from hdet_scale.kernels.inspect import Report
from hdet_scale.kernels.machine_code import TARGETS
from hdet_scale.kernels.table import combinations

pytestmark = pytest.mark.slow

KERNELS = {"adamw", "sgd", "lion", "gather", "scatter", "scale", "pack", "unpack", "advance"}


@pytest.fixture(scope="module")
def found() -> list[Report]:
    return list(inspect.reports())


@pytest.mark.timeout(900)
def test_every_kernel_and_dtype_combination_on_every_target(found: list[Report]) -> None:
    places = {(r.kernel, r.variant, r.target) for r in found}
    assert len(places) == len(found) == len(cases()) * len(TARGETS)
    assert {r.kernel for r in found} == KERNELS
    count = {k: len({r.variant for r in found if r.kernel == k}) for k in KERNELS}
    assert count["adamw"] == len(combinations(coded=True))
    assert count["lion"] == len(combinations())
    assert count["sgd"] == len(combinations(momentless=True))
    assert count["gather"] == count["scatter"] == 9
    registers = defaultdict(list)
    for r in found:
        registers[r.kernel, r.target].append(r.registers)
    for (kernel, target), values in registers.items():
        print(f"{kernel:8} {target:7} registers {min(values)}-{max(values)}")
    assert [f"{r.kernel} {r.variant} {r.target}: {r.faults}" for r in found if r.faults] == []


def test_no_spills_and_registers_for_full_occupancy_of_memory(found: list[Report]) -> None:
    """At most 128 registers a thread: four blocks of 128 threads on an NVIDIA multiprocessor hold
    more loads in flight than its share of the bandwidth needs."""
    assert max(r.spills for r in found) == 0
    assert max(r.registers for r in found if r.target != "gfx942") <= 128
    assert max(r.registers for r in found if r.target == "gfx942") <= 256


@pytest.mark.parametrize(
    ("kernel", "variant", "expected"),
    [
        ("adamw", "p,g fp32 m fp32", 28),
        ("adamw", "p,g bf16 m fp32+master", 28),
        ("adamw", "p,g bf16 m bf16", 14),
        ("adamw", "p,g fp32 m int8", 16.25),
        ("adamw", "p,g bf16 m int8", 10.25),
        ("adamw", "p,g bf16 m int8+master", 14.25),
        ("sgd", "p,g fp32 m fp32", 20),
        ("sgd", "p,g fp32 m none", 12),
        ("lion", "p,g fp32 m fp32", 20),
        ("gather", "tensor fp32 bucket fp32", 8),
        ("scatter", "tensor bf16 bucket fp32", 6),
    ],
)
def test_bytes_a_parameter(found: list[Report], kernel: str, variant: str, expected: float) -> None:
    """Each array read once and written once, counted from the instructions."""
    chosen = [r for r in found if (r.kernel, r.variant) == (kernel, variant)]
    assert {r.target for r in chosen} == set(TARGETS)
    for r in chosen:
        assert r.bytes_per_parameter == expected
        assert max(r.load_widths) == max(r.store_widths) == 128
        bandwidth = TARGETS[r.target].bandwidth
        assert r.seconds_7b == pytest.approx(expected * 7e9 / bandwidth)


def case(kernel: str, variant: str) -> Case:
    return next(c for c in cases() if (c.kernel, c.variant) == (kernel, variant))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_check_finds_an_access_that_is_not_wide(target: str) -> None:
    """The same kernel told that its bucket is not aligned."""
    good = case("scale", "bucket fp32")
    narrow = dataclasses.replace(good, constants={**good.constants, "ALIGNED": False})
    faults = inspect.report(narrow, target).faults
    assert len(faults) == 2
    assert "0 of 4 bytes an element are read 128 bits at a time" in faults[0]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_check_finds_a_second_pass(target: str) -> None:
    """A kernel that moves more than it is said to need: AdamW passed off as SGD."""
    faults = inspect.report(
        dataclasses.replace(case("adamw", "p,g fp32 m fp32"), reads=12.0, writes=8.0), target
    ).faults
    assert faults == [
        "16 bytes an element are read, once is 12",
        "12 bytes an element are written, once is 8",
    ]


def test_the_check_finds_spills() -> None:
    text = """
        .private_segment_fixed_size: 64
        .sgpr_spill_count: 0
        .vgpr_count:     250
        .vgpr_spill_count: 16
    """
    assert machine_code._amd_resources(text) == (250, 80)
    assert inspect._faults(case("scale", "bucket fp32"), 80, 4, 4) == ["80 spills"]


def test_the_command_prints_the_table_and_exits_with_the_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert inspect.main(["--kernel", "scale", "--target", "sm_90", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    for word in ("regs", "spill", "B/param", "7B ms", "bucket bf16", "0 kernels with a fault"):
        assert word in printed
    assert inspect.main(["--kernel", "scale", "--target", "sm_90", "--jobs", "1", "--json"]) == 0
    assert '"bytes_per_parameter": 8.0' in capsys.readouterr().out
