"""The training loop: build a job, resume it, train, save, stop.

Every rank runs it. Ranks exchange a loss and the wish to stop only on steps that are logged or
saved, so that all of them stop after the same step and no other step waits for a collective.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet_scale.models.gpt import GPTConfig
from hdet_scale.models.text import Text, batch, evaluation, standard_library
from hdet_scale.search.decision import RateSearch
from hdet_scale.train.job import TrainingJob, build_job
from hdet_scale.train.progress import Show
from hdet_scale.train.saving import newest_checkpoint, remove_partial
from hdet_scale.train.workers import Refused
from hdet_scale.train.writer import Writer

PROBE_BATCHES = 16
STOPPED = 128 + signal.SIGTERM
"""The exit code of a run that SIGTERM ended: 143, as a shell has it."""


class Stop:
    """Whether SIGTERM has arrived. Installs the handler and unblocks the signal."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _on_sigterm(self, *_: object) -> None:
        self.requested = True


def run(args: argparse.Namespace, show: Show) -> int:
    """Train as the command line says, on this rank. The process group exists already.

    Args:
        args: what `command.parse` returns. `args.run` is set to the folder of the run.
        show: called with each message for the screen, on rank 0.

    Returns:
        0 when the run has reached its end, STOPPED when SIGTERM ended it.

    Raises:
        Refused: if the options cannot be used.
    """
    stop = Stop()
    try:
        shape, text = _shape(args), _text(args)
        job = build_job(args, shape)
        args.run = args.run or _shared_folder()
        if job.scheduler.searching or job.scheduler.config.rule == "slope":
            _probe(job, text, shape)
        elif args.find:
            raise ValueError(_no_search(job))
        if args.resume:
            found = newest_checkpoint(args.run)
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
            remove_partial(args.run)
            writer = stack.enter_context(Writer(args, job, shape, steps, show))
        return _Loop(args, job, text, shape, steps, writer, stop).run()


def _no_search(job: TrainingJob) -> str:
    rule, total = job.scheduler.config.rule, job.scheduler.config.total_steps
    if rule != "auto":
        return f"rule={rule!r} does not search: hdet find needs --rule auto"
    least = RateSearch.least_steps(job.scheduler.replicas.size)
    return f"a run of {total} steps is too short for a search: give --steps, at least {least}"


def dated_folder() -> Path:
    """The folder of a run that was given none: runs/DATE."""
    return Path("runs") / time.strftime("%Y%m%d-%H%M%S")


def _shared_folder() -> Path:
    """Rank 0's dated folder, on every rank: the clocks of machines differ."""
    name = [str(dated_folder())]
    dist.broadcast_object_list(name, src=0)
    return Path(name[0])


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


def _probe(job: TrainingJob, text: Text, shape: GPTConfig) -> None:
    """Give the scheduler held-out batches, the same on every replica, to compare replicas on."""
    held = [*evaluation(text.validation, size=8, context=shape.context, batches=PROBE_BATCHES)]

    def losses(part: int = 0, parts: int = 1) -> Iterator[Tensor]:
        return (job.loss_of(*batch) for batch in held[part::parts])

    job.scheduler.probe_with(losses)


class _Loop:
    """The steps of a run, on every rank. Only rank 0 has a writer."""

    def __init__(
        self,
        args: argparse.Namespace,
        job: TrainingJob,
        text: Text,
        shape: GPTConfig,
        steps: int,
        writer: Writer | None,
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
            # On all other steps nothing is exchanged and the host does not wait for the device.
            if due or job.step % self.args.log_every == 0 or job.step == self.steps:
                mean, stopping = self._exchange(loss)
                if self.writer is not None:
                    self.writer.step(job.step, mean)
            if self.args.find:
                if not job.scheduler.searching:
                    return self._found()
            elif due or stopping:
                self._save()
        if stopping and job.step < self.steps:
            self._event("stop", f"stopped by SIGTERM after step {job.step}: go on with --resume")
            return STOPPED
        job.scheduler.finalize()
        if self.saved != job.step:
            self._save()
        if self.writer is not None:
            self.writer.end(job.step)
        return 0

    def _found(self) -> int:
        result = self.job.scheduler.search_result
        if self.writer is not None and result is not None:
            self.writer.found(result, self.job.step)
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
        """True at the first end of a round or of a trial at or after each multiple of `--every`.

        It depends on the step alone, so that a resumed run saves at the steps of the unbroken one.
        """
        step, stride = self.job.step, int(self.job.scheduler.stride)
        return stride > 0 and step // self.args.every > (step - stride) // self.args.every

    def _exchange(self, loss: Tensor) -> tuple[float, bool]:
        """The mean loss over all ranks, and whether SIGTERM has reached one of them."""
        sums = torch.stack([loss.double(), loss.new_tensor(self.stop.requested).double()])
        dist.all_reduce(sums)
        total, requested = sums.tolist()
        return total / dist.get_world_size(), requested > 0

    def _save(self) -> None:
        if self.writer is not None:
            self.writer.log.sync()
        self.job.save(self.args.run)
        self.saved = self.job.step
        self._event("checkpoint", f"checkpoint at step {self.saved}")

    def _event(self, event: str, text: str) -> None:
        if self.writer is not None:
            self.writer.event(event, text, self.job.step)
