"""What 8-bit moments cost in loss: FusedAdamW(state="int8") against fp32 moments.

    python -m benchmarks.speed.int8_loss [--task gpt vit] [--seeds 4] [--steps 400 800] [--check]

Two tasks: the demo's GPT on Python's standard library, at the demo's rate, batch and steps on one
process, and one of benchmarks.lr that AdamW trains. Both states start from the same weights and see
the same batches under OneCycleLR; a run's result is its loss on held-out examples at the end.

--check exits with 1 unless the mean loss with 8-bit moments is within one standard error of that
with fp32 moments, over the seeds.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from benchmarks import rows
from benchmarks.lr.tasks import TASKS
from hdet_scale.models.gpt import GPT, GPTConfig
from hdet_scale.models.text import Text, batch, evaluation, standard_library
from hdet_scale.optim.fused_adamw import FusedAdamW

RATE = 2e-3
"""The demo's."""
STEPS = {"gpt": 400, "vit": 800}
"""The demo's, and the shorter of the task's two lengths."""
STATES: dict[str, str | None] = {"fp32": None, "int8": "int8"}


def train(
    params: Iterable[nn.Parameter], loss: Callable[[int], Tensor], steps: int, **options: object
) -> None:
    optimizer = FusedAdamW(params, **options)  # type: ignore[arg-type]
    rate = optimizer.param_groups[0]["lr"]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        scheduler.step()


@functools.cache
def text_of_demo() -> Text:
    return Text.read(standard_library())


def gpt(seed: int, steps: int, state: str | None) -> float:
    """The demo's model; 8 sequences a step."""
    text = text_of_demo()
    model = GPT(GPTConfig.named("tiny"), seed=seed)
    shape = {"size": 8, "context": model.config.context}

    def loss(step: int) -> Tensor:
        found: Tensor = model(*batch(text.train, **shape, seed=seed, step=step, rank=0))
        return found

    train(model.parameters(), loss, steps, lr=RATE, weight_decay=0.1, state=state)
    with torch.no_grad():
        batches = evaluation(text.validation, **shape, batches=64)
        return statistics.fmean(float(model(*pair)) for pair in batches)


def task(name: str, seed: int, steps: int, state: str | None) -> float:
    """A task of benchmarks.lr with one copy of its model."""
    found = TASKS[name]
    start = found.init(torch.Generator().manual_seed(seed))
    params = {k: nn.Parameter(v[None].clone()) for k, v in start.items()}
    draws = found.draw(seed, steps)
    train(
        params.values(),
        lambda step: found.losses(dict(params), draws[step][None]).sum(),
        steps,
        lr=found.around,
        betas=(0.9, 0.99),
        weight_decay=found.weight_decay,
        state=state,
    )
    with torch.no_grad():
        return float(found.validate({k: p.detach() for k, p in params.items()}))


def measure(name: str, seeds: int, steps: int) -> dict[str, object]:
    """A row: the losses of both states, their means, and the gap in standard errors."""
    losses: dict[str, list[float]] = {state: [] for state in STATES}
    for seed in range(seeds):
        for state, option in STATES.items():
            run = gpt(seed, steps, option) if name == "gpt" else task(name, seed, steps, option)
            losses[state].append(round(run, 5))
            print(f"{name} seed {seed} {state}: {run:.4f}", flush=True)
    error = statistics.stdev(losses["fp32"]) / seeds**0.5
    gap = statistics.fmean(losses["int8"]) - statistics.fmean(losses["fp32"])
    return {
        "task": name,
        "steps": steps,
        "losses": losses,
        "gap": round(gap, 5),
        "standard_error_fp32": round(error, 5),
        "gap_in_standard_errors": round(gap / error, 3),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What 8-bit moments cost in loss.")
    parser.add_argument("--task", nargs="+", default=list(STEPS), help="gpt, or one of lr.tasks")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, help="of every task; None: of the demo, of the task")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="exit with 1 beyond a standard error")
    parser.add_argument("--no-rows", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    found = [measure(t, options.seeds, options.steps or STEPS.get(t, 800)) for t in options.task]
    for row in found:
        print(
            f"figure: {row['task']}: int8 - fp32 moments {row['gap']:+}, "
            f"{row['gap_in_standard_errors']} standard errors of fp32"
        )
    if not options.no_rows:
        print("rows:", rows.append("int8_loss", found))
    missed = [r for r in found if float(str(r["gap_in_standard_errors"])) > 1]
    for row in missed:
        print(f"MISSED {row['task']}: {row['gap_in_standard_errors']} standard errors, limit 1")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
