"""`hdet demo`: plain DDP, then HDET, on the source of Python's standard library.

Both runs start from the same weights and draw the same batches with the same AdamW. The only
difference is the scheduler: torch's OneCycleLR, and OneCycleAutoLR in its place. The demo prints a
table and writes the report of the two runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from hdet_scale.method.records import RoundRecord
from hdet_scale.models.gpt import GPT, GPTConfig
from hdet_scale.models.text import Text, batch, evaluation, standard_library
from hdet_scale.runs.log import FILE, RunLog, read
from hdet_scale.schedulers import OneCycleAutoLR
from hdet_scale.topology import Replicas
from hdet_scale.train.workers import Send, WorkerError, messages

if TYPE_CHECKING:
    from rich.console import Console

PLAIN, HDET = "plain DDP", "HDET"
FOLDERS = {PLAIN: "plain", HDET: "hdet"}
LOG_STEPS = 5
"""Steps between two lines of a log."""
LAST_SHARE = 0.1
"""The part of a run whose mean is its final training loss."""
COUNTED_SHARE = 0.02
"""The table compares bases where the schedule is above this share of its peak."""
VALIDATION_BATCHES = 64
SIGMA = 0.002
"""loss_scale of the paper rule: the authors' value, which the text below the table repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What the two runs have in common."""

    steps: int = 400
    """Optimizer steps of each run."""
    interval: int = 10
    """T: steps of a round."""
    max_lr: float = 2e-3
    """Peak of the schedule, on the low side."""
    spread: float = 1 / 9
    """Replicas' learning rates lie within this share of the base."""
    decay: str = "schedule"
    """How HDET's base falls. "schedule": with the shape of the plain run's schedule. "floor": by a
    constant factor a round, which is soon far below it."""
    seed: int = 0
    """Of weights, batches and assignments."""
    replicas: int = 4
    """Workers, one replica each."""
    size: str = "tiny"
    """Of the model."""
    sequences: int = 8
    """Sequences of a replica's batch."""
    out: Path = Path("runs/demo")
    """Where the logs of the two runs and the report go."""

    def __post_init__(self) -> None:
        if self.steps < 10:
            raise ValueError(f"steps must be at least 10, got {self.steps}; the default is 400")
        if not 1 <= self.interval <= self.steps:
            raise ValueError(
                f"interval must be in [1, steps] = [1, {self.steps}], got {self.interval}: a round "
                "has to end within the run"
            )
        if not (math.isfinite(self.max_lr) and self.max_lr > 0):
            raise ValueError(f"lr must be above 0, got {self.max_lr}; the default is 0.002")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What replica 0 sends after a step."""

    run: str
    step: int
    loss: float
    base: float


@dataclass(slots=True, kw_only=True)
class DemoRun:
    """What one run did."""

    name: str
    losses: list[list[float]] = field(default_factory=list)
    """Training loss of each replica at each step."""
    bases: list[float] = field(default_factory=list)
    """The base at each step."""
    rounds: list[RoundRecord] = field(default_factory=list)
    """One record a converge; none in the plain run."""
    validation: float = math.nan
    """Loss on held-out text of the converged model."""
    seconds: float = 0.0
    """Of the training, validation not counted."""
    converge_seconds: float = 0.0
    """Of them, in the scheduler at the end of rounds: check, exchange, averaging, steering."""

    @property
    def training(self) -> float:
        """The mean over the replicas and the last tenth of the run."""
        losses = [statistics.fmean(row) for row in zip(*self.losses, strict=True)]
        return statistics.fmean(losses[-max(1, round(LAST_SHARE * len(losses))) :])


def train_both(send: Send, settings: DemoSettings) -> None:
    """The plain run and then HDET, in each worker; replica 0 sends progress and results."""
    text = Text.read(standard_library())
    replicas = Replicas.world()
    tell: Send = send if replicas.rank == 0 else lambda _: None
    for name in (PLAIN, HDET):
        tell(train(name, text, replicas, settings, tell))


def train(name: str, text: Text, replicas: Replicas, settings: DemoSettings, tell: Send) -> DemoRun:
    """One run from the seed to the validation."""
    model = GPT(GPTConfig.named(settings.size), seed=settings.seed)
    wrapped = DistributedDataParallel(model)
    optimizer = AdamW(model.parameters(), lr=settings.max_lr, weight_decay=0.1)
    scheduler = _scheduler(name, optimizer, settings)
    run = DemoRun(name=name)
    log = _log(name, settings, replicas)
    if isinstance(scheduler, OneCycleAutoLR):
        scheduler.on_round(run.rounds.append)
        if log is not None:
            scheduler.on_record(log.record)
    dist.barrier()
    begin = time.perf_counter()
    losses: list[float] = []
    shape = {"size": settings.sequences, "context": model.config.context, "seed": settings.seed}
    for step in range(settings.steps):
        run.bases.append(_base(scheduler))
        loss = wrapped(*batch(text.train, **shape, step=step, rank=replicas.rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        run.converge_seconds += _advance(scheduler, loss.detach())
        _sample(log, step + 1, loss.detach(), run.bases, replicas)
        tell(Progress(run=name, step=step + 1, loss=losses[-1], base=run.bases[-1]))
    if isinstance(scheduler, OneCycleAutoLR):
        scheduler.finalize()
    if log is not None:
        log.end(settings.steps)
        log.close()
    run.seconds = time.perf_counter() - begin
    run.losses = replicas.exchange(losses, torch.device("cpu"))
    run.validation = _validate(model, text, replicas, settings)
    return run


def _log(name: str, settings: DemoSettings, replicas: Replicas) -> RunLog | None:
    """The log of a run, on replica 0."""
    if replicas.rank != 0:
        return None
    log = RunLog(settings.out / FOLDERS[name])
    about = {"engine": "ddp", "size": settings.size, "replicas": replicas.size, "shards": 1}
    log.begin({**about, "seed": settings.seed, "interval": settings.interval})
    return log


def _sample(
    log: RunLog | None, step: int, loss: Tensor, bases: Sequence[float], replicas: Replicas
) -> None:
    """Every few steps, log the mean loss of the replicas and the bases since the last line."""
    if step % LOG_STEPS:
        return
    mean = statistics.fmean(row[0] for row in replicas.exchange([float(loss)], loss.device))
    if log is not None:
        log.step(step, mean, {"lr/group0": bases[-LOG_STEPS:]})


def _scheduler(name: str, optimizer: AdamW, settings: DemoSettings) -> OneCycleLR:
    """The only difference between the runs."""
    if name == PLAIN:
        return OneCycleLR(optimizer, settings.max_lr, settings.steps, pct_start=0.1)
    return OneCycleAutoLR(
        optimizer,
        max_lr=settings.max_lr,
        total_steps=settings.steps,
        pct_start=0.1,
        auto_lr_warmup_steps=0,
        ensemble_lr_spread_ratio=settings.spread,
        model_sync_interval=settings.interval,
        enable_auto_lr=True,
        loss_scale=SIGMA,
        decay=settings.decay,
        seed=settings.seed,
    )


def _base(scheduler: OneCycleLR) -> float:
    if isinstance(scheduler, OneCycleAutoLR):
        return scheduler.get_base_lr()[0]
    return float(scheduler.get_last_lr()[0])


def _advance(scheduler: OneCycleLR, loss: Tensor) -> float:
    """Step the scheduler; the seconds of it if that was a converge, else 0."""
    if not isinstance(scheduler, OneCycleAutoLR):
        scheduler.step()
        return 0.0
    begin = time.perf_counter()
    scheduler.step(loss)
    return time.perf_counter() - begin if scheduler.at_boundary else 0.0


@torch.no_grad()
def _validate(model: GPT, text: Text, replicas: Replicas, settings: DemoSettings) -> float:
    """The mean loss over windows of all the held-out text; the replicas share the work."""
    shape = {"size": 4 * settings.sequences, "context": model.config.context}
    batches = evaluation(text.validation, **shape, batches=VALIDATION_BATCHES)
    mine = [float(model(*pair)) for pair in [*batches][replicas.rank :: replicas.size]]
    rows = replicas.exchange([math.fsum(mine), len(mine)], torch.device("cpu"))
    return math.fsum(total for total, _ in rows) / math.fsum(count for _, count in rows)


def watch(settings: DemoSettings, console: Console) -> list[DemoRun]:
    """Start the workers, show their progress, return the two runs."""
    runs: list[DemoRun] = []
    show = _bars if console.is_terminal else _lines
    with show(settings, console) as update:
        for message in messages(train_both, settings.replicas, settings):
            if isinstance(message, DemoRun):
                runs.append(message)
            else:
                update(message)
    return runs


@contextmanager
def _bars(settings: DemoSettings, console: Console) -> Iterator[Callable[[Progress], None]]:
    from rich import progress as bar

    done = ("{task.description:<9}", bar.BarColumn(bar_width=None), bar.MofNCompleteColumn())
    time_left = (bar.TimeElapsedColumn(), "left", bar.TimeRemainingColumn())
    with bar.Progress(*done, "{task.fields[state]}", *time_left, console=console) as bars:
        tasks = {
            name: bars.add_task(name, total=settings.steps, start=False, state="waiting")
            for name in (PLAIN, HDET)
        }

        def update(p: Progress) -> None:
            if p.step == 1:
                bars.start_task(tasks[p.run])
            state = f"loss {p.loss:.3f}  base LR {p.base:.2e}"
            bars.update(tasks[p.run], completed=p.step, state=state)

        yield update


@contextmanager
def _lines(settings: DemoSettings, console: Console) -> Iterator[Callable[[Progress], None]]:
    every = max(1, settings.steps // 5)

    def update(p: Progress) -> None:
        if p.step % every == 0 or p.step == settings.steps:
            state = f"loss {p.loss:.3f}  base LR {p.base:.2e}"
            print(f"{p.run:<9}  step {p.step:>4}/{settings.steps}  {state}", flush=True)

    yield update


def rows(plain: DemoRun, hdet: DemoRun) -> list[tuple[str, str, str]]:
    """The table: what is compared, the plain run, HDET."""
    least = COUNTED_SHARE * max(plain.bases)
    ratios = [b / s for b, s in zip(hdet.bases, plain.bases, strict=True) if s >= least]
    total = math.fsum(hdet.bases) / math.fsum(plain.bases)
    return [
        ("training loss, last tenth (nats/byte)", f"{plain.training:.4f}", f"{hdet.training:.4f}"),
        ("validation loss (nats/byte)", f"{plain.validation:.4f}", f"{hdet.validation:.4f}"),
        ("base LR, highest", f"{max(plain.bases):.2e}", f"{max(hdet.bases):.2e}"),
        ("base LR, last step", f"{plain.bases[-1]:.2e}", f"{hdet.bases[-1]:.2e}"),
        ("LR found: base / schedule, from - to", "1", f"{min(ratios):.2f} - {max(ratios):.2f}"),
        ("LR found: sum of base / of schedule", "1", f"{total:.2f}"),
        ("seconds", f"{plain.seconds:.1f}", f"{hdet.seconds:.1f}"),
        ("converge, share of the time", "none", f"{hdet.converge_seconds / hdet.seconds:.1%}"),
    ]


def verdict(plain: DemoRun, hdet: DemoRun, settings: DemoSettings) -> str:
    """What the numbers show and what they do not."""
    change = hdet.validation / plain.validation - 1
    noise = statistics.median(statistics.stdev(r.losses) for r in hdet.rounds)
    return (
        f"HDET's validation loss is {abs(change):.1%} {'lower' if change < 0 else 'higher'}. "
        "One seed on a tiny model: a few percent either way is chance.\n"
        "The paper rule steers by the replicas' training losses, each on its own batches. Over a "
        f"round of {settings.interval} steps these differ by {noise:.3f} (standard deviation), "
        f"and the rule takes {SIGMA} for evidence: most of what it follows is which batches were "
        "drawn. It moves the base a little at a time, and does not find a learning rate that is "
        "ten times off."
    )


def show(plain: DemoRun, hdet: DemoRun, settings: DemoSettings, console: Console) -> None:
    """Print the table and the text below it."""
    from rich.table import Table

    title = f"{settings.replicas} replicas, {settings.steps} steps, seed {settings.seed}"
    table = Table(title=title)
    table.add_column("")
    table.add_column(plain.name, justify="right")
    table.add_column(hdet.name, justify="right")
    for row in rows(plain, hdet):
        table.add_row(*row)
    console.print(table)
    console.print(verdict(plain, hdet, settings), highlight=False)


def parse(argv: Sequence[str] | None) -> DemoSettings:
    """The settings that the command line asks for; ValueError if they cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m hdet_scale.demo",
        description="Train a byte-level GPT on the source of Python's standard library with 4 "
        "replicas on the CPU: plain DDP, then HDET. Ends with a table and a report.",
        epilog="example: python -m hdet_scale.demo --steps 200 --lr 0.006",
    )
    default = DemoSettings()
    add = parser.add_argument
    add("--steps", type=int, default=default.steps, help="steps of each run")
    add("--interval", type=int, default=default.interval, help="T, steps a round")
    add("--lr", type=float, default=default.max_lr, help="peak of the schedule")
    decay = "how HDET's base falls: as the schedule, or by a constant factor a round to its floor"
    add("--decay", choices=("schedule", "floor"), default=default.decay, help=decay)
    add("--seed", type=int, default=default.seed, help="of weights and batches")
    add("--out", type=Path, default=default.out, help="folder of what it writes")
    options = vars(parser.parse_args(argv))
    return DemoSettings(max_lr=options.pop("lr"), **options)


def main(argv: Sequence[str] | None = None) -> int:
    """DemoRun the demo and return its exit code: 0 done, 1 failed, 130 Ctrl-C."""
    try:
        settings = parse(argv)
    except ValueError as error:
        return _fail(error)
    try:
        _run(settings)
    except (ModuleNotFoundError, OSError, WorkerError) as error:
        return _fail(error)
    except KeyboardInterrupt:
        print("interrupted: the workers have ended", file=sys.stderr)
        return 130
    return 0


def _fail(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 1


def _run(settings: DemoSettings) -> None:
    try:
        from rich.console import Console
    except ImportError as error:
        raise ModuleNotFoundError(
            "the demo needs rich, which is not installed: pip install hdet_scale[report]"
        ) from error
    from hdet_scale.runs import report

    console = Console()
    runs = [settings.out / folder for folder in FOLDERS.values()]
    for run in runs:
        (run / FILE).unlink(missing_ok=True)
    parameters = GPTConfig.named(settings.size).parameters
    console.print(
        f"A GPT of {parameters:,} parameters on the source of Python's standard library, "
        f"{settings.replicas} replicas on the CPU: plain DDP, then HDET.",
        highlight=False,
    )
    plain, hdet = watch(settings, console)
    show(plain, hdet, settings, console)
    page = settings.out / "report.html"
    page.write_text(report.page([read(run) for run in runs]), encoding="utf-8")
    print(f"report:  {page}   open it in a browser")


if __name__ == "__main__":
    sys.exit(main())
