"""The int8 message: a code for each element, then an fp32 scale for each run of QUANTUM.

    y = theta - point + residual
    s = max |y| of a run / 127,  q = round(y / s),  residual <- y - s q

On a GPU one kernel packs and one forms the mean (`pack` and `unpack` of `hdet_scale.kernels`). On a
CPU the same arithmetic runs block by block in the cache, and gives the bits that the kernels'
references give.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hdet_scale.converge.remembered import Memory
from hdet_scale.kernels.choice import on_kernels
from hdet_scale.kernels.int8_format import FAINT, QUANTUM

CACHED = 2**18
"""Elements of a block: few enough for its second read to come out of the cache, and enough to
outweigh what starting an operation costs. Whole runs."""


def message_bytes(numel: int) -> int:
    """Bytes of a message of `numel` elements: codes and scales, each padded to 16 bytes, which is
    how a GPU wants to read them."""
    return _padded(numel) + _padded(4 * -(-numel // QUANTUM))


class Codec:
    """Packs and unpacks, on a CPU in scratch memory that it keeps."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    def pack(self, flat: Tensor, memory: Memory, message: Tensor) -> None:
        """Quantise flat - point + residual; what is left out becomes the residual."""
        if not flat.numel():
            return
        codes, scales = (row[0] for row in _opened(message[None], flat.numel()))
        if on_kernels(flat):
            from hdet_scale.kernels.pack import pack

            pack(flat, memory.point, memory.residual, codes, scales)
            return
        blocks = _tables([flat, memory.point, memory.residual, codes], scales)
        for x, point, residual, code, s in blocks:
            y, q = self._two(x)
            torch.sub(x, point, out=y).add_(residual)
            torch.amax(torch.abs(y, out=q), 1, keepdim=True, out=s).div_(127.0)
            torch.mul(y, torch.where(s >= FAINT, 1.0 / s, 0.0), out=q).round_()
            code.copy_(q)
            torch.sub(y, q.mul_(s), out=residual)

    def mean(
        self,
        messages: Tensor,
        weights: Sequence[float],
        out: Tensor,
        point: Tensor | None = None,
        *,
        move: bool = False,
    ) -> None:
        """out <- point + sum over replicas r of weights[r] s_r q_r, in their order.

        Args:
            messages: a row a message; used up.
            weights: of the replicas.
            out: overwritten.
            point: what the sum is added to (default None: 0).
            move: overwrite the point with the result too (default False).
        """
        if not out.numel():
            return
        codes, scales = _opened(messages, out.numel())
        if on_kernels(out):
            from hdet_scale.kernels.unpack import unpack

            factors = _on_device(tuple(weights), out.device)
            unpack(codes, scales, factors, out, point, move=move)
            return
        for row, weight in zip(scales, weights, strict=True):
            row.mul_(weight)
        n = len(weights)
        for part, *said in _tables([out, *codes, *([] if point is None else [point])], *scales):
            total, table = self._two(part)
            for r, (code, s) in enumerate(zip(said[:n], said[-n:], strict=True)):
                into = table if r else total
                into.copy_(code).mul_(s)
                if r:
                    total.add_(table)
            part.copy_(total if point is None else total.add_(said[n]))
            if move and point is not None:
                said[n].copy_(part)

    def _two(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._scratch.device != like.device or not self._scratch.numel():
            self._scratch = torch.empty(2, CACHED, dtype=torch.float32, device=like.device)
        first, second = self._scratch[:, : like.numel()].view(2, *like.shape)
        return first, second


def _padded(size: int) -> int:
    return 16 * -(-size // 16)


def _opened(messages: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """The codes and the scales of messages, a row each."""
    scales = messages[:, _padded(numel) :].view(torch.float32)[:, : -(-numel // QUANTUM)]
    return messages[:, :numel].view(torch.int8), scales


def _tables(flats: Sequence[Tensor], *scales: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of equally long tensors, a run a row, with their scales as columns. The last run, if
    it is not whole, is a block of its own."""
    numel = flats[0].numel()
    whole = numel // QUANTUM * QUANTUM
    ends = [(i, min(i + CACHED, whole)) for i in range(0, whole, CACHED)]
    for begin, end in [*ends, (whole, numel)] if whole < numel else ends:
        columns = (s[begin // QUANTUM : -(-end // QUANTUM), None] for s in scales)
        yield (*(t[begin:end].view(-1, min(QUANTUM, end - begin)) for t in flats), *columns)


@functools.lru_cache(maxsize=64)
def _on_device(weights: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(weights, dtype=torch.float32, device=device)
