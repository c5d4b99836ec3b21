"""What a scheduler is made of: a round, and a search before it, from a config."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hdet_scale.config import HDETConfig
from hdet_scale.engines.averaged import Averaged
from hdet_scale.factors.space import Factor
from hdet_scale.method.paper import Descent, PaperRule, Steering
from hdet_scale.method.round import Round
from hdet_scale.rules.climb import Climb
from hdet_scale.rules.designs import check_design
from hdet_scale.rules.guided import Guided
from hdet_scale.rules.slope import Slope, Width
from hdet_scale.search.decision import ENOUGH, Race
from hdet_scale.search.driver import Search
from hdet_scale.search.schedule import Outline
from hdet_scale.topology import Replicas

logger = logging.getLogger("hdet_scale")
GUIDED = ("slope", "climb")
"""Rules that are fed by a probe at each converge."""


def averaged_by(optimizer: Optimizer, model: nn.Module | None, config: HDETConfig) -> Averaged:
    return Averaged(optimizer, model if config.converge.buffers else None)


def make_round(
    averaged: Averaged,
    factors: Sequence[Factor],
    where: Replicas,
    config: HDETConfig,
    descent: Descent,
    step: int,
) -> Round:
    if config.searches:
        config = dataclasses.replace(config, spread=0.0)
    # With spread 0 there is nothing to compare: the schedule stays the user's.
    steers = config.rule == "paper" and config.spread > 0
    rule = functools.partial(PaperRule, config.loss_scale, config.momentum, config.step_size)
    return Round(
        factors=factors,
        replicas=where,
        config=config,
        steering=guided(factors, where, config, descent.total_steps)
        or Steering([f.name for f in factors], rule if steers else None, descent),
        averaged=averaged,
        step=step,
    )


def races(config: HDETConfig, where: Replicas, total_steps: int) -> bool:
    """Whether a race comes before the run; "auto" leaves it out where it could not tell enough."""
    if config.rule != "auto":
        return config.searches
    least = Race.least_steps(where.size, ENOUGH)
    if total_steps < least and where.rank == where.shard_rank == 0:
        logger.info(
            "rule='auto' runs no race: %d steps are too few for %d replicas, %d would do; the "
            "schedule given is run as it is",
            total_steps,
            where.size,
            least,
        )
    return total_steps >= least


def divides_by_the_gradient(optimizer: Optimizer) -> bool:
    """Whether a step's size does not grow with the gradient's: Adam and its kin, RMSprop, Adagrad,
    Lion, Muon, and not SGD. What divides has something against a zero, or betas."""
    return not {"eps", "betas"}.isdisjoint(optimizer.defaults)


def make_search(
    cycle: Round,
    outline: Outline,
    total_steps: int,
    switch: Callable[[str], None],
    place: Callable[[], Any],
) -> Search:
    race = Race(
        replicas=cycle.replicas.size,
        total_steps=total_steps,
        adaptive=divides_by_the_gradient(cycle.averaged.optimizer),
        idle=not races(cycle.config, cycle.replicas, total_steps),
    )
    return Search(race, cycle, outline=outline, switch=switch, place=place)


def check_search(config: HDETConfig, factors: Sequence[Factor] | None) -> None:
    if not config.searches:
        return
    if config.total_steps is None:
        raise ValueError(
            f"rule={config.rule!r} spends a share of the run on its search and must know its "
            "length: set total_steps in the config, the number of scheduler steps you will make"
        )
    if factors is not None:
        raise ValueError(
            f"rule={config.rule!r} moves the learning rates of all param groups together: leave "
            "factors out"
        )


def guided(
    factors: Sequence[Factor], where: Replicas, config: HDETConfig, total_steps: int
) -> Guided | None:
    """The rules that are fed by a probe; None for the others, and where nothing is explored."""
    if config.rule not in GUIDED or config.spread == 0:
        return None
    names = [f.name for f in factors]
    if config.rule == "slope":
        check_design(where.size, len(names))
        return Guided(factors, Slope(names, Width(config.spread, config.patience)))
    total_steps = config.total_steps or total_steps
    if not total_steps:
        raise ValueError(
            "rule='climb' must know how long the run is, for its grace and its end: pass "
            "total_steps in the config"
        )
    return Guided(factors, Climb(names, total_steps, spread=config.spread))
