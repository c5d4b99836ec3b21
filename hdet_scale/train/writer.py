"""Writer: what rank 0 writes during a run, to the log and to the screen."""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import time
from typing import Any

import torch
import torch.distributed as dist

from hdet_scale.method.records import Record
from hdet_scale.models.gpt import GPTConfig
from hdet_scale.runs.boards import boards
from hdet_scale.runs.log import RunLog, plain
from hdet_scale.search.result import SearchResult
from hdet_scale.train.job import TrainingJob, hdet_overrides
from hdet_scale.train.progress import Show


class Writer:
    """Writes the log of a run and sends messages to the screen. Use it as a context manager.

    Args:
        args: what `command.parse` returns.
        job: the run; its step is where the log goes on.
        shape: of the GPT.
        steps: where the run ends.
        show: called with each message for the screen.
    """

    def __init__(
        self, args: argparse.Namespace, job: TrainingJob, shape: GPTConfig, steps: int, show: Show
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

    def __enter__(self) -> Writer:
        self._hearing.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hearing.__exit__(None, None, None)
        self.log.close()

    def before(self, step: int) -> None:
        """Remember the base that a step is going to use."""
        self.log.now = step
        self._bases.append(self.job.scheduler.get_base_lr())

    def step(self, step: int, loss: float) -> None:
        """Write a sampled step, with the bases of all steps since the last one."""
        now, (begin, first) = time.perf_counter(), self._last
        pace = (now - begin) / max(1, step - first)
        columns = zip(self.job.scheduler.factor_names, zip(*self._bases, strict=True), strict=True)
        speed = self._tokens / pace
        self.log.step(step, loss, dict(columns), tokens_per_second=round(speed, 1))
        self.show(self._message(step, loss, pace))
        self._last = (now, step)
        self._bases.clear()

    def _message(self, step: int, loss: float, pace: float) -> dict[str, Any]:
        """A step for the screen; `pace` is in seconds a step."""
        scheduler = self.job.scheduler
        base, scheduled = scheduler.get_base_lr()[0], scheduler.get_schedule()[0]
        steps_left = scheduler.steps_to_converge
        return {
            "kind": "step",
            "step": step,
            "steps": self.steps,
            "loss": loss if math.isfinite(loss) else None,
            "base": base,
            "change": base / scheduled - 1 if scheduled else 0.0,
            "tokens_per_second": self._tokens / pace,
            "converge_in": None if steps_left is None else steps_left * pace,
            "left": (self.steps - step) * pace,
        }

    def _record(self, record: Record) -> None:
        self.log.record(record)
        self.show({"kind": record.kind, **plain(record)})

    def event(self, event: str, text: str, step: int) -> None:
        """Write something that happened once: a checkpoint, a stop."""
        self.log.event(event, text, step)
        self.show({"kind": "event", "event": event, "step": step, "text": text})

    def found(self, result: SearchResult, step: int) -> None:
        """Write what a search has found, where the run ends with it."""
        self.log.end(step, base=list(result.taken))
        self.show(
            {
                "kind": "end",
                "step": step,
                "lr": list(result.taken),
                "range": list(result.range),
                "cost": result.cost,
                "verdict": result.verdict,
                "text": f"{result.told}; log in {self.log.path.parent}",
            }
        )

    def end(self, step: int) -> None:
        """Write that the run has reached its end."""
        base = self.job.scheduler.get_base_lr()
        self.log.end(step, base=base)
        text = f"done: {step} steps, log and checkpoints in {self.log.path.parent}"
        self.show({"kind": "end", "step": step, "base": base, "text": text})


def _about(args: argparse.Namespace, job: TrainingJob, shape: GPTConfig) -> dict[str, Any]:
    """The "run" of the log's first line."""
    place = job.scheduler.replicas
    return {
        "engine": args.engine,
        "size": args.size,
        "model": dataclasses.asdict(shape),
        "parameters": shape.parameters,
        "replicas": place.size,
        "shards": place.shard_size,
        "gradients": job.scheduler.config.gradients,
        "interval": job.scheduler.config.interval,
        "sequences": job.sequences * dist.get_world_size(),
        "seed": args.seed,
        "config": str(args.deepspeed_config or args.config or ""),
        "asked": hdet_overrides(args),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "device": job.device.type,
    }
