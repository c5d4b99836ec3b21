"""What a search tells while it runs: log lines on one rank, records for every listener."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from hdet_scale.method.records import SearchRecord, TrialRecord
from hdet_scale.phases.run import Run
from hdet_scale.search.decision import Arm, RateSearch
from hdet_scale.search.result import curve_of, result_of
from hdet_scale.search.trials import Trial

logger = logging.getLogger("hdet_scale")


class SearchNews:
    """The news of one search.

    Args:
        run: whose listeners are told.
        rule: the search.
        peaks: the initial rate of each param group.
    """

    def __init__(self, run: Run, rule: RateSearch, peaks: Sequence[float]) -> None:
        self.run, self.rule, self.peaks = run, rule, tuple(peaks)
        self._announced = False

    def log(self, level: int, text: str) -> None:
        """A line, on the one rank that writes them."""
        if self.run.writes_log:
            logger.log(level, text)

    def announce(self, trial: Trial) -> None:
        """What the search will do and cost, once."""
        if self._announced:
            return
        self._announced, rule = True, self.rule
        if rule.trials_run:
            return  # resumed
        meanwhile = "the run goes on in one team of replicas meanwhile"
        if not trial.has_head_start:
            meanwhile = "with one replica these steps are not part of the run"
        self.log(
            logging.INFO,
            f"search: at most the first {rule.longest} of {rule.total_steps} steps "
            f"({rule.longest / rule.total_steps:.1%}) compare learning rates around "
            f"{self.peaks[0]:.3g}; {meanwhile}. Then the whole schedule is played in the steps "
            "that are left.",
        )

    def round(self, trial: Trial, arms: Sequence[Arm], verdict: str, seconds: float) -> None:
        """The rates of a round with their losses and errors."""
        first, run = len(self.rule.arms) - len(arms), self.run
        points = curve_of(self.rule, self.peaks)[first:]
        rates = ", ".join(f"{p.rates[0]:.3g}: {p.loss:.5g} +- {p.error:.1g}" for p in points)
        kind = "training" if run.probe is None else "held-out"
        text = f"search, step {run.step}: {trial.stage} stage, {kind} loss by rate {rates}"
        self.log(logging.INFO, f"{text}; {verdict}" if verdict else text)
        for index, (arm, point) in enumerate(zip(arms, points, strict=True)):
            last = index == len(arms) - 1
            trained = [rate / trial.translation for rate in point.rates]
            run.publish(
                TrialRecord(
                    stage=trial.stage,
                    trial=first + index,
                    step=run.step,
                    rates=dict(zip(run.names, trained, strict=True)),
                    loss=point.loss,
                    error=point.error,
                    losses=arm.losses,
                    translation=trial.translation,
                    verdict=verdict if last else "",
                    seconds=seconds if last else 0.0,
                )
            )

    def end(self, *, completed: bool) -> None:
        """The result; `completed`: the search was not given up."""
        run, rule = self.run, self.rule
        # Those of trials that were started again are part of its cost.
        steps, cost = run.lost, run.lost / rule.total_steps
        run.search_result = replace(result_of(rule, self.peaks), steps=steps, cost=cost)
        peaks = dict(zip(run.names, self.peaks, strict=True))
        run.publish(
            SearchRecord(
                step=run.step,
                trials=len(rule.arms),
                initial=peaks,
                taken={name: peak * rule.scale for name, peak in peaks.items()},
                completed=completed,
                verdict=rule.verdict,
            )
        )
        if completed:
            self.log(logging.INFO, f"search, step {run.step}: {run.search_result}")
