"""`hdet train`: a GPT on text or tokens, with replicas, on DDP, FSDP2 or DeepSpeed.

    hdet train --engine fsdp --config configs/fsdp_hdet.json --workers 4 --run runs/first
    torchrun --nproc-per-node 8 -m hdet_scale.train --config configs/fsdp_hdet.json --folder RUN
    deepspeed --num_accelerators 4 --module hdet_scale.train --deepspeed_config configs/ds_hdet.json
    srun python -m hdet_scale.train --config configs/fsdp_hdet.json        (with MASTER_ADDR set)

Without a launcher it starts `--workers` local ones. RUN gets the log and the checkpoints: right
after a converge every `--every` steps, and on SIGTERM, where it stands. Batches are a pure
function of (seed, step, rank): `--resume` goes on from the newest whole checkpoint with the bits
of the unbroken run. Exit codes: 0 done, 1 failed, 2 refused, 130 Ctrl-C, 143 SIGTERM, saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.config import HDETConfig, read
from hdet_scale.method.records import Record
from hdet_scale.models.gpt import GPT, SIZES, GPTConfig
from hdet_scale.models.text import TOKEN_TYPES, Text, batch, evaluation, standard_library
from hdet_scale.phases.assembly import GUIDED
from hdet_scale.runs.boards import BOARDS, boards
from hdet_scale.runs.log import FILE, RunLog, plain
from hdet_scale.train import saving as checkpoints
from hdet_scale.train.progress import Show, shown
from hdet_scale.train.workers import Refused, WorkerError, leave, messages

ENGINES = ("ddp", "fsdp", "deepspeed")
PROBE_BATCHES = 16
STOPPED = 128 + signal.SIGTERM
"""The exit code of a run that SIGTERM ended: 143, as a shell has it."""


class Job(Protocol):
    """One engine's run: what the loop below needs of it."""

    scheduler: Any
    device: torch.device

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def total_steps(self) -> int | None:
        """Where the schedule ends."""
        ...

    @property
    def sequences(self) -> int:
        """That a rank draws for an optimizer step."""
        ...

    def train_step(self, draw: Callable[[int, int], Any]) -> Tensor:
        """One optimizer step; `draw(size, index)` gives the inputs and targets of a batch. The
        mean loss of this rank's batches, on the device."""
        ...

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of this replica's weights on a batch, for a probe."""
        ...

    def save(self, run: Path) -> None:
        """Write a checkpoint; collective. In the middle of a round each replica its own."""
        ...

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint; collective."""
        ...


class Stop:
    """Whether SIGTERM has come; the loop looks at it where all ranks can agree to stop."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _hear(self, *_: object) -> None:
        self.asked = True


def run(args: argparse.Namespace, show: Show) -> int:
    """Build, resume, train, make the replicas agree, save; the exit code."""
    stop = Stop()
    try:
        shape, text = _shape(args), _text(args)
        job = _job(args, shape)
        args.run = args.run or _shared_name()
        if job.scheduler.searching or job.scheduler._round.config.rule in GUIDED:
            _probe(job, text, shape)
        if args.resume:
            found = checkpoints.newest(args.run)
            if found is not None:
                job.resume(found)
        steps = args.stop_at or args.steps or job.total_steps
        if steps is None:
            raise ValueError("this schedule has no end of its own: give --steps")
    except (ValueError, TypeError, ImportError, FileNotFoundError) as error:
        raise Refused(str(error)) from error
    with ExitStack() as stack:
        writer = None
        if dist.get_rank() == 0:
            checkpoints.clear(args.run)
            writer = stack.enter_context(_Writer(args, job, shape, steps, show))
        return _Loop(args, job, text, shape, steps, writer, stop).run()


class _Loop:
    """The steps of a run, on every rank."""

    def __init__(
        self,
        args: argparse.Namespace,
        job: Job,
        text: Text,
        shape: GPTConfig,
        steps: int,
        writer: _Writer | None,
        stop: Stop,
    ) -> None:
        self.args, self.job, self.steps = args, job, steps
        self.text, self.shape = text, shape
        self.writer, self.stop = writer, stop
        self.saved = job.step

    def run(self) -> int:
        job, stopping = self.job, False
        while job.step < self.steps and not stopping:
            if self.writer is not None:
                self.writer.before(job.step + 1)
            loss = job.train_step(self._draw)
            due = self._save_due()
            # Nothing is exchanged and nobody waits on the other steps.
            if due or job.step % self.args.log_every == 0 or job.step == self.steps:
                mean, stopping = self._agree(loss)
                if self.writer is not None:
                    self.writer.step(job.step, mean)
            if due or stopping:
                self._save()
        if stopping and job.step < self.steps:
            self._tell("stop", f"stopped by SIGTERM after step {job.step}: go on with --resume")
            return STOPPED
        job.scheduler.finalize()
        if self.saved != job.step:
            self._save()
        if self.writer is not None:
            self.writer.end(job.step)
        return 0

    def _draw(self, size: int, index: int) -> Any:
        return batch(
            self.text.train,
            size=size,
            context=self.shape.context,
            seed=self.args.seed,
            step=index,
            rank=dist.get_rank(),
        )

    def _save_due(self) -> bool:
        """At the first end of a round or of a heat at or after each multiple of `--every`: a
        function of the step alone, so that a resumed run saves where the unbroken one does."""
        step, stride = self.job.step, int(self.job.scheduler.stride)
        return stride > 0 and step // self.args.every > (step - stride) // self.args.every

    def _agree(self, loss: Tensor) -> tuple[float, bool]:
        """The mean loss over all ranks, and whether one of them was asked to stop."""
        told = torch.stack([loss.double(), loss.new_tensor(self.stop.asked).double()])
        dist.all_reduce(told)
        total, asked = told.tolist()
        return total / dist.get_world_size(), asked > 0

    def _save(self) -> None:
        if self.writer is not None:
            self.writer.log.sync()
        self.job.save(self.args.run)
        self.saved = self.job.step
        self._tell("checkpoint", f"checkpoint at step {self.saved}")

    def _tell(self, event: str, text: str) -> None:
        if self.writer is not None:
            self.writer.event(event, text, self.job.step)


class _Writer:
    """What rank 0 writes: the log, and messages to the screen."""

    def __init__(
        self, args: argparse.Namespace, job: Job, shape: GPTConfig, steps: int, show: Show
    ) -> None:
        self.job, self.steps, self.show = job, steps, show
        about = _about(args, job, shape)
        made = boards(args.board, args.run, step=job.step, run=about)
        self.log = RunLog(args.run, step=job.step, boards=made)
        self.log.begin(about)
        self._hearing = self.log.hearing()
        self._tokens = job.sequences * shape.context * dist.get_world_size()
        self._bases: list[list[float]] = []
        self._last = (time.perf_counter(), job.step)
        job.scheduler.on_record(self._record)

    def __enter__(self) -> _Writer:
        self._hearing.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hearing.__exit__(None, None, None)
        self.log.close()

    def before(self, step: int) -> None:
        """The base that `step` is going to use."""
        self.log.now = step
        self._bases.append(self.job.scheduler.get_base_lr())

    def step(self, step: int, loss: float) -> None:
        """A sampled step."""
        now, scheduler = time.perf_counter(), self.job.scheduler
        base, scheduled = scheduler.get_base_lr()[0], scheduler._schedule[0]
        begin, first = self._last
        pace = (now - begin) / max(1, step - first)
        names = [f.name for f in scheduler._round.factors]
        columns = zip(names, zip(*self._bases, strict=True), strict=True)
        speed = self._tokens / pace
        self.log.step(step, loss, dict(columns), tokens_per_second=round(speed, 1))
        steps_left, explores = -step % scheduler.interval, scheduler._round.diverges
        self.show(
            {
                "kind": "step",
                "step": step,
                "steps": self.steps,
                "loss": loss if math.isfinite(loss) else None,
                "base": base,
                "change": base / scheduled - 1 if scheduled else 0.0,
                "tokens_per_second": speed,
                "converge_in": steps_left * pace if explores else None,
                "left": (self.steps - step) * pace,
            }
        )
        self._last = (now, step)
        self._bases.clear()

    def _record(self, record: Record) -> None:
        self.log.record(record)
        self.show({"kind": record.kind, **plain(record)})

    def event(self, event: str, text: str, step: int) -> None:
        self.log.event(event, text, step)
        self.show({"kind": "event", "event": event, "step": step, "text": text})

    def end(self, step: int) -> None:
        base = self.job.scheduler.get_base_lr()
        self.log.end(step, base=base)
        text = f"done: {step} steps, log and checkpoints in {self.log.path.parent}"
        self.show({"kind": "end", "step": step, "base": base, "text": text})


# -- what the command line asks for -------------------------------------------------------------


def _shape(args: argparse.Namespace) -> GPTConfig:
    changes = {"context": args.context, "vocabulary": args.vocabulary}
    return GPTConfig.named(args.size, **{k: v for k, v in changes.items() if v is not None})


def _text(args: argparse.Namespace) -> Text:
    if args.tokens is None:
        return Text.read(args.text or standard_library())
    if args.text:
        raise ValueError("--text and --tokens: give one of them")
    if args.vocabulary is None:
        raise ValueError(f"--tokens {args.tokens} needs --vocabulary, the number of its tokens")
    return Text.mapped(args.tokens, args.token_type)


def _job(args: argparse.Namespace, shape: GPTConfig) -> Job:
    path = args.deepspeed_config or args.config
    values = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    if args.engine == "deepspeed":
        from hdet_scale.train.deepspeed_job import DeepSpeedJob, with_asked

        made = with_asked(values, _asked(args), args)
        made["hdet"] = _with_rule(made["hdet"])
        return DeepSpeedJob(made, GPT(shape, seed=args.seed))
    from hdet_scale.train.torch_job import Recipe, TorchJob

    plain_recipe = read(Recipe, {k: v for k, v in values.items() if k != "hdet"}, str(args.config))
    recipe = _recipe(args, plain_recipe)
    asked = _with_rule({**values.get("hdet", {}), **_asked(args)})
    if asked.get("rule") in ("race", "auto", *GUIDED):  # a search takes a share of the run
        asked.setdefault("total_steps", recipe.schedule.get("total_steps"))
    hdet = HDETConfig.from_dict(asked)
    return TorchJob(args.engine, GPT(shape, seed=args.seed), recipe, hdet)


def _recipe(args: argparse.Namespace, recipe: Any) -> Any:
    """The recipe with what the command line says over it."""
    schedule = dict(recipe.schedule)
    schedule |= {} if args.steps is None else {"total_steps": args.steps}
    schedule |= {} if args.lr is None else {"max_lr": args.lr}
    if args.replay is not None:
        schedule = {"replay": str(args.replay)}
    changes: dict[str, Any] = {"schedule": schedule}
    changes |= {"dtype": "bf16"} if args.bf16 else {}
    changes |= {} if args.accumulation is None else {"accumulation": args.accumulation}
    return dataclasses.replace(recipe, **changes)


def _probe(job: Job, text: Text, shape: GPTConfig) -> None:
    """Held-out batches, the same on every replica, for a rule that compares them on such."""
    held = [*evaluation(text.validation, size=8, context=shape.context, batches=PROBE_BATCHES)]

    def losses(part: int = 0, parts: int = 1) -> Iterator[Tensor]:
        return (job.loss_of(*batch) for batch in held[part::parts])

    job.scheduler.probe_with(losses)


def _with_rule(hdet: dict[str, Any]) -> dict[str, Any]:
    """A rule where nobody named one: "auto", unless there is a spread to explore with."""
    return hdet if {"rule", "spread"} & hdet.keys() else {**hdet, "rule": "auto"}


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says over the file's hdet block."""
    names = ("replicas", "shards", "gradients", "rule", "spread", "interval")
    return {n: getattr(args, n) for n in names if getattr(args, n) is not None}


def _about(args: argparse.Namespace, job: Job, shape: GPTConfig) -> dict[str, Any]:
    """The "run" of the log's first line."""
    place = job.scheduler.replicas
    return {
        "engine": args.engine,
        "size": args.size,
        "model": dataclasses.asdict(shape),
        "parameters": shape.parameters,
        "replicas": place.size,
        "shards": place.shard_size,
        "gradients": job.scheduler.gradients_of_the_run,
        "interval": job.scheduler.interval,
        "sequences": job.sequences * dist.get_world_size(),
        "seed": args.seed,
        "config": str(args.deepspeed_config or args.config or ""),
        "asked": _asked(args),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "device": job.device.type,
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; --local_rank and --deepspeed_config are the DeepSpeed launcher's."""
    parser = argparse.ArgumentParser(
        prog="hdet train",
        usage="hdet train [options]",
        description="Train a GPT with replicas that explore learning rates.",
        epilog="example: hdet train --engine fsdp --config configs/fsdp_hdet.json --workers 4",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
    )
    add = parser.add_argument
    add("--engine", choices=ENGINES, help="ddp if unset")
    add("--config", type=Path, metavar="FILE", help="JSON: recipe and hdet block, or DeepSpeed's")
    add("--deepspeed_config", type=Path, help=argparse.SUPPRESS)
    # torchrun takes --run for the beginning of an option of its own: under it, --folder.
    add("--run", "--folder", type=Path, metavar="RUN", help="log, checkpoints; runs/DATE if unset")
    add("--resume", action="store_true", help="go on from RUN's newest whole checkpoint")
    add("--workers", type=int, default=2, metavar="N", help="local processes without a launcher: 2")
    add("--replicas", type=int, metavar="N", help="over the config's, as the next five")
    add("--shards", type=int, metavar="N", help="ranks of one replica")
    add("--gradients", choices=("shared", "local"), help="cross replicas each step, or never")
    add("--rule", help="what steers: auto, race, paper, slope, climb, none")
    add("--spread", type=float, metavar="A", help="0 is plain training")
    add("--interval", type=int, metavar="T", help="steps of a round")
    add("--lr", type=float, help="peak of the schedule, over the config's")
    add("--steps", type=int, metavar="N", help="length of the schedule, over the config's")
    add("--stop-at", type=int, metavar="N", help="end here, though the schedule is longer")
    add("--replay", type=Path, metavar="FILE", help="a schedule that hdet replay wrote")
    add("--size", choices=list(SIZES), default="tiny", help="of the model: tiny")
    add("--context", type=int, metavar="N", help="tokens of a sequence")
    add("--text", nargs="*", metavar="FILE", help="bytes as tokens; Python's own source if unset")
    add("--tokens", type=Path, metavar="FILE", help="memory-mapped token file")
    add("--token-type", choices=TOKEN_TYPES, default="uint16", help="of --tokens: uint16")
    add("--vocabulary", type=int, metavar="N", help="number of tokens, with --tokens")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--accumulation", type=int, metavar="N", help="micro-batches of an optimizer step")
    add("--every", type=int, default=1000, metavar="N", help="steps between checkpoints: 1000")
    add("--log-every", type=int, default=10, metavar="N", help="steps between log lines: 10")
    add("--board", action="append", default=[], choices=BOARDS, help="log there too")
    add("--seed", type=int, default=0, help="of the weights and the batches: 0")
    add("--json", action="store_true", help="progress as JSON lines")
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.engine = args.engine or ("deepspeed" if args.deepspeed_config else "ddp")
    if args.engine == "deepspeed" and not (args.config or args.deepspeed_config):
        parser.error("--engine deepspeed needs --config, e.g. configs/ds_hdet.json")
    for name in ("every", "log_every", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1: {getattr(args, name)}")
    if args.replay is not None:
        args.spread = 0.0 if args.spread is None else args.spread
        args.rule = args.rule or "none"
    if args.resume and args.run is None:
        parser.error("--resume needs --run, the folder of the run to go on with")
    return args


# -- starting -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Under a launcher: one rank, and the end of its process. Otherwise: start the workers and wait
    for them."""
    args = parse(argv)
    try:
        launched = _launched()
        if not launched or os.environ["RANK"] == "0":
            _refuse_to_overwrite(args)
        return _as_rank(args) if launched else _with_workers(args)
    except (Refused, WorkerError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"hdet train: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1
    except KeyboardInterrupt:
        print("interrupted: the workers have ended", file=sys.stderr)
        return 130


def _launched() -> bool:
    """torchrun and DeepSpeed set RANK; srun's own variables are translated to it."""
    env = os.environ
    if "RANK" in env:
        return True
    if "SLURM_STEP_ID" not in env or int(env.get("SLURM_NTASKS", "1")) == 1:
        return False
    if "MASTER_ADDR" not in env:
        raise Refused(
            "started by srun without MASTER_ADDR: export MASTER_ADDR=$(scontrol show hostnames "
            "$SLURM_JOB_NODELIST | head -n 1) first"
        )
    env.setdefault("MASTER_PORT", "29500")
    env |= {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_NTASKS"]}
    env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
    return True


def _refuse_to_overwrite(args: argparse.Namespace) -> None:
    if args.run is None or args.resume:
        return
    if (args.run / FILE).exists() or checkpoints.newest(args.run) is not None:
        raise Refused(f"{args.run} holds a run already: add --resume, or choose another --run")


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _as_rank(args: argparse.Namespace) -> NoReturn:
    if args.engine == "deepspeed":
        _prepare_deepspeed()
    elif not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group(_backend())
    with shown(args.json) as show:
        code = run(args, show)
    dist.destroy_process_group()
    leave(code)


def _with_workers(args: argparse.Namespace) -> int:
    if args.engine == "deepspeed":
        _prepare_deepspeed()
    args.run = args.run or _dated()
    code = 0
    with shown(args.json) as show:
        for message in messages(_worker, args.workers, args, backend=_backend(), hand_on_term=True):
            if isinstance(message, int):
                code = message
            else:
                show(message)
    return code


def _worker(send: Callable[[Any], None], args: argparse.Namespace) -> None:
    code = run(args, send)
    if dist.get_rank() == 0:
        send(code)


def _dated() -> Path:
    return Path("runs") / time.strftime("%Y%m%d-%H%M%S")


def _shared_name() -> Path:
    """Rank 0's: the clocks of machines differ."""
    name = [str(_dated())]
    dist.broadcast_object_list(name, src=0)
    return Path(name[0])


def _prepare_deepspeed() -> None:
    """DeepSpeed looks for an accelerator when it is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
