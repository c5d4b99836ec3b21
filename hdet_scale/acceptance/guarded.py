"""Tensors with guards around them, and the comparison of results.

A kernel that writes outside of its tensor may damage another tensor and give the right result all
the same. Here each tensor lies between guards whose value is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet_scale.acceptance.findings import WrongResultError
from hdet_scale.kernels.launch import device_block_size

GUARD = 64
"""Elements of a guard: a multiple of 16 bytes in every dtype."""
SENTINEL = 97.0

TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2 * 2.0**-8,
    torch.float16: 2 * 2.0**-11,
}
"""Largest difference from torch, relative to the largest value of the array. A GPU divides and
takes roots to within a few units of 2^-24; where that decides how a 16-bit value is rounded, it
ends one spacing further, and a second one when it happens again."""

TIES = {torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 2e-3}
"""Share of the 8-bit codes that may be one off, by the dtype that they were made of. The last bits
of fp32 move what is rounded to a code by less than 1e-4, so that 1 in 5,000 values is that close to
half way. Of the ratios of two bf16 values 1 in 100 is exactly half way."""


def sizes(device: torch.device) -> list[tuple[int, int]]:
    """(elements, elements behind a 16-byte boundary): one element, a part of a block, whole blocks
    and a rest, a tensor that is not aligned; on a GPU many blocks too."""
    block = device_block_size(device)
    found = [(1, 0), (1000, 0), (2 * block + 17, 0), (block + 5, 1)]
    return [*found, (1 << 20, 0)] if device.type == "cuda" else found


class Guarded:
    """Tensors of given sizes between guards.

    Args:
        sizes: (elements, elements behind a 16-byte boundary) of each tensor.
        dtype, device: of all tensors.
        seed: of the values, which are normal.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._arenas, self.tensors = [], []
        for numel, shift in sizes:
            arena = torch.full((numel + shift + 2 * GUARD,), SENTINEL, dtype=dtype, device=device)
            self._arenas.append(arena)
            self.tensors.append(arena[GUARD + shift :][:numel])
            self.tensors[-1].copy_(torch.randn(numel, generator=generator))

    def check(self, what: str) -> None:
        """Raise WrongResultError if a guard was written to."""
        for arena, tensor in zip(self._arenas, self.tensors, strict=True):
            start = tensor.storage_offset()
            guards = torch.cat([arena[:start], arena[start + tensor.numel() :]])
            if not bool((guards == SENTINEL).all()):
                raise WrongResultError(
                    f"{what}: memory outside of a tensor of {tensor.numel()} elements was written"
                )


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value of `theirs`; NaN counts as infinite."""
    if ours.numel() == 0:
        return 0.0
    largest = theirs.double().abs().max().clamp_min(1e-30)
    found = ((ours.double() - theirs.double()).abs().max() / largest).item()
    return found if found == found else float("inf")


def compare(what: str, ours: Tensor | None, theirs: Tensor, *, exact: bool = False) -> float:
    """Raise WrongResultError unless two tensors are equal within the tolerance of their dtype.

    Args:
        what: names the tensor in the error.
        ours, theirs: the kernel's result, or None if it is missing; and torch's.
        exact: whether every element must be equal (default False).

    Returns:
        The difference over what is allowed; the difference itself if `exact`.
    """
    ours = expect_like(what, ours, theirs)
    found = gap(ours, theirs)
    allowed = 0.0 if exact else TOLERANCE[ours.dtype]
    if found > allowed:
        raise WrongResultError(
            f"{what} differs from torch by {found:.1e} of its largest value, {allowed:.1e} is "
            "allowed"
        )
    return found if exact else found / allowed


def expect_like(what: str, ours: Tensor | None, theirs: Tensor) -> Tensor:
    """Our tensor; raise WrongResultError if it is missing, or not of the dtype and shape."""
    if ours is None or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        received = None if ours is None else (ours.dtype, tuple(ours.shape))
        wanted = (theirs.dtype, tuple(theirs.shape))
        raise WrongResultError(f"{what} is {received}, torch has {wanted}")
    return ours


def expect_codes(
    what: str, ours: Tensor | None, theirs: Tensor, made_of: torch.dtype = torch.float32
) -> None:
    """Raise WrongResultError unless 8-bit codes differ by one at most, and few of them: a value
    half way between two codes may take either."""
    off = (expect_like(what, ours, theirs).int() - theirs.int()).abs()
    if off.numel() and int(off.max()) > 1:
        raise WrongResultError(f"{what}: a code is {int(off.max())} off, 1 is allowed")
    allowed = int(TIES[made_of] * off.numel()) + 1
    if int(off.sum()) > allowed:
        raise WrongResultError(
            f"{what}: {int(off.sum())} of {off.numel()} codes are one off, {allowed} are allowed"
        )
