"""How a run is put together from a config: its steering, its first phase, the phase of a state."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hdet_scale.config import HDETConfig
from hdet_scale.engines.protocol import Engine
from hdet_scale.factors.space import Factor
from hdet_scale.method.paper import Descent, PaperRule, PaperSteering
from hdet_scale.optim.family import divides_by_the_gradient
from hdet_scale.phases.exploring import Exploring
from hdet_scale.phases.plain import Plain
from hdet_scale.phases.run import Phase, Run, Steering
from hdet_scale.phases.searching import Searching
from hdet_scale.phases.watched import Watched
from hdet_scale.rules.designs import check_design
from hdet_scale.rules.guided import GuidedSteering
from hdet_scale.rules.slope import Slope, Width
from hdet_scale.search.decision import RateSearch
from hdet_scale.search.schedule import ScheduleShape
from hdet_scale.topology import Replicas

logger = logging.getLogger("hdet_scale")


def make_run(
    engine: Engine,
    factors: Sequence[Factor],
    config: HDETConfig,
    descent: Descent,
    *,
    total_steps: int,
    step: int,
) -> Run:
    """The run of a scheduler, before its first phase is chosen."""
    steering = _steering(factors, engine.replicas, config, descent)
    return Run(
        engine=engine,
        factors=factors,
        config=config,
        steering=steering,
        total_steps=total_steps,
        step=step,
    )


def _steering(
    factors: Sequence[Factor], where: Replicas, config: HDETConfig, descent: Descent
) -> Steering:
    names, spread = [f.name for f in factors], 0.0 if config.searches else config.spread
    if config.rule == "slope" and spread > 0:
        check_design(where.size, len(names))
        rule = Slope(names, Width(spread, config.patience))
        return GuidedSteering(factors, rule, seed=config.seed)
    # With spread 0 there is nothing to compare: the schedule stays the user's.
    steers = config.rule == "paper" and spread > 0
    paper = functools.partial(PaperRule, config.loss_scale, config.momentum, config.step_size)
    return PaperSteering(names, paper if steers else None, descent, spread=spread, seed=config.seed)


class Phases:
    """Makes the phases of a run.

    Args:
        run: the run.
        shape: makes the shape of the schedule; called only where a search may come first.
    """

    def __init__(self, run: Run, shape: Callable[[], ScheduleShape]) -> None:
        self.run = run
        self.shape = shape() if run.config.searches else None

    def first(self) -> Phase:
        """The phase of the first step."""
        run = self.run
        if self.shape is None:
            return self.after_search()
        if not searches(run.config, run.replicas, run.total_steps):
            run.verdict = "no search was run: the run is too short"
            return self.after_search()
        return self._searching()

    def after_search(self) -> Phase:
        """The phase of a run without a search, or after one that no watch follows."""
        return Exploring(self.run) if self.run.diverges else Plain(self.run)

    def of_state(
        self, name: str, state: Mapping[str, Any], *, replicas: int, present: Phase
    ) -> Phase:
        """The phase that a state of `replicas` replicas goes on with, and its state loaded.

        A search or a watch is left out by a run whose rule is another. A present exploration goes
        on as itself: it ends an averaging that is under way, and keeps its process group.
        """
        explores = name == present.name == Exploring.name and self.run.diverges
        phase = present if explores else self._named(name)
        if phase.name == name:
            phase.load_state_dict(state, replicas=replicas)
        return phase

    def check_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Refuse the state of a search that cannot go on, before anything is changed."""
        if self.shape is not None and name == Searching.name:
            self._rule(idle=True).check_state(state["rule"])

    def _named(self, name: str) -> Phase:
        if self.shape is not None and name == Searching.name:
            return self._searching()
        if self.shape is not None and name == Watched.name:
            return Watched(self.run)
        return self.after_search()

    def _rule(self, *, idle: bool = False) -> RateSearch:
        run = self.run
        return RateSearch(
            replicas=run.replicas.size,
            total_steps=run.total_steps,
            adaptive=divides_by_the_gradient(run.engine.optimizer),
            passes=run.config.passes,
            idle=idle,
        )

    def _searching(self) -> Searching:
        if self.shape is None:
            raise RuntimeError(f"rule={self.run.config.rule!r} has no search")
        return Searching(self.run, self._rule(), schedule=self.shape, after=self.after_search)


def searches(config: HDETConfig, where: Replicas, total_steps: int) -> bool:
    """Whether a search comes before the run: it is left out where the run is too short for one."""
    if not config.searches:
        return False
    least = RateSearch.least_steps(where.size)
    if total_steps < least and where.rank == where.shard_rank == 0:
        logger.warning(
            "rule='auto' runs no search: %d steps are too few for %d replicas, it needs %d; the "
            "schedule is run as it is",
            total_steps,
            where.size,
            least,
        )
    return total_steps >= least


def check_search(config: HDETConfig, factors: Sequence[Factor] | None) -> None:
    """Refuse a search whose length is not known, or of other factors than learning rates."""
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
