"""Kernel against reference, 100 steps side by side, in Triton's interpreter.

The kernels run through the optimizers (backend="triton"), the references by hand on clones with the
same gradients. The gradients do not depend on the parameters, so that a difference is a difference
of arithmetic and does not feed on itself.
"""

from typing import Any

import pytest
import torch

from hdet_scale.kernels.adamw import adamw_reference
from hdet_scale.kernels.interpreter import interpreted
from hdet_scale.kernels.launch import SPAN
from hdet_scale.kernels.lion import lion_reference
from hdet_scale.kernels.random_words import tensor_key
from hdet_scale.kernels.sgd import sgd_reference
from hdet_scale.kernels.table import Combination, combinations
from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.optim.fused_lion import FusedLion
from hdet_scale.optim.fused_sgd import FusedSGD
from tests.support.stepping import LR, SGD_OPTIONS
from tests.support.stepping import params as odd_params

pytestmark = pytest.mark.slow

STEPS = 100
SEED = 11
RHO = 1.1
# Largest difference after 100 steps, relative to the largest value of the array. fp32: a third of
# what half a spacing (2^-24) a step would add up to. A 16-bit array rounds the other way where the
# two sides differ in the last bit of fp32: one spacing (2^-8 in bf16, 2^-11 in fp16), and a second
# one when it happens again.
TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 2 * 2.0**-8,
    torch.float16: 2 * 2.0**-11,
}

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": True}
LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
KINDS: dict[str, tuple[Any, Any, dict[str, Any], tuple[str, ...]]] = {
    "adamw": (FusedAdamW, adamw_reference, ADAMW, ("exp_avg", "exp_avg_sq")),
    "sgd": (FusedSGD, sgd_reference, SGD, ("momentum_buffer",)),
    "lion": (FusedLion, lion_reference, LION, ("exp_avg",)),
}


def tensor(numel: int, dtype: torch.dtype, generator: torch.Generator, shift: int) -> torch.Tensor:
    """Values whose first element is `shift` elements behind a 16-byte boundary."""
    values = torch.randn(numel + shift, generator=generator).to(dtype)
    return values[shift:]


@interpreted
def lockstep(
    kind: str,
    combination: Combination,
    sizes: list[tuple[int, int]],
    groups: list[dict[str, Any]],
    steps: int = STEPS,
) -> dict[str, float]:
    """The largest relative difference of each array; tensor i is in group i modulo the groups."""
    make, reference, defaults, names = KINDS[kind]
    generator = torch.Generator().manual_seed(5)
    dtype = combination.param
    params = [torch.nn.Parameter(tensor(n, dtype, generator, shift)) for n, shift in sizes]
    clones = [p.detach().clone() for p in params]
    masters = [c.float() if combination.master else None for c in clones]
    options = [{**defaults, **group} for group in groups]
    if combination.moment is None:
        options = [{**o, "momentum": 0.0, "nesterov": False} for o in options]
        names = ()
    optimizer = make(
        [{"params": params[i :: len(groups)], **o} for i, o in enumerate(options)],
        master_weights=combination.master,
        stochastic_rounding=combination.stochastic,
        moment_dtype=combination.moment if combination.moment != torch.float16 else None,
        seed=SEED,
        backend="triton",
    )
    moments = [[torch.zeros_like(c, dtype=combination.moment) for _ in names] for c in clones]
    keys = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    for step in range(1, steps + 1):
        for i, (param, (n, shift)) in enumerate(zip(params, sizes, strict=True)):
            param.grad = tensor(n, dtype, generator, shift)
            reference(
                clones[i],
                param.grad,
                *(moments[i] if names or kind != "sgd" else [None]),
                master=masters[i],
                step=step,
                key=tensor_key(SEED, keys[id(param)]) if combination.stochastic else None,
                **options[i % len(groups)],
            )
        optimizer.step()

    gaps: dict[str, float] = {}
    sizes_of: dict[str, float] = {}
    for i, param in enumerate(params):
        state = optimizer.state[param]
        assert state["step"].item() == steps
        pairs = {"param": (param.detach(), clones[i])}
        pairs |= {name: (state[name], moments[i][at]) for at, name in enumerate(names)}
        if combination.master:
            pairs["master"] = (state["master"], masters[i])
        for name, (ours, theirs) in pairs.items():
            assert ours.dtype == theirs.dtype
            if ours.numel():
                gap = (ours.double() - theirs.double()).abs().max().item()
                assert gap < float("inf")
                gaps[name] = max(gaps.get(name, 0.0), gap)
                largest = theirs.double().abs().max().item()
                sizes_of[name] = max(sizes_of.get(name, 0.0), largest)
    return {name: gap / sizes_of[name] for name, gap in gaps.items()}


def within(kind: str, worst: dict[str, float], combination: Combination) -> None:
    print({name: f"{error:.1e}" for name, error in worst.items()})
    for name, error in worst.items():
        dtype = {"param": combination.param, "master": torch.float32}.get(name, combination.moment)
        tolerance = TOLERANCE[dtype]
        if dtype == torch.float32 and combination.moment in (torch.bfloat16, torch.float16):
            # fp32 values stepped from 16-bit moments: a moment that rounds the other way moves a
            # step by its own spacing, for as long as it remembers; in Lion it may turn one sign.
            tolerance = 4 * ADAMW["lr"] * TOLERANCE[combination.moment]
            if kind == "lion":
                tolerance = 2 * LION["lr"] * RHO
        assert error <= tolerance, f"{name}: {error:.2e} > {tolerance:.2e}"


def label(combination: Combination) -> str:
    mode = "master" if combination.master else "sr" if combination.stochastic else "nearest"
    return f"{combination.param}-{combination.moment}-{mode}".replace("torch.", "")


EVERY = [(k, c) for k in KINDS for c in combinations(momentless=k == "sgd")]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[tuple[str, Combination], list[Any]]:
    """The runs of the tests that were selected, started together: they share the cores."""
    chosen = [i.callspec.params for i in request.session.items if hasattr(i, "callspec")]
    pairs = [(p["kind"], p["combination"]) for p in chosen if "combination" in p]
    group = [{"lr_multiplier": RHO}]
    return {
        (kind, combination): [
            lockstep.submit(kind, combination, [(1024, 0)], group),
            lockstep.submit(kind, combination, [(17, 1)], group, steps=3),
        ]
        for kind, combination in pairs
    }


@pytest.mark.parametrize(("kind", "combination"), EVERY, ids=[f"{k}-{label(c)}" for k, c in EVERY])
def test_every_dtype_combination(
    kind: str, combination: Combination, runs: dict[tuple[str, Combination], list[Any]]
) -> None:
    """100 steps of a whole block with 128-bit accesses; and the masked path, on a tensor that is
    neither whole nor aligned."""
    for run in runs[kind, combination]:
        within(kind, run.result(), combination)


FP32 = Combination(param=torch.float32, moment=torch.float32)


@pytest.fixture(scope="module")
def mixed_runs() -> dict[str, Any]:
    """Started together, to share the cores."""
    sizes = [(0, 0), (1, 0), (17, 1), (1023, 0), (1024, 1), (1024, 0), (1025, 3)]
    second = {"lr": 3e-3, "lr_multiplier": 0.7, "weight_decay": 0.03, "maximize": True}
    betas = {"betas": (0.8, 0.95)}
    momentum = {"nesterov": False, "dampening": 0.3, "momentum": 0.8}
    return {
        kind: lockstep.submit(
            kind,
            FP32,
            sizes,
            [{"lr_multiplier": 1.25}, second | (momentum if kind == "sgd" else betas)],
        )
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
def test_odd_sizes_unaligned_views_and_mixed_groups(kind: str, mixed_runs: dict[str, Any]) -> None:
    """Sizes around a block, views that start off a 16-byte boundary, and two groups whose numbers
    all differ, in one launch."""
    within(kind, mixed_runs[kind].result(), FP32)


@interpreted
def controlled(kind: str, found_inf: float, scale: float, clip: float) -> dict[str, torch.Tensor]:
    """One step under a loss scale, a clip factor and found_inf, after one plain step."""
    make, _, defaults, names = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(torch.randn(1030, generator=generator))
    optimizer = make([param], **defaults, backend="triton")
    grad = torch.randn(1030, generator=generator)
    param.grad = grad.clone()
    optimizer.step()
    param.grad = grad * scale / clip
    optimizer.grad_scale = torch.tensor([scale])
    optimizer.found_inf = torch.tensor([found_inf])
    kept = param.grad.clone()
    optimizer.step(clip_factor=torch.tensor(clip))
    assert torch.equal(param.grad, kept), "a kernel must leave the gradient alone"
    state = optimizer.state[param]
    return {"param": param.detach(), "step": state["step"], **{n: state[n] for n in names}}


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_clip_are_applied_inside_the_pass(kind: str) -> None:
    """Powers of two, which lose no bit: the step must be that of the plain gradient."""
    plain = controlled(kind, 0.0, 1.0, 1.0)
    scaled = controlled(kind, 0.0, 1024.0, 0.25)
    for name, value in plain.items():
        assert torch.equal(scaled[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_found_inf_writes_nothing(kind: str) -> None:
    skipped = controlled(kind, 1.0, 1.0, 1.0)
    taken = controlled(kind, 0.0, 1.0, 1.0)
    assert skipped["step"].item() == 1
    assert taken["step"].item() == 2
    names = KINDS[kind][3]
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(torch.randn(1030, generator=generator))
    before = one_step(kind, param.detach().clone(), torch.randn(1030, generator=generator))
    for name in ("param", *names):
        assert torch.equal(skipped[name], before[name]), name
        assert not torch.equal(taken[name], before[name]), name


@interpreted
def one_step(kind: str, values: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    make, _, defaults, names = KINDS[kind]
    param = torch.nn.Parameter(values)
    optimizer = make([param], **defaults, backend="triton")
    param.grad = grad
    optimizer.step()
    return {"param": param.detach(), **{n: optimizer.state[param][n] for n in names}}


@interpreted
def two_numbers_change() -> list[float]:
    """A scheduler writes the base, a controller the multiplier, between steps; and tensors."""
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = FusedSGD([param], lr=1.0, lr_multiplier=torch.tensor(2.0), backend="triton")
    seen = []
    for lr, multiplier in ((1.0, 2.0), (0.5, 2.0), (0.5, 3.0)):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.param_groups[0]["lr_multiplier"].fill_(multiplier)
        before = param.detach().clone()
        param.grad = torch.ones(4)
        optimizer.step()
        seen.append((before - param.detach())[0].item())
    return seen


def test_the_kernel_multiplies_base_and_multiplier_of_the_table() -> None:
    assert two_numbers_change() == [2.0, 1.0, 1.5]


@pytest.mark.parametrize("shift", [0, 1])
def test_a_tensor_of_several_spans(shift: int) -> None:
    """A program goes through the blocks of its span: whole ones, and a rest in the last span."""
    worst = lockstep("adamw", FP32, [(SPAN + 1024 + 9, shift)], [{"lr_multiplier": RHO}], steps=2)
    within("adamw", worst, FP32)


@interpreted
def later_gradient() -> tuple[float, float, torch.Tensor, torch.Tensor]:
    """A parameter that has no gradient at the first step counts its own steps."""
    first, second = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizer = FusedAdamW([first, second], lr=0.1, weight_decay=0.0, backend="triton")
    first.grad = torch.ones(5)
    optimizer.step()
    second.grad = torch.ones(5)
    optimizer.step()
    counts = [optimizer.state[p]["step"].item() for p in (first, second)]
    return counts[0], counts[1], first.detach(), second.detach()


def test_each_parameter_counts_its_own_steps() -> None:
    first_count, second_count, first, second = later_gradient()
    assert (first_count, second_count) == (2, 1)
    # A constant gradient gives steps of lr whatever the count, if the correction has that count.
    torch.testing.assert_close(first, torch.full((5,), 0.8))
    torch.testing.assert_close(second, torch.full((5,), 0.9))


# --- the references against torch --------------------------------------------------------------

REFERENCES: list[tuple[Any, Any, dict[str, Any], int]] = [
    (adamw_reference, torch.optim.AdamW, {"weight_decay": 0.1}, 2),
    (adamw_reference, torch.optim.AdamW, {"betas": (0.8, 0.95), "maximize": True}, 2),
    *[(sgd_reference, torch.optim.SGD, options, 1) for options in SGD_OPTIONS],
]


@pytest.mark.parametrize(("reference", "make_torch", "options", "slots"), REFERENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reference_against_torch(
    reference: Any,
    make_torch: Any,
    options: dict[str, Any],
    slots: int,
    dtype: torch.dtype,
) -> None:
    """Lockstep, 100 steps. Against torch in fp64 too: there the difference is the rounding of the
    fp32 parameter at each step, at most half a spacing (2^-24) each time, and no other."""
    yours = odd_params(dtype)
    theirs = make_torch(yours, lr=LR, foreach=False, **options)
    mine = [p.detach().float() for p in odd_params()]
    moments: list[list[Any]] = [[torch.zeros_like(p) for _ in range(slots)] for p in mine]
    if reference is sgd_reference and not options.get("momentum"):
        moments = [[None] for _ in mine]
    for step in range(1, 101):
        generator = torch.Generator().manual_seed(step)
        for values, state, param in zip(mine, moments, yours, strict=True):
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad.to(dtype)
            reference(values, grad, *state, step=step, lr=LR, **options)
        theirs.step()
    pairs = [(a, b) for a, b in zip(mine, yours, strict=True) if a.numel()]
    scale = max(b.abs().max().item() for _, b in pairs)
    worst = max((a.double() - b.double()).abs().max().item() for a, b in pairs) / scale
    print(f"max relative error {worst:.1e}")
    assert worst <= 100 * 2.0**-24
