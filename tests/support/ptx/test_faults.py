"""The interpreter finds what is wrong with a kernel: real kernels, made wrong on purpose."""

import re
from collections.abc import Callable, Sequence

import pytest
import torch

from hdet_scale.kernels import bucket_scale, pack, pieces, table
from hdet_scale.kernels.cases import Case, cases
from hdet_scale.optim.fused_adamw import FusedAdamW
from tests.support.ptx.device import Device
from tests.support.ptx.executions import run
from tests.support.ptx.parse import PTXError, parse

pytestmark = pytest.mark.slow

TARGETS = ["sm_80", "sm_90", "sm_100"]


def case(kernel: str, variant: str) -> Case:
    return next(c for c in cases() if (c.kernel, c.variant) == (kernel, variant))


def replaced(pattern: str, by: str, count: int = 0) -> Callable[[str], str]:
    """An edit that has to change something: a pattern that is no longer there fails the test."""

    def edit(text: str) -> str:
        changed, times = re.subn(pattern, by, text, count=count)
        assert times, f"{pattern} is not in the PTX"
        return changed

    return edit


def moved(parameter: int, by: int) -> Callable[[str], str]:
    """A pointer argument that points `by` bytes further."""
    return replaced(
        rf"(ld\.param\.b64\s+(%rd\d+), \[\w+_param_{parameter}\];)", rf"\1 add.s64 \2, \2, {by};"
    )


def scaled(target: str, numel: int, edit: Callable[[str], str] | None = None) -> None:
    with Device(target, edit=edit):
        bucket_scale.scale(torch.ones(numel), torch.tensor(0.5))


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_themselves_are_without_fault(target: str) -> None:
    for numel in (1, 1000, 2048, 2065):
        scaled(target, numel)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("by", [16, 2048, -16])
def test_a_shifted_pointer_leaves_its_tensor(target: str, by: int) -> None:
    with pytest.raises(PTXError, match=r"loads 16 bytes out of bounds"):
        scaled(target, 2048, moved(0, by))


@pytest.mark.parametrize("target", TARGETS)
def test_a_pointer_shifted_by_one_element_is_misaligned(target: str) -> None:
    with pytest.raises(PTXError, match="loads 16 bytes, misaligned"):
        scaled(target, 4096, moved(0, 4))


def unaligned_gather() -> None:
    pieces.Pieces([torch.ones(2048)]).gather(torch.zeros(2048))


def unaligned_step() -> None:
    param = torch.nn.Parameter(torch.ones(2048))
    param.grad = torch.ones(2048)
    FusedAdamW([param], backend="triton").step()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("start", [unaligned_gather, unaligned_step])
def test_a_wide_access_to_an_unaligned_tensor_is_misaligned(
    start: Callable[[], None], target: str
) -> None:
    """Kernels that take every address for a multiple of 16, and tensors that are not."""

    def edit(text: str) -> str:
        blind = replaced(r"(and\.b64\s+%rd\d+, %rd\d+), 15;", r"\1, 0;", count=1)
        return text if "advance_kernel" in text else blind(text)

    with Device(target, shift=True):
        start()
    with (
        Device(target, shift=True, edit=edit),
        pytest.raises(PTXError, match="misaligned at byte 0 of a tensor of 8192 bytes"),
    ):
        start()


@pytest.mark.parametrize("target", TARGETS)
def test_a_table_that_calls_every_block_whole_leaves_a_tensor(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(sizes: Sequence[tuple[int, int, bool]], block: int) -> torch.Tensor:
        return table.chunk_table([(row, -(-n // block) * block, a) for row, n, a in sizes], block)

    monkeypatch.setattr(pieces, "chunk_table", careless)
    with Device(target), pytest.raises(PTXError, match="out of bounds at byte 8224"):
        pieces.Pieces([torch.ones(2056)]).gather(torch.zeros(4096))


@pytest.mark.parametrize("target", TARGETS)
def test_a_block_too_many_leaves_its_tensor(target: str) -> None:
    """The masked path of a block that begins behind the end, without its mask."""
    edit = replaced(r"@%p\d+ (ld|st)\.global", r"\1.global")
    with pytest.raises(PTXError, match="out of bounds"):
        scaled(target, 2065, edit)


@pytest.mark.parametrize("target", TARGETS)
def test_a_mask_that_is_one_too_wide_leaves_its_tensor(target: str) -> None:
    """`<=` for `<`."""
    with pytest.raises(PTXError, match=r"loads 4 bytes out of bounds at byte 8260"):
        scaled(target, 2065, replaced(r"setp\.gt\.s64", "setp.ge.s64"))


def gathered(target: str, edit: Callable[[str], str] | None) -> None:
    with Device(target, edit=edit):
        # Room behind each tensor, so that only the bucket, where they touch, can show it.
        tensors = [torch.full((1100,), float(i + 1))[:1000] for i in range(2)]
        pieces.Pieces(tensors).gather(torch.zeros(2000))


@pytest.mark.parametrize("target", TARGETS)
def test_a_mask_that_is_one_too_wide_meets_the_next_tensor_in_the_bucket(target: str) -> None:
    gathered(target, None)
    with pytest.raises(PTXError, match=r"to one address: a race|out of bounds"):
        gathered(target, replaced(r"setp\.gt\.s64", "setp.ge.s64"))


@pytest.mark.parametrize("target", TARGETS)
def test_two_blocks_that_work_on_the_same_elements_race(target: str) -> None:
    with pytest.raises(PTXError, match="a race"):
        scaled(target, 2048, replaced(r"mov\.u32\s+(%r\d+), %ctaid\.x;", r"mov.u32 \1, 0;"))


def packed(target: str, edit: Callable[[str], str] | None = None) -> None:
    with Device(target, edit=edit):
        numel = 2065
        codes, scales = torch.empty(numel, dtype=torch.int8), torch.empty(9)
        pack.pack(torch.randn(numel), torch.zeros(numel), torch.zeros(numel), codes, scales)


def without_barrier(number: int) -> Callable[[str], str]:
    def edit(text: str) -> str:
        pieces = text.split("bar.sync")
        kept = "bar.sync".join(pieces[: number + 1])
        # What follows the opcode is its operand and a semicolon.
        return kept + "bar.sync".join([pieces[number + 1].split(";", 1)[1], *pieces[number + 2 :]])

    return edit


@pytest.mark.parametrize("target", TARGETS)
def test_each_barrier_that_is_removed_is_missed(target: str) -> None:
    texts: list[str] = []
    packed(target, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
    barriers = texts[0].count("bar.sync")
    assert barriers >= 4
    for number in range(barriers):
        edit = without_barrier(number)
        assert edit(texts[0]).count("bar.sync") == barriers - 1
        with pytest.raises(PTXError, match="without a barrier between: a race"):
            packed(target, edit)


def test_an_opcode_that_is_not_known_is_named() -> None:
    with pytest.raises(PTXError, match=r"opcodes without a meaning here: \['mul.rz.f32'\]"):
        scaled("sm_90", 10, replaced(r"mul\.f32", "mul.rz.f32"))


@pytest.mark.parametrize(
    ("kernel", "variant", "pattern", "by"),
    [
        ("adamw", "p,g fp32 m fp32", r"sqrt\.approx\.ftz\.f32", "mov.f32"),
        ("adamw", "p,g bf16 m fp32+master", r"fma\.rn\.f32(.*), (%r\d+);", r"mul.f32\1;"),
        ("adamw", "p,g bf16 m bf16+stochastic", r"-2048144789", "-2048144787"),
        ("sgd", "p,g fp16 m fp32", r"cvt\.f32\.f16", "cvt.f32.bf16"),
        ("lion", "p,g fp32 m fp32", r"setp\.gt\.f32", "setp.lt.f32"),
        ("unpack", "out fp32", r"cvt\.s16\.s8", "cvt.u16.u8"),
    ],
)
def test_wrong_arithmetic_is_told_by_the_reference(
    kernel: str, variant: str, pattern: str, by: str
) -> None:
    def edit(text: str) -> str:
        return text if "advance_kernel" in text else replaced(pattern, by)(text)

    with pytest.raises(AssertionError):
        run(case(kernel, variant), "sm_90", edit=edit)


def test_a_gap_in_the_text_is_not_passed_over() -> None:
    with pytest.raises(PTXError, match=r"no `.visible .entry`"):
        parse(".version 8.0")
