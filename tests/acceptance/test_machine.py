"""The head of what a user sends along with a fault."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from hdet_scale.acceptance import machine


def test_versions_and_system_are_named() -> None:
    lines = machine.describe_machine()
    assert f"torch {torch.__version__}" in lines[0]
    assert f"triton {importlib.metadata.version('triton')}" in lines[0]
    assert lines[1].startswith("Python 3.")
    assert lines[2].startswith("no GPU")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    assert machine.describe_machine()[0].endswith(", no no-such-package")


def test_gpus_driver_and_runtime_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "driver_version", lambda: (13, 1))
    assert machine.describe_machine()[2] == (
        "GPU 0: NVIDIA H100, compute capability 9.0, 80 GiB, 132 multiprocessors"
    )
    assert machine.describe_machine()[3].startswith("torch for CUDA 13.0, driver of CUDA 13.1, ")

    def missing() -> tuple[int, int]:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(machine, "driver_version", missing)
    assert "driver unknown (libcuda.so.1: cannot open" in machine.describe_machine()[3]
