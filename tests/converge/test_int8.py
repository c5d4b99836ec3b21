"""The int8 message: what it says and what it leaves out."""

from __future__ import annotations

import pytest
import torch

from hdet_scale.converge.int8 import CACHED, Codec, message_bytes
from hdet_scale.converge.remembered import Memory


@pytest.mark.parametrize("numel", [1, 5, 255, 257, CACHED - 1, CACHED, CACHED + 3, 3 * CACHED])
def test_an_int8_message_and_its_residual_are_the_whole(numel: int) -> None:
    """d = s q + residual to the last bit that fp32 sums allow, and |residual| <= s / 2."""
    g = torch.Generator().manual_seed(numel)
    flat, point, before = torch.randn(3, numel, generator=g)
    residual = before.clone()
    message = torch.empty(message_bytes(numel), dtype=torch.uint8)
    codec = Codec()
    codec.pack(flat.clone(), Memory(point, residual), message)
    said = torch.empty(numel)
    codec.mean(message[None], [1.0], said)
    d = (flat - point) + before
    torch.testing.assert_close(said + residual, d, rtol=0, atol=1e-6)
    assert float(residual.abs().max()) <= float(d.abs().max()) / 127 * 0.5001


def test_an_int8_message_of_no_difference_is_zero() -> None:
    x = torch.randn(1000)
    message = torch.empty(message_bytes(1000), dtype=torch.uint8)
    memory = Memory(x.clone(), torch.zeros(1000))
    codec = Codec()
    codec.pack(x, memory, message)
    said = torch.empty(1000)
    codec.mean(message[None], [1.0], said)
    assert not said.any()
    assert not memory.residual.any()
