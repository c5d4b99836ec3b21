"""The optimizers on a CPU: torch's results to the last bit, its checkpoints, its manners."""

import copy
import pickle
from typing import Any

import pytest
import torch

from hdet_scale.optim.fused_adamw import FusedAdamW
from hdet_scale.optim.fused_lion import FusedLion
from hdet_scale.optim.fused_sgd import FusedSGD
from tests.support.stepping import LR, RHO, SGD_OPTIONS, drive, params, same

PAIRS: list[tuple[Any, Any, dict[str, Any]]] = [
    (FusedAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    (FusedAdamW, torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6, "maximize": True}),
    *[(FusedSGD, torch.optim.SGD, options) for options in SGD_OPTIONS],
]


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
