"""8-bit optimizer state: what it costs, how it is saved and loaded, and what it is refused with."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hdet_scale.engines.protocol import Engine
from hdet_scale.kernels.int8_state import RUN, join
from hdet_scale.optim.fused_adamw import FusedAdamW
from tests.support.stepping import LR, drive, params, same

MODES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"master_weights": True}),
]


def stepped(dtype: torch.dtype, options: dict[str, Any], steps: int = 10) -> tuple[Any, list[Any]]:
    mine = params(dtype)
    optimizer = FusedAdamW(mine, lr=LR, state="int8", **options)
    drive(steps, optimizer, mine, FusedAdamW(other := params(), lr=LR), other)
    return optimizer, mine


@pytest.mark.parametrize(("dtype", "options"), MODES)
def test_bytes_beside_parameter_and_gradient(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """At most 6 a parameter."""
    param = torch.nn.Parameter(torch.ones(64 * RUN, dtype=dtype))
    optimizer = FusedAdamW([param], state="int8", **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    stored = sum(t.nbytes for k, t in optimizer.state[param].items() if k != "step")
    assert stored / param.numel() == 2 + 2 * 4 / RUN + 2 * bool(options)
    assert stored / param.numel() <= 6


@pytest.mark.parametrize(("dtype", "options"), MODES)
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    going, unbroken = stepped(dtype, options)
    _, broken = stepped(dtype, options)
    assert same(unbroken, broken)
    resumed = FusedAdamW(broken, lr=1.0, state="int8", **options)
    resumed.load_state_dict(pickle.loads(pickle.dumps(going.state_dict())))
    assert resumed.state[broken[3]]["exp_avg_sq"].dtype == torch.uint8
    drive(10, going, unbroken, resumed, broken, first=10)
    assert same(unbroken, broken)
    for a, b in zip(unbroken, broken, strict=True):
        assert set(going.state[a]) == set(resumed.state[b])
        assert all(torch.equal(v, resumed.state[b][k]) for k, v in going.state[a].items())


@pytest.mark.parametrize(("dtype", "options"), MODES)
def test_a_state_goes_to_fp32_and_back(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """To FusedAdamW with fp32 moments, and again to codes: the same codes."""
    first, mine = stepped(dtype, options)
    saved = first.state_dict()
    wide = FusedAdamW(mine, lr=1.0, moment_dtype=torch.float32, **options)
    wide.load_state_dict(copy.deepcopy(saved))
    for i, p in enumerate(mine):
        state = wide.state[p]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if options else set())
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].dtype == torch.float32
            assert torch.equal(state[name], saved["state"][i][name])
        if options:
            assert torch.equal(state["master"], join(p.detach(), first.state[p]["master_low"]))
            assert torch.equal(state["master"].to(dtype), p)
    again = FusedAdamW(mine, lr=1.0, state="int8", **options)
    again.load_state_dict(wide.state_dict())
    for p in mine:
        assert all(torch.equal(v, again.state[p][k]) for k, v in first.state[p].items())


def test_a_state_comes_from_torchs_adamw_and_goes_there() -> None:
    """In fp32 codes are what torch's moments are, to half a code; torch goes on from them."""
    yours = params()
    theirs = torch.optim.AdamW(yours, lr=LR, fused=True)
    drive(10, theirs, yours, FusedAdamW(other := params(), lr=LR), other)
    ours = FusedAdamW(yours, lr=1.0, state="int8")
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert ours.param_groups[0]["lr"] == LR
    back = torch.optim.AdamW(yours, lr=1.0)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    for p in yours:
        for name, most in (("exp_avg", 127), ("exp_avg_sq", 255)):
            want, got = theirs.state[p][name], back.state[p][name]
            assert got.dtype == torch.float32
            if name == "exp_avg_sq":
                want, got = want.sqrt(), got.sqrt()
            if p.numel():
                assert (want - got).abs().max() <= 0.501 * want.abs().max() / most
        assert back.state[p]["step"] == theirs.state[p]["step"]
    drive(3, back, yours, FusedAdamW(other, lr=LR), other, first=10)


@pytest.mark.parametrize(("dtype", "options"), MODES)
def test_copies_and_pickles_keep_the_codes(dtype: torch.dtype, options: dict[str, Any]) -> None:
    optimizer, mine = stepped(dtype, options)
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = again.param_groups[0]["params"]
        fresh, kept = copy.deepcopy((optimizer, mine))
        drive(3, again, theirs, fresh, kept, first=10)
        assert same(theirs, kept)


def test_100_steps_stay_beside_fp32_moments() -> None:
    """Each parameter moves as far and as it does with fp32 moments, to a few per cent of the
    distance: gradients of one scale in a run, which is what codes are made for."""
    narrow, wide = params(), params()
    start = [p.detach().clone() for p in wide]
    drive(
        100,
        FusedAdamW(narrow, lr=LR, state="int8"),
        narrow,
        FusedAdamW(wide, lr=LR),
        wide,
    )
    for a, b, s in zip(narrow, wide, start, strict=True):
        if a.numel():
            assert (a - b).norm() <= 0.05 * (b - s).norm()


def test_channels_last_parameters() -> None:
    values = torch.randn(8, 4, 3, 3)
    mine = torch.nn.Parameter(values.clone().to(memory_format=torch.channels_last))
    yours = torch.nn.Parameter(values.permute(0, 2, 3, 1).contiguous())
    ours, theirs = (FusedAdamW([p], lr=LR, state="int8") for p in (mine, yours))
    for _ in range(4):
        grad = torch.randn(8, 4, 3, 3)
        mine.grad, yours.grad = grad.clone(), grad.permute(0, 2, 3, 1).contiguous()
        ours.step()
        theirs.step()
    assert torch.equal(mine.permute(0, 2, 3, 1), yours)
    saved = ours.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(saved.permute(0, 2, 3, 1), theirs.state_dict()["state"][0]["exp_avg"])


def scales_removed(entry: dict[str, Any]) -> None:
    del entry["exp_avg_scales"]


def scales_replaced(entry: dict[str, Any]) -> None:
    entry["exp_avg_sq_scales"] = torch.full_like(entry["exp_avg_sq_scales"], 0.25)


@pytest.mark.parametrize("change", [scales_removed, scales_replaced])
def test_changed_scales_are_noticed(change: Callable[[dict[str, Any]], None]) -> None:
    """A moment without its scales is begun anew."""
    optimizer, mine = stepped(torch.float32, {}, 2)
    change(optimizer.state[mine[3]])
    fresh, kept = copy.deepcopy((optimizer, mine))
    drive(1, optimizer, mine, fresh, kept, first=2)
    assert same(mine, kept)
    for name, value in optimizer.state[mine[3]].items():
        assert torch.equal(value, fresh.state[kept[3]][name])


def test_a_converge_leaves_no_lower_half_of_another_parameter() -> None:
    """Replicas are equal after their bf16 parameters were averaged."""
    optimizer, mine = stepped(torch.bfloat16, {"master_weights": True})
    low = optimizer.state[mine[5]]["master_low"]
    assert low.any()
    Engine(optimizer).refresh()
    assert not low.any()
    assert all(p.isfinite().all() for p in mine)


@pytest.mark.parametrize(
    ("dtype", "options", "match"),
    [
        (torch.float32, {"state": "int4"}, "state='int4': valid are None"),
        (torch.float32, {"moment_dtype": torch.bfloat16}, "moment_dtype=torch.bfloat16"),
        (torch.bfloat16, {"stochastic_rounding": True}, "stochastic_rounding=True"),
        (torch.float16, {}, "takes fp32 and bf16 parameters"),
        (torch.float64, {}, "takes fp32 and bf16 parameters"),
    ],
)
def test_what_has_no_codes_is_refused(
    dtype: torch.dtype, options: dict[str, Any], match: str
) -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=match):
        FusedAdamW([param], **{"state": "int8", **options}).step()
    assert torch.equal(param, torch.ones_like(param))
