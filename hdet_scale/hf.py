"""Hugging Face: a callback for its Trainer, and `attach` for a loop with Accelerate.

    trainer = Trainer(..., callbacks=[HDETCallback(HDETConfig(rule="paper", interval=100))])

    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    hdet = attach(model, optimizer, scheduler, HDETConfig(...))        # the loop stays as it is

Every process is a replica (DDP). The loss is read by a forward hook on the model; the schedule
is the user's own, counted once an optimizer step.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdet_scale.config import HDETConfig
from hdet_scale.loops.counted import Counted
from hdet_scale.runs.log import RunLog
from hdet_scale.topology import is_distributed

try:
    from transformers import TrainerCallback
except ImportError as missing:
    raise ImportError(
        "hdet_scale.hf needs transformers and accelerate: pip install hdet_scale[hf]"
    ) from missing

STATE = "hdet.pt"
"""Beside the Trainer's own files in each checkpoint."""
IGNORED = -100
"""The label that transformers' losses leave out."""


class AttachedLoop(Counted):
    """Counted, with the losses that the model's forward returns."""

    def __init__(
        self, model: nn.Module, optimizer: Any, scheduler: Any, config: HDETConfig
    ) -> None:
        if config.gradients == "local":
            raise ValueError(
                'gradients="local" is not for a model that a trainer has wrapped: use "shared", or '
                "a loop of your own with OneCycleAutoLR(model=...)"
            )
        super().__init__(optimizer, scheduler, config, model)
        whole = getattr(model, "module", model)
        self._listening = whole.register_forward_hook(self._forward, with_kwargs=True)

    def _forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if not module.training or loss is None:
            return
        whole, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
        if whole is None or labels is None:
            self.add_loss(loss)
            return
        # The Trainer asks for a sum over this batch's tokens, divided by the tokens of the whole
        # step on all processes: turn it back into this replica's mean.
        mine = _targets(module, labels)
        self.add_loss(loss * whole / mine, mine)

    def detach(self) -> None:
        self._listening.remove()
        super().detach()


def attach(
    model: nn.Module, optimizer: Any, scheduler: Any, config: HDETConfig | None = None
) -> AttachedLoop:
    """Let the replicas of an Accelerate loop explore, after `accelerator.prepare`.

    Args:
        model: as `prepare` returned it; its forward returns a "loss".
        optimizer, scheduler: the pair that trains it, bare or as `prepare` returned them.
        config: what is explored, and how; rule="paper" where it is None.

    Returns:
        A handle. `.exploring` is the AutoLR: `finalize()` at the end, `on_round`, `state_dict`.
        Call `.detach()` to give everything back.

    Raises:
        ValueError, TypeError: for a pair that does not belong together, or a config that this
            integration does not support.

    Limitations:
        Shared gradients only, and no search: rule="auto" needs a loop of your own.
    """
    return AttachedLoop(model, optimizer, scheduler, config or HDETConfig(rule="paper"))


def _targets(module: nn.Module, labels: Tensor) -> Tensor:
    """Tokens that the loss counts; a causal model predicts none for the first of a row."""
    kind = f"{getattr(module, 'loss_type', '')} {type(module).__name__}"
    causal = "CausalLM" in kind or "LMHead" in kind
    return (labels[..., 1:] if causal else labels).ne(IGNORED).sum().clamp(min=1)


class HDETCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types for us
    """HDET in a Trainer: `Trainer(..., callbacks=[HDETCallback(config)])`.

    Args:
        config: what is explored, and how; rule="paper" where it is None.
        log: a folder for the run log, which `hdet report` and `hdet replay` read: a line a round,
            and a step line when the Trainer logs (`logging_steps`) or saves. None: no log.

    Limitations:
        Shared gradients only, and no search. Checkpoints hold the converged model. Let `save_steps`
        be a multiple of `interval`: elsewhere the replicas are averaged for the saving, and the run
        goes on from that.
    """

    def __init__(self, config: HDETConfig | None = None, *, log: str | Path | None = None) -> None:
        self.config = config or HDETConfig(rule="paper")
        self.folder = log
        self.attached: AttachedLoop | None = None
        self._log: RunLog | None = None
        self._bases: list[list[float]] = []

    @property
    def scheduler(self) -> Any:
        """The AutoLR while training runs."""
        return None if self.attached is None else self.attached.exploring

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach; after a resume, go on where the checkpoint was saved."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if is_distributed() and dist.get_world_size() != args.world_size:
            raise ValueError(
                f"the Trainer knows of {args.world_size} processes and torch.distributed of "
                f"{dist.get_world_size()}: its gradients would not be shared; on machines without "
                "a GPU pass TrainingArguments(use_cpu=True)"
            )
        self.attached = attach(model, optimizer, kwargs["lr_scheduler"], self.config)
        if state.global_step:
            self._resume(args, state.global_step)
        place = self.scheduler.replicas
        if self.folder is not None and place.rank == place.shard_rank == 0:
            self._log = RunLog(self.folder, step=state.global_step)
            self._log.begin(
                {
                    "engine": "transformers",
                    "size": type(model).__name__,
                    "replicas": place.size,
                    "shards": place.shard_size,
                    "interval": self.config.interval,
                }
            )
            self.scheduler.on_record(self._log.record)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The base that the step is going to use."""
        if self._log is not None:
            self._bases.append(self.scheduler.get_base_lr())

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The mean loss that the Trainer has gathered anyway, over all processes."""
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            self._write_steps(state.global_step, float(logs["loss"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer's own callback has decided by now whether it saves."""
        if control.should_save and not self.scheduler.at_boundary:
            self.scheduler.equalize()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The round beside the Trainer's files. The log knows every step that they do: a resumed
        run would leave a gap in the schedule otherwise."""
        self._write_steps(state.global_step)
        held = self.scheduler.state_dict()
        if args.should_save:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            torch.save(held, folder / STATE)
        if is_distributed():
            dist.barrier()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every replica the same model, and the trainer's scheduler its own again."""
        if self.attached is None:
            return
        self.scheduler.finalize()
        if self._log is not None:
            self._write_steps(state.global_step)
            self._log.end(state.global_step)
            self._log.close()
            self._log = None
        self.attached.detach()
        self.attached = None

    def _write_steps(self, step: int, loss: float = math.nan) -> None:
        """What is new since the last line; without a loss where the Trainer has not logged one."""
        if self._log is None or not self._bases:
            return
        names = self.scheduler.factor_names
        columns = zip(names, zip(*self._bases, strict=True), strict=True)
        self._log.step(step, loss, dict(columns))
        self._bases.clear()

    def _resume(self, args: Any, step: int) -> None:
        asked, latest = args.resume_from_checkpoint, f"checkpoint-{step}"
        path = Path(asked if isinstance(asked, str) else Path(args.output_dir, latest), STATE)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: the checkpoint was saved without HDETCallback; start from its "
                "weights instead of resuming"
            )
        self.scheduler.load_state_dict(torch.load(path, map_location="cpu"))
