"""`hdet train`: a byte-level GPT on text, with replicas, on DDP, FSDP2 or DeepSpeed.

    hdet train --engine fsdp --config configs/fsdp_hdet.json --workers 4
    torchrun --nproc-per-node 8 -m hdet_scale.train --engine fsdp --config configs/fsdp_hdet.json
    deepspeed --num_accelerators 4 --module hdet_scale.train --deepspeed_config configs/ds_hdet.json

Without a launcher it starts `--workers` local ones. Batches are a pure function of (seed, step,
rank), so that a resumed run draws what the unbroken run would have drawn; checkpoints are written
right after a converge, and `--save` goes on from the newest whole one.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hdet_scale.config import HDETConfig, read
from hdet_scale.model import GPT, SIZES, GPTConfig
from hdet_scale.round import RoundRecord
from hdet_scale.text import Text, batch, standard_library

ENGINES = ("ddp", "fsdp", "deepspeed")


class Job(Protocol):
    """One engine's run: what the loop below needs of it."""

    scheduler: Any

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def total_steps(self) -> int | None:
        """Where the schedule ends."""
        ...

    def train_step(self, draw: Callable[[int, int], Any]) -> None:
        """One optimizer step; `draw(size, index)` gives the inputs and targets of a batch."""
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint; collective."""
        ...

    def resume(self, folder: Path) -> None:
        """Go on from the newest whole checkpoint, if there is one; collective."""
        ...


def run(args: argparse.Namespace) -> None:
    """Build, resume, train, make the replicas agree, save."""
    shape = GPTConfig.named(args.size, **({"context": args.context} if args.context else {}))
    text = Text.read(args.text or standard_library())
    job = _job(args, shape)
    if args.save is not None:
        job.resume(args.save)
    job.scheduler.on_round(_tell)
    steps = args.steps or job.total_steps
    if steps is None:
        raise ValueError("this schedule has no end of its own: give --steps")

    def draw(size: int, index: int) -> Any:
        return batch(
            text.train,
            size=size,
            context=shape.context,
            seed=args.seed,
            step=index,
            rank=dist.get_rank(),
        )

    saved = job.step
    while job.step < steps:
        job.train_step(draw)
        late = job.step - saved - args.every
        # At a converge; where replicas never all agree (overlap, fragments), after a round.
        due = late >= 0 and (job.scheduler.at_boundary or late >= job.scheduler.interval)
        if args.save is not None and due:
            job.save(args.save)
            saved = job.step
    job.scheduler.finalize()
    if args.save is not None and saved != job.step:
        job.save(args.save)
    if dist.get_rank() == 0:
        print(json.dumps({"done": job.step, "base": job.scheduler.get_base_lr()}), flush=True)


def _job(args: argparse.Namespace, shape: GPTConfig) -> Job:
    if args.engine == "deepspeed":
        from hdet_scale.train_deepspeed import DeepSpeedJob

        return DeepSpeedJob(args, GPT(shape, seed=args.seed))
    from hdet_scale.train_torch import Recipe, TorchJob

    values = json.loads(args.config.read_text(encoding="utf-8")) if args.config else {}
    recipe = read(Recipe, {k: v for k, v in values.items() if k != "hdet"}, str(args.config))
    hdet = HDETConfig.from_dict({**values.get("hdet", {}), **_asked(args)})
    return TorchJob(args.engine, GPT(shape, seed=args.seed), recipe, hdet)


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says over the file."""
    names = ("replicas", "shards", "gradients", "rule")
    return {n: getattr(args, n) for n in names if getattr(args, n) is not None}


def _tell(record: RoundRecord) -> None:
    """A line a round, from rank 0."""
    if dist.get_rank() == 0:
        said = {"step": record.step, "losses": record.losses, "bases": record.bases}
        print(json.dumps(said), flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; --local_rank and --deepspeed_config are the DeepSpeed launcher's."""
    parser = argparse.ArgumentParser(
        prog="hdet train",
        description="Train a byte-level GPT with replicas that explore learning rates.",
        epilog="example: hdet train --engine fsdp --config configs/fsdp_hdet.json --workers 4",
    )
    add = parser.add_argument
    add("--engine", choices=ENGINES, help="ddp; deepspeed where there is a --deepspeed_config")
    add("--config", type=Path, help="JSON of the recipe and its hdet block (ddp, fsdp)")
    add("--deepspeed_config", help="JSON of DeepSpeed with an hdet block")
    add("--workers", type=int, default=2, help="local processes, where no launcher started us")
    add("--replicas", type=int, help="over the config's")
    add("--shards", type=int, help="ranks of a replica, over the config's")
    add("--gradients", choices=("shared", "local"), help="over the config's")
    add("--rule", help="over the config's")
    add("--size", choices=list(SIZES), default="tiny", help="of the model")
    add("--context", type=int, help="tokens of a sequence; the size's own if unset")
    add("--steps", type=int, help="stop here; the schedule's total_steps if unset")
    add("--text", nargs="*", help="files; the Python standard library if unset")
    add("--save", type=Path, help="folder of checkpoints; goes on from its newest")
    add("--every", type=int, default=1000, help="steps between checkpoints, at converges")
    add("--seed", type=int, default=0, help="of the weights and the batches")
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.engine = args.engine or ("deepspeed" if args.deepspeed_config else "ddp")
    if args.engine == "deepspeed" and not args.deepspeed_config:
        parser.error("--engine deepspeed needs --deepspeed_config, e.g. configs/ds_hdet.json")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Under a launcher: one rank. Otherwise: start the workers and wait for them."""
    args = parse(argv)
    if "RANK" in os.environ:
        if args.engine != "deepspeed" and not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        run(args)
        return 0
    if args.engine == "deepspeed":
        raise SystemExit(
            "start DeepSpeed with its launcher: deepspeed --num_accelerators N --module "
            f"hdet_scale.train --deepspeed_config {args.deepspeed_config}"
        )
    from hdet_scale.workers import messages

    for _ in messages(_worker, args.workers, args):
        pass
    return 0


def _worker(send: Callable[[Any], None], args: argparse.Namespace) -> None:
    run(args)


if __name__ == "__main__":
    raise SystemExit(main())
