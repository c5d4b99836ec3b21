"""The paper's rule: losses and learning rates in, new base out. No torch, no process group.

At each converge after the warm-up, with L_r the replica's mean training loss over the round and
eta_r its learning rate:

    w    = softmax((mean(L) - L_r) / sigma)
    D    = sum_r w_r eta_r - mean(eta)
    v    <- beta v + (1 - beta) D
    base <- base (1 - gamma) + lambda v

A replica without a finite loss is left out of mean(L), w and D.

`PaperSteering` keeps the shared base of every factor between the converges: it follows the user's
schedule until the rule takes over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdet_scale.method.spread import assignment, multipliers

logger = logging.getLogger("hdet_scale")

SMALLEST_SCALE = 1e-3
"""Of a schedule that is followed: the rule's steps are in proportion to the base, so that a base of
zero would never be left again."""


class PaperRule:
    """The rule above for one factor; its only memory is the velocity v.

    Args:
        loss_scale: sigma, the loss difference that counts as one unit of evidence.
        momentum: beta of the velocity.
        step_size: lambda, how far the base follows the velocity.
        decay: gamma, the share of the base that is lost at each converge.

    Raises:
        ValueError, TypeError: for a number out of range.
    """

    def __init__(
        self,
        loss_scale: float = 0.002,
        momentum: float = 0.9,
        step_size: float = 0.5,
        decay: float = 0.0,
    ) -> None:
        self.loss_scale = _number("loss_scale", loss_scale)
        self.momentum = _number("momentum", momentum)
        self.step_size = _number("step_size", step_size)
        self.decay = _number("decay", decay)
        self.velocity = 0.0
        if self.loss_scale <= 0:
            raise ValueError(f"loss_scale must be above 0, got {loss_scale}; the default is 0.002")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}; the default is 0.9")
        if self.step_size < 0:
            raise ValueError(f"step_size must be 0 or more, got {step_size}; the default is 0.5")
        if not 0 <= self.decay <= 1:
            raise ValueError(
                f"decay (gamma) must be in [0, 1], got {decay}: below 0 the base would grow "
                "without any signal"
            )

    def update(
        self, losses: Sequence[float], values: Sequence[float], *, base: float | None = None
    ) -> float:
        """The new base.

        Args:
            losses: L_r, each replica's mean loss over the round; one that is not finite is left
                out.
            values: eta_r, what each replica used.
            base: what is moved; the mean of the values where it is None.

        Raises:
            ValueError: where losses and values do not match, or no loss is finite.
        """
        if len(losses) != len(values) or not values:
            raise ValueError(
                f"one loss and one value for each replica: got {len(losses)} losses and "
                f"{len(values)} values"
            )
        if base is None:
            base = math.fsum(values) / len(values)
        self.velocity = self.momentum * self.velocity + (1 - self.momentum) * self.signal(
            losses, values
        )
        return self.coast(base) + self.step_size * self.velocity

    def signal(self, losses: Sequence[float], values: Sequence[float]) -> float:
        """D: how far the performance-weighted mean of the values is from the plain mean."""
        finite = [(x, y) for x, y in zip(losses, values, strict=True) if math.isfinite(x)]
        if not finite:
            raise ValueError(
                f"no replica has a finite loss, got {list(losses)}: there is no signal to follow"
            )
        mean_loss = math.fsum(x for x, _ in finite) / len(finite)
        scores = [(mean_loss - x) / self.loss_scale for x, _ in finite]
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        total = math.fsum(weights)
        weighted = math.fsum(w * y for w, (_, y) in zip(weights, finite, strict=True)) / total
        return weighted - math.fsum(y for _, y in finite) / len(finite)

    def coast(self, base: float) -> float:
        """The base after a round without any signal: the decay alone."""
        return base * (1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the velocity, and the decay fixed at the take-over."""
        return {"velocity": self.velocity, "decay": self.decay}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the memory of another run of this rule."""
        velocity, decay = float(state["velocity"]), float(state["decay"])
        self.velocity, self.decay = velocity, decay


@dataclass(frozen=True, slots=True, kw_only=True)
class Descent:
    """When the rule takes over from the schedule, and how the base falls from there."""

    kind: str = "schedule"
    """"schedule": base(t) = schedule(t) x scale, the rule moves the scale. "floor": the base is
    held between converges and falls by gamma at each."""
    start: int = 0
    """Steps before which the schedule is followed: the later of S_warm and the schedule's peak,
    since holding the base before the peak would freeze the warm-up."""
    total_steps: int = 0
    """S, for the number of rounds that are left at the take-over."""
    interval: int = 1
    """T."""
    floors: tuple[float, ...] = ()
    """For each factor the lowest base: the floor of the schedule."""

    def gamma(self, base: float, floor: float, step: int) -> float:
        """The decay fixed at the take-over, with K = (S - step) / T rounds left."""
        if self.kind == "schedule":
            return 0.0
        return floor_decay(base, floor, (self.total_steps - step) / self.interval)


class PaperSteering:
    """The shared base of each factor: the schedule's value until the rule moves it.

    Args:
        factors: their names.
        rule: makes the rule of one factor; None to explore without steering.
        descent: when the rule takes over, and how the base falls.
        spread: a, of every round.
        seed: of the assignments.
    """

    probe: Callable[[], Any] | None = None
    """This rule compares training losses: it has no use for a probe."""

    def __init__(
        self,
        factors: Sequence[str],
        rule: Callable[[], PaperRule] | None,
        descent: Descent,
        *,
        spread: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.factors = list(factors)
        self.rules = [rule() for _ in factors] if rule is not None else []
        self.descent, self.spread, self.seed = descent, spread, seed
        self.floors = list(descent.floors) or [0.0] * len(self.factors)
        self.scales = [1.0] * len(self.factors)
        self.scale = 1.0
        """What a search before the run multiplies the schedule with."""
        self.held: list[float] | None = None
        self.taken_over = False
        self._warned = False

    def fans(self, replicas: int, round: int) -> list[list[float]]:
        """For each factor every replica's multiplier in a round."""
        fan = multipliers(replicas, self.spread)
        return [
            [fan[i] for i in assignment(replicas, seed=self.seed, round=round, factor=name)]
            for name in self.factors
        ]

    def ask(self, *_: object) -> None:
        """Nothing is evaluated before the averaging."""

    def bases(self, schedule: Sequence[float]) -> list[float]:
        """The base of each factor, given what the schedule says now."""
        if self.scale != 1.0:
            schedule = [s * self.scale for s in schedule]
        if not self.taken_over:
            return list(schedule)
        if self.held is not None:
            return list(self.held)
        follows = zip(schedule, self.scales, self.floors, strict=True)
        return [s if k == 1.0 else max(s * k, floor) for s, k, floor in follows]

    def update(
        self,
        step: int,
        schedule: Sequence[float],
        losses: Sequence[float],
        values: Sequence[Sequence[float]],
    ) -> None:
        """Steer at the converge after `step` steps. NaN losses are left out."""
        known = any(math.isfinite(x) for x in losses)
        if self.rules and not known and not self._warned:
            self._warned = True
            logger.warning("no replica passed a loss in this round: call step(loss) to steer")
        if not self.rules or step < self.descent.start or step >= self._end():
            return
        bases = self.bases(schedule)
        if not self.taken_over:
            self._take_over(bases, step)
        for i, rule in enumerate(self.rules):
            # Along a falling schedule the rule works on the scale: a velocity in learning-rate
            # units, gathered while the schedule was high, would fling the base about later.
            unit = schedule[i] if self.held is None else 1.0
            if unit <= 0:
                continue
            base, eta = bases[i] / unit, [x / unit for x in values[i]]
            fresh = rule.update(losses, eta, base=base) if known else rule.coast(base)
            self._set(i, fresh, unit)

    def _end(self) -> float:
        return math.inf if self.descent.kind == "schedule" else self.descent.total_steps

    def _take_over(self, bases: Sequence[float], step: int) -> None:
        for rule, base, floor in zip(self.rules, bases, self.floors, strict=True):
            rule.decay = self.descent.gamma(base, floor, step)
        self.held = None if self.descent.kind == "schedule" else list(bases)
        self.taken_over = True

    def _set(self, i: int, fresh: float, unit: float) -> None:
        if self.held is None:
            fresh = max(fresh, SMALLEST_SCALE)
        if fresh * unit < self.floors[i]:
            logger.info(
                "%s: the rule asked for %.3g, below the floor of the schedule: held at %.3g",
                self.factors[i],
                fresh * unit,
                self.floors[i],
            )
            fresh = self.floors[i] / unit
        if self.held is not None:
            self.held[i] = fresh
        else:
            self.scales[i] = fresh

    def state_dict(self) -> dict[str, Any]:
        """Bases, velocities and decays: the same on every rank."""
        return {
            "taken_over": self.taken_over,
            "scales": list(self.scales),
            "scale": self.scale,
            "held": None if self.held is None else list(self.held),
            "rules": [rule.state_dict() for rule in self.rules],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another run's steering."""
        self.taken_over = bool(state["taken_over"]) and bool(self.rules)
        self.scales = [float(x) for x in state["scales"]]
        self.scale = float(state["scale"])
        self.held = None if state["held"] is None else [float(x) for x in state["held"]]
        # A state of a run without a rule has none to load: this run's rules start afresh.
        for rule, saved in zip(self.rules, state["rules"], strict=False):
            rule.load_state_dict(saved)


def floor_decay(start: float, floor: float, rounds: float) -> float:
    """gamma = 1 - (floor / start)^(1/K): without a signal the base meets the floor in K rounds.

    What the printed formula is meant to do. A start already at or below the floor stays.
    """
    if rounds <= 0:
        raise ValueError(f"rounds must be above 0, got {rounds}: nothing is left to decay over")
    if start <= floor:
        return 0.0
    return 1.0 - math.pow(floor / start, 1.0 / rounds)


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)
