"""The kernels of a converge: tensors to a flat bucket and back, a bucket times a scalar, int8."""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_scale.acceptance.findings import WrongResultError
from hdet_scale.acceptance.guarded import TOLERANCE, Guarded, compare, gap, sizes
from hdet_scale.kernels.bucket_scale import scale
from hdet_scale.kernels.int8_format import QUANTUM, packed_blocks
from hdet_scale.kernels.pack import pack, pack_reference
from hdet_scale.kernels.pieces import Pieces
from hdet_scale.kernels.unpack import unpack, unpack_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FACTOR = 0.7


def check_gather(device: torch.device) -> str:
    """Tensors into a bucket, scaled, in all dtypes; a value that is not finite raises the flag."""
    for tensor, bucket in _pairs():
        what = f"{tensor} into {bucket}"
        pieces = Guarded(sizes(device), tensor, device).tensors
        numel = sum(t.numel() for t in pieces)
        target = Guarded([(numel, 0)], bucket, device)
        flag = Pieces(pieces).gather(target.tensors[0], _scalar(_FACTOR, device))
        wanted = torch.cat(pieces).float() * _scalar(_FACTOR, device)
        compare(what, target.tensors[0], wanted.to(bucket), exact=True)
        target.check(what)
        _expect_flag(flag, 0, what)
        pieces[2][-1] = float("nan")
        _expect_flag(Pieces(pieces).gather(target.tensors[0]), 1, what)
    return "9 variants equal to torch, bit for bit"


def check_scatter(device: torch.device) -> str:
    """A bucket back into tensors, scaled, in all dtypes; nothing is written under a raised flag."""
    for tensor, bucket in _pairs():
        what = f"{bucket} into {tensor}"
        target = Guarded(sizes(device), tensor, device, seed=1)
        before = torch.cat(target.tensors)
        source = Guarded([(before.numel(), 0)], bucket, device, seed=2).tensors[0]
        raised = torch.ones(1, dtype=torch.int32, device=device)
        Pieces(target.tensors).scatter(source, _scalar(_FACTOR, device), raised)
        compare(f"{what}, skipped", torch.cat(target.tensors), before, exact=True)
        Pieces(target.tensors).scatter(source, _scalar(_FACTOR, device), raised * 0)
        wanted = source.float() * _scalar(_FACTOR, device)
        compare(what, torch.cat(target.tensors), wanted.to(tensor), exact=True)
        target.check(what)
    return "9 variants equal to torch, bit for bit"


def check_scale(device: torch.device) -> str:
    """A bucket times a scalar."""
    for dtype in DTYPES:
        buckets = Guarded(sizes(device), dtype, device)
        for bucket in buckets.tensors:
            wanted = (bucket.float() * _scalar(_FACTOR, device)).to(dtype)
            scale(bucket, _scalar(_FACTOR, device))
            compare(f"{dtype}", bucket, wanted, exact=True)
        buckets.check(f"{dtype}")
    return "3 variants equal to torch, bit for bit"


def check_pack(device: torch.device) -> str:
    """A bucket as int8 codes: scales of torch, codes at most one off, and nothing is lost."""
    for dtype in DTYPES:
        buckets = Guarded(sizes(device), dtype, device, seed=3)
        errors = Guarded(sizes(device), torch.float32, device, seed=4)
        for bucket, error in zip(buckets.tensors, errors.tensors, strict=True):
            value = bucket.float() + error
            theirs = _packed(bucket, error.clone(), reference=True)
            codes, scales = _packed(bucket, error)
            compare(f"{dtype}: scales", scales, theirs[1])
            if int((codes.int() - theirs[0].int()).abs().max()) > 1:
                raise WrongResultError(f"{dtype}: a code is more than one off")
            sent = codes.float() * scales.repeat_interleave(QUANTUM)[: codes.numel()]
            compare(f"{dtype}: what is sent and what is kept", sent + error, value)
        errors.check(f"{dtype}")
    return "3 variants, sent and kept are the value"


def _packed(bucket: Tensor, error: Tensor, *, reference: bool = False) -> tuple[Tensor, Tensor]:
    codes = torch.zeros(bucket.numel(), dtype=torch.int8, device=bucket.device)
    scales = torch.zeros(packed_blocks(bucket.numel()), device=bucket.device)
    (pack_reference if reference else pack)(bucket, error, codes, scales)
    return codes, scales


def check_unpack(device: torch.device) -> str:
    """The weighted sum of three replicas' int8 codes."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.tensor([0.5, 0.3, 0.2], device=device)
    worst = 0.0
    for dtype in DTYPES:
        out = Guarded(sizes(device), dtype, device)
        for bucket in out.tensors:
            numel = bucket.numel()
            codes = torch.randint(-127, 128, (3, numel), generator=generator).to(device, torch.int8)
            scales = torch.rand(3, packed_blocks(numel), generator=generator).to(device)
            wanted = torch.empty_like(bucket)
            unpack_reference(codes, scales, weights, wanted)
            unpack(codes, scales, weights, bucket)
            compare(f"{dtype}", bucket, wanted)
            worst = max(worst, gap(bucket, wanted) / TOLERANCE[dtype])
        out.check(f"{dtype}")
    return f"3 variants like torch, at most {worst:.2f} of what is allowed"


def _pairs() -> list[tuple[torch.dtype, torch.dtype]]:
    return [(tensor, bucket) for tensor in DTYPES for bucket in DTYPES]


def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.float32, device=device)


def _expect_flag(flag: Tensor, wanted: int, what: str) -> None:
    if int(flag) != wanted:
        raise WrongResultError(f"{what}: the flag of values that are not finite is {int(flag)}")
