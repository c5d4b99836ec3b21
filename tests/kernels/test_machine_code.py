"""Compiling ahead of time, where it cannot be done."""

import pytest

from hdet_scale.kernels.cases import cases
from hdet_scale.kernels.machine_code import compile_case


def test_an_interpreted_process_refuses_to_inspect(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases()[0]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_case(case, "sm_90")
