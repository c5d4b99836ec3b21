"""Train a byte-level GPT with DeepSpeed and replicas; the program that the launcher starts:

deepspeed --num_accelerators 4 --module hdet_scale.train --deepspeed_config configs/ds_hdet.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hdet_scale.model import GPT, SIZES, GPTConfig
from hdet_scale.text import Text, batch, standard_library


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; --local_rank is the launcher's."""
    parser = argparse.ArgumentParser(prog="hdet_scale.train", description=__doc__)
    parser.add_argument("--engine", choices=["deepspeed"], default="deepspeed")
    parser.add_argument("--deepspeed_config", required=True, help="JSON with an hdet block")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="of the model")
    parser.add_argument("--context", type=int, help="tokens of a sequence; the size's own if unset")
    parser.add_argument("--steps", type=int, help="stop here; the schedule's total_steps if unset")
    parser.add_argument("--text", nargs="*", help="files; the Python standard library if unset")
    parser.add_argument("--save", type=Path, help="folder of checkpoints; resumes from its latest")
    parser.add_argument("--every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Build, resume where there is something to resume, train, make the replicas agree, save."""
    from hdet_scale import deepspeed

    args = parse(argv)
    shape = GPTConfig.named(args.size, **({"context": args.context} if args.context else {}))
    text = Text.read(args.text or standard_library())
    model = GPT(shape, seed=args.seed)
    engine, _, _, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters()
    )
    if args.save is not None and (args.save / "latest").is_file():
        engine.load_checkpoint(str(args.save))
    scheduler.on_round(_tell)
    steps = args.steps or getattr(scheduler, "total_steps", None)
    if steps is None:
        raise ValueError("this schedule has no end of its own: give --steps")
    while engine.global_steps < steps:
        _step(engine, text, shape.context, args.seed)
        if args.save is not None and engine.global_steps % args.every == 0:
            engine.save_checkpoint(str(args.save))
    scheduler.finalize()
    if args.save is not None:
        engine.save_checkpoint(str(args.save))
    if dist.get_rank() == 0:
        print(json.dumps({"done": engine.global_steps, "base": scheduler.get_base_lr()}))


def _step(engine: Any, text: Text, context: int, seed: int) -> None:
    """One optimizer step: every rank of the world draws batches of its own."""
    for part in range(engine.gradient_accumulation_steps()):
        inputs, targets = batch(
            text.train,
            size=engine.train_micro_batch_size_per_gpu(),
            context=context,
            seed=seed,
            step=engine.global_steps * engine.gradient_accumulation_steps() + part,
            rank=dist.get_rank(),
        )
        loss = engine(inputs.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()


def _tell(record: Any) -> None:
    """A line a round, from rank 0."""
    if dist.get_rank() == 0:
        said = {"step": record.step, "losses": record.losses, "bases": record.bases}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
