"""`hdet train`: train a GPT on text or tokens with replicas, on DDP, FSDP2 or DeepSpeed.

    hdet train --engine fsdp --config configs/fsdp_hdet.json --workers 4 --run runs/first
    torchrun --nproc-per-node 8 -m hdet_scale.train --config configs/fsdp_hdet.json --folder RUN
    deepspeed --num_accelerators 4 --module hdet_scale.train --deepspeed_config configs/ds_hdet.json
    srun python -m hdet_scale.train --config configs/fsdp_hdet.json        (with MASTER_ADDR set)

Without a launcher it starts `--workers` processes on this machine. The log and the checkpoints go
to RUN. A checkpoint is written every `--every` steps where replicas are equal, and on SIGTERM at
the current step. Batches are a pure function of (seed, step, rank): `--resume` loads the newest
complete checkpoint and gives the bits of the unbroken run.

Exit codes: 0 done, 1 failed, 2 refused, 130 Ctrl-C, 143 SIGTERM (with a checkpoint).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hdet_scale.config import HDETConfig, described
from hdet_scale.models.gpt import SIZES
from hdet_scale.models.text import TOKEN_TYPES
from hdet_scale.runs.boards import BOARDS
from hdet_scale.runs.log import FILE
from hdet_scale.train.job import ENGINES, HDET_KEYS
from hdet_scale.train.progress import shown
from hdet_scale.train.saving import newest_checkpoint
from hdet_scale.train.training_loop import dated_folder, run
from hdet_scale.train.workers import Refused, WorkerError, leave, messages

# -- the command line ---------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; an error ends the process with code 2.

    Args:
        argv: the words after `hdet train`. Default: those of this process.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    args.engine = args.engine or ("deepspeed" if args.deepspeed_config else "ddp")
    if args.engine == "deepspeed" and not (args.config or args.deepspeed_config):
        parser.error("--engine deepspeed needs --config, e.g. configs/ds_hdet.json")
    for name in ("every", "log_every", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1: {getattr(args, name)}")
    if args.replay is not None:
        args.spread = getattr(args, "spread", 0.0)
        args.rule = getattr(args, "rule", "none")
    if args.resume and args.run is None:
        parser.error("--resume needs --run, the folder of the run to go on with")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hdet train",
        usage="hdet train [options]",
        description="Train a GPT with replicas; find its learning rate in the run.",
        epilog="example: hdet train --engine fsdp --config configs/fsdp_hdet.json --workers 4",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
    )
    _add_run(parser.add_argument)
    _add_hdet(parser.add_argument)
    _add_schedule(parser.add_argument)
    _add_model(parser.add_argument)
    _add_log(parser.add_argument)
    return parser


def _add_run(add: Callable[..., Any]) -> None:
    add("--engine", choices=ENGINES, help="ddp if unset")
    add("--config", type=Path, metavar="FILE", help="JSON: recipe and hdet block, or DeepSpeed's")
    # The DeepSpeed launcher passes --deepspeed_config and --local_rank.
    add("--deepspeed_config", type=Path, help=argparse.SUPPRESS)
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    # torchrun reads --run as an abbreviation of an option of its own: --folder is for torchrun.
    add("--run", "--folder", type=Path, metavar="RUN", help="log, checkpoints; runs/DATE if unset")
    add("--resume", action="store_true", help="go on from RUN's newest complete checkpoint")
    add("--find", action="store_true", help=argparse.SUPPRESS)  # `hdet find`
    add("--workers", type=int, default=2, metavar="N", help="local processes without a launcher: 2")


def _add_hdet(add: Callable[..., Any]) -> None:
    """An option for each key of HDETConfig; it replaces the config file's."""
    texts = described(HDETConfig)
    for key in HDET_KEYS:
        option = f"--{key.replace('_', '-')}"
        # argparse expands a percent sign.
        text = texts[key].replace("%", "%%")
        add(option, type=_value, metavar="VALUE", default=argparse.SUPPRESS, help=text)


def _value(text: str) -> Any:
    """A number, null, true, false or an object as JSON has it; any other word as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _add_schedule(add: Callable[..., Any]) -> None:
    add("--lr", type=float, help="peak of the schedule, replaces the config's")
    add("--steps", type=int, metavar="N", help="length of the schedule, replaces the config's")
    add("--stop-at", type=int, metavar="N", help="end after this step of a longer schedule")
    add("--replay", type=Path, metavar="FILE", help="a schedule that hdet replay wrote")


def _add_model(add: Callable[..., Any]) -> None:
    add("--size", choices=list(SIZES), default="tiny", help="of the model: tiny")
    add("--context", type=int, metavar="N", help="tokens of a sequence")
    add("--text", nargs="*", metavar="FILE", help="bytes as tokens; Python's own source if unset")
    add("--tokens", type=Path, metavar="FILE", help="memory-mapped token file")
    types = f"{', '.join(TOKEN_TYPES)}; uint16 if unset"
    add("--token-type", choices=TOKEN_TYPES, default="uint16", metavar="TYPE", help=types)
    add("--vocabulary", type=int, metavar="N", help="number of tokens, with --tokens")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--accumulation", type=int, metavar="N", help="micro-batches of an optimizer step")


def _add_log(add: Callable[..., Any]) -> None:
    add("--every", type=int, default=1000, metavar="N", help="steps between checkpoints: 1000")
    add("--log-every", type=int, default=10, metavar="N", help="steps between log lines: 10")
    add("--board", action="append", default=[], choices=BOARDS, help="log there too")
    add("--seed", type=int, default=0, help="of the weights and the batches: 0")
    add("--json", action="store_true", help="progress as JSON lines")


# -- starting -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Under a launcher this process is one rank, and it ends here.

    Args:
        argv: the words after `hdet train`. Default: those of this process.

    Returns:
        The exit code, see the docstring of the file.
    """
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
    """Whether a launcher started this process. torchrun and DeepSpeed set RANK; srun's own
    variables are translated to it."""
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
    if (args.run / FILE).exists() or newest_checkpoint(args.run) is not None:
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
    args.run = args.run or dated_folder()
    code = 0
    with shown(args.json) as show:
        for message in messages(
            _worker, args.workers, args, backend=_backend(), forward_sigterm=True
        ):
            if isinstance(message, int):
                code = message
            else:
                show(message)
    return code


def _worker(send: Callable[[Any], None], args: argparse.Namespace) -> None:
    code = run(args, send)
    if dist.get_rank() == 0:
        send(code)


def _prepare_deepspeed() -> None:
    """Choose the CPU accelerator without a GPU: DeepSpeed detects one when it is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
