"""The list of checks: every kernel variant is launched, and a broken kernel is caught."""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any

import pytest
import torch

from hdet_scale import doctor
from hdet_scale.acceptance import ABSENT, BAD, NO_DEVICE, OK, Finding
from hdet_scale.acceptance.checklist import KERNELS, OTHERS, accept, device_here
from hdet_scale.acceptance.findings import tried
from hdet_scale.kernels.cases import cases
from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.kernels.launch import launch as start
from tests.support import launches

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
VARIED = ("BLOCK", "ALIGNED", "ROWS", "INCLUDED")
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
}


def variant(kernel: Any, pointers: list[str], constants: dict[str, Any]) -> str:
    """A kernel as it is compiled, but for block size, alignment and the rows of a mean."""
    kept = {k: v for k, v in constants.items() if k not in VARIED}
    named = {k: str(getattr(v, "__name__", v)) for k, v in kept.items()}
    return f"{launches.name_of(kernel)} {pointers} {sorted(named.items())}"


@interpreted
def launched_variants() -> tuple[set[str], set[str], list[Finding], set[Any]]:
    """The variants that the checks launch, those that `cases` lists, the findings, and the rows
    and included rows of the means."""
    seen, means = set(), set()

    def run(kernel: Any, programs: int, device: torch.device, *args: Any, **constants: Any) -> None:
        pointers = [POINTERS[a.dtype] for a in args if isinstance(a, torch.Tensor)]
        seen.add(variant(kernel, pointers, constants))
        if "INCLUDED" in constants:
            means.add((constants["ROWS"], constants["INCLUDED"]))
        start(kernel, programs, device, *args, **constants)

    with launches.launched_through(run):
        found = list(accept())
    listed = {
        variant(c.function, [t for t in c.signature.values() if t[0] == "*"], c.constants)
        for c in cases()
    }
    return seen, listed, found, means


def test_every_variant_of_every_kernel_is_launched_and_right() -> None:
    seen, listed, found, means = launched_variants()
    assert len(listed) == len(cases())
    assert seen == listed
    assert means == {(2, 0b11), (3, 0b101)}, "all of two rows, and two of three"
    states = {finding.name: finding.state for finding in found}
    assert states.pop("CUDA graph") == states.pop("driver") == ABSENT
    assert set(states) == {f"kernel {name}" for name in KERNELS} | {"moving gradients"}
    assert set(states.values()) == {OK}
    absent = [finding.found for finding in found if finding.state == ABSENT]
    assert absent == [NO_DEVICE, NO_DEVICE]


def test_the_checks_are_those_of_all_kernels() -> None:
    """A new kernel in `cases` needs a check here."""
    assert set(KERNELS) == {case.kernel for case in cases()}


@interpreted
def idle(name: str) -> Finding:
    """The check of a kernel that does nothing."""
    kernel = {"adamw": "update", "sgd": "update", "lion": "update"}.get(name, name)
    with launches.launched_through(launches.without(f"{kernel}_kernel")):
        return tried(name, functools.partial(KERNELS[name], CPU), "send us this block")


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_does_nothing_is_caught(name: str) -> None:
    finding = idle(name)
    assert finding.state == BAD
    assert "Error" not in finding.found, "the result is wrong, and nothing else is"


@interpreted
def broken(how: str) -> list[Finding]:
    replacement = {
        "rule": launches.with_rule(launches.undecayed_rule),
        "store": launches.with_kernel("scale_kernel", launches.overrunning_kernel),
        "launch": launches.failing,
    }[how]
    with launches.launched_through(replacement):
        return list(accept())


def test_a_rule_that_forgets_a_term_is_caught() -> None:
    found = {finding.name: finding for finding in broken("rule")}
    for name in ("kernel adamw", "kernel advance", "moving gradients"):
        assert found[name].state == BAD
    assert "param differs from torch by" in found["kernel adamw"].found
    assert found["kernel gather"].state == OK


def test_a_store_outside_of_its_tensor_is_caught() -> None:
    """Every element of the bucket is right; the one behind it is not."""
    found = {finding.name: finding for finding in broken("store")}
    assert [name for name in found if found[name].state == BAD] == ["kernel scale"]
    assert "memory outside of a tensor of 1 elements was written" in found["kernel scale"].found


def test_a_launch_that_fails_ends_one_check_and_not_the_list() -> None:
    found = broken("launch")
    states = [finding.state for finding in found]
    assert states == [BAD] * (len(KERNELS) + 1) + [ABSENT] * 2
    assert found[0].found.startswith("RuntimeError: CUDA error: an illegal memory access")


@interpreted
def exit_code_of_doctor(faulty: bool) -> tuple[int, str]:
    printed = io.StringIO()
    rule = launches.with_rule(launches.undecayed_rule) if faulty else start
    with contextlib.redirect_stdout(printed), launches.launched_through(rule):
        code = doctor.main([], doctor._acceptance)
    return code, printed.getvalue()


@pytest.mark.parametrize("faulty", [False, True])
def test_the_command_fails_where_a_kernel_is_wrong(faulty: bool) -> None:
    code, printed = exit_code_of_doctor(faulty)
    assert code == int(faulty)
    assert ("BAD kernel adamw" in printed) == faulty


def test_without_a_gpu_nothing_is_launched_and_that_is_said() -> None:
    assert device_here() is None, "the tests have no GPU, and here nothing is interpreted"
    found = list(accept())
    assert [finding.name for finding in found] == ["kernels run", *OTHERS]
    assert {(finding.state, finding.found) for finding in found} == {(ABSENT, NO_DEVICE)}
    assert "TRITON_INTERPRET=1" in found[0].todo
