"""`hdet doctor` on this very machine, and what it says when something is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
import torch

from hdet_scale import cli, doctor
from hdet_scale.acceptance import ABSENT, BAD, NO_DEVICE, OK, Finding, checklist
from hdet_scale.acceptance.machine import describe_machine
from hdet_scale.kernels import launch
from hdet_scale.train.workers import Send

pytestmark = pytest.mark.slow


def test_this_machine_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    states = {f["name"]: f["state"] for f in told["findings"]}
    assert told["bad"] == 0
    assert states["gloo, 2 processes"] == states["torch"] == states["kernels"] == OK
    found = {f["name"]: f["found"] for f in told["findings"]}
    assert found["torch"] == torch.__version__
    assert "1 MiB added in" in found["gloo, 2 processes"]
    for name in ("kernels run", "CUDA graph", "driver", "converge on nccl"):
        assert (states[name], found[name]) == (ABSENT, NO_DEVICE)
    assert told["machine"][0].startswith("hdet_scale 0.1.0, torch ")


def some_bad() -> Iterator[Finding]:
    yield Finding("torch", OK, "2.13.0")
    yield Finding("gloo, 2 processes", BAD, "no route", "set GLOO_SOCKET_IFNAME")


def test_what_is_wrong_comes_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([], some_bad) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-3].startswith("BAD gloo, 2 processes")
    assert out[-3].endswith("no route   -> set GLOO_SOCKET_IFNAME")
    assert out[-2] == "1 of 2 checks failed"


def test_the_output_is_one_block_to_send(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, GPU and driver, results: all between two lines."""
    doctor.main([], some_bad)
    out = capsys.readouterr().out.splitlines()
    assert (out[0], out[-1]) == (doctor.FIRST_LINE, doctor.LAST_LINE)
    assert out[1 : len(describe_machine()) + 1] == describe_machine()


def test_a_triton_that_is_missing_or_broken_launches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(checklist.KERNELS), "imported here, while Triton is there"
    monkeypatch.setitem(sys.modules, "triton", None)
    absent = Finding("kernels run", ABSENT, "not checked: Triton is not installed")
    assert list(doctor._acceptance()) == [absent]
    monkeypatch.setattr(launch, "require_triton", _fails)
    (bad,) = doctor._acceptance()
    assert (bad.state, bad.todo) == (BAD, "pip install -U triton")


def _fails(*_: object) -> None:
    raise RuntimeError("the network is down")


def _wrong_sum(send: Send, backend: str) -> None:
    send((7, 0.1))


def test_a_collective_that_fails_or_lies_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_sum", _fails)
    found = doctor._collective("gloo")
    assert (found.state, found.found) == (BAD, "RuntimeError: the network is down")
    assert "GLOO_SOCKET_IFNAME" in found.todo
    monkeypatch.setattr(doctor, "_sum", _wrong_sum)
    assert doctor._collective("gloo").found.startswith("a wrong sum")


def test_an_old_torch_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1+cpu")
    assert doctor._torch() == Finding("torch", BAD, "2.7.1+cpu", "pip install 'torch>=2.8'")


def test_another_deepspeed_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "0.30.1")
    found = doctor._deepspeed()
    assert (found.state, found.found) == (BAD, "0.30.1")
    assert "pip install 'deepspeed==0.19.*'" in found.todo


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_help_fits_a_screen_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main([name, "--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert "example:" in out
    assert len(out.splitlines()) <= 48
    assert max(map(len, out.splitlines())) <= 100


def test_the_commands_help_fits_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "example:" in out
    assert len(out.splitlines()) <= 24
    assert all(name in out for name in cli.COMMANDS)
