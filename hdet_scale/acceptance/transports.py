"""The kernels of a converge: tensors to a flat bucket and back, a bucket times a scalar, the mean
of rows, int8."""

from __future__ import annotations

import torch
from torch import Tensor

from hdet_scale.acceptance.findings import WrongResultError
from hdet_scale.acceptance.guarded import Guarded, compare, expect_codes, sizes
from hdet_scale.kernels.bucket_scale import scale
from hdet_scale.kernels.int8_format import QUANTUM, packed_blocks
from hdet_scale.kernels.pack import pack, pack_reference
from hdet_scale.kernels.pieces import Pieces
from hdet_scale.kernels.row_mean import row_mean, row_mean_reference
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
    """A bucket back into tensors, scaled, in all dtypes, or an fp32 bucket added to them. Nothing
    is written under a raised flag."""
    cases = [(*pair, False) for pair in _pairs()]
    cases += [(tensor, torch.float32, True) for tensor in DTYPES]
    for tensor, bucket, add in cases:
        what = f"{bucket} {'added' if add else 'in'}to {tensor}"
        target = Guarded(sizes(device), tensor, device, seed=1)
        before = torch.cat(target.tensors)
        source = Guarded([(before.numel(), 0)], bucket, device, seed=2).tensors[0]
        raised = torch.ones(1, dtype=torch.int32, device=device)
        # Scaled and added, a multiply-add rounds once where torch rounds twice: half is exact.
        factor = _scalar(0.5 if add else _FACTOR, device)
        Pieces(target.tensors).scatter(source, factor, raised, add=add)
        compare(f"{what}, skipped", torch.cat(target.tensors), before, exact=True)
        Pieces(target.tensors).scatter(source, factor, raised * 0, add=add)
        wanted = source.float() * factor + (before.float() if add else 0.0)
        compare(what, torch.cat(target.tensors), wanted.to(tensor), exact=True)
        target.check(what)
    return f"{len(cases)} variants equal to torch, bit for bit"


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


def check_row_mean(device: torch.device) -> str:
    """The mean of two rows, and of two of three where the one left out is not a number."""
    cases = [(rows, out) for rows in DTYPES[1:] for out in (rows, torch.float32)]
    for rows, dtype in cases:
        for included in ((True, True), (True, False, True)):
            what = f"{sum(included)} of {len(included)} rows of {rows} into {dtype}"
            out = Guarded(sizes(device), dtype, device)
            for mean in out.tensors:
                table = _table(len(included), mean.numel(), rows, device)
                if not all(included):
                    table[1] = torch.nan
                wanted = torch.empty_like(mean)
                row_mean_reference(table, included, wanted)
                row_mean(table, included, mean)
                compare(what, mean, wanted, exact=True)
            out.check(what)
    return f"{len(cases)} variants equal to torch, bit for bit"


def _table(rows: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of values that lie 16 bytes apart, so that the accesses may be wide."""
    generator = torch.Generator().manual_seed(6)
    stride = 8 * -(-numel // 8)
    return torch.randn(rows, stride, generator=generator).to(device, dtype)[:, :numel]


def check_pack(device: torch.device) -> str:
    """What a bucket has gained as int8 codes: scales of torch, codes at most one off, and nothing
    is lost."""
    for dtype in DTYPES:
        buckets = Guarded(sizes(device), dtype, device, seed=3)
        points = Guarded(sizes(device), torch.float32, device, seed=7)
        errors = Guarded(sizes(device), torch.float32, device, seed=4)
        for three in zip(buckets.tensors, points.tensors, errors.tensors, strict=True):
            bucket, point, error = three
            value = bucket.float() - point + error
            theirs = _packed(bucket, point, error.clone(), reference=True)
            codes, scales = _packed(bucket, point, error)
            compare(f"{dtype}: scales", scales, theirs[1])
            expect_codes(f"{dtype}: codes", codes, theirs[0])
            sent = codes.float() * scales.repeat_interleave(QUANTUM)[: codes.numel()]
            compare(f"{dtype}: what is sent and what is kept", sent + error, value)
        errors.check(f"{dtype}")
        points.check(f"{dtype}")
    return f"{len(DTYPES)} variants, sent and kept are the value"


def _packed(
    bucket: Tensor, point: Tensor, error: Tensor, *, reference: bool = False
) -> tuple[Tensor, Tensor]:
    codes = torch.zeros(bucket.numel(), dtype=torch.int8, device=bucket.device)
    scales = torch.zeros(packed_blocks(bucket.numel()), device=bucket.device)
    (pack_reference if reference else pack)(bucket, point, error, codes, scales)
    return codes, scales


def check_unpack(device: torch.device) -> str:
    """The weighted sum of three replicas' int8 codes: alone, added to a point, and kept in it."""
    modes = [(dtype, mode) for dtype in DTYPES for mode in ("", " from a point", " as the point")]
    worst = 0.0
    for dtype, mode in modes:
        out = Guarded(sizes(device), dtype, device)
        points = Guarded(sizes(device), torch.float32, device, seed=8)
        for bucket, point in zip(out.tensors, points.tensors, strict=True):
            found = _unpacked(bucket, point if mode else None, move=mode == " as the point")
            for name, ours, theirs in found:
                worst = max(worst, compare(f"{dtype}{mode}: {name}", ours, theirs))
        out.check(f"{dtype}{mode}")
        points.check(f"{dtype}{mode}")
    return f"{len(modes)} variants like torch, at most {worst:.2f} of what is allowed"


def _unpacked(
    bucket: Tensor, point: Tensor | None, *, move: bool
) -> list[tuple[str, Tensor, Tensor]]:
    """What the kernel writes and what torch writes, with names."""
    generator, device, numel = torch.Generator().manual_seed(5), bucket.device, bucket.numel()
    codes = torch.randint(-127, 128, (3, numel), generator=generator).to(device, torch.int8)
    scales = torch.rand(3, packed_blocks(numel), generator=generator).to(device)
    weights = torch.tensor([0.5, 0.3, 0.2], device=device)
    wanted, kept = torch.empty_like(bucket), None if point is None else point.clone()
    unpack_reference(codes, scales, weights, wanted, kept, move=move)
    unpack(codes, scales, weights, bucket, point, move=move)
    found = [("the sum", bucket, wanted)]
    return found if point is None or kept is None else [*found, ("the point", point, kept)]


def _pairs() -> list[tuple[torch.dtype, torch.dtype]]:
    return [(tensor, bucket) for tensor in DTYPES for bucket in DTYPES]


def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.float32, device=device)


def _expect_flag(flag: Tensor, wanted: int, what: str) -> None:
    if int(flag) != wanted:
        raise WrongResultError(f"{what}: the flag of values that are not finite is {int(flag)}")
