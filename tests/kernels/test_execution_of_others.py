"""The compiled kernels beside the optimizers', executed by the PTX interpreter; and what must hold
for all of them: each has an execution, and moves the bytes that it should."""

import dataclasses

import pytest
import torch

from hdet_scale.kernels.bucket_scale import scale
from hdet_scale.kernels.cases import Case, cases, updates
from hdet_scale.kernels.int8_format import QUANTUM, packed_blocks
from hdet_scale.kernels.launch import SPAN
from hdet_scale.kernels.pack import pack
from hdet_scale.kernels.pieces import Pieces
from hdet_scale.kernels.row_mean import row_mean
from hdet_scale.kernels.table import Combination
from hdet_scale.kernels.unpack import unpack
from hdet_scale.kernels.update import update_kernel
from tests.support.ptx.device import Device
from tests.support.ptx.executed import ALONE, TARGETS, Variant, name_of, others, variants
from tests.support.ptx.executions import (
    OPTIONS,
    execution_of,
    lockstep,
    make_optimizer,
    matches,
    run,
    values,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("variant", variants(others()), ids=name_of)
def test_a_variant_does_what_its_reference_does(variant: Variant) -> None:
    case, target, shift = variant
    run(case, target, shift=shift)


def test_every_kernel_has_an_execution() -> None:
    for case in cases():
        assert execution_of(case)
    stranger = dataclasses.replace(cases()[0], kernel="stranger")
    with pytest.raises(KeyError, match=r"'stranger' is never executed: add it to EXECUTIONS"):
        execution_of(stranger)


def test_the_test_files_share_out_every_variant() -> None:
    """What is executed is what is listed, with nothing left out, on three targets, twice."""
    shared_out = [*variants(ALONE), *variants(others())]
    assert len(shared_out) == 6 * len(cases())
    assert {name_of(v) for v in shared_out} == {name_of(v) for v in variants(_kernels())}
    assert len({name_of(v) for v in shared_out}) == len(shared_out)


def _kernels() -> set[str]:
    return {case.kernel for case in cases()}


def test_a_case_that_is_not_what_was_started_is_told() -> None:
    """An execution that starts another variant than the one it is asked for proves nothing."""
    bf16 = next(c for c in cases() if (c.kernel, c.variant) == ("scale", "bucket bf16"))
    fp16 = next(c for c in cases() if (c.kernel, c.variant) == ("scale", "bucket fp16"))
    gpu = run(bf16, "sm_90")
    assert any(matches(found, bf16, aligned=True) for found in gpu.launches)
    assert not any(matches(found, bf16, aligned=False) for found in gpu.launches)
    assert not any(matches(found, fp16, aligned=True) for found in gpu.launches)


# --- integer arguments ---------------------------------------------------------------------------

WIDE_INTEGERS = [
    case
    for case in cases()
    if any(not kind.startswith("*") for kind in case.signature.values())
    and not case.variant.endswith("fp16")
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", WIDE_INTEGERS, ids=lambda c: f"{c.kernel} {c.variant}")
def test_the_variant_of_a_bucket_beyond_32_bits(case: Case, target: str) -> None:
    """A launch of a small bucket has 32-bit integers: here the types are those of the largest."""
    wide = {name: kind for name, kind in case.signature.items() if not kind.startswith("*")}
    gpu = Device(target, types=dict.fromkeys(wide, "i64") if case.kernel != "advance" else wide)
    execution_of(case)(case, gpu)
    found = [g for g in gpu.launches if g.kernel is case.function]
    assert found
    assert all(g.signature[name] in ("i64", "i32", "constexpr") for g in found for name in wide)
    if case.kernel != "advance":
        assert any(g.signature["numel"] == "i64" for g in found)


@pytest.mark.parametrize("target", TARGETS)
def test_a_launch_has_the_specializations_of_its_integers(target: str) -> None:
    """1 becomes a constant, a multiple of 16 is known as one, and both are executed."""
    gpu = run(next(c for c in cases() if c.kernel == "unpack"), target)
    kinds = {g.signature["replicas"] for g in gpu.launches}
    assert kinds == {"i32", "constexpr"}
    gpu = run(next(c for c in cases() if c.kernel == "scale"), target)
    assert {("numel" in g.divisible, g.signature["numel"]) for g in gpu.launches} == {
        (True, "i32"),
        (False, "i32"),
        (False, "constexpr"),
    }


# --- spans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_a_tensor_of_several_spans(target: str) -> None:
    """The sizes of the variants fit into one span: here a second program begins behind it."""
    update = next(u for u in updates() if u.name == "adamw")
    gpu = Device(target)
    lockstep(update, Combination(param=torch.float32, moment=torch.float32), gpu, [SPAN + 1030])
    assert {g.blocks for g in gpu.launches if g.kernel is update_kernel} == {2}


# --- bytes ---------------------------------------------------------------------------------------

NUMEL = 8192
"""Whole blocks, so that what is moved divides evenly."""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "param", "moment", "master", "expected"),
    [
        ("adamw", torch.float32, torch.float32, False, 28),
        ("adamw", torch.bfloat16, torch.float32, True, 28),
        ("adamw", torch.bfloat16, torch.bfloat16, False, 14),
        ("adamw", torch.float32, torch.int8, False, 16.25),
        ("adamw", torch.bfloat16, torch.int8, False, 10.25),
        ("adamw", torch.bfloat16, torch.int8, True, 14.25),
        ("sgd", torch.float32, torch.float32, False, 20),
        ("sgd", torch.float32, None, False, 12),
        ("lion", torch.float32, torch.float32, False, 20),
    ],
)
def test_bytes_a_parameter_of_an_optimizers_step(
    kernel: str,
    param: torch.dtype,
    moment: torch.dtype | None,
    master: bool,
    expected: float,
    target: str,
) -> None:
    """Counted as the loads and stores are executed. The tables, which all threads of a block read,
    are counted once a warp here, though a cache serves all warps of a block."""
    update = next(u for u in updates() if u.name == kernel)
    options = {**OPTIONS[kernel][0], **({"momentum": 0.0, "nesterov": False} if not moment else {})}
    gpu = Device(target)
    with gpu:
        weight = torch.nn.Parameter(values(NUMEL, param))
        combination = Combination(param=param, moment=moment, master=master)
        optimizer = make_optimizer(update, combination, [{"params": [weight], **options}])
        weight.grad = values(NUMEL, param, 1)
        optimizer.step()
        gpu.memory.forget_traffic()
        optimizer.step()
    state = [v for k, v in optimizer.state[weight].items() if k != "step"]
    moved = gpu.memory.traffic(weight, weight.grad, *state)
    assert (moved.loaded + moved.stored) / NUMEL == expected
    everything = gpu.memory.traffic_of_all()
    tables = everything.loaded + everything.stored - moved.loaded - moved.stored
    print(f"{kernel} {target}: {expected} bytes a parameter, tables {tables / NUMEL:.2f}")
    assert tables / NUMEL < 1.0
    narrow = {w for (_, w), lanes in gpu.memory.widths.items() if lanes >= NUMEL // 8}
    assert max(narrow) == 16


def moved_by(gpu: Device, *arrays: torch.Tensor) -> float:
    found = gpu.memory.traffic(*arrays)
    return (found.loaded + found.stored) / NUMEL


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("replicas", [2, 8])
def test_bytes_an_element_of_the_int8_wire(replicas: int, target: str) -> None:
    """N + 29 and the scales. Packing reads the value, the point and the error, and writes the error
    and the code: 17. Unpacking reads N codes and the point, and writes the point and the mean:
    N + 12. A scale is 4 bytes for each run of QUANTUM, written once and read N times."""
    gpu = Device(target)
    with gpu:
        x, point, error = values(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)
        codes = torch.zeros(replicas, NUMEL, dtype=torch.int8)
        scales = torch.zeros(replicas, packed_blocks(NUMEL))
        weights, out = torch.full((replicas,), 1 / replicas), torch.empty(NUMEL)
        pack(x, point, error, codes[0], scales[0])
        assert moved_by(gpu, x, point, error, codes) == 17
        assert moved_by(gpu, scales) == 4 / QUANTUM
        before = gpu.memory.traffic(scales).loaded
        unpack(codes, scales, weights, out, point, move=True)
    assert moved_by(gpu, x, point, error, codes, out) == replicas + 29
    # Each thread of a row reads the row's scale: counted once a warp.
    loaded = (gpu.memory.traffic(scales).loaded - before) / NUMEL
    print(f"int8 wire {target} {replicas}: {replicas + 29} bytes an element, scales {loaded:.2f}")
    assert replicas * 4 / QUANTUM <= loaded <= replicas / 8


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("mode", "expected"), [("no point", 4), ("from point", 8), ("move point", 12)]
)
def test_bytes_an_element_of_unpack_beside_the_codes(mode: str, expected: int, target: str) -> None:
    with Device(target) as gpu:
        codes, scales = torch.ones(2, NUMEL, dtype=torch.int8), torch.ones(2, packed_blocks(NUMEL))
        point, out = values(NUMEL), torch.empty(NUMEL)
        given = None if mode == "no point" else point
        unpack(codes, scales, torch.ones(2), out, given, move=mode == "move point")
        assert moved_by(gpu, codes) == 2
        assert moved_by(gpu, point, out) == expected


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("rows", "out", "expected"),
    [
        (torch.bfloat16, torch.float32, 8),
        (torch.float16, torch.float32, 8),
        (torch.bfloat16, torch.bfloat16, 6),
        (torch.float16, torch.float16, 6),
    ],
)
def test_bytes_an_element_of_the_mean_of_two(
    rows: torch.dtype, out: torch.dtype, expected: int, target: str
) -> None:
    """Each row is read once and the mean is written once; a row that is left out is not read."""
    with Device(target) as gpu:
        table, mean = values(3 * NUMEL, rows).view(3, NUMEL), torch.empty(NUMEL, dtype=out)
        row_mean(table, [True, False, True], mean)
        moved = moved_by(gpu, table, mean)
    print(f"row_mean {target} {rows} into {out}: {moved:g} bytes an element")
    assert moved == expected
    assert max(w for (_, w), lanes in gpu.memory.widths.items() if lanes >= NUMEL // 8) == 16


@pytest.mark.parametrize("target", TARGETS)
def test_bytes_an_element_of_the_copies(target: str) -> None:
    with Device(target) as gpu:
        tensor, bucket, factor = values(NUMEL), torch.empty(NUMEL).bfloat16(), torch.tensor(0.5)
        pieces = Pieces([tensor])
        pieces.gather(bucket)
        assert moved_by(gpu, tensor, bucket) == 6
        pieces.scatter(bucket)
        assert moved_by(gpu, tensor, bucket) == 12
        wide = torch.zeros(NUMEL)
        gpu.memory.forget_traffic()
        pieces.scatter(wide, add=True)
        assert moved_by(gpu, tensor, wide) == 12
        gpu.memory.forget_traffic()
        scale(bucket, factor)
        assert moved_by(gpu, bucket) == 4
