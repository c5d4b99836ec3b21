"""Where the authors' code goes wrong: a test for each entry, which fails on that behaviour.

The ten entries are those of the design, in its order; each test says what happened there.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet_scale import OneCycleAutoLR, Replicas
from hdet_scale.converge.pipeline import Converge
from hdet_scale.ddp import warm_init
from hdet_scale.method.spread import multipliers
from tests.support.fleet import Fleet
from tests.support.rng import rng_states
from tests.support.toy import bits, buffers, learn, moments, parameters, same, toy

T, S, SPREAD = 4, 40, 0.3


def _scheduler(optimizer: Optimizer, rank: int, size: int, **changes: Any) -> OneCycleAutoLR:
    """As the authors' README builds it: rank and world_size are passed."""
    chosen: dict[str, Any] = {
        "total_steps": S,
        "ensemble_lr_spread_ratio": SPREAD,
        "model_sync_interval": T,
        "rank": rank,
        "world_size": size,
    }
    return OneCycleAutoLR(optimizer, 0.1, **(chosen | changes))


def _alone(**changes: Any) -> OneCycleAutoLR:
    optimizer = SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    return _scheduler(optimizer, 0, 1, **changes)


def _work(scheduler: OneCycleAutoLR, loss: Any) -> None:
    for group in scheduler.optimizer.param_groups:
        for p in group["params"]:
            p.grad = p.detach().cos()
    scheduler.optimizer.step()
    scheduler.step(loss)


# -- 1. the spread is never applied -----------------------------------------------------------


def _spread_before_warmup(rank: int, size: int) -> tuple[list[float], list[float], bool]:
    results = []
    for ours in (True, False):
        model = toy(rank)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        rates = []
        scheduler: Any = OneCycleLR(optimizer, 0.1, total_steps=S)
        if ours:
            scheduler = _scheduler(
                optimizer, rank, size, enable_auto_lr=True, auto_lr_warmup_steps=30
            )
        for step in range(T - 1):
            rates.append(optimizer.param_groups[0]["lr"])
            loss = learn(model, optimizer, step, rank)
            scheduler.step(loss) if ours else scheduler.step()
        results.append((rates, parameters(model)))
    (mine, my_parameters), (plain, plain_parameters) = results
    return mine, plain, same(my_parameters, plain_parameters)


def test_1_the_spread_reaches_the_optimizer_before_s_warm(trio: Fleet) -> None:
    """It was plain DDP, bit for bit: base_lrs was scaled, which OneCycleLR never reads."""
    rho = multipliers(3, SPREAD)
    for rank, (mine, plain, as_plain) in enumerate(trio.run(_spread_before_warmup)):
        assert mine == [lr * rho[rank] for lr in plain]
        assert not as_plain  # the middle replica too: it steps with the others' gradients


# -- 2. nothing without auto-LR ---------------------------------------------------------------


def _without_auto_lr(rank: int, size: int, spread: float, gradients: str) -> dict[str, Any]:
    model = toy(rank)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = _scheduler(
        optimizer,
        rank,
        size,
        enable_auto_lr=False,
        ensemble_lr_spread_ratio=spread,
        gradients=gradients,
        model=model,
    )
    rate = optimizer.param_groups[0]["lr"]
    for step in range(T):
        loss = learn(model, optimizer, step, rank)
        before = parameters(model)
        scheduler.step(loss)
    return {"rate": rate, "before": before, "after": parameters(model)}


@pytest.mark.parametrize(("spread", "gradients"), [(SPREAD, "shared"), (0.0, "local")])
def test_2_without_auto_lr_it_spreads_and_averages(
    trio: Fleet, spread: float, gradients: str
) -> None:
    """Both only happened inside the auto-LR branch: two rows of the paper could not be run."""
    runs = trio.run(_without_auto_lr, spread, gradients)
    assert len({run["rate"] for run in runs}) == (3 if spread else 1)
    assert not same(*(run["before"] for run in runs))
    assert same(*(run["after"] for run in runs))


# -- 3. gamma ---------------------------------------------------------------------------------


def test_3_equal_losses_never_grow_the_learning_rate() -> None:
    """With OneCycleLR's own factors (25, 1e4) gamma was negative: 400-fold growth."""
    scheduler = _alone(enable_auto_lr=True, auto_lr_warmup_steps=12)
    peak = 0.0
    for step in range(S):
        _work(scheduler, 2.0)
        if step >= 12:
            assert scheduler.get_base_lr()[0] <= peak
        peak = max(peak, scheduler.get_base_lr()[0])
    assert peak == pytest.approx(0.1, rel=1e-12)
    assert scheduler.get_base_lr()[0] == pytest.approx(0.1 / 25 / 1e4, rel=1e-9)


def test_3_the_printed_formula_is_not_offered() -> None:
    with pytest.raises(ValueError, match=r"decay must be one of .*'floor'.*, got 'literal'"):
        _alone(enable_auto_lr=True, auto_lr_warmup_steps=12, decay="literal")


def test_3_no_steps_after_the_warm_up_is_refused() -> None:
    """S = S_warm gave K = 0 and a learning rate of -inf."""
    with pytest.raises(ValueError, match=f"auto_lr_warmup_steps={S} "):
        _alone(enable_auto_lr=True, auto_lr_warmup_steps=S)


def test_3_a_round_of_no_steps_is_refused() -> None:
    """T = 0 divided by zero."""
    with pytest.raises(ValueError, match="interval must be at least 1, got 0"):
        _alone(model_sync_interval=0)


# -- 4. random numbers ------------------------------------------------------------------------


def _masks(rank: int, size: int) -> tuple[bool, Tensor]:
    model = toy(rank)
    torch.manual_seed(100 + rank)
    before = rng_states()
    _scheduler(SGD(model.parameters(), lr=0.1, momentum=0.9), rank, size)
    return rng_states() == before, torch.nn.functional.dropout(torch.ones(64))


def test_4_every_rank_keeps_its_own_dropout_masks(trio: Fleet) -> None:
    """torch.manual_seed(1024) in the constructor gave all ranks the same masks."""
    runs = trio.run(_masks)
    assert all(untouched for untouched, _ in runs)
    assert len({tuple(mask.tolist()) for _, mask in runs}) == 3


def _out_of_step(rank: int, size: int) -> list[float]:
    """Each rank has drawn a different number of random numbers before every round."""
    model = toy(rank)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = _scheduler(optimizer, rank, size)
    ratios = []
    for step in range(6 * T):
        torch.rand(rank + 1)
        scheduler.step(learn(model, optimizer, step, rank))
        ratios.append(round(scheduler.get_last_lr()[0] / scheduler.get_base_lr()[0], 9))  # type: ignore[arg-type]
    return ratios


def test_4_multipliers_stay_a_permutation_when_ranks_are_out_of_step(trio: Fleet) -> None:
    """Drawn from the global generator they collided as soon as one rank had drawn more."""
    fans = list(zip(*trio.run(_out_of_step), strict=True))
    assert all(sorted(fan) == [0.7, 1.0, 1.3] for fan in fans)
    assert len(set(fans)) > 1


# -- 5. arguments and losses ------------------------------------------------------------------


def test_5_epochs_and_steps_per_epoch() -> None:
    scheduler = _alone(total_steps=None, epochs=4, steps_per_epoch=10)
    assert scheduler.total_steps == 40
    for _ in range(40):
        _work(scheduler, 1.0)


def test_5_a_loss_of_none() -> None:
    scheduler = _alone(enable_auto_lr=True, auto_lr_warmup_steps=0)
    for step in range(S):
        _work(scheduler, None if step % 3 else 1.0)
    assert all(math.isfinite(lr) for lr in scheduler.get_last_lr())


def _reports(rank: int, size: int, losses: list[Any]) -> list[float]:
    """The base after each step of four rounds; losses[rank] is reported in one step alone."""
    model = toy(rank)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = _scheduler(
        optimizer, rank, size, enable_auto_lr=True, auto_lr_warmup_steps=0, pct_start=0.05
    )
    bases = []
    for step in range(4 * T):
        learn(model, optimizer, step, rank)
        scheduler.step(losses[rank] if step == T else 1.0 + 0.0001 * rank)
        bases.append(scheduler.get_base_lr()[0])
    return bases


def test_5_one_nan_loss_does_not_spoil_the_learning_rate(trio: Fleet) -> None:
    """One NaN made every rank's learning rate NaN for good."""
    runs = trio.run(_reports, [1.0, math.nan, 1.0])
    assert runs[0] == runs[1] == runs[2]
    assert all(math.isfinite(base) and base > 0 for base in runs[0])


def test_5_a_loss_of_shape_one_gives_the_signal_of_the_scalar(trio: Fleet) -> None:
    """It was broadcast into another signal, silently."""
    values = [1.0, 1.25, 1.0]
    scalars = trio.run(_reports, [torch.tensor(x) for x in values])
    vectors = trio.run(_reports, [torch.tensor([x]) for x in values])
    others = trio.run(_reports, [torch.tensor(x) for x in [1.25, 1.0, 1.0]])
    assert vectors == scalars
    assert others != scalars


# -- 6. checkpoints ---------------------------------------------------------------------------


def _checkpointed(rank: int, size: int, order: str, at: bytes | None) -> tuple[bytes, Any]:
    """Twelve steps and a save; or, given that file of rank 0, the steps after it."""
    model = toy(rank, rebuild=False)
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = _scheduler(optimizer, rank, size, enable_auto_lr=True, auto_lr_warmup_steps=0)
    begin = 0
    if at is not None:
        saved = pickle.loads(at)
        model.load_state_dict(saved["model"])
        for name in order.split():
            {"optimizer": optimizer, "scheduler": scheduler}[name].load_state_dict(saved[name])  # type: ignore[attr-defined]
        begin = 3 * T
    rates, file = [], b""
    for step in range(begin, 6 * T):
        if step == 3 * T:
            objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            file = pickle.dumps({k: v.state_dict() for k, v in objects.items()})  # type: ignore[attr-defined]
        if step >= 3 * T:
            rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(learn(model, optimizer, step, rank))
    return file, (rates, bits(parameters(model)))


@pytest.mark.parametrize("order", ["optimizer scheduler", "scheduler optimizer"])
def test_6_rank_zeros_checkpoint_is_right_on_every_rank_in_any_order(
    trio: Fleet, order: str
) -> None:
    """Every rank became rank 0, drew other permutations, and lost its learning rate when the
    optimizer was loaded first."""
    unbroken = trio.run(_checkpointed, order, None)
    resumed = trio.run(_checkpointed, order, unbroken[0][0])
    for (_, whole), (_, again) in zip(unbroken, resumed, strict=True):
        assert again[0] == whole[0]  # the learning rates of three rounds, so the permutations
        assert again[1] == whole[1]
    assert len({again[0][0] for _, again in resumed}) == 3


# -- 7. a scheduler like torch's --------------------------------------------------------------


def test_7_momentum_goes_on_cycling_after_s_warm() -> None:
    """It stopped at S_warm."""
    scheduler = _alone(enable_auto_lr=True, auto_lr_warmup_steps=12)
    plain = OneCycleLR(
        SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9), 0.1, total_steps=S
    )
    momenta = []
    for _ in range(S):
        _work(scheduler, 1.0)
        plain.optimizer.step()
        plain.step()
        momenta.append(scheduler.optimizer.param_groups[0]["momentum"])
        assert momenta[-1] == plain.optimizer.param_groups[0]["momentum"]
    assert len(set(momenta[20:])) > 10


@pytest.mark.parametrize("auto_lr", [False, True])
def test_7_get_last_lr_is_what_the_step_uses(auto_lr: bool) -> None:
    """It raised without auto-LR."""
    scheduler = _alone(enable_auto_lr=auto_lr, auto_lr_warmup_steps=12)
    for _ in range(S):
        assert scheduler.get_last_lr() == [g["lr"] for g in scheduler.optimizer.param_groups]
        _work(scheduler, 1.0)


def test_7_past_the_end_is_an_error() -> None:
    scheduler = _alone()
    for _ in range(S):
        _work(scheduler, 1.0)
    with pytest.raises(ValueError, match=f"Tried to step {S + 1} times"):
        scheduler.step(1.0)


def test_7_foreach_optimizers_step_with_the_learning_rate() -> None:
    """It became a tensor, which foreach refuses."""
    optimizer = Adam([torch.nn.Parameter(torch.ones(3))], lr=0.1, foreach=True)
    scheduler = _scheduler(optimizer, 0, 1, enable_auto_lr=True, auto_lr_warmup_steps=0)
    for _ in range(S):
        _work(scheduler, torch.tensor(1.0))
        assert type(optimizer.param_groups[0]["lr"]) is float
    assert not torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3))


# -- 8. what else must agree ------------------------------------------------------------------


def _ends(rank: int, size: int, case: str, steps: int) -> tuple[list[Tensor], ...]:
    model = toy(rank, norm=True)
    decay = 0.5 if case == "l2" else 0.0
    optimizer = Adam(model.parameters(), lr=0.1, weight_decay=decay)
    gradients = "local" if case == "local" else "shared"
    scheduler = _scheduler(optimizer, rank, size, model=model, gradients=gradients)
    for step in range(steps):
        loss = learn(model, optimizer, step, rank)
        before = parameters(model), buffers(model), moments(optimizer)
        scheduler.step(loss)
    if steps % T:
        before = parameters(model), buffers(model), moments(optimizer)
        scheduler.finalize()
    return (*before, parameters(model), buffers(model), moments(optimizer))


@pytest.mark.parametrize("case", ["plain", "l2", "local"])
def test_8_batch_norm_buffers_are_averaged(trio: Fleet, case: str) -> None:
    runs = trio.run(_ends, case, T)
    assert not same(*(run[1] for run in runs))
    assert same(*(run[4] for run in runs))


@pytest.mark.parametrize("case", ["l2", "local"])
def test_8_adam_moments_agree_after_a_round(trio: Fleet, case: str) -> None:
    runs = trio.run(_ends, case, T)
    assert not same(*(run[2] for run in runs))
    assert same(*(run[5] for run in runs))


@pytest.mark.parametrize("case", ["plain", "l2", "local"])
def test_8_replicas_equal_at_the_end_when_s_is_no_multiple_of_t(trio: Fleet, case: str) -> None:
    runs = trio.run(_ends, case, 2 * T + 1)
    assert not same(*(run[0] for run in runs))
    for what in (3, 4, 5):
        assert same(*(run[what] for run in runs))


# -- 9. warm noise ----------------------------------------------------------------------------


def _noisy(rank: int, size: int) -> list[list[Tensor]]:
    model = toy(rank)
    warm_init(model)
    seen = [parameters(model)]
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = _scheduler(optimizer, rank, size, model=model)
    model(torch.ones(8, 4))
    seen.append(parameters(model))
    for step in range(T):
        scheduler.step(learn(model, optimizer, step, rank))
        seen.append(parameters(model))
    return seen


def test_9_warm_noise_lives_through_the_first_round(trio: Fleet) -> None:
    """DDP's broadcast undid it, and so did an averaging at step 0."""
    runs = trio.run(_noisy)
    for moment in range(1 + T):
        assert not same(*(run[moment] for run in runs))
    assert same(*(run[-1] for run in runs))


def _noise_before_ddp(rank: int, size: int) -> str:
    try:
        warm_init(toy(rank, wrap=False))
    except ValueError as error:
        return str(error)
    return "no error"


def test_9_noise_before_ddp_is_refused(pair: Fleet) -> None:
    for text in pair.run(_noise_before_ddp):
        assert "would broadcast rank 0's parameters over the noise" in text


# -- 10. groups, fp16, and the order of construction ------------------------------------------


def _shards(rank: int, size: int) -> Tensor:
    where = Replicas.of(shard_size=2)
    p = torch.nn.Parameter(torch.full((5,), 100.0 * where.shard_rank + where.rank))
    optimizer = SGD([p], lr=0.0, momentum=0.9)
    scheduler = OneCycleAutoLR(
        optimizer,
        1e-30,
        total_steps=S,
        ensemble_lr_spread_ratio=SPREAD,
        model_sync_interval=T,
        replicas=where,
    )
    for _ in range(T):
        _work(scheduler, 1.0)
    return p.detach()


def test_10_a_shard_is_averaged_with_the_same_shard(quartet: Fleet) -> None:
    """Without a process group, slices were averaged with other slices."""
    for rank, p in enumerate(quartet.run(_shards)):
        assert torch.equal(p, torch.full((5,), 100.0 * (rank % 2) + 0.5))


def _half(rank: int, size: int) -> Tensor:
    t = torch.full((7,), 60000.0 + 32 * rank, dtype=torch.float16)
    Converge([t], Replicas.world())()
    return t


def test_10_fp16_does_not_overflow(fleet: Fleet) -> None:
    """It was summed before it was divided: inf from 65504 on."""
    mean = torch.tensor([60000.0 + 32 * r for r in range(fleet.size)]).mean().half()
    for t in fleet.run(_half):
        assert torch.equal(t, mean.expand(7))


def _constructed_early(rank: int, size: int, store: Path) -> tuple[float, list[Tensor]]:
    """A worker without its process group, like a script before init_process_group."""
    dist.destroy_process_group()
    model = toy(wrap=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = _scheduler(optimizer, rank, size)
    ratio = optimizer.param_groups[0]["lr"] / scheduler.get_base_lr()[0]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for step in range(T):
        scheduler.step(learn(model, optimizer, step, rank))
    return ratio, parameters(model)


def test_10_the_constructor_works_before_init_process_group(trio: Fleet, tmp_path: Path) -> None:
    runs = trio.run(_constructed_early, tmp_path / "store")
    assert [ratio for ratio, _ in runs] == pytest.approx(multipliers(3, SPREAD), rel=1e-15)
    assert same(*(p for _, p in runs))
