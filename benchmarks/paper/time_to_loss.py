"""Steps and tokens until HDET reaches vanilla DDP's final loss: same weights, batches and schedule.

    python -m benchmarks.paper.time_to_loss            # 4 replicas, 3 seeds

The loss is that on held-out text at the end of each round, where replicas are equal, as a trailing
mean over --window rounds; the goal is what vanilla DDP has at its end. A run that never gets there
is counted as never: nothing is extrapolated. Steps and tokens have one ratio, since every mode
trains on the same batch at a step.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from typing import Any

from benchmarks import ranks, rows
from benchmarks.paper.learning import Curve, Recipe, trailing_mean, train
from hdet_scale.models.text import Text, standard_library

SPREAD = 1 / 9


def modes(lr: float) -> list[Recipe]:
    """The first is the goal."""
    return [
        Recipe(name="vanilla DDP", lr=lr),
        Recipe(name="HDET shared", lr=lr, spread=SPREAD, rule=True),
        Recipe(name="HDET shared, no rule", lr=lr, spread=SPREAD),
        Recipe(name="HDET local", lr=lr, spread=SPREAD, rule=True, gradients="local"),
    ]


def work(send: ranks.Send, options: Any) -> None:
    """In each rank: every mode with every seed."""
    text = Text.read(standard_library())
    common = {"steps": options.steps, "interval": options.interval}
    for seed in range(options.seeds):
        for recipe in modes(options.lr):
            curve = train(dataclasses.replace(recipe, seed=seed, **common), text)
            if ranks.first():
                send(curve)


def smooth(curve: Curve, window: int) -> list[tuple[int, float]]:
    """(steps, trailing mean of the validation loss), the longer evaluation at the end left out."""
    places = curve.validation[:-1]
    means = trailing_mean([loss for _, loss in places], window)
    return [(step, mean) for (step, _), mean in zip(places, means, strict=True)]


def steps_to(curve: Curve, goal: float, window: int) -> int | None:
    """The first round's end at which the loss is at or below the goal; None for never."""
    return next((step for step, loss in smooth(curve, window) if loss <= goal), None)


def summary(curves: list[Curve], window: int) -> list[dict[str, Any]]:
    """For each mode its steps over vanilla DDP's, seed by seed."""
    by_seed: dict[int, dict[str, Curve]] = {}
    for curve in curves:
        by_seed.setdefault(curve.recipe.seed, {})[curve.recipe.name] = curve
    first = curves[0].recipe.name
    results = []
    for name in dict.fromkeys(c.recipe.name for c in curves):
        steps: list[int | None] = []
        ratios: list[float] = []
        for runs in by_seed.values():
            end, goal = smooth(runs[first], window)[-1]
            own = steps_to(runs[name], goal, window)
            steps.append(own)
            if own is not None:
                ratios.append(own / end)
        finals = [runs[name].final_validation for runs in by_seed.values()]
        results.append(
            {
                "mode": name,
                "lr": curves[0].recipe.lr,
                "seeds": len(by_seed),
                "reached": len(ratios),
                "steps": steps,
                "tokens_a_step": curves[0].tokens_a_step,
                "ratio": statistics.fmean(ratios) if ratios else None,
                "ratios": ratios,
                "final_validation": statistics.fmean(finals),
            }
        )
    return results


def main(arguments: list[str] | None = None) -> int:
    """Start the replicas, tell."""
    parser = ranks.parser(__doc__)
    parser.set_defaults(ranks=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--interval", type=int, default=5, help="T")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.006)
    parser.add_argument("--window", type=int, default=3, help="rounds of the trailing mean")
    options = parser.parse_args(arguments)
    found = ranks.run(work, options)
    if found is None:
        return 0
    results = summary(found, options.window)
    lines = [
        [
            r["mode"],
            f"{r['reached']} of {r['seeds']}",
            ", ".join("never" if s is None else str(s) for s in r["steps"]),
            "" if r["ratio"] is None else f"{r['ratio']:.3f}",
            f"{r['final_validation']:.3f}",
        ]
        for r in results
    ]
    tokens = results[0]["tokens_a_step"]
    print(
        f"{options.ranks} replicas, {options.steps} steps of {tokens} tokens, T = "
        f"{options.interval}, LR {options.lr:g}"
    )
    head = ["mode", "reached", "steps, by seed", "x vanilla, where reached", "final validation"]
    print(rows.table(head, lines))
    for r in results[1:]:
        ratio = "never" if r["ratio"] is None else f"{r['ratio']:.3f}"
        print(f"figure: {r['mode']}: steps to vanilla's loss {ratio}")
    if not options.no_rows:
        common = {"replicas": options.ranks, "total_steps": options.steps}
        common |= {"interval": options.interval, "window": options.window}
        print("rows:", rows.append("time_to_loss", [{**common, **r} for r in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
