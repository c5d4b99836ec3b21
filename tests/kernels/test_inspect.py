"""The machine code of every kernel, ahead of time, on a machine without a GPU.

Every kernel and dtype combination is compiled for the four targets that most users have, and two
variants of each kernel for all others, so that a change that costs a spill, a 128-bit access or a
second pass over memory fails here. `hdet kernels` compiles everything for every target.
"""

import dataclasses
from collections import defaultdict

import pytest

from hdet_scale.kernels import inspect, machine_code
from hdet_scale.kernels.cases import PLAIN, Case, Specialization, cases
from hdet_scale.kernels.inspect import Report
from hdet_scale.kernels.machine_code import TARGETS, MachineCode, Target
from hdet_scale.kernels.occupancy import Processor, occupancy
from hdet_scale.kernels.table import combinations

pytestmark = pytest.mark.slow

COMMON = ("sm_80", "sm_90", "sm_100", "gfx942")
RARE = tuple(target for target in TARGETS if target not in COMMON)

COPIES = {"gather", "scatter", "scale", "row_mean", "pack", "unpack"}
KERNELS = {"adamw", "sgd", "lion", "advance"} | COPIES


@pytest.fixture(scope="module")
def found() -> list[Report]:
    return list(inspect.reports(COMMON))


@pytest.mark.timeout(900)
def test_every_kernel_and_dtype_combination_on_the_common_targets(found: list[Report]) -> None:
    places = {(r.kernel, r.variant, r.target) for r in found}
    assert len(places) == len(found) == len(cases()) * len(COMMON)
    assert {r.kernel for r in found} == KERNELS
    count = {k: len({r.variant for r in found if r.kernel == k}) for k in KERNELS}
    assert count["adamw"] == len(combinations(coded=True))
    assert count["lion"] == len(combinations())
    assert count["sgd"] == len(combinations(momentless=True))
    assert (count["gather"], count["scatter"]) == (9, 9 + 3)  # and three that add
    assert (count["unpack"], count["row_mean"]) == (9, 4)
    registers = defaultdict(list)
    for r in found:
        registers[r.kernel, r.target].append(r.registers)
    for (kernel, target), values in registers.items():
        print(f"{kernel:8} {target:7} registers {min(values)}-{max(values)}")
    assert [f"{r.kernel} {r.variant} {r.target}: {r.faults}" for r in found if r.faults] == []


def test_no_spills_and_occupancy_for_the_memory(found: list[Report]) -> None:
    """At most 128 registers a thread: four blocks of 128 threads on an NVIDIA multiprocessor hold
    more loads in flight than its share of the bandwidth needs."""
    assert max(r.spills for r in found) == 0
    assert max(r.registers for r in found if r.target != "gfx942") <= 128
    assert max(r.registers for r in found if r.target == "gfx942") <= 256
    assert min(r.occupancy for r in found) >= 0.25


@pytest.fixture(scope="module")
def rare() -> list[Report]:
    """Of each kernel the first variant, and the last with stochastic rounding, which needs the most
    registers; what launches make of their arguments too."""
    everything = cases()
    chosen = set()
    for kernel in KERNELS:
        at = [i for i, c in enumerate(everything) if c.kernel == kernel]
        chosen |= {
            at[0],
            [i for i in at if "stochastic" in everything[i].variant or i == at[0]][-1],
        }
    found = inspect.places(TARGETS, launches=True)
    return list(
        inspect.reports_at(
            [place for place in found if place[0] in chosen and (place[1] in RARE or place[2].name)]
        )
    )


@pytest.mark.timeout(900)
def test_the_other_targets_and_launches_are_without_fault(rare: list[Report]) -> None:
    assert {r.target for r in rare} == set(TARGETS)
    assert {r.kernel for r in rare if r.target in RARE} == KERNELS
    wanted = {"", "unaligned", "integers % 16", "numel = 1", "count = 1", "replicas = 1"}
    assert {r.launch for r in rare} >= wanted
    for target in RARE:
        chosen = [r for r in rare if r.target == target]
        print(
            f"{target:7} registers {max(r.registers for r in chosen)}, occupancy at least "
            f"{min(r.occupancy for r in chosen):.2f}, driver {chosen[0].driver}"
        )
    assert [f"{r.kernel} {r.variant} {r.target}: {r.faults}" for r in rare if r.faults] == []
    assert min(r.occupancy for r in rare) >= 0.25


def test_an_unaligned_launch_has_no_wide_access(rare: list[Report]) -> None:
    chosen = [r for r in rare if r.launch == "unaligned"]
    assert {r.kernel for r in chosen} == {"scale", "row_mean", "pack", "unpack"}
    assert {r.target for r in chosen} == set(TARGETS)
    assert {r.bytes_read + r.bytes_written for r in chosen} == {0}


def test_every_kernel_runs_with_a_driver_that_is_known(
    found: list[Report], rare: list[Report]
) -> None:
    """A compiler that makes PTX of another release needs another driver: users must be told."""
    for r in (*found, *rare):
        if TARGETS[r.target].backend == "hip":
            assert (r.ptx, r.driver) == ("", None)
        else:
            assert r.driver is not None
            assert r.driver <= 580
    assert {r.driver for r in found if r.target == "sm_80"} == {525}


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ((7, 8), "sm_80", 450),
        ((8, 8), "sm_80", 525),
        ((9, 1), "sm_80", 580),
        ((8, 7), "sm_100", 570),
        ((10, 0), "sm_90", None),
    ],
)
def test_the_driver_that_a_version_of_ptx_needs(
    version: tuple[int, int], target: str, expected: int | None
) -> None:
    assert machine_code.driver_of(version, target) == expected


@pytest.mark.parametrize(
    ("registers", "shared", "expected"),
    [
        (32, 0, 1.0),  # 16 blocks of 4 warps: all 64
        (33, 0, 0.75),  # 40 registers: 12 warps on each of the four schedulers
        (128, 0, 0.25),
        (255, 0, 0.125),
        (16, 40 * 1024, 0.25),  # four blocks of 41 KB in 164 KB
        (16, 200 * 1024, 0.0),
    ],
)
def test_occupancy(registers: int, shared: int, expected: float) -> None:
    """By hand, for an A100."""
    a100 = TARGETS["sm_80"].processor
    assert occupancy(a100, registers=registers, shared=shared, warps=4) == expected


def test_occupancy_is_bounded_by_blocks() -> None:
    few = Processor(warps=64, programs=4, registers=65536, unit=8, shared=0)
    assert occupancy(few, registers=16, shared=0, warps=4) == 0.25
    mi300 = TARGETS["gfx942"].processor
    # 256 registers of 512 leave two wavefronts on each of the four units: 8 of 32.
    assert occupancy(mi300, registers=256, shared=0, warps=4, warp=64) == 0.25


def test_a_target_that_triton_does_not_know_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    known = TARGETS["sm_90"]
    stranger = Target("cuda", 999, 32, "none", 1e12, known.processor, 999)
    monkeypatch.setitem(TARGETS, "sm_999", stranger)
    found = inspect.report(case("scale", "bucket fp32"), "sm_999")
    assert len(found.faults) == 1
    assert found.faults[0].startswith("Triton ")
    assert "does not compile it" in found.faults[0]


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
        ("row_mean", "2 rows bf16 out fp32", 8),
        ("pack", "x fp32", 17),
        ("unpack", "out fp32 move point", 13),
        ("scatter", "tensor fp32 bucket fp32 add", 12),
        ("lion", "p,g fp32 m fp32", 20),
        ("gather", "tensor fp32 bucket fp32", 8),
        ("scatter", "tensor bf16 bucket fp32", 6),
    ],
)
def test_bytes_a_parameter(found: list[Report], kernel: str, variant: str, expected: float) -> None:
    """Each array read once and written once, counted from the instructions."""
    chosen = [r for r in found if (r.kernel, r.variant) == (kernel, variant)]
    assert {r.target for r in chosen} == set(COMMON)
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
    spilled = MachineCode(250, 80, 0, {128: 2}, {128: 2}, (8, 7))
    scale = case("scale", "bucket fp32")
    assert inspect._faults(scale, "sm_90", PLAIN, spilled) == ["80 spills"]
    strange = dataclasses.replace(spilled, spills=0, ptx=(10, 0))
    assert inspect._faults(scale, "sm_90", PLAIN, strange) == [
        "PTX 10.0: no driver is known for it"
    ]
    unaligned = Specialization(name="unaligned", aligned=False)
    assert len(inspect._faults(scale, "sm_90", unaligned, strange)) == 3


def test_the_command_prints_the_table_and_exits_with_the_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert inspect.main(["--kernel", "scale", "--target", "sm_90", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    for word in (
        "regs",
        "spill",
        "B/param",
        "7B ms",
        "bucket bf16",
        "occup",
        "driver",
        "0 kernels with a fault",
    ):
        assert word in printed
    assert inspect.main(["--kernel", "scale", "--target", "sm_90", "--jobs", "1", "--json"]) == 0
    assert '"bytes_per_parameter": 8.0' in capsys.readouterr().out
