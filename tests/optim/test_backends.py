"""Which backend carries out a step, and what is said when it cannot."""

import logging

import pytest
import torch

from hdet_scale.optim import backends
from hdet_scale.optim.fused_adamw import FusedAdamW
from tests.support.stepping import params, same


def test_triton_on_a_cpu_is_refused_with_the_next_move() -> None:
    mine = params()
    ours = FusedAdamW(mine, backend="triton")
    before = [p.detach().clone() for p in mine]
    for p in mine:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="backend='torch'"):
        ours.step()
    assert same([p.detach() for p in mine], before)


def test_a_gpu_without_triton_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    backends._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hdet_scale.optim.backends"):
        chosen = [backends.choose_backend(None, torch.device("cuda")) for _ in range(3)]
    assert chosen == ["torch"] * 3
    assert len(caplog.records) == 1
    assert "hdet_scale[triton]" in caplog.text
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: object())
    assert backends.choose_backend(None, torch.device("cuda")) == "triton"
    assert backends.choose_backend(None, torch.device("cpu")) == "torch"
