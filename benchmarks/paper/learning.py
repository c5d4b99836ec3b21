"""Runs of a small byte-level GPT on real text, in real replicas: what several benchmarks compare.

A recipe says everything: the same recipe gives the same run. Replicas are processes; the batches
are a pure function of (seed, step, rank), so that two recipes with one seed see the same data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from hdet_scale import OneCycleAutoLR
from hdet_scale.converge.pipeline import NoHealthyReplicaError
from hdet_scale.ddp import warm_init
from hdet_scale.models.gpt import GPT, GPTConfig
from hdet_scale.models.text import Text, batch, evaluation
from hdet_scale.topology import Replicas

VALIDATION_BATCHES = 64
LAST_SHARE = 0.1
"""The part of a run whose mean is its final training loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One run."""

    name: str
    """What a table calls it."""
    lr: float
    """Peak of the OneCycle schedule."""
    spread: float = 0.0
    """0 and no rule: plain DDP with torch's own scheduler, unless `warm`."""
    rule: bool = False
    """The paper's auto-LR."""
    warm: bool = False
    """Noise of its own on each replica's initial weights."""
    gradients: str = "shared"
    """Or "local"."""
    steps: int = 200
    interval: int = 10
    """T."""
    warmup: float = 0.1
    """Share of the steps before the schedule's peak."""
    decay: str = "schedule"
    """How the base falls once the rule has taken over. "schedule" keeps the shape of the plain
    run, so that only the exploring differs."""
    seed: int = 0
    size: str = "tiny"
    sequences: int = 2
    """Of a replica's batch."""

    @property
    def plain(self) -> bool:
        """Whether this is vanilla DDP."""
        return not (self.spread or self.rule or self.warm or self.gradients == "local")


@dataclass(slots=True, kw_only=True)
class Curve:
    """What a run did."""

    recipe: Recipe
    losses: list[float] = field(default_factory=list)
    """Training loss of each step, the mean over the replicas."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """(steps done, loss on held-out text) at the end of each round."""
    tokens_a_step: int = 0
    """Of all replicas."""
    error: str = ""
    """Why it stopped early."""

    @property
    def final(self) -> float:
        """Training loss of the last tenth; NaN for a run that stopped."""
        if self.error or len(self.losses) < self.recipe.steps:
            return math.nan
        last = self.losses[-max(1, round(LAST_SHARE * len(self.losses))) :]
        return sum(last) / len(last)

    @property
    def final_validation(self) -> float:
        """Of the converged model at the end."""
        return math.nan if self.error else self.validation[-1][1]


def train(recipe: Recipe, text: Text) -> Curve:
    """One run in every rank; the curve is the same on all of them."""
    replicas = Replicas.world()
    model = GPT(GPTConfig.named(recipe.size), seed=recipe.seed)
    wrapped = DistributedDataParallel(model)
    if recipe.warm:
        warm_init(wrapped, replicas, seed=recipe.seed, gradients=recipe.gradients)
    optimizer = AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.1, fused=True)
    scheduler = _scheduler(recipe, optimizer, wrapped)
    context = model.config.context
    curve = Curve(recipe=recipe, tokens_a_step=replicas.size * recipe.sequences * context)
    mine = torch.full((recipe.steps,), math.nan, dtype=torch.float64)
    try:
        for step in range(recipe.steps):
            inputs, targets = batch(
                text.train,
                size=recipe.sequences,
                context=context,
                seed=recipe.seed,
                step=step,
                rank=replicas.rank,
            )
            loss = wrapped(inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mine[step] = loss.detach()
            if isinstance(scheduler, OneCycleAutoLR):
                scheduler.step(loss.detach())
            else:
                scheduler.step()
            if (step + 1) % recipe.interval == 0 and step + 1 < recipe.steps:
                curve.validation.append((step + 1, validate(model, text, recipe, replicas, 8)))
        if isinstance(scheduler, OneCycleAutoLR):
            scheduler.finalize()
    except NoHealthyReplicaError as error:
        curve.error = str(error)
    last = validate(model, text, recipe, replicas, VALIDATION_BATCHES)
    curve.validation.append((recipe.steps, last))
    dist.all_reduce(mine)
    curve.losses = (mine / replicas.size).tolist()
    return curve


def _scheduler(recipe: Recipe, optimizer: AdamW, model: nn.Module) -> OneCycleLR:
    if recipe.plain:
        return OneCycleLR(optimizer, recipe.lr, recipe.steps, pct_start=recipe.warmup)
    return OneCycleAutoLR(
        optimizer,
        recipe.lr,
        recipe.steps,
        pct_start=recipe.warmup,
        auto_lr_warmup_steps=0,
        ensemble_lr_spread_ratio=recipe.spread,
        model_sync_interval=recipe.interval,
        enable_auto_lr=recipe.rule,
        decay=recipe.decay,
        gradients=recipe.gradients,
        seed=recipe.seed,
        model=model,
    )


@torch.no_grad()
def validate(model: GPT, text: Text, recipe: Recipe, replicas: Replicas, batches: int) -> float:
    """Mean loss over windows of the held-out text; the replicas share the work."""
    shared = evaluation(
        text.validation,
        size=4 * recipe.sequences,
        context=model.config.context,
        batches=batches,
    )
    mine = [float(model(*b)) for i, b in enumerate(shared) if i % replicas.size == replicas.rank]
    told = replicas.exchange([math.fsum(mine), len(mine)], torch.device("cpu"))
    return math.fsum(total for total, _ in told) / math.fsum(count for _, count in told)


def unigram_entropy(text: Text) -> float:
    """Nats a byte of a model that knows the frequencies of bytes and nothing else."""
    counts = torch.bincount(text.train.long(), minlength=256).double()
    p = counts / counts.sum()
    return float(-(p[p > 0] * p[p > 0].log()).sum())


def trailing_mean(values: list[float], window: int) -> list[float]:
    """Over the last `window` values at each place."""
    return [
        math.fsum(values[max(0, i - window) : i]) / min(i, window)
        for i in range(1, len(values) + 1)
    ]
