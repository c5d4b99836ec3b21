"""HDETConfig: what a user may decide, checked at once, read from a dict or a JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdet_scale.converge.checks import check_choice, check_int, check_type, read, read_nested
from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.method.paper import PaperRule
from hdet_scale.method.spread import check_spread

__all__ = ["DECAYS", "GRADIENTS", "RULES", "ConvergePolicy", "HDETConfig", "read"]

GRADIENTS = ("shared", "local")
RULES = ("none", "paper", "slope", "climb", "race", "auto")
DECAYS = ("auto", "floor", "schedule", "literal")


@dataclass(frozen=True, slots=True, kw_only=True)
class HDETConfig:
    """One exploration: the fan, the round, the rule that steers, and how replicas converge."""

    spread: float = 1 / 9
    """a: replicas' multipliers lie in [1 - a, 1 + a]. 0 is plain training, exactly."""
    interval: int = 1000
    """T: optimizer steps of a round."""
    gradients: str = "shared"
    """"shared": one all-reduced gradient for all replicas. "local": each steps with its own, and
    nothing crosses replicas between converges."""
    rule: str = "paper"
    """What moves the base: "paper", "slope" and "climb" at each converge, the last two fed by a
    probe; "race", which finds the learning rate before the run and leaves plain training behind it;
    "none" to explore without steering. "auto" is what benchmarks/lr_recovery.py shows to be best:
    "race" where the run is long enough for one, with a watch over what it found, and plain
    training elsewhere."""
    total_steps: int | None = None
    """S: optimizer steps of the run, which race and climb must know; OneCycleAutoLR knows it."""
    probe: int = 16
    """At most so many losses are taken from a probe."""
    patience: int | None = 50
    """Rounds without a move after which the slope rule halves the spread; None: never."""
    warmup_steps: int = 0
    """S_warm: the rule leaves the schedule alone before this step."""
    loss_scale: float = 0.002
    """sigma of the paper rule: the loss difference that counts as one unit of evidence."""
    momentum: float = 0.9
    """beta of the paper rule."""
    step_size: float = 0.5
    """lambda of the paper rule."""
    decay: str = "auto"
    """gamma of the paper rule: "floor", "schedule", "literal"; "auto" is "floor" where the
    schedule has a known floor (OneCycleAutoLR) and "schedule" elsewhere."""
    seed: int = 0
    """Seed of the assignments; nothing else is drawn."""
    replicas: int | str = "auto"
    """Number of replicas, where the engine makes the groups; "auto" follows from the world."""
    shards: int | str = "auto"
    """Ranks of one replica, where the engine makes the groups."""
    converge: ConvergePolicy = field(default_factory=ConvergePolicy)
    """How parameters are averaged."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "spread", check_spread(self.spread))
        check_int("interval", self.interval, at_least=1)
        check_int("warmup_steps", self.warmup_steps, at_least=0)
        check_int("seed", self.seed, at_least=0)
        check_int("probe", self.probe, at_least=1)
        for name in ("total_steps", "patience"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1, other="or None")
        PaperRule(self.loss_scale, self.momentum, self.step_size)  # its own checks
        check_choice("gradients", self.gradients, GRADIENTS)
        check_choice("rule", self.rule, RULES)
        check_choice("decay", self.decay, DECAYS)
        for name in ("replicas", "shards"):
            if getattr(self, name) != "auto":
                check_int(name, getattr(self, name), at_least=1, other='or "auto"')
        read_nested(self, "converge", ConvergePolicy)
        check_type("converge", self.converge, ConvergePolicy)
        self._check_fragments()

    def _check_fragments(self) -> None:
        span = self.interval // self.converge.fragments
        if span < 1:
            raise ValueError(
                f"fragments={self.converge.fragments} of an interval of {self.interval} steps: "
                "there must be at least one step for each fragment"
            )
        if self.converge.overlap and self.converge.overlap_steps > span:
            raise ValueError(
                f"overlap_steps={self.converge.overlap_steps} must be at most interval / fragments "
                f"= {span}, so that one averaging is folded in before the next starts"
            )

    @property
    def diverges(self) -> bool:
        """True when replicas come apart in a round, so that there is something to average."""
        return (self.spread > 0 and not self.searches) or self.gradients == "local"

    @property
    def searches(self) -> bool:
        """True when a search comes before the run, and no spread after it."""
        return self.rule in ("race", "auto")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HDETConfig:
        """From the `"hdet": {...}` block of a JSON config. Unknown keys are refused."""
        return read(cls, values, "hdet")

    @classmethod
    def from_json(cls, path: str | Path) -> HDETConfig:
        """From a JSON file: the block itself, or a file with an "hdet" block in it."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls.from_dict(values.get("hdet", values) if isinstance(values, dict) else values)

    def to_dict(self) -> dict[str, Any]:
        """The same values as plain JSON types; `from_dict` reads them back."""
        return dataclasses.asdict(self)
