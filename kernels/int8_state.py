"""Moments of an optimizer kept as 8-bit codes, with an fp32 scale for each run of RUN elements.

    first moment    m ~ s q / 127,         q in -127..127, s = max|m| of the run
    second moment   v ~ (s q / 255)^2,     q in 0..255,    s = max sqrt(v) of the run

The second moment is kept by its root, which is what the step divides by: v itself would lose what
is 1/16 of the largest gradient of its run. A v above 0 never gets the code 0, since a step divided
by it would be arbitrarily large. Codes are rounded to nearest. The largest of a run is kept exactly
(fl(127 / 127) = fl(255 / 255) = 1), so that codes made of the decoded values are the same codes: a
checkpoint in fp32 loses nothing.

With 16-bit parameters the fp32 master may be split: the bf16 parameter is its upper half, rounded
to nearest, and `master_low` (int16) what is to be added to its bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

RUN = 64
"""Elements that share a scale: 16 scales in a block of 1,024."""

CODES = (torch.int8, torch.uint8)
"""The dtypes of the first and the second moment's codes."""

FAINT = 1e-30
"""A run whose scale is below this is kept as zeros: the inverse may overflow."""

_LARGEST = (127.0, 255.0)


def scales_of(numel: int) -> int:
    """How many scales the codes of `numel` elements have."""
    return -(-numel // RUN)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of memory, which is the order of the runs."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the codes and scales of a moment.

    Args:
        values: fp32, dense.
        codes: Of the same shape and memory order; int8 for a first moment, uint8 for a second.
        scales: fp32 [scales_of(n)].
    """
    if values.numel() == 0:
        return
    root = codes.dtype == torch.uint8
    x = flat(values.sqrt() if root else values)
    runs = torch.nn.functional.pad(x, (0, -x.numel() % RUN)).view(-1, RUN)
    largest = runs.abs().amax(1)
    scales.copy_(largest)
    inverse = torch.where(largest >= FAINT, _LARGEST[root] / largest, 0.0)
    q = (runs * inverse[:, None]).round()
    if root:
        q = torch.where(runs > 0, q.clamp(1, 255), 0.0)
    flat(codes).copy_(q.clamp(-127, 255).flatten()[: x.numel()])


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The moment, fp32, in the memory order of its codes."""
    root = codes.dtype == torch.uint8
    out = torch.empty_like(codes, dtype=torch.float32)
    q = flat(codes).float() * torch.tensor(1.0 / _LARGEST[root], device=codes.device)
    each = scales.repeat_interleave(RUN)[: codes.numel()]
    flat(out).copy_((q * each).square() if root else q * each)
    return out


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An fp32 master as the bf16 parameter, and what `join` adds to its bits."""
    bits = master.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    # A NaN of all ones would round up to the bits of zero.
    bits = torch.where(master.isnan(), 0x7FC00000, bits)
    upper = (bits + 0x8000) & 0xFFFF0000
    low = (bits - upper).to(torch.int16)
    return upper.to(torch.int32).view(torch.float32).to(torch.bfloat16), low


def join(param: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 parameter."""
    return (param.float().contiguous().view(torch.int32) + low.to(torch.int32)).view(torch.float32)


def step_reference(
    reference: Callable[..., None],
    param: torch.Tensor,
    grad: torch.Tensor,
    codes: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    *,
    low: torch.Tensor | None,
    **numbers: Any,
) -> None:
    """An optimizer's reference on moments that are kept as codes: decoded, stepped, encoded.

    Args:
        reference: Of an `update.Update`.
        param: Dense; the other arrays have its memory order.
        grad: Its gradient.
        codes: Of each moment.
        scales: Of each moment.
        low: The lower half of a split master; None without one.
        **numbers: What the reference takes by name, except `master`.
    """
    moments = [flat(decode(c, s)) for c, s in zip(codes, scales, strict=True)]
    stepped, master = flat(param), None if low is None else join(flat(param), flat(low))
    reference(stepped, flat(grad), *moments, master=master, **numbers)
    if master is not None and low is not None:
        upper, rest = split(master)
        stepped.copy_(upper)
        flat(low).copy_(rest)
    for values, c, s in zip(moments, codes, scales, strict=True):
        encode(values, flat(c), s)
