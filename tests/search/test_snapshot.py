"""Snapshots: weights, buffers, optimizer state, options and loss scale go back to the bit, and
`adopt` gives all replicas those of the first."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

from hdet_scale import FusedAdamW, FusedLion, FusedSGD
from hdet_scale.engines.protocol import Engine
from hdet_scale.engines.replica_state import adopt
from hdet_scale.search.snapshot import Snapshot
from hdet_scale.topology import Replicas
from tests.support.fleet import Fleet
from tests.support.toy import batch, bits, learn, parameters, same, toy

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.01),
    "amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True),
    # The first step copies the gradient, later ones damp it: a state of zeros is not a fresh one.
    "sgd": lambda p: SGD(p, lr=0.01, momentum=0.9, dampening=0.5),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    # Its state is there before the first step.
    "adagrad": lambda p: Adagrad(p, lr=0.01),
    "fused adamw": lambda p: FusedAdamW(p, lr=0.01, master_weights=True),
    "fused sgd": lambda p: FusedSGD(p, lr=0.01, momentum=0.9, dampening=0.5, master_weights=True),
    "fused lion": lambda p: FusedLion(p, lr=0.01, master_weights=True),
}
MASTERS = ("fused adamw", "fused sgd", "fused lion")


class Scaled(Engine):
    """An engine with a loss scale of its own."""

    scale = 1024.0

    def loss_scale(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_loss_scale(self, state: Mapping[str, float]) -> None:
        self.scale = state["scale"]


class Run:
    """A toy with BatchNorm, in bf16 with fp32 masters when asked."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = toy(wrap=False, norm=True).to(dtype)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.engine = Scaled(self.optimizer, self.model)
        self.dtype = dtype

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            x, y = (t.to(self.dtype) for t in batch(step, 0))
            self.optimizer.zero_grad()
            (self.model(x) - y).square().mean().backward()
            self.optimizer.step()

    def everything(self) -> Any:
        """All that a step reads; bf16 as the integers it is stored in."""
        options = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        states = [dict(self.optimizer.state.get(p, {})) for p in self.model.parameters()]
        held = [self.model.state_dict(), states, options, self.engine.scale]
        return bits(_readable(held))


def _readable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().view(torch.int16) if value.dtype == torch.bfloat16 else value.detach()
    if isinstance(value, dict):
        return {k: _readable(v) for k, v in value.items()}
    return [_readable(v) for v in value] if isinstance(value, list | tuple) else value


CASES = [
    *((kind, torch.float32) for kind in OPTIMIZERS),
    *((kind, torch.bfloat16) for kind in MASTERS),
]


@pytest.mark.parametrize("how", ["in memory", "on the host", "from a file"])
@pytest.mark.parametrize("at", [0, 3], ids=["fresh", "after three steps"])
@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_a_run_goes_back_and_continues_bit_for_bit(
    kind: str, dtype: torch.dtype, at: int, how: str
) -> None:
    """Twice: the steps after the first return have not changed the snapshot."""
    run, plain = Run(kind, dtype), Run(kind, dtype)
    for each in (run, plain):
        each.train(0, at)
    before = run.everything()
    snapshot = Snapshot(run.engine, host=how == "on the host")
    if how == "from a file":
        file = io.BytesIO()
        torch.save(snapshot.state_dict(), file)
        file.seek(0)
        snapshot = Snapshot(run.engine, torch.load(file, weights_only=False))
    plain.train(10, 14)
    for _ in range(2):
        run.train(20, 25)
        run.engine.scale = 2.0
        assert run.everything() != before
        snapshot.restore()
        assert run.everything() == before
        run.train(10, 14)
        assert run.everything() == plain.everything()


@pytest.mark.parametrize("kind", MASTERS)
def test_parameters_of_16_bits_are_rounded_from_masters_that_went_back(kind: str) -> None:
    run = Run(kind, torch.bfloat16)
    run.train(0, 3)
    snapshot = Snapshot(run.engine)
    masters = copy.deepcopy([run.optimizer.state[p]["master"] for p in run.model.parameters()])
    run.train(3, 8)
    snapshot.restore()
    for p, master in zip(run.model.parameters(), masters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(run.optimizer.state[p]["master"], master)
        assert torch.equal(p, master.to(torch.bfloat16))


def test_options_go_back_and_the_learning_rate_stays() -> None:
    """Some optimizers count in their param groups; the learning rate is the schedule's."""
    run = Run("sgd")
    (group,) = run.optimizer.param_groups
    group["weights"] = torch.ones(2)
    snapshot = Snapshot(run.engine)
    group.update({"lr": 0.5, "momentum": 0.1, "counted": 7})
    group["weights"].mul_(3.0)
    snapshot.restore()
    assert (group["lr"], group["momentum"]) == (0.5, 0.9)
    assert "counted" not in group
    assert group["weights"].tolist() == [1.0, 1.0]
    group["weights"].mul_(3.0)
    snapshot.restore()
    assert group["weights"].tolist() == [1.0, 1.0], "the snapshot's own is not handed out"


def test_frozen_parameters_and_constant_buffers_are_not_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    model[0].requires_grad_(False)
    snapshot = Snapshot(Engine(AdamW(model.parameters()), model))
    assert [list(t.shape) for t in snapshot.tensors] == [[3, 3], [3]]


@pytest.mark.parametrize("buffers", [True, False], ids=["averaged", "not averaged"])
def test_statistics_of_batch_norm_go_back_averaged_or_not(buffers: bool) -> None:
    """Without a momentum its mean is over all batches so far: their count goes back too."""
    model = nn.BatchNorm1d(3, momentum=None)
    engine = Engine(SGD(model.parameters(), lr=0.1), model, buffers=buffers)
    assert len(engine.buffers()) == 2 * buffers
    snapshot, before = Snapshot(engine), bits(model.state_dict())
    model(torch.full((4, 3), torch.nan))
    assert bits(model.state_dict()) != before
    snapshot.restore()
    assert bits(model.state_dict()) == before


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_empty_entry_of_the_optimizers_state_is_a_fresh_start(kind: str) -> None:
    """`optimizer.state[p]` makes one when it is read. A fused step after going back raised
    KeyError: 'exp_avg'."""
    model, fresh = toy(wrap=False), toy(wrap=False)
    optimizer, other = (OPTIMIZERS[kind](m.parameters()) for m in (model, fresh))
    for p in model.parameters():
        optimizer.state[p]  # read by a user's logging
    kept = Snapshot(Engine(optimizer, model))
    learn(model, optimizer, 0, 0)
    kept.restore()
    for step in range(1, 3):
        learn(model, optimizer, step, 0)
        learn(fresh, other, step, 0)
    assert same(parameters(model), parameters(fresh))


def test_a_snapshot_on_the_host_shares_no_memory_with_the_run() -> None:
    run = Run("adamw")
    run.train(0, 2)
    kept = Snapshot(run.engine, host=True)
    tensors = [*kept.tensors, *(v for state in kept.state if state for v in state.values())]
    live = [*run.model.state_dict().values()]
    live += [v for state in run.optimizer.state.values() for v in state.values()]
    assert len(tensors) == len(live)
    assert all(t.device.type == "cpu" for t in tensors)
    assert {t.data_ptr() for t in tensors}.isdisjoint(t.data_ptr() for t in live)


# -- adopt --------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A convolution whose weight is not contiguous, BatchNorm, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.gain = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.norm(self.conv(x).mean((2, 3)))
        return (self.gain * pooled).square().sum() + self.empty.sum()


ADOPTED = OPTIMIZERS | {
    "torch's fused adamw": lambda p: AdamW(p, lr=0.01, fused=True),
    "torch's fused sgd": lambda p: SGD(p, lr=0.01, momentum=0.9, fused=True),
}


class Replica:
    """One replica of three: weights, steps, options and loss scale of its own."""

    def __init__(self, rank: int, kind: str, dtype: torch.dtype) -> None:
        torch.manual_seed(rank)
        self.dtype, self.model = dtype, Mixed().to(dtype)
        self.optimizer = ADOPTED[kind](self.model.parameters())
        self.engine = Scaled(self.optimizer, self.model, Replicas.world())
        self.engine.scale = 2.0**rank
        (group,) = self.optimizer.param_groups
        group.update({"lr": 0.01 * (1 + rank), "counted": rank, "weights": torch.full((2,), rank)})
        if rank:
            group["own"] = rank

    def train(self, steps: int, rank: int) -> None:
        for step in range(steps):
            g = torch.Generator().manual_seed(97 * step + rank)
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 3, 4, 4, generator=g).to(self.dtype)).backward()
            self.optimizer.step()

    def everything(self) -> Any:
        """All that a step reads but the learning rate."""
        options = [
            {k: v for k, v in group.items() if k not in ("params", "lr")}
            for group in self.optimizer.param_groups
        ]
        states = [
            dict(sorted((self.optimizer.state.get(p) or {}).items()))
            for p in self.model.parameters()
        ]
        return bits(_readable([self.model.state_dict(), states, options, self.engine.scale]))


def _adopts(
    rank: int, size: int, kind: str, dtype: torch.dtype, steps: list[int], back: bool
) -> Any:
    """Everything before, after, and three common steps later; and the learning rate after.

    `back`: all but the first return to their snapshot before, as at the end of a trial.
    """
    replica = Replica(rank, kind, dtype)
    snapshot = Snapshot(replica.engine)
    strides = replica.model.conv.weight.stride()
    assert not replica.model.conv.weight.is_contiguous()
    replica.train(steps[rank], rank)
    if back and rank:
        snapshot.restore()
    before = replica.everything()
    held = [p.data_ptr() for p in replica.model.parameters()]
    adopt(replica.engine)
    after, (group,) = replica.everything(), replica.optimizer.param_groups
    assert [p.data_ptr() for p in replica.model.parameters()] == held, "written in place"
    assert replica.model.conv.weight.stride() == strides
    rate, group["lr"] = group["lr"], 0.02
    replica.train(3, 9)
    return before, after, replica.everything(), rate


@pytest.mark.parametrize(
    ("steps", "back"),
    [([4, 2, 0], False), ([0, 3, 1], False), ([4, 2, 3], True)],
    ids=["one is fresh", "the first is", "the others went back"],
)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in ADOPTED),
        *((kind, torch.bfloat16) for kind in MASTERS),
    ],
    ids=str,
)
def test_all_replicas_adopt_the_first_bit_for_bit(
    trio: Fleet, kind: str, dtype: torch.dtype, steps: list[int], back: bool
) -> None:
    """A replica that skipped its steps has no optimizer state, and the first may have none. One
    that went back may have listed the state of its trial: a fused optimizer went on with that."""
    first, *others = trio.run(_adopts, kind, dtype, steps, back)
    before, after, later, _ = first
    assert after == before, "the first stays as it is"
    assert later != after
    for rank, (own, adopted, continued, rate) in enumerate(others, start=1):
        assert own != before
        assert adopted == before
        assert continued == later
        assert rate == 0.01 * (1 + rank), "the learning rate is the schedule's"


def test_a_single_replica_has_nothing_to_adopt() -> None:
    run = Run("adamw")
    run.train(0, 2)
    before = run.everything()
    adopt(run.engine)
    assert run.everything() == before
