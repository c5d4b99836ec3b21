"""HDETConfig: what a user may decide, checked at once, read from a dict or a JSON file.

    HDETConfig(rule="auto", total_steps=10_000)
    HDETConfig.from_dict({"rule": "paper", "spread": 0.1, "interval": 1000})

A key is written once, as a field below: the JSON block "hdet", the schedulers' keyword arguments,
the params of DeepSpeed's scheduler types and the options of `hdet train` follow from the fields.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdet_scale.converge.checks import (
    check_choice,
    check_int,
    check_type,
    near_keys,
    read,
    read_nested,
)
from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.method.paper import PaperRule
from hdet_scale.method.spread import check_spread

GRADIENTS = ("shared", "local")
SPREAD = 1 / 9
"""The authors' spread."""
RULES = ("auto", "paper", "slope", "none")
DECAYS = ("auto", "floor", "schedule")
AUTHORS: dict[str, tuple[str, Any]] = {
    "auto_lr_warmup_steps": ("warmup_steps", 100000),
    "ensemble_lr_spread_ratio": ("spread", 0.0),
    "model_sync_interval": ("interval", 1000),
    "loss_scale": ("loss_scale", 0.002),
    "lr_of_lr": ("step_size", 0.5),
    "momentum_of_lr": ("momentum", 0.9),
}
"""The authors' names of OneCycleAutoLR's arguments: the key that each stands for, its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HDETConfig:
    """What is searched or explored, and how replicas converge.

    Args:
        Every field below is a keyword argument and a key of the JSON block "hdet".

    Raises:
        ValueError, TypeError: for a value that is not valid.
    """

    rule: str = "auto"
    """"auto", "paper", "slope" or "none": what finds or moves the rate. "auto": a search at the
    start of the run, then the user's schedule at the rate that won, watched on held-out batches; a
    run that is too short for a search is plain training. "paper": the published rule at each
    converge. "slope": at each converge by a probe, for any factor. "none": explore without
    steering."""
    spread: float = SPREAD
    """a: replicas' multipliers lie in [1 - a, 1 + a]. 0 is plain training, exactly."""
    interval: int = 1000
    """T: optimizer steps of a round."""
    gradients: str = "shared"
    """"shared" or "local": step with all replicas' gradient or its own. With local gradients
    nothing crosses replicas between converges."""
    total_steps: int | None = None
    """S: optimizer steps of the run, which a search must know; OneCycleAutoLR knows it."""
    passes: float | None = None
    """Passes over the training data in the whole run; None counts as fresh data. A search is too
    short to see a run overfit, and takes lower rates where there are more than eight passes.
    OneCycleAutoLR takes them from `epochs`."""
    probe_batches: int = 64
    """At most so many losses are taken from a probe."""
    restart_budget: float = 0.15
    """Share of the steps that going back to earlier weights may discard. A run goes back where its
    held-out loss rises. 0: it never does, and its rate is lowered in place."""
    patience: int | None = 50
    """Rounds without a move until the slope rule halves its spread. None: never."""
    warmup_steps: int = 0
    """S_warm: the rule leaves the schedule alone before this step."""
    loss_scale: float = 0.002
    """sigma of the paper rule: a loss difference of one unit of evidence."""
    momentum: float = 0.9
    """beta of the paper rule."""
    step_size: float = 0.5
    """lambda of the paper rule."""
    decay: str = "auto"
    """gamma of the paper rule: "auto", "floor" or "schedule". "auto" is "floor" where the schedule
    has a known floor (OneCycleAutoLR) and "schedule" elsewhere."""
    seed: int = 0
    """Seed of the assignments; nothing else is drawn."""
    replicas: int | str = "auto"
    """Number of replicas; "auto" follows from the world. Used where the engine makes the groups."""
    shards: int | str = "auto"
    """Ranks of one replica, where the engine makes the groups."""
    converge: ConvergePolicy = field(default_factory=ConvergePolicy)
    """How parameters are averaged."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "spread", check_spread(self.spread))
        check_int("interval", self.interval, at_least=1)
        check_int("warmup_steps", self.warmup_steps, at_least=0)
        check_int("seed", self.seed, at_least=0)
        check_int("probe_batches", self.probe_batches, at_least=1)
        if not 0.0 <= self.restart_budget < 1.0:
            raise ValueError(
                f"restart_budget must be a share in [0, 1), got {self.restart_budget!r}: 0.15 lets "
                "restarts discard 15 % of the steps"
            )
        if self.passes is not None and not (
            isinstance(self.passes, int | float) and 0 < self.passes < math.inf
        ):
            raise ValueError(
                f"passes must be a finite number above 0 or None, got {self.passes!r}: give the "
                "number of epochs of the run"
            )
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
        if self.searches and self.spread not in (0.0, SPREAD):
            raise ValueError(
                f"spread={self.spread} has no effect with rule='auto', which searches and then "
                "trains without a spread: leave it out, or use rule='paper', 'slope' or 'none'"
            )

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
        """True when replicas come to differ in a round, so that there is something to average."""
        return (self.spread > 0 and not self.searches) or self.gradients == "local"

    @property
    def searches(self) -> bool:
        """True when a search comes before the run, and no spread after it."""
        return self.rule == "auto"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HDETConfig:
        """From the `"hdet": {...}` block of a JSON config.

        Args:
            values: the block: any of the fields by name; "converge" and its "outer" are blocks
                themselves.

        Raises:
            ValueError, TypeError: for an unknown key, or a value that is not valid.
        """
        return read(cls, values, "hdet")

    @classmethod
    def from_json(cls, path: str | Path) -> HDETConfig:
        """From a JSON file: the block itself, or a file with an "hdet" block in it."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls.from_dict(values.get("hdet", values) if isinstance(values, dict) else values)

    def to_dict(self) -> dict[str, Any]:
        """The same values as plain JSON types; `from_dict` reads them back."""
        return dataclasses.asdict(self)


def with_authors_names(
    config: HDETConfig | None, options: Mapping[str, Any], *, enable_auto_lr: bool, **given: Any
) -> HDETConfig:
    """The config of a scheduler that takes the authors' names, further keys, or an HDETConfig.

    Args:
        config: where it is given, nothing else may contradict it.
        options: keys of HDETConfig.
        enable_auto_lr: the authors' name for rule="paper".
        given: the authors' other names, each with its value or default.

    Raises:
        TypeError: for an option that is no key of HDETConfig.
        ValueError: for a value that is not valid, or that contradicts `config`.
    """
    for key in options:
        if key not in HDETConfig.__dataclass_fields__:
            raise TypeError(f"unexpected keyword argument {key!r}{near_keys(HDETConfig, key)}")
    named = {AUTHORS[name][0]: v for name, v in given.items() if v != AUTHORS[name][1]}
    named |= {"rule": "paper"} if enable_auto_lr else {}
    for key in sorted(named.keys() & options.keys() - {"rule"}):  # rule= is over enable_auto_lr
        if named[key] != options[key]:
            raise ValueError(
                f"{key}={options[key]!r} contradicts the authors' name for it, which says "
                f"{named[key]!r}: write one of them"
            )
    if config is None:
        defaults = dict(AUTHORS.values())
        whole = {**defaults, "rule": "none", **named, **options}
        return HDETConfig(**whole)
    for key, value in {**named, **options}.items():
        if getattr(config, key) != value:
            raise ValueError(
                f"{key}={value!r} beside config=, which says {key}={getattr(config, key)!r}: "
                "write it in the HDETConfig alone"
            )
    return config


def described(kind: type) -> dict[str, str]:
    """The first sentence, or its first part, of the docstring under each field: for help texts."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    found, name = {}, ""
    for node in getattr(body, "body", []):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[name] = (
                " ".join(str(node.value.value).split())
                .partition(". ")[0]
                .partition(";")[0]
                .rstrip(".")
            )
            name = ""
    return found
