"""Dropout, weight decay, temperature, label smoothing started wrong: does the slope rule find them?

    python -m benchmarks.lr.factors [--short] [--no-rows] [--steps 640] [--seeds 3]

Handwritten digits (scikit-learn), 500 for training of which a fifth have a wrong label, so that
regularisation matters; 600 for the probe, the rest for validation. Eight rows of pixels are eight
tokens of one attention layer with a temperature, a dropout and a feed-forward layer; AdamW, cosine.
A team is 8 replicas with local gradients, averaged every T steps. All teams of a comparison train
in one process, as slices of the same tensors: the same seeds have the same weights and batches.

For each factor: a grid of fixed values as the limit, the wrong start left as it is, and the wrong
start under the slope rule, which explores in the first half of the run and then stops. Then all
factors together with the learning rate, all started wrong. Excess is that of the validation loss
over the best of the grid, paired by seed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import rows
from hdet_scale.factors import Space
from hdet_scale.rules.designs import levels
from hdet_scale.rules.slope import Slope, Width
from hdet_scale.rules.sums import Sums

TRAIN, PROBE = 500, 600
TEAM, BATCH, EVERY = 8, 8, 8
BATCHES, SIZE = 8, 64
"""Of the probe: how many, and examples in each."""
WIDTH = 32


@dataclass(frozen=True, slots=True)
class Kind:
    """A factor of the benchmark."""

    space: Space
    usual: float
    grid: tuple[float, ...]
    wrong: tuple[float, ...]


FACTORS = {
    "lr": Kind(
        Space("log", (1e-5, 1.0)), 4e-3, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), (4e-4, 2e-2)
    ),
    "weight_decay": Kind(
        Space("log", (1e-6, 30.0)), 0.1, (0.01, 0.03, 0.1, 0.3, 1.0, 3.0), (0.01, 10.0)
    ),
    "dropout": Kind(
        Space("logit", (1e-3, 0.95)), 0.2, (0.02, 0.1, 0.2, 0.4, 0.6, 0.8), (0.02, 0.9)
    ),
    "temperature": Kind(
        Space("log", (1e-3, 1e3)), 1.0, (0.1, 0.3, 1.0, 3.0, 10.0, 30.0), (0.02, 50.0)
    ),
    "smoothing": Kind(
        Space("logit", (1e-4, 0.95)), 0.1, (0.003, 0.01, 0.03, 0.1, 0.2, 0.4), (0.003, 0.8)
    ),
}


@dataclass(slots=True)
class Team:
    """Eight replicas of one run: a seed, the bases it starts with, and what the rule explores."""

    label: str
    seed: int
    bases: dict[str, float]
    explored: tuple[str, ...] = ()
    spread: float = 0.5
    rule: Slope | None = field(init=False, default=None)
    fans: dict[str, list[float]] = field(init=False, default_factory=dict)
    probed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.explored:
            width = Width(self.spread, patience=None)
            self.rule = Slope(list(self.explored), width, limit=math.log(1000.0))
        self.assign(0)

    def base(self, name: str) -> float:
        """After the steering."""
        if self.rule is None or name not in self.explored:
            return self.bases[name]
        offset = self.rule.decision.offsets[self.explored.index(name)]
        return FACTORS[name].space.at(self.bases[name], math.exp(offset))

    def assign(self, round: int, *, explore: bool = True) -> None:
        """Multipliers of the next round."""
        self.fans = {name: [1.0] * TEAM for name in FACTORS}
        if self.explored and explore:
            columns = levels(TEAM, self.explored, seed=self.seed, round=round)
            for name, column in zip(self.explored, columns, strict=True):
                self.fans[name] = [1.0 + self.spread * x for x in column]

    def values(self, name: str) -> list[float]:
        """Of its replicas."""
        space, base = FACTORS[name].space, self.base(name)
        return [space.at(base, rho) for rho in self.fans[name]]

    def update(self, losses: Sequence[Sequence[float]], step: int) -> None:
        """Give the rule one round's probe losses, a row a replica."""
        if self.rule is None:
            return
        total = Sums.none(len(self.explored), BATCHES)
        for r, row in enumerate(losses):
            offsets = [
                FACTORS[name].space.offset(self.base(name), self.fans[name][r])
                for name in self.explored
            ]
            total = total + Sums.of(offsets, row)
        self.rule.update(total, step)
        self.probed += 1


class Digits:
    """The data of one seed: which digits are trained on, and which labels are wrong."""

    def __init__(self, seed: int) -> None:
        from sklearn.datasets import load_digits

        raw = load_digits()
        g = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(raw.target), generator=g)
        self.x = torch.tensor(raw.images, dtype=torch.float32)[order] / 8.0 - 1.0
        self.y = torch.tensor(raw.target)[order]
        wrong = torch.rand(TRAIN, generator=g) < 0.2
        other = torch.randint(10, (TRAIN,), generator=g)
        self.y[:TRAIN] = torch.where(wrong, other, self.y[:TRAIN])
        self.order = g


def initial(seed: int) -> dict[str, Tensor]:
    """Weights of one replica."""
    g = torch.Generator().manual_seed(1000 + seed)

    def dense(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=g) / math.sqrt(rows)

    return {
        "embed": dense(8, WIDTH),
        "place": 0.3 * torch.randn(8, WIDTH, generator=g),
        "query": dense(WIDTH, WIDTH),
        "key": dense(WIDTH, WIDTH),
        "value": dense(WIDTH, WIDTH),
        "up": dense(WIDTH, 4 * WIDTH),
        "down": dense(4 * WIDTH, WIDTH),
        "head": dense(8 * WIDTH, 10),
    }


def forward(
    p: dict[str, Tensor], x: Tensor, temperature: Tensor, drop: Tensor | None, g: torch.Generator
) -> Tensor:
    """Log-probabilities [R, b, 10] of images [R, b, 8, 8]; every replica has its own weights."""

    def apply(t: Tensor, weight: Tensor) -> Tensor:
        flat = t.reshape(t.shape[0], -1, t.shape[-1])
        return torch.bmm(flat, weight).reshape(*t.shape[:-1], weight.shape[-1])

    def dropped(t: Tensor) -> Tensor:
        if drop is None:
            return t
        rate = drop.view(-1, *(1,) * (t.dim() - 1))
        return t * (torch.rand(t.shape, generator=g) >= rate) / (1 - rate)

    h = apply(x, p["embed"]) + p["place"][:, None]
    q, k, v = (apply(h, p[name]) for name in ("query", "key", "value"))
    scores = q @ k.mT / (math.sqrt(WIDTH) * temperature.view(-1, 1, 1, 1))
    h = h + dropped(torch.softmax(scores, -1) @ v)
    h = h + apply(dropped(torch.relu(apply(h, p["up"]))), p["down"])
    return torch.log_softmax(apply(dropped(h.flatten(2)), p["head"]), -1)


def smoothed(logp: Tensor, y: Tensor, smoothing: Tensor) -> Tensor:
    """The training loss of each replica, [R]."""
    right = -logp.gather(-1, y[..., None]).squeeze(-1).mean(1)
    return (1 - smoothing) * right - smoothing * logp.mean((1, 2))


class Adam:
    """AdamW with a learning rate and a weight decay for each replica."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        self.params, self.t = params, 0
        self.m = {n: torch.zeros_like(p) for n, p in params.items()}
        self.v = {n: torch.zeros_like(p) for n, p in params.items()}

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], lr: Tensor, decay: Tensor) -> None:
        self.t += 1
        for (n, p), grad in zip(self.params.items(), grads, strict=True):
            self.m[n].lerp_(grad, 0.1)
            self.v[n].lerp_(grad.square(), 0.01)
            hat = self.m[n] / (1 - 0.9**self.t)
            root = (self.v[n] / (1 - 0.99**self.t)).sqrt_().add_(1e-8)
            p.mul_(1 - (lr * decay).view(-1, 1, 1)).sub_(lr.view(-1, 1, 1) * hat / root)

    @torch.no_grad()
    def average(self) -> None:
        """The converge of each team: parameters and moments."""
        for tensors in (self.params, self.m, self.v):
            for t in tensors.values():
                copies = t.view(-1, TEAM, *t.shape[1:])
                copies.copy_(copies.mean(1, keepdim=True).expand_as(copies))


def train(teams: Sequence[Team], steps: int) -> list[float]:
    """The validation loss of each team after a whole run."""
    data = {seed: Digits(seed) for seed in {t.seed for t in teams}}
    owner = [t for t in teams for _ in range(TEAM)]
    start = {s: initial(s) for s in data}
    names = list(next(iter(start.values())))
    params = {n: torch.stack([start[t.seed][n] for t in owner]).requires_grad_() for n in names}
    optimizer = Adam(params)
    masks = torch.Generator().manual_seed(0)
    exploring = [i for i, t in enumerate(teams) if t.explored]
    for step in range(steps):
        drawn = {s: torch.randint(TRAIN, (TEAM, BATCH), generator=d.order) for s, d in data.items()}
        x = torch.cat([data[t.seed].x[drawn[t.seed]] for t in teams])
        y = torch.cat([data[t.seed].y[drawn[t.seed]] for t in teams])
        now = {n: torch.tensor([v for t in teams for v in t.values(n)]) for n in FACTORS}
        logp = forward(params, x, now["temperature"], now["dropout"], masks)
        loss = smoothed(logp, y, now["smoothing"]).sum()
        grads = torch.autograd.grad(loss, list(params.values()))
        shape = min(1.0, (step + 1) / (0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.step(grads, now["lr"] * shape, now["weight_decay"])
        if (step + 1) % EVERY == 0:
            explore = step + 1 < steps // 2
            if explore and exploring:
                probe(teams, exploring, params, data, step + 1)
            optimizer.average()
            for team in teams:
                team.assign((step + 1) // EVERY, explore=explore)
    optimizer.average()
    return [validate(params, data[t.seed], t, i) for i, t in enumerate(teams)]


@torch.no_grad()
def probe(
    teams: Sequence[Team],
    exploring: Sequence[int],
    params: dict[str, Tensor],
    data: dict[int, Digits],
    step: int,
) -> None:
    """Fresh batches, the same for all replicas of a team; the plain loss, without smoothing."""
    for i in exploring:
        team, digits = teams[i], data[teams[i].seed]
        g = torch.Generator().manual_seed(step)
        pick = TRAIN + torch.randperm(PROBE, generator=g)[: BATCHES * SIZE]
        mine = {n: p[i * TEAM : (i + 1) * TEAM] for n, p in params.items()}
        x, y = digits.x[pick].expand(TEAM, -1, -1, -1), digits.y[pick].expand(TEAM, -1)
        logp = forward(mine, x, torch.tensor(team.values("temperature")), None, g)
        nll = -logp.gather(-1, y[..., None]).squeeze(-1).reshape(TEAM, BATCHES, SIZE)
        team.update(nll.mean(-1).double().tolist(), step)


@torch.no_grad()
def validate(params: dict[str, Tensor], digits: Digits, team: Team, index: int) -> float:
    """Plain loss on what neither training nor the probe has seen."""
    mine = {n: p[index * TEAM : index * TEAM + 1] for n, p in params.items()}
    x, y = digits.x[None, TRAIN + PROBE :], digits.y[None, TRAIN + PROBE :]
    logp = forward(mine, x, torch.tensor([team.base("temperature")]), None, torch.Generator())
    return float(functional.nll_loss(logp[0], y[0]))


def with_values(**changed: float) -> dict[str, float]:
    """The usual values, but for these."""
    return {name: kind.usual for name, kind in FACTORS.items()} | changed


def compare(name: str, seeds: Sequence[int], steps: int) -> list[dict[str, object]]:
    """One factor: the grid, and each wrong start left alone and steered."""
    kind = FACTORS[name]
    teams = [Team(f"fixed {v:g}", s, with_values(**{name: v})) for v in kind.grid for s in seeds]
    for v in kind.wrong:
        for s in seeds:
            teams.append(Team(f"wrong {v:g}", s, with_values(**{name: v})))
            teams.append(Team(f"slope from {v:g}", s, with_values(**{name: v}), (name,)))
    return summarise(name, teams, train(teams, steps), len(kind.grid), seeds)


def together(seeds: Sequence[int], steps: int, side: int) -> list[dict[str, object]]:
    """All factors and the learning rate wrong at once, low (side 0) or high (1)."""
    wrong = {name: kind.wrong[side] for name, kind in FACTORS.items()}
    teams = [Team("fixed usual", s, with_values()) for s in seeds]
    for s in seeds:
        teams.append(Team("wrong", s, dict(wrong)))
        teams.append(Team("slope", s, dict(wrong), tuple(FACTORS)))
        teams.append(Team("slope on lr alone", s, dict(wrong), ("lr",)))
    name = f"all together, {'high' if side else 'low'}"
    return summarise(name, teams, train(teams, steps), 1, seeds)


def summarise(
    name: str, teams: Sequence[Team], losses: Sequence[float], fixed: int, seeds: Sequence[int]
) -> list[dict[str, object]]:
    """A row for each kind of team: loss, excess over the best fixed one, the values at its end."""
    of: dict[str, list[int]] = {}
    for i, team in enumerate(teams):
        of.setdefault(team.label, []).append(i)

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    limits = list(of)[:fixed]
    best = min(limits, key=lambda label: mean([losses[i] for i in of[label]]))
    made: list[dict[str, object]] = []
    for label, which in of.items():
        excess = [losses[i] / losses[j] - 1 for i, j in zip(which, of[best], strict=True)]
        spread = math.sqrt(sum((e - mean(excess)) ** 2 for e in excess) / max(1, len(excess) - 1))
        ends = {n: [teams[i].base(n) for i in which] for n in teams[which[0]].explored}
        made.append(
            {
                "factor": name,
                "run": label,
                "best": best,
                "loss": round(mean([losses[i] for i in which]), 4),
                "excess": round(mean(excess), 4),
                "error": round(spread / math.sqrt(len(excess)), 4),
                "ends": {n: [float(f"{v:.3g}") for v in vs] for n, vs in ends.items()},
                "rounds": teams[which[0]].probed,
                "seeds": len(seeds),
            }
        )
    return made


def main() -> None:
    """Every factor alone, then all together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one seed, fewer steps")
    parser.add_argument("--no-rows", action="store_true")
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=[*FACTORS, "together"])
    options = parser.parse_args()
    steps, seeds = (160, 1) if options.short else (options.steps, options.seeds)
    torch.set_num_threads(1)
    for name in [*FACTORS, "together"]:
        if options.only not in (None, name):
            continue
        start = time.perf_counter()
        if name == "together":
            made = [r for side in (0, 1) for r in together(range(seeds), steps, side)]
        else:
            made = compare(name, range(seeds), steps)
        lines = [
            [
                str(r["factor"]),
                str(r["run"]),
                f"{r['loss']:.3f}",
                f"{r['excess']:+.1%} ± {r['error']:.1%}",
                str(r["ends"] or ""),
            ]
            for r in made
        ]
        print(rows.table(["factor", "run", "loss", "excess", "ends at"], lines))
        print(f"{time.perf_counter() - start:.0f} s\n", flush=True)
        if not (options.no_rows or options.short):
            rows.append("factor_recovery", [{**r, "steps": steps} for r in made])


if __name__ == "__main__":
    main()
