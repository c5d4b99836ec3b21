"""What is inspected: an optimizer's update is found in its file, and not listed."""

import sys
from pathlib import Path
from typing import Any

import pytest

import hdet_scale.kernels as room
from hdet_scale.kernels.cases import cases, updates
from hdet_scale.kernels.inspect import report

NEWCOMER = '''
"""Sign descent: p <- p - eta rho sgn(g)."""

import torch

from hdet_scale.kernels.launch import jit, tl
from hdet_scale.kernels.rounding import write_reference
from hdet_scale.kernels.update import Update


@jit
def newcomer_rule(p, g, m, v, lr, group, correction, MOMENTS: tl.constexpr):
    p = p - lr * tl.where(g > 0.0, 1.0, -1.0)
    return p, m, v


def newcomer_reference(param, grad, *, master, step, lr, lr_multiplier, factor, key, offset):
    p = param.float() if master is None else master
    p = p - lr * lr_multiplier * torch.where(grad.float() * factor > 0, 1.0, -1.0)
    write_reference([(param, p)], key=key, step=step, offset=offset)
    if master is not None:
        master.copy_(p)


NEWCOMER = Update(
    name="newcomer",
    rule=newcomer_rule,
    reference=newcomer_reference,
    options=(),
    moments=(),
    momentless=True,
)
'''


def test_the_updates_of_the_folder_are_found() -> None:
    assert [update.name for update in updates()] == ["adamw", "lion", "sgd"]


def test_a_new_optimizers_kernel_is_inspected_without_being_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "newcomer.py").write_text(NEWCOMER)
    monkeypatch.setattr(room, "__path__", [*room.__path__, str(tmp_path)])
    found: dict[str, Any] = {c.variant: c for c in cases() if c.kernel == "newcomer"}
    assert "p,g fp32 m none" in found
    measured = report(found["p,g fp32 m none"], "sm_90")
    assert measured.faults == []
    assert measured.bytes_per_parameter == 12
    sys.modules.pop("hdet_scale.kernels.newcomer")
