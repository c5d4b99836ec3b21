"""The interpreter itself, on PTX written by hand: what an opcode means, and what it refuses."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support.ptx import floats
from tests.support.ptx.machine import execute
from tests.support.ptx.memory import Memory
from tests.support.ptx.parse import PTXError, parse

HEAD = """
.version 8.0
.target sm_80
.extern .shared .align 16 .b8 smem[];
.visible .entry probe(
\t.param .u64 .ptr .global .align 1 probe_param_0,
\t.param .u64 .ptr .global .align 1 probe_param_1
)
.reqntid 64
{
\t.reg .pred %p<9>;
\t.reg .b16 %rs<9>;
\t.reg .b32 %r<99>;
\t.reg .b64 %rd<99>;
\tld.param.b64 %rd1, [probe_param_0];
\tld.param.b64 %rd2, [probe_param_1];
\tmov.u32 %r1, %tid.x;
\tmov.u32 %r2, %ctaid.x;
\tmad.lo.s32 %r3, %r2, 64, %r1;
\tmad.wide.u32 %rd3, %r3, 4, %rd1;
\tmad.wide.u32 %rd4, %r3, 4, %rd2;
"""


def run(
    body: str, given: torch.Tensor | None = None, *, blocks: int = 1, shared: int = 0, out: int = 0
) -> torch.Tensor:
    """Execute lines in which %r1 is the thread, %r3 the lane over all blocks, and %rd3 and %rd4
    point at its elements, 4 bytes each, of the first array and of the second, which is returned."""
    memory = Memory()
    lanes = 64 * blocks
    first = memory.place(torch.zeros(lanes, dtype=torch.int32) if given is None else given)
    second = memory.place(torch.full((out or lanes,), -1, dtype=torch.int32))
    text = HEAD + "\n".join(f"\t{line.strip()}" for line in body.strip().splitlines()) + "\n}\n"
    execute(parse(text), blocks, [first.data_ptr(), second.data_ptr()], memory, shared)
    return second.clone()


def of_each(operation: str, given: list[int] | torch.Tensor) -> list[int]:
    """What `operation` makes in %r5 of %r4."""
    values = torch.zeros(64, dtype=torch.int32)
    kept = given if isinstance(given, torch.Tensor) else torch.tensor(given).to(torch.int32)
    values[: len(kept)] = kept.view(torch.int32)
    found = run(
        f"ld.global.b32 %r4, [%rd3];\n{operation}\nst.global.b32 [%rd4], %r5;\nret;", values
    )
    return [int(v) for v in found[: len(kept)]]


@pytest.mark.parametrize(
    ("operation", "given", "expected"),
    [
        ("add.s32 %r5, %r4, 1;", [2**31 - 1], [-(2**31)]),
        ("neg.s32 %r5, %r4;", [5, -7], [-5, 7]),
        ("shr.s32 %r5, %r4, 40;", [-8, 8], [-1, 0]),
        ("shr.u32 %r5, %r4, 31;", [-8, 8], [1, 0]),
        ("shl.b32 %r5, %r4, 32;", [3], [0]),
        ("bfe.u32 %r5, %r4, 4, 8;", [0x12345], [0x34]),
        ("bfe.u32 %r5, %r4, 28, 8;", [-1], [15]),
        ("bfe.u32 %r5, %r4, 4, 0;", [-1], [0]),
        ("bfe.s32 %r5, %r4, 4, 8;", [0x12345, 0x12F45], [0x34, -12]),
        ("bfe.s32 %r5, %r4, 28, 8;", [-(1 << 28), 7 << 28], [-1, 7]),
        ("bfe.s32 %r5, %r4, 4, 0;", [-1], [0]),
        ("prmt.b32 %r5, %r4, 0x44332211, 0x3340U;", [0x04030201], [0x04041101]),
        ("prmt.b32 %r5, %r4, 0, 0x8888U;", [0x80, 0x7F], [-1, 0]),
        ("mul.hi.u32 %r5, %r4, -2048144789;", [1 << 31], [0x85EBCA6B >> 1]),
        ("div.s32 %r5, %r4, 3;", [-7, 7], [-2, 2]),
        ("rem.s32 %r5, %r4, 3;", [-7, 7], [-1, 1]),
        ("cvt.s8.s32 %r5, %r4;", [200, 100], [-56, 100]),
        ("setp.lt.s32 %p1, %r4, 0;\nselp.b32 %r5, 7, 9, %p1;", [-1, 1], [7, 9]),
        ("@%p1 mov.b32 %r5, 1;", [0], None),
        ("lop3.b32 %r5, %r4, 12, 10, 0x96;", [9], [9 ^ 12 ^ 10]),
        ("mov.b32 {%rs1, %rs2}, %r4;\nmov.b32 %r5, {%rs2, %rs1};", [0x12345678], [0x56781234]),
        ("mul.wide.s32 %rd9, %r4, -3;\nshr.u64 %rd9, %rd9, 32;\ncvt.u32.u64 %r5, %rd9;", [5], [-1]),
    ],
)
def test_integers(operation: str, given: list[int], expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(PTXError, match=r"%p1 is read before it is written"):
            of_each(operation, given)
    else:
        assert of_each(operation, given) == expected


@pytest.mark.parametrize(
    ("operation", "given", "expected"),
    [
        ("cvt.rzi.s32.f32 %r5, %r4;", [1.9, -1.9, 3e9, -3e9, float("nan")], "int"),
        ("max.f32 %r5, %r4, 0f00000000;", [float("nan"), -1.0, -0.0], [0.0, 0.0, 0.0]),
        ("min.f32 %r5, %r4, 0f3F800000;", [float("nan"), 3.0], [1.0, 1.0]),
        ("cvt.rmi.ftz.f32.f32 %r5, %r4;", [1.5, -1.5], [1.0, -2.0]),
        ("abs.ftz.f32 %r5, %r4;", [-1e-40, -2.0], [0.0, 2.0]),
        ("neg.f32 %r5, %r4;", [1.5], [-1.5]),
        ("sqrt.approx.ftz.f32 %r5, %r4;", [4.0, 1e-40], [2.0, 0.0]),
        ("div.full.f32 %r5, %r4, 0f40000000;", [3.0], [1.5]),
        ("mov.b32 {_, %rs1}, %r4;\nadd.rn.f32.bf16 %r5, %rs1, 0f3F800000;", [1.5], [2.5]),
    ],
)
def test_floats(operation: str, given: list[float], expected: list[float] | str) -> None:
    found = of_each(operation, torch.tensor(given))
    if expected == "int":
        assert found == [1, -1, 2**31 - 1, -(2**31), 0]
    else:
        result = torch.tensor(found, dtype=torch.int32).view(torch.float32)
        wanted = torch.tensor(expected)
        assert torch.equal(result, wanted)
        assert torch.equal(result.signbit(), wanted.signbit())


def _rounded(exact: Fraction, dtype: type) -> float:
    """A fraction to nearest, by trying the neighbours of a first guess."""
    guess = dtype(float(exact))
    around = [guess, np.nextafter(guess, dtype(np.inf)), np.nextafter(guess, dtype(-np.inf))]
    bits = {np.float32: "u4", np.float64: "u8"}[dtype]
    return float(
        min(around, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(bits)) & 1))
    )


@pytest.mark.parametrize(("dtype", "fma"), [(np.float32, floats.fma32), (np.float64, floats.fma64)])
def test_a_fused_multiply_add_is_rounded_once(dtype: type, fma: object) -> None:
    """Against fractions; half of the sums nearly cancel, and some lie on a tie in fp64."""
    source = random.Random(3)
    a, b, c = [], [], []
    for at in range(2000):
        x, y = (dtype(source.gauss(0, 1)) for _ in range(2))
        z = dtype(-x * y) * dtype(1 + source.choice([0, 0, 1e-7])) if at % 2 else None
        a.append(x)
        b.append(y)
        c.append(dtype(source.gauss(0, 2.0 ** source.randint(-40, 40))) if z is None else z)
    found = fma(*(np.array(v, dtype) for v in (a, b, c)))  # type: ignore[operator]
    for x, y, z, got in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert float(got) == _rounded(exact, dtype), (x, y, z)


def test_16_bit_formats_are_torchs() -> None:
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=torch.Generator().manual_seed(1))
    x = bits.to(torch.int32).view(torch.float32)
    x = torch.cat([x, torch.randn(20000) * 2.0 ** torch.randint(-30, 16, (20000,))])
    x = x[~x.isnan()]
    for convert, dtype in ((floats.to_bf16, torch.bfloat16), (floats.to_f16, torch.float16)):
        with np.errstate(over="ignore"):
            ours = torch.from_numpy(convert(x.numpy()).view(np.int16))
        assert torch.equal(ours, x.to(dtype).view(torch.int16))
    back = floats.from_bf16(np.arange(65536, dtype="u2"))
    wanted = torch.arange(65536).to(torch.int16).view(torch.bfloat16).float()
    assert torch.equal(torch.from_numpy(back).view(torch.int32), wanted.view(torch.int32))


def test_threads_part_and_meet_again() -> None:
    """A loop that runs as often as the thread's number says."""
    body = """
        mov.b32 %r5, 0;
        mov.b32 %r6, %r1;
        $L_loop:
        setp.eq.b32 %p1, %r6, 0;
        @%p1 bra $L_end;
        add.s32 %r5, %r5, %r6;
        add.s32 %r6, %r6, -1;
        bra.uni $L_loop;
        $L_end:
        st.global.b32 [%rd4], %r5;
        ret;
    """
    assert run(body).tolist() == [n * (n + 1) // 2 for n in range(64)]


def test_a_loop_without_an_end_stops() -> None:
    with pytest.raises(PTXError, match="without an end"):
        run("$L_a:\nbra.uni $L_a;")


def test_shuffles_and_reductions_stay_within_a_warp() -> None:
    found = run("shfl.sync.bfly.b32 %r5, %r1, 3, 31, -1;\nst.global.b32 [%rd4], %r5;\nret;")
    assert found.tolist() == [n ^ 3 for n in range(64)]
    found = run("redux.sync.max.u32 %r5, %r1, -1;\nst.global.b32 [%rd4], %r5;\nret;")
    assert found.tolist() == [31] * 32 + [63] * 32


def test_a_shuffle_among_threads_that_are_elsewhere_is_refused() -> None:
    with pytest.raises(PTXError, match="of warp 0 only 16 threads"):
        run(
            "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $L_a;\nret;\n$L_a:\n"
            "shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;\nret;"
        )


STORE = "shl.b32 %r6, %r1, 2;\nst.shared.b32 [%r6], %r1;\n"
READ = "xor.b32 %r7, %r6, 252;\nld.shared.b32 %r5, [%r7];\nst.global.b32 [%rd4], %r5;\nret;"


def test_shared_memory_is_each_blocks_own_and_wants_a_barrier() -> None:
    found = run(f"{STORE}bar.sync 0;\n{READ}", blocks=3, shared=256)
    assert found.tolist() == [63 - n for n in range(64)] * 3
    with pytest.raises(PTXError, match="without a barrier between: a race"):
        run(STORE + READ, shared=256)
    with pytest.raises(PTXError, match="that nobody has stored"):
        run("mov.b32 %r6, 0;\n" + READ, shared=256)
    with pytest.raises(PTXError, match="out of 128 bytes of shared memory"):
        run(f"{STORE}bar.sync 0;\n{READ}", shared=128)


def test_a_barrier_for_some_threads_only_is_refused() -> None:
    with pytest.raises(PTXError, match="threads that have ended"):
        run("setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L_a;\nret;\n$L_a:\nbar.sync 0;\nret;")
    with pytest.raises(PTXError, match="at different barriers"):
        run(
            "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L_a;\nbar.sync 0;\nret;\n$L_a:\nbar.sync 0;\nret;"
        )


def test_threads_may_store_one_value_to_one_address_and_not_two() -> None:
    assert run("mov.b32 %r5, 9;\nst.global.b32 [%rd2], %r5;\nret;", blocks=2)[0] == 9
    with pytest.raises(PTXError, match="different values to one address: a race"):
        run("st.global.b32 [%rd2], %r1;\nret;")
    with pytest.raises(PTXError, match="different values to one address: a race"):
        run("st.global.b32 [%rd2], %r2;\nret;", blocks=2)


def test_a_load_that_races_with_a_store_is_found_from_both_sides() -> None:
    late = "setp.ne.b32 %p1, %r1, 5;\n"
    loads = "@%p1 ld.global.b32 %r5, [%rd1];\n"
    stores = "@!%p1 st.global.b32 [%rd1], %r1;\n"
    with pytest.raises(PTXError, match="stores what another thread loads"):
        run(late + loads + stores + "ret;")
    with pytest.raises(PTXError, match="loads what another thread stores"):
        run(late + stores + loads + "ret;")
    # A barrier orders the threads of one block, and not those of two.
    run(late + loads + "bar.sync 0;\n" + stores + "ret;")
    with pytest.raises(PTXError, match="stores what another thread loads"):
        run(late + loads + "bar.sync 0;\n" + stores + "ret;", blocks=2)


def test_traffic_counts_an_address_once_a_warp() -> None:
    memory = Memory()
    first, second = (memory.place(torch.zeros(64, dtype=torch.int32)) for _ in range(2))
    text = HEAD + "\tld.global.b32 %r5, [%rd1];\n\tst.global.b32 [%rd4], %r5;\n\tret;\n}\n"
    execute(parse(text), 1, [first.data_ptr(), second.data_ptr()], memory, 0)
    assert (memory.traffic(first).loaded, memory.traffic(first).stored) == (2 * 4, 0)
    assert (memory.traffic(second).loaded, memory.traffic(second).stored) == (0, 64 * 4)
    assert memory.widths == {("load", 4): 64, ("store", 4): 64}


@pytest.mark.parametrize("turned", ["", ".trans"])
def test_matrices_are_loaded_and_stored_in_the_order_of_the_manual(turned: str) -> None:
    """One matrix of 8 x 8 in the first 128 bytes: element (r, c) has the value 8 r + c. Lane i
    takes (i / 4, 2 (i % 4)) and its right neighbour, or the transposed pair."""
    fill = """
        setp.lt.u32 %p1, %r1, 32;
        shl.b32 %r6, %r1, 2;
        shl.b32 %r7, %r1, 1;
        add.s32 %r8, %r7, 1;
        shl.b32 %r8, %r8, 16;
        or.b32 %r9, %r7, %r8;
        @%p1 st.shared.b32 [%r6], %r9;
        bar.sync 0;
        and.b32 %r10, %r1, 7;
        shl.b32 %r10, %r10, 4;
    """
    load = f"ldmatrix.sync.aligned.m8n8.x1{turned}.shared.b16 {{%r5}}, [%r10];\n"
    found = run(fill + load + "st.global.b32 [%rd4], %r5;\nret;", shared=128)
    for lane in range(64):
        row, column = lane % 32 // 4, lane % 4 * 2
        pair = [(row, column), (row, column + 1)]
        low, high = (8 * c + r if turned else 8 * r + c for r, c in pair)
        assert int(found[lane]) == low | high << 16
    # Stored back to where it came from, by the first warp, nothing changes.
    back = f"bar.sync 0;\nstmatrix.sync.aligned.m8n8.x1{turned}.shared.b16 [%r10], {{%r5}};\n"
    once = "setp.ge.u32 %p2, %r1, 32;\n@%p2 bra $L_a;\n" + back.split("\n")[1] + "\n$L_a:\n"
    again = "bar.sync 0;\nand.b32 %r11, %r6, 124;\nld.shared.b32 %r12, [%r11];\n"
    body = fill + load + "bar.sync 0;\n" + once + again + "st.global.b32 [%rd4], %r12;\nret;"
    kept = run(body, shared=128)
    assert [int(v) for v in kept] == [2 * n | 2 * n + 1 << 16 for n in range(32)] * 2
