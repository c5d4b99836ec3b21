"""For each kernel of `cases.py`, how its variants are executed and what they are compared with.

`run(case, target, shift=...)` calls the operation that starts the kernel, as a user's code does, on
a `Device`, and compares the outcome with the torch reference that stands beside the kernel. It then
makes sure that the case itself was started: the same function with the same constants.

A new kernel needs an entry in `EXECUTIONS`; a new optimizer only one in `OPTIONS`.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from hdet_scale.acceptance import guarded
from hdet_scale.acceptance.twins import Twins
from hdet_scale.kernels.bucket_scale import scale, scale_reference
from hdet_scale.kernels.cases import Case, updates
from hdet_scale.kernels.int8_format import QUANTUM, packed_blocks
from hdet_scale.kernels.launch import tl_dtype
from hdet_scale.kernels.pack import pack, pack_reference
from hdet_scale.kernels.pieces import Pieces, gather_reference, scatter_reference
from hdet_scale.kernels.random_words import tensor_key
from hdet_scale.kernels.row_mean import row_mean, row_mean_reference
from hdet_scale.kernels.table import Combination
from hdet_scale.kernels.unpack import MOVE_POINT, NO_POINT, unpack, unpack_reference
from hdet_scale.kernels.update import Update
from hdet_scale.optim.precision import is_coded
from tests.support.ptx.device import Device, Launch

SIZES = [2065, 1024, 1008, 1]
"""Two whole blocks and a rest, one block, and less than one. A size that 16 divides and one of 1
are specializations of their own: where 16 divides the rest, its accesses are wide too."""
SEED = 7
STEPS = 3
CLIP = 0.5

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "adamw": [
        {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
        {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0, "maximize": True},
    ],
    "sgd": [
        {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"lr": 3e-2, "momentum": 0.8, "dampening": 0.3, "maximize": True},
    ],
    "lion": [
        {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
        {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.0, "maximize": True},
    ],
}
"""Two param groups of each optimizer, whose numbers all differ."""

ASKED = (torch.float32, torch.bfloat16)
"""What `moment_dtype` takes."""

ROUNDED = {torch.float32: 5e-7, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Difference allowed after three steps, relative to the largest value of an array: a few spacings
in fp32, one in 16 bits, where the two sides round a value on a tie to different sides."""
FLIPPED = 0.01
"""Share of the elements of a 16-bit array that may differ at all."""


def run(
    case: Case, target: str, *, shift: bool = False, edit: Callable[[str], str] | None = None
) -> Device:
    """Execute a case and compare it.

    Args:
        case: What `cases()` lists.
        target: An NVIDIA target.
        shift: Whether all tensors begin off a 16-byte boundary (default: False).
        edit: Changes the PTX of every launch (default: None).

    Raises:
        AssertionError: The outcome differs, or the case was not started.
        WrongResultError: The outcome with 8-bit moments differs.
        KeyError: The kernel has no execution; the message says what to add.
        PTXError: An access is wrong, or an opcode is not known.
    """
    gpu = Device(target, shift=shift, edit=edit)
    execution_of(case)(case, gpu)
    started = [found for found in gpu.launches if matches(found, case, aligned=not shift)]
    assert started, f"{case.kernel} {case.variant} was not started on {target}"
    return gpu


def execution_of(case: Case) -> Callable[[Case, Device], None]:
    """How a case is executed.

    Raises:
        KeyError: Nothing says how.
    """
    if case.kernel in EXECUTIONS:
        return EXECUTIONS[case.kernel]
    if case.kernel in OPTIONS:
        return _update
    raise KeyError(
        f"kernel {case.kernel!r} is never executed: add it to EXECUTIONS, or an optimizer to "
        "OPTIONS, in tests/support/ptx/executions.py"
    )


def matches(launch: Launch, case: Case, *, aligned: bool) -> bool:
    """Whether a launch was of this case, and of its aligned variant or the other."""
    wanted = dict(case.constants)
    if "ALIGNED" in wanted:
        wanted["ALIGNED"] = aligned
    pointers = {name for name, kind in launch.signature.items() if kind.startswith("*")}
    return (
        launch.kernel is case.function
        and all(launch.constants.get(name) == value for name, value in wanted.items())
        and (pointers <= launch.divisible if aligned else not pointers & launch.divisible)
    )


def values(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values that depend on size and seed alone."""
    generator = torch.Generator().manual_seed(1000 * seed + numel)
    return torch.randn(numel, generator=generator).to(dtype)


def same(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Every bit."""
    assert torch.equal(ours, theirs), f"{what}: {int((ours != theirs).sum())} elements differ"


# --- optimizers ----------------------------------------------------------------------------------


def optimizer_of(update: Update) -> Any:
    """The class of `hdet_scale.optim` that steps by this update."""
    module = importlib.import_module(f"hdet_scale.optim.fused_{update.name}")
    found = [v for v in vars(module).values() if getattr(v, "_update", None) is update]
    assert len(found) == 1, f"one class of {module.__name__} has the update, found {found}"
    return found[0]


def combination_of(update: Update, case: Case) -> Combination:
    """The dtypes of a case."""
    kept = {name: value for name, value in case.constants.items() if name != "SPAN"}
    return next(c for c in update.combinations if update.constants(c) == kept)


def make_optimizer(
    update: Update, combination: Combination, groups: Sequence[dict[str, Any]]
) -> Any:
    """The optimizer on its kernels, with the dtypes of a combination."""
    return optimizer_of(update)(
        list(groups),
        master_weights=combination.master,
        stochastic_rounding=combination.stochastic,
        # A 16-bit moment of the parameter's own dtype is what None asks for.
        moment_dtype=combination.moment if combination.moment in ASKED else None,
        seed=SEED,
        backend="triton",
        **({"state": "int8"} if is_coded(combination) else {}),
    )


def _options(update: Update, combination: Combination) -> list[dict[str, Any]]:
    still = {"momentum": 0.0, "nesterov": False, "dampening": 0.0}
    plain = still if combination.moment is None else {}
    rates = ({"lr_multiplier": 1.1}, {"lr_multiplier": 0.7})
    return [o | plain | r for o, r in zip(OPTIONS[update.name], rates, strict=True)]


def _update(case: Case, gpu: Device) -> None:
    update = next(u for u in updates() if u.name == case.kernel)
    combination = combination_of(update, case)
    if is_coded(combination):
        _coded(update, combination, gpu)
    else:
        lockstep(update, combination, gpu, SIZES)


def _coded(update: Update, combination: Combination, gpu: Device) -> None:
    """Three steps with 8-bit moments, each from the same codes on both sides. Without guards a
    tensor's neighbours are out of bounds, which the device finds."""
    options = {**OPTIONS[update.name][0], "lr_multiplier": 1.1}
    with gpu, mock.patch.object(guarded, "GUARD", 0):
        twins = Twins(update, optimizer_of(update), torch.device("cpu"), combination, **options)
        for step in range(1, STEPS + 1):
            twins.give(twins.draw(step))
            twins.optimizer.step(clip_factor=torch.tensor(CLIP))
            twins.step_reference(factor=CLIP)
            twins.check(f"step {step}")


def lockstep(update: Update, combination: Combination, gpu: Device, sizes: list[int]) -> None:
    """Three steps of the optimizer, and of the reference on clones with the same gradients."""
    options = _options(update, combination)
    with gpu:
        params = [torch.nn.Parameter(values(n, combination.param, i)) for i, n in enumerate(sizes)]
        places = list(range(0, len(sizes), 2)) + list(range(1, len(sizes), 2))
        split = [params[0::2], params[1::2]]
        groups = [{"params": p, **o} for p, o in zip(split, options, strict=True) if p]
        optimizer = make_optimizer(update, combination, groups)
    names = update.moments if combination.moment is not None else ()
    clones = [p.detach().clone() for p in params]
    masters = [c.float() if combination.master else None for c in clones]
    moments = [[torch.zeros_like(c, dtype=combination.moment) for _ in names] for c in clones]
    for step in range(1, STEPS + 1):
        with gpu:
            for i, param in enumerate(params):
                param.grad = values(sizes[i], combination.param, 100 * step + i)
            optimizer.step(clip_factor=torch.tensor(CLIP))
        for key, i in enumerate(places):
            update.reference(
                clones[i],
                params[i].grad,
                *moments[i],
                master=masters[i],
                step=step,
                factor=CLIP,
                key=tensor_key(SEED, key) if combination.stochastic else None,
                **options[i % 2],
            )
    for i, param in enumerate(params):
        state = optimizer.state[param]
        assert state["step"].item() == STEPS
        pairs = {"param": (param.detach(), clones[i])}
        pairs |= {name: (state[name], moments[i][at]) for at, name in enumerate(names)}
        if combination.master:
            pairs["master"] = (state["master"], masters[i])
        for name, pair in pairs.items():
            _close(f"{name} of {sizes[i]}", *pair, combination, options[i % 2])


def _close(
    what: str,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    combination: Combination,
    options: dict[str, Any],
) -> None:
    assert ours.dtype == theirs.dtype
    gap = (ours.double() - theirs.double()).abs()
    worst = (gap.max() / theirs.double().abs().max()).item()
    allowed = ROUNDED[theirs.dtype]
    if theirs.dtype == torch.float32 and combination.moment in (torch.bfloat16, torch.float16):
        # A moment that rounds to the other side moves a step by its own spacing.
        allowed = 4 * options["lr"] * ROUNDED[combination.moment]
    # Not `>`: what is not a number must not pass.
    assert worst <= allowed, f"{what}: {worst:.1e} > {allowed:.1e}"
    if theirs.dtype != torch.float32:
        share = (gap > 0).double().mean().item()
        assert share <= FLIPPED + 1 / theirs.numel(), f"{what}: {share:.1%} elements differ"


def _advance(case: Case, gpu: Device) -> None:
    """More tensors than a block of the kernel has threads, whose counts all follow."""
    update = next(u for u in updates() if u.name == "adamw")
    plain = Combination(param=torch.float32, moment=torch.float32)
    lockstep(update, plain, gpu, [3] * 130)


# --- buckets -------------------------------------------------------------------------------------


def _dtype(case: Case, name: str) -> torch.dtype:
    known = (torch.float32, torch.bfloat16, torch.float16)
    return next(d for d in known if tl_dtype(d) == case.constants[name])


def _pieces(case: Case, gpu: Device) -> tuple[Pieces, torch.Tensor, torch.Tensor]:
    """Tensors, a bucket with a gap between two of them, and a factor; inside of the device."""
    tensors = [values(n, _dtype(case, "T"), i) for i, n in enumerate(SIZES)]
    # Multiples of 8 elements keep the alignment of a 16-bit bucket; the last follows unaligned.
    offsets = [0, 2080, 3104, 4115]
    bucket = values(4130, _dtype(case, "B"))
    return Pieces(tensors, offsets), bucket, torch.tensor(0.3)


def _gather(case: Case, gpu: Device) -> None:
    with gpu:
        pieces, bucket, factor = _pieces(case, gpu)
        theirs, no_flag = bucket.clone(), torch.zeros(1, dtype=torch.int32)
        flag = pieces.gather(bucket, factor)
    gather_reference(pieces.tensors, pieces.offsets, theirs, no_flag, factor)
    same(bucket, theirs, "bucket")
    assert flag.item() == no_flag.item() == 0
    with gpu:
        pieces.tensors[0][2050] = float("inf")
        pieces.gather(bucket, factor, flag)
    assert flag.item() == 1


def _scatter(case: Case, gpu: Device) -> None:
    add = case.constants["ADD"]
    with gpu:
        pieces, bucket, factor = _pieces(case, gpu)
        theirs = [t.clone() for t in pieces.tensors]
        skip = torch.ones(1, dtype=torch.int32)
        pieces.scatter(bucket, factor, skip, add=add)
        for ours, kept in zip(pieces.tensors, theirs, strict=True):
            same(ours, kept, "a tensor that was to be left alone")
        # Times one, a multiply-add rounds as the sum does.
        pieces.scatter(bucket, None if add else factor, add=add)
    scatter_reference(theirs, pieces.offsets, bucket, None if add else factor, add=add)
    for ours, wanted in zip(pieces.tensors, theirs, strict=True):
        same(ours, wanted, "tensor")


def _scale(case: Case, gpu: Device) -> None:
    for numel in SIZES:
        with gpu:
            bucket, factor = values(numel, _dtype(case, "B")), torch.tensor(0.3)
            theirs = bucket.clone()
            scale(bucket, factor)
        scale_reference(theirs, factor)
        same(bucket, theirs, f"bucket of {numel}")


def _pack(case: Case, gpu: Device) -> None:
    """Twice, so that the second takes up what the first has lost; a third of the values is 0."""
    short = case.variant.removeprefix("x ")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[short]
    for numel in SIZES:
        with gpu:
            x = values(numel, dtype)
            point = values(numel, seed=3)
            x[: numel // 3] = point[: numel // 3] = 0
            ours = [torch.zeros(numel), torch.empty(numel, dtype=torch.int8)]
            ours.append(torch.empty(packed_blocks(numel)))
        for _ in range(2):
            theirs = [t.clone() for t in ours]
            with gpu:
                pack(x, point, *ours)
            pack_reference(x, point, *theirs)
            _check_packed(ours, theirs)


def _check_packed(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Errors, codes and scales. A value half way between two codes may take either, since the
    kernel rounds its multiply-add once: what is sent and what is kept must still have one sum."""
    (error, codes, scales), (error2, codes2, scales2) = ours, theirs
    torch.testing.assert_close(scales, scales2, rtol=1e-6, atol=0)
    numel = codes.numel()
    spread, spread2 = (s.repeat_interleave(QUANTUM)[:numel] for s in (scales, scales2))
    sums = (spread * codes + error).double(), (spread2 * codes2 + error2).double()
    torch.testing.assert_close(*sums, rtol=0, atol=scales2.max().item() * 127 * 2.0**-22)
    differ = codes != codes2
    assert (codes.int() - codes2.int()).abs().max() <= 1
    assert differ.double().mean().item() <= 1e-3 + 1 / numel
    half = (error.abs() / spread - 0.5).abs()
    assert not differ.any() or half[differ].max() < 1e-4, "a code is off that was no tie"


def _unpack(case: Case, gpu: Device) -> None:
    """One replica is a specialization of its own. The order of summation is the reference's, so
    that only multiply-adds, which round once, can differ: by one spacing of the largest term."""
    dtype = _dtype(case, "B")
    for numel, replicas in zip(SIZES, (3, 2, 1, 2), strict=True):
        with gpu:
            codes = (values(numel * replicas) * 40).clamp(-127, 127).to(torch.int8)
            codes = codes.view(replicas, numel)
            blocks = packed_blocks(numel)
            scales = values(replicas * blocks, seed=1).abs().view(replicas, blocks)
            weights, out = values(replicas, seed=2).abs(), torch.empty(numel, dtype=dtype)
            theirs, mode = out.clone(), case.constants["MODE"]
            point = None if mode == NO_POINT else values(numel, seed=3)
            kept = None if point is None else point.clone()
            unpack(codes, scales, weights, out, point, move=mode == MOVE_POINT)
        unpack_reference(codes, scales, weights, theirs, kept, move=mode == MOVE_POINT)
        atol = (127 * scales.max() * weights.max()).item() * 2.0**-22
        rtol = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        torch.testing.assert_close(out, theirs, rtol=rtol, atol=atol)
        if point is not None:
            torch.testing.assert_close(point, kept, rtol=0, atol=atol)


def _row_mean(case: Case, gpu: Device) -> None:
    """The rows that are chosen, of a table with one more that is not a number."""
    rows16, _, out_dtype = case.variant.removeprefix("2 rows ").partition(" out ")
    known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for numel in SIZES:
        with gpu:
            stride = 8 * -(-numel // 8)
            table = values(3 * stride, known[rows16]).view(3, stride)[:, :numel]
            table[1] = torch.nan
            out = torch.empty(numel, dtype=known[out_dtype])
            theirs = out.clone()
            row_mean(table[::2], [True, True], out)
        row_mean_reference(table[::2], [True, True], theirs)
        same(out, theirs, f"mean of {numel}")


EXECUTIONS: dict[str, Callable[[Case, Device], None]] = {
    "advance": _advance,
    "gather": _gather,
    "scatter": _scatter,
    "scale": _scale,
    "pack": _pack,
    "row_mean": _row_mean,
    "unpack": _unpack,
}
