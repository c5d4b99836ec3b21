"""The optimizers on a CPU: torch's results to the last bit, its checkpoints, its manners."""

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hdet_scale.kernels.adamw import adamw_reference
from hdet_scale.kernels.lion import lion_reference
from hdet_scale.kernels.sgd import sgd_reference
from hdet_scale.optim import fused
from hdet_scale.optim.fused_adamw import FusedAdamW, FusedLion, FusedSGD, effective_lr, write_lr

SIZES = [0, 1, 17, 1023, 1024, 1025]
LR, RHO = 3e-3, 1.07

SGD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.01},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "maximize": True},
]
PAIRS: list[tuple[Any, Any, dict[str, Any]]] = [
    (FusedAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    (FusedAdamW, torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6, "maximize": True}),
    *[(FusedSGD, torch.optim.SGD, options) for options in SGD_OPTIONS],
]


def params(dtype: torch.dtype = torch.float32, shift: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n + shift, generator=generator).to(dtype)[shift:] for n in SIZES]
    return [torch.nn.Parameter(values) for values in made]


def drive(
    steps: int, ours: Any, mine: list[Any], theirs: Any, yours: list[Any], first: int = 0
) -> None:
    """The same gradients for both; one parameter has none at the fourth step."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for i, (a, b) in enumerate(zip(mine, yours, strict=True)):
            grad = torch.randn(a.shape, generator=generator)
            none = step == 3 and i == 2
            a.grad = None if none else grad.to(a.dtype, copy=True)
            b.grad = None if none else grad.to(b.dtype, copy=True)
        ours.step()
        theirs.step()


def same(mine: list[Any], yours: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("make", "make_torch", "options"), PAIRS)
def test_multiplier_is_lr_times_rho_to_the_last_bit(
    make: Any, make_torch: Any, options: dict[str, Any], shift: int
) -> None:
    """100 steps, odd sizes, aligned or not, with and without a gradient."""
    mine, yours = params(shift=shift), params(shift=shift)
    ours = make(mine, lr=LR, lr_multiplier=RHO, **options)
    theirs = make_torch(yours, lr=LR * RHO, fused=True, **options)
    drive(100, ours, mine, theirs, yours)
    assert same(mine, yours)
    for a, b in zip(mine, yours, strict=True):
        for name, value in theirs.state[b].items():
            if value is not None:
                assert torch.equal(ours.state[a][name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_torchs_too(dtype: torch.dtype) -> None:
    mine, yours = params(dtype), params(dtype)
    ours = FusedAdamW(mine, lr=LR, lr_multiplier=RHO)
    theirs = torch.optim.AdamW(yours, lr=LR * RHO, fused=True)
    drive(30, ours, mine, theirs, yours)
    assert same(mine, yours)
    assert ours.state[mine[3]]["exp_avg"].dtype == dtype


def test_mixed_groups_each_with_its_own_numbers() -> None:
    mine, yours = params(), params()
    numbers = [{"lr": 1e-2, "lr_multiplier": 0.5}, {"lr": 2e-3, "weight_decay": 0.3}]
    ours = FusedAdamW([{"params": mine[i::2], **n} for i, n in enumerate(numbers)])
    rates = [{"lr": 5e-3}, {"lr": 2e-3, "weight_decay": 0.3}]
    theirs = torch.optim.AdamW(
        [{"params": yours[i::2], **n} for i, n in enumerate(rates)], fused=True
    )
    drive(20, ours, mine, theirs, yours)
    assert same(mine, yours)


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
    yours = params(dtype)
    theirs = make_torch(yours, lr=LR, foreach=False, **options)
    mine = [p.detach().float() for p in params()]
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


def test_lion_is_its_equation() -> None:
    """Against the three lines of the paper, written out in fp64."""
    mine = params()
    ours = FusedLion(mine, lr=LR, lr_multiplier=RHO, betas=(0.9, 0.99), weight_decay=0.1)
    values = [p.detach().double() for p in mine]
    moments = [torch.zeros_like(v) for v in values]
    for step in range(100):
        generator = torch.Generator().manual_seed(step)
        for i, param in enumerate(mine):
            g = torch.randn(param.shape, generator=generator)
            param.grad = g.clone()
            direction = (0.9 * moments[i] + 0.1 * g.double()).sign()
            values[i] -= LR * RHO * (direction + 0.1 * values[i])
            moments[i] = 0.99 * moments[i] + 0.01 * g.double()
        ours.step()
    limit = 100 * 2.0**-24 * max(v.abs().max().item() for v in values if v.numel())
    for a, b in zip(mine, values, strict=True):
        torch.testing.assert_close(a.detach().double(), b, rtol=0, atol=limit)
    assert ours.state[mine[1]]["step"].item() == 100


def test_lion_reference_is_the_foreach_step() -> None:
    mine = params()
    ours = FusedLion(mine, lr=LR, weight_decay=0.1)
    values = [p.detach().clone() for p in mine]
    moments = [torch.zeros_like(v) for v in values]
    for step in range(1, 101):
        generator = torch.Generator().manual_seed(step)
        for v, m, param in zip(values, moments, mine, strict=True):
            param.grad = torch.randn(param.shape, generator=generator)
            lion_reference(v, param.grad, m, step=step, lr=LR, weight_decay=0.1)
        ours.step()
    limit = 100 * 2.0**-24 * max(v.abs().max().item() for v in values if v.numel())
    for a, b in zip(mine, values, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=0, atol=limit)


# --- 16-bit parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [FusedAdamW, FusedSGD, FusedLion])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_is_stepped_as_fp32_parameters_are(make: Any, dtype: torch.dtype) -> None:
    narrow, wide = params(dtype), [torch.nn.Parameter(p.detach().float()) for p in params(dtype)]
    ours, theirs = make(narrow, lr=LR, master_weights=True), make(wide, lr=LR)
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(narrow, wide, strict=True):
            a.grad = torch.randn(a.shape, generator=generator).to(dtype)
            b.grad = a.grad.float()
        ours.step()
        theirs.step()
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(ours.state[a]["master"], b)
        assert torch.equal(a, b.to(dtype))


@pytest.mark.parametrize("make", [FusedAdamW, FusedSGD, FusedLion])
def test_small_updates_are_lost_to_nearest_and_kept_by_the_two_other_ways(make: Any) -> None:
    """Updates of 1e-5 to parameters of 1, where bf16 has a spacing of 2^-8 below."""

    def moved(**options: Any) -> float:
        param = torch.nn.Parameter(torch.ones(20000, dtype=torch.bfloat16))
        decay = {} if make is FusedSGD else {"weight_decay": 0.0}
        optimizer = make([param], lr=1e-5, moment_dtype=torch.float32, **decay, **options)
        for _ in range(200):
            param.grad = torch.ones_like(param)
            optimizer.step()
        return 1 - param.detach().double().mean().item()

    assert moved() == 0
    spacing = 2.0**-8
    assert moved(master_weights=True) == pytest.approx(2e-3, abs=spacing / 2)
    # 20000 elements, 200 roundings each: a standard error of about 2e-5.
    assert moved(stochastic_rounding=True) == pytest.approx(2e-3, abs=1e-4)


def test_stochastic_rounding_depends_on_the_seed_alone() -> None:
    def run(seed: int) -> torch.Tensor:
        param = torch.nn.Parameter(torch.ones(500, dtype=torch.bfloat16))
        optimizer = FusedAdamW([param], lr=1e-4, stochastic_rounding=True, seed=seed)
        for _ in range(5):
            param.grad = torch.ones_like(param)
            optimizer.step()
        return param.detach()

    torch.manual_seed(1)
    first, state = run(3), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(run(3), first)
    assert not torch.equal(run(4), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "no global generator is touched"


# --- checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "make_torch", "options"), PAIRS)
@pytest.mark.parametrize("fused", [True, False])
def test_state_goes_from_torch_to_here_and_back(
    make: Any, make_torch: Any, options: dict[str, Any], fused: bool
) -> None:
    """10 steps of torch, 10 of ours, 10 of torch are 30 of torch."""
    yours = params()
    theirs = make_torch(yours, lr=LR, fused=True, **options)
    drive(30, theirs, yours, make_torch(params(), lr=LR, **options), params())

    mine = params()
    start = make_torch(mine, lr=LR, fused=True, **options)
    drive(10, start, mine, start_shadow := make_torch(params(), lr=LR, **options), params())
    saved = copy.deepcopy(start.state_dict())
    for group in saved["param_groups"]:
        group["fused"] = fused or None
    ours = make(mine, lr=123.0, **options)
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == LR
    drive(10, ours, mine, start_shadow, params(), first=10)
    back = make_torch(mine, lr=5.0, fused=True)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    drive(10, back, mine, start_shadow, params(), first=20)
    assert same(mine, yours)


def test_the_multiplier_is_the_replicas_and_not_the_files() -> None:
    first = FusedAdamW(params(), lr=LR, lr_multiplier=0.9)
    saved = first.state_dict()
    assert "lr_multiplier" not in saved["param_groups"][0]
    second = FusedAdamW(params(), lr=1.0, lr_multiplier=1.1)
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr_multiplier"] == 1.1
    assert second.param_groups[0]["lr"] == LR
    saved["param_groups"][0]["lr_multiplier"] = 0.9
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr_multiplier"] == 1.1
    assert first.param_groups[0]["lr_multiplier"] == 0.9


@pytest.mark.parametrize("how", ["master_weights", "stochastic_rounding"])
def test_a_resumed_run_with_16_bit_parameters_has_the_bits_of_the_unbroken_one(how: str) -> None:
    """torch would cast fp32 moments and master to bf16 while loading."""
    options = {"lr": LR, how: True, "moment_dtype": torch.float32, "seed": 5}
    unbroken, broken = params(torch.bfloat16), params(torch.bfloat16)
    first = FusedAdamW(broken, **options)
    drive(10, going := FusedAdamW(unbroken, **options), unbroken, first, broken)
    resumed = FusedAdamW(broken, **options)
    resumed.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert resumed.state[broken[3]]["exp_avg"].dtype == torch.float32
    drive(10, going, unbroken, resumed, broken, first=10)
    assert same(broken, unbroken)


def test_load_hooks_run_and_see_the_restored_state() -> None:
    mine = params(torch.bfloat16)
    ours = FusedAdamW(mine, lr=LR, moment_dtype=torch.float32)
    drive(2, ours, mine, FusedAdamW(params(), lr=LR), params())
    saved = copy.deepcopy(ours.state_dict())
    seen: list[torch.dtype] = []

    def rename(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {"state": state["renamed"], "param_groups": state["param_groups"]}

    ours.register_load_state_dict_pre_hook(rename)
    ours.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[mine[3]]["exp_avg"].dtype)
    )
    ours.load_state_dict({"renamed": saved["state"], "param_groups": saved["param_groups"]})
    assert seen == [torch.float32]
    assert torch.equal(ours.state[mine[3]]["exp_avg"], saved["state"][3]["exp_avg"])


def test_copies_and_pickles_step_alike() -> None:
    mine = params()
    ours = FusedAdamW(mine, lr=LR, lr_multiplier=RHO)
    drive(3, ours, mine, FusedAdamW(params(), lr=LR), params())
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        theirs = again.param_groups[0]["params"]
        continued = [torch.nn.Parameter(p.detach().clone()) for p in mine]
        other = FusedAdamW(continued, lr=LR, lr_multiplier=RHO)
        other.load_state_dict(copy.deepcopy(ours.state_dict()))
        drive(3, again, theirs, other, continued, first=4)
        assert same(theirs, continued)


# --- torch's manners --------------------------------------------------------------------------


def test_add_param_group_closure_hooks_and_zero_grad() -> None:
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    ours = FusedSGD([first], lr=0.1)
    calls: list[str] = []
    ours.register_step_pre_hook(lambda *_: calls.append("pre"))
    ours.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> torch.Tensor:
        calls.append("closure")
        ours.zero_grad()
        loss = (first.sum() + second.sum()) * 2
        loss.backward()
        return loss

    assert ours.step(closure).item() == 12.0
    assert calls == ["pre", "closure", "post"]
    ours.add_param_group({"params": [second], "lr": 0.2, "lr_multiplier": 0.5})
    ours.step(closure)
    torch.testing.assert_close(first.detach(), torch.full((3,), 0.6))
    torch.testing.assert_close(second.detach(), torch.full((3,), 0.8))
    ours.zero_grad()
    assert first.grad is None


def test_schedulers_write_the_base() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    ours = FusedAdamW([param], lr=1.0, lr_multiplier=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(ours, 1, gamma=0.1)
    param.grad = torch.ones(3)
    ours.step()
    scheduler.step()
    assert ours.param_groups[0]["lr"] == pytest.approx(0.1)
    assert ours.param_groups[0]["lr_multiplier"] == 0.5
    assert effective_lr(ours.param_groups[0]) == pytest.approx(0.05)


def test_one_place_decides_where_the_multiplier_goes() -> None:
    ours = FusedAdamW(params(), lr=1.0).param_groups[0]
    theirs = torch.optim.AdamW(params(), lr=1.0).param_groups[0]
    tensor = torch.optim.AdamW(params(), lr=torch.tensor(1.0)).param_groups[0]
    kept = tensor["lr"]
    for group in (ours, theirs, tensor):
        write_lr(group, 0.2, 1.5)
        assert float(effective_lr(group)) == pytest.approx(0.3)
    assert (ours["lr"], ours["lr_multiplier"]) == (0.2, 1.5)
    assert "lr_multiplier" not in theirs
    assert tensor["lr"] is kept
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="lr_multiplier"):
            write_lr(ours, 0.1, bad)
    assert ours["lr"] == 0.2


def test_tensor_lr_and_multiplier() -> None:
    mine, yours = params(), params()
    ours = FusedAdamW(mine, lr=torch.tensor(LR), lr_multiplier=torch.tensor(2.0), capturable=True)
    theirs = torch.optim.AdamW(yours, lr=torch.tensor(LR) * 2.0, fused=True)
    drive(5, ours, mine, theirs, yours)
    assert same(mine, yours)


@pytest.mark.parametrize("make", [FusedAdamW, FusedSGD, FusedLion])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"stochastic_rounding": True}])
def test_scale_clip_and_found_inf(make: Any, options: dict[str, Any]) -> None:
    """The GradScaler's protocol and our clip factor, in powers of two: no bit is lost."""
    dtype = torch.bfloat16 if options else torch.float32

    def run(scale: float, clip: float | None, found: float) -> list[torch.Tensor]:
        mine = params(dtype)
        ours = make(mine, lr=LR, **options)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in mine:
                factor = scale / (clip or 1.0)
                p.grad = (torch.randn(p.shape, generator=generator) * factor).to(dtype)
            ours.grad_scale = torch.tensor(scale)
            ours.found_inf = torch.tensor(found if step == 1 else 0.0)
            ours.step(clip_factor=None if clip is None else torch.tensor(clip))
        return [p.detach() for p in mine]

    plain = run(1.0, None, 0.0)
    assert same(run(512.0, None, 0.0), plain)
    assert same(run(512.0, 0.25, 0.0), plain)
    assert not same(run(1.0, None, 1.0), plain)
    # What a skipped step leaves is what two steps leave.
    mine = params(dtype)
    ours = make(mine, lr=LR, **options)
    for step in (0, 2):
        generator = torch.Generator().manual_seed(step)
        for p in mine:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        ours.step()
    assert same(run(1.0, None, 1.0), [p.detach() for p in mine])


def test_grad_scaler_hands_over_its_scale() -> None:
    assert FusedAdamW(params())._step_supports_amp_scaling is True
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    mine, yours = torch.nn.Parameter(torch.ones(9)), torch.nn.Parameter(torch.ones(9))
    ours, theirs = FusedAdamW([mine], lr=LR), FusedAdamW([yours], lr=LR)
    for scale in (1.0, float("inf"), 2.0):
        ours.zero_grad()
        scaler.scale((mine * scale).sum()).backward()
        scaler.step(ours)
        scaler.update()
        if scale != float("inf"):
            yours.grad = torch.full((9,), scale)
            theirs.step()
    assert torch.equal(mine, yours)


def test_channels_last_parameters_and_gradients_in_another_order() -> None:
    values = torch.randn(4, 3, 2, 2)
    mine = torch.nn.Parameter(values.clone().to(memory_format=torch.channels_last))
    yours = torch.nn.Parameter(values.clone())
    ours, theirs = FusedAdamW([mine], lr=LR), torch.optim.AdamW([yours], lr=LR, fused=True)
    for step in range(4):
        grad = torch.randn(4, 3, 2, 2)
        order = torch.channels_last if step % 2 else torch.contiguous_format
        mine.grad, yours.grad = grad.clone().to(memory_format=order), grad.clone()
        ours.step()
        theirs.step()
    assert torch.equal(mine, yours)


def test_a_state_that_the_user_replaced_is_the_one_that_is_stepped() -> None:
    mine = params()
    ours = FusedAdamW(mine, lr=LR)
    drive(2, ours, mine, FusedAdamW(params(), lr=LR), params())
    fresh = torch.zeros_like(mine[3])
    ours.state[mine[3]]["exp_avg"] = fresh
    drive(1, ours, mine, FusedAdamW(params(), lr=LR), params(), first=5)
    assert fresh.abs().sum() > 0


def test_dtensor_parameters_step_their_local_shards(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        values = torch.randn(6, 5)
        mine = torch.nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(0)]))
        yours = torch.nn.Parameter(values.clone())
        ours, theirs = FusedAdamW([mine], lr=LR), torch.optim.AdamW([yours], lr=LR, fused=True)
        for _ in range(3):
            grad = torch.randn(6, 5)
            mine.grad = distribute_tensor(grad.clone(), mesh, [Shard(0)])
            yours.grad = grad.clone()
            ours.step()
            theirs.step()
        assert torch.equal(mine.full_tensor(), yours)
        state = ours.state_dict()["state"][0]
        assert state["exp_avg"].placements == (Shard(0),)
        assert torch.equal(state["exp_avg"].full_tensor(), theirs.state[yours]["exp_avg"])
        before = mine.full_tensor().clone()
        wrong = torch.distributed.tensor.DTensor.from_local(torch.ones(6, 5), mesh, [Partial()])
        mine.grad = wrong
        with pytest.raises(ValueError, match="redistribute"):
            ours.step()
        assert torch.equal(mine.full_tensor(), before)
    finally:
        torch.distributed.destroy_process_group()


# --- bad input: an error that helps, and nothing written ----------------------------------------


def sparse_grad(p: torch.nn.Parameter, _: Any) -> None:
    p.grad = torch.eye(3).to_sparse()


def set_multiplier(value: Any) -> Callable[[torch.nn.Parameter, Any], None]:
    def change(_: torch.nn.Parameter, optimizer: Any) -> None:
        optimizer.param_groups[1]["lr_multiplier"] = value

    return change


def make_complex(p: torch.nn.Parameter, _: Any) -> None:
    p.grad = None
    p.data = torch.ones(3, 3, dtype=torch.complex64)
    p.grad = torch.ones(3, 3, dtype=torch.complex64)


def make_other_dtype(p: torch.nn.Parameter, _: Any) -> None:
    p.grad = None
    p.grad_dtype = None
    p.grad = torch.ones(3, 3, dtype=torch.bfloat16)


def make_strided(p: torch.nn.Parameter, _: Any) -> None:
    p.grad = None
    p.data = torch.ones(3, 6)[:, ::2]
    p.grad = torch.ones(3, 3)


@pytest.mark.parametrize("make", [FusedAdamW, FusedSGD, FusedLion])
@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (sparse_grad, TypeError, "torch.sparse_coo"),
        (make_complex, TypeError, "complex64"),
        (make_strided, ValueError, "contiguous"),
        (make_other_dtype, TypeError, "torch.bfloat16 and the parameter torch.float32"),
        (set_multiplier(-0.5), ValueError, "lr_multiplier=-0.5"),
        (set_multiplier(float("nan")), ValueError, "lr_multiplier=nan"),
        (set_multiplier(float("inf")), ValueError, "lr_multiplier=inf"),
        (set_multiplier("2"), TypeError, "lr_multiplier='2'"),
        (set_multiplier(torch.tensor(-1.0)), ValueError, "lr_multiplier=-1.0"),
        (set_multiplier(torch.ones(2)), ValueError, "one element"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    make: Any, spoil: Any, error: type[Exception], match: str
) -> None:
    """The fault is in the second group; the first must be as it was, and so its state."""
    good, bad = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(3, 3))
    optimizer = make([{"params": [good]}, {"params": [bad]}], lr=0.1)
    good.grad, bad.grad = torch.ones(4), torch.ones(3, 3)
    spoil(bad, optimizer)
    with pytest.raises(error, match=match):
        optimizer.step()
    assert torch.equal(good, torch.ones(4))
    assert len(optimizer.state) == 0


def test_tensors_on_two_devices_are_refused() -> None:
    here, there = (
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Parameter(torch.ones(3, device="meta")),
    )
    with pytest.raises(ValueError, match=r"\['cpu', 'meta'\]"):
        FusedAdamW([here, there])
    optimizer = FusedAdamW([here])
    with pytest.raises(ValueError, match="one device"):
        optimizer.add_param_group({"params": [there, torch.nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        (FusedAdamW, {"amsgrad": True}, "amsgrad"),
        (FusedAdamW, {"differentiable": True}, "differentiable"),
        (FusedAdamW, {"fused": False}, "always fused"),
        (FusedAdamW, {"foreach": True}, "always fused"),
        (FusedAdamW, {"lr": -1.0}, "lr=-1.0"),
        (FusedAdamW, {"lr": torch.ones(2)}, "lr of shape"),
        (FusedAdamW, {"lr_multiplier": float("nan")}, "lr_multiplier"),
        (FusedAdamW, {"betas": (0.9, 1.0)}, "betas"),
        (FusedAdamW, {"eps": -1e-8}, "eps"),
        (FusedAdamW, {"weight_decay": -1.0}, "weight_decay"),
        (FusedAdamW, {"backend": "cuda"}, "backend='cuda'"),
        (FusedAdamW, {"moment_dtype": torch.int8}, "moment_dtype"),
        (FusedAdamW, {"master_weights": True, "stochastic_rounding": True}, "choose one"),
        (FusedSGD, {"momentum": -0.9}, "momentum"),
        (FusedSGD, {"nesterov": True}, "nesterov"),
        (FusedLion, {"betas": (-0.1, 0.9)}, "betas"),
    ],
)
def test_bad_options_are_refused_at_construction(make: Any, options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(params(), **options)


def test_a_state_that_no_kernel_steps_is_refused() -> None:
    amsgrad = torch.optim.AdamW(params(), amsgrad=True).state_dict()
    ours = FusedAdamW(params(), lr=LR)
    with pytest.raises(ValueError, match="amsgrad"):
        ours.load_state_dict(amsgrad)
    assert ours.param_groups[0]["lr"] == LR
    adam = torch.optim.Adam(params()).state_dict()
    with pytest.raises(ValueError, match="AdamW"):
        ours.load_state_dict(adam)


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
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    fused._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hdet_scale.optim.fused"):
        chosen = [fused._choose_backend(None, torch.device("cuda")) for _ in range(3)]
    assert chosen == ["torch"] * 3
    assert len(caplog.records) == 1
    assert "hdet_scale[triton]" in caplog.text
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: object())
    assert fused._choose_backend(None, torch.device("cuda")) == "triton"
    assert fused._choose_backend(None, torch.device("cpu")) == "torch"
