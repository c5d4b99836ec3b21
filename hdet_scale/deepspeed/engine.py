"""HDETEngine: DeepSpeed's engine with replicas.

backward(loss)     the loss passes here: it is kept until the step
step()             at the accumulation boundary: shared gradients are averaged across
                   replicas, DeepSpeed takes its norm, clips and steps, and the scheduler is
                   told; it counts on every replica at every such step, also where fp16
                   overflowed and DeepSpeed skipped
save_checkpoint    see hdet_scale.deepspeed.checkpoints
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hdet_scale.config import HDETConfig
from hdet_scale.deepspeed import checkpoints as checkpoint
from hdet_scale.deepspeed.partitions import ZeroEngine, check_attributes
from hdet_scale.engines.gradient_mean import GradientMean
from hdet_scale.method.records import Record, RoundRecord
from hdet_scale.phases.phased import PhasedScheduler
from hdet_scale.runs.boards import record_scalars
from hdet_scale.topology import Replicas

NEEDS = (
    "_take_model_step",
    "_get_ckpt_name",
    "_get_rank_zero_ckpt_name",
    "_step_applied",
    "_config",
    "basic_optimizer",
    "save_non_zero_checkpoint",
    "save_zero_checkpoint",
    "seq_data_parallel_group",
    "tput_timer",
)


class HDETEngine(DeepSpeedEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """The engine that `hdet_scale.deepspeed.initialize` returns."""

    replicas: Replicas
    partitions: ZeroEngine
    lr_scheduler: PhasedScheduler
    save_non_zero_checkpoint: bool
    save_zero_checkpoint: bool

    @classmethod
    def adopt(
        cls, engine: Any, scheduler: PhasedScheduler, replicas: Replicas, config: HDETConfig
    ) -> HDETEngine:
        """Turn DeepSpeed's engine into one with replicas, as FSDP2 does with a module."""
        check_attributes(engine, NEEDS)
        if type(engine) is not DeepSpeedEngine:
            raise TypeError(
                f"DeepSpeed made a {type(engine).__name__}: only its plain engine can have "
                "replicas; leave hybrid engine and pipelines out"
            )
        engine.__class__ = cls
        engine._adopted(scheduler, replicas, config)
        return engine  # type: ignore[no-any-return]

    def _adopted(self, scheduler: PhasedScheduler, replicas: Replicas, config: HDETConfig) -> None:
        self.lr_scheduler, self.replicas = scheduler, replicas
        engine = scheduler.engine
        if not isinstance(engine, ZeroEngine):
            raise TypeError(f"the scheduler trains on {type(engine).__name__}, not on DeepSpeed")
        self.partitions = engine
        self._mean = GradientMean(config.converge.bucket_bytes)
        self._loss: Tensor | None = None
        self._losses = 0
        self._place: str | None = None
        self._writes = (self.save_non_zero_checkpoint, self.save_zero_checkpoint)
        self._config.train_batch_size *= replicas.size
        self.tput_timer.batch_size = self._config.train_batch_size
        scheduler.on_round(self._report_round)
        scheduler.on_record(self._report_search)

    # -- the loss and the step ------------------------------------------------------------------

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """DeepSpeed's backward; the loss is kept for the scheduler."""
        result = super().backward(loss, retain_graph, scale_wrt_gas)
        # A loss that the user has divided for accumulation counts as often as there are parts.
        parts = 1 if scale_wrt_gas else self.gradient_accumulation_steps()
        whole = loss.detach().float() * parts
        self._loss = whole if self._loss is None else self._loss + whole
        self._losses += 1
        return result

    def _take_model_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        self.lr_scheduler.before_step()
        sharers = self.partitions.sharers
        if sharers.size > 1:
            self._mean(self.partitions.gradients(), sharers)
            self.partitions.gradients_changed()
        # DeepSpeed must not step the scheduler: it would not on an overflow, and replicas that
        # count differently enter different collectives; and it answers any TypeError of a step
        # with a second one that passes the batch size.
        scheduler, self.lr_scheduler = self.lr_scheduler, None  # type: ignore[assignment]
        try:
            super()._take_model_step(None)
        finally:
            self.lr_scheduler = scheduler
        told = {"loss": self._mean_loss(), **(lr_kwargs or {})}
        if not self._step_applied:
            told["loss"] = None  # what overflowed says nothing about the learning rate
        self.lr_scheduler.step(**told)  # type: ignore[attr-defined]

    def _mean_loss(self) -> Tensor | None:
        """The mean over the micro-batches of this step."""
        total, count = self._loss, self._losses
        self._loss, self._losses = None, 0
        return None if total is None else total / count

    # -- batches --------------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """The batch of all replicas, by changing the accumulation."""
        ranks = self.replicas.size * self.replicas.shard_size
        if train_batch_size % (self.train_micro_batch_size_per_gpu() * ranks):
            raise ValueError(
                f"a batch of {train_batch_size} cannot be made of micro-batches of "
                f"{self.train_micro_batch_size_per_gpu()} on {ranks} ranks: give a multiple of "
                f"{self.train_micro_batch_size_per_gpu() * ranks}"
            )
        super().set_train_batch_size(train_batch_size // self.replicas.size)
        self._config.train_batch_size = train_batch_size

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """The micro-batch of each rank; the whole batch follows."""
        super().set_train_micro_batch_size(micro_batch_size)
        self._config.train_batch_size *= self.replicas.size

    def deepspeed_io(
        self, dataset: Dataset[Any], *args: Any, data_sampler: Any = None, **kwargs: Any
    ) -> Any:
        """DeepSpeed's loader; every rank of the world gets its own samples, replicas too."""
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            world = (dist.get_world_size(), dist.get_rank())
            training = kwargs.get("route", "train") == "train"
            data_sampler = DistributedSampler(dataset, *world, shuffle=training)
        return super().deepspeed_io(dataset, *args, data_sampler=data_sampler, **kwargs)

    # -- checkpoints ----------------------------------------------------------------------------

    def _get_ckpt_name(self, checkpoints_path: str, tag: str, *args: Any, **kwargs: Any) -> str:
        tag = tag if self._place is None else os.path.join(str(tag), self._place)
        return str(super()._get_ckpt_name(checkpoints_path, tag, *args, **kwargs))

    def _get_rank_zero_ckpt_name(
        self, checkpoints_path: str, tag: str, *args: Any, **kw: Any
    ) -> str:
        tag = tag if self._place is None else os.path.join(str(tag), self._place)
        return str(super()._get_rank_zero_ckpt_name(checkpoints_path, tag, *args, **kw))

    def _layout(self, diverged: bool = False) -> checkpoint.Layout:
        return checkpoint.Layout(
            replicas=self.replicas.size,
            shards=self.replicas.shard_size,
            stage=int(self.zero_optimization_stage()),
            diverged=diverged,
            step=self.global_steps,
        )

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's, on every rank; no two replicas write the same file."""
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        folder = Path(save_dir, tag)
        diverged = self._diverged()
        if self.global_rank == 0:
            self._layout(diverged).write(folder)
        state = client_state or {}
        self.lr_scheduler.save_snapshot(folder)
        if diverged:
            mine = checkpoint.place(self.replicas.rank)
            checkpoint.save_rank(folder / mine, self.lr_scheduler)
            self._save(save_dir, tag, state, False, exclude_frozen_parameters, mine)
            with checkpoint.converged(self.partitions, self.replicas):
                self._save(save_dir, tag, state, save_latest, exclude_frozen_parameters, None)
        else:
            self._save(save_dir, tag, state, save_latest, exclude_frozen_parameters, None)
        return True

    def _diverged(self) -> bool:
        """Whether a replica needs a place of its own; an averaging under way is folded in, and a
        trial of a search starts again."""
        config = self.lr_scheduler.config
        if self.lr_scheduler.searching:
            self.lr_scheduler.finalize()
        scale = self.fp16_enabled() and config.gradients == "local"
        buffers = not config.converge.buffers and any(
            b.is_floating_point() for b in self.module.buffers()
        )
        return self.lr_scheduler.replicas_differ(own=scale or buffers)

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """DeepSpeed's, of the converged model."""
        if not self._diverged():
            return bool(super().save_16bit_model(*args, **kwargs))
        with checkpoint.converged(self.partitions, self.replicas):
            return bool(super().save_16bit_model(*args, **kwargs))

    def _save(
        self,
        save_dir: str,
        tag: str,
        state: dict[str, Any],
        latest: bool,
        exclude: bool,
        place: str | None,
    ) -> None:
        """DeepSpeed's save: into a replica's place by all, or into its own layout by replica 0."""
        writes = place is not None or self.replicas.rank == 0
        self.save_non_zero_checkpoint = writes and self._writes[0]
        self.save_zero_checkpoint = writes and self._writes[1]
        self._place = place
        try:
            super().save_checkpoint(save_dir, tag, state, latest, exclude)
        finally:
            self._place = None
            self.save_non_zero_checkpoint, self.save_zero_checkpoint = self._writes

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """As DeepSpeed's, on every rank; a replica that had its own place continues from it."""
        latest = Path(load_dir, "latest")
        if tag is None and latest.is_file():
            tag = latest.read_text(encoding="utf-8").strip()
        folder = Path(load_dir, str(tag))
        found = checkpoint.Layout.read(folder)
        resume = load_optimizer_states and load_lr_scheduler_states and not load_module_only
        if found is not None:
            found.check(self._layout(), folder, resume=resume)
        own = found is not None and found.diverged and resume
        self._place = checkpoint.place(self.replicas.rank) if own else None
        try:
            result = super().load_checkpoint(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
        finally:
            self._place = None
        if own:
            place = checkpoint.place(self.replicas.rank)
            checkpoint.load_rank(folder / place, self.lr_scheduler)
        if resume:
            self.lr_scheduler.load_snapshot(folder)
        self.lr_scheduler.rewrite()  # the optimizer's state brought another replica's rate
        return result  # type: ignore[no-any-return]

    # -- beginning and end ----------------------------------------------------------------------

    @torch.no_grad()
    def begin_equal(self) -> None:
        """Give every replica the parameters and buffers of replica 0, as DeepSpeed does within
        its data-parallel group."""
        if self.replicas.size == 1:
            return
        group = self.replicas.connected()
        first = dist.get_global_rank(group, 0)
        frozen = [
            getattr(p, "ds_tensor", p) for p in self.module.parameters() if not p.requires_grad
        ]
        for t in [*self.partitions.masters(), *frozen, *self.module.buffers()]:
            raw = t.data.contiguous().view(-1).view(torch.uint8)  # gloo does not know every dtype
            dist.broadcast(raw, src=first, group=group)
            t.data.copy_(raw.view(t.dtype).view(t.shape))
        self.partitions.refresh()

    def _report_round(self, record: RoundRecord) -> None:
        """Base, each replica's rate and loss, the rule's velocity, and what the converge cost,
        to the monitors that the config names."""
        if not self.monitor.enabled or self.global_rank != 0:
            return
        rows = {f"base/{name}": value for name, value in record.bases.items()}
        rows |= {f"velocity/{name}": value for name, value in record.velocities.items()}
        for name, values in record.values.items():
            rows |= {f"{name}/replica{r}": value for r, value in enumerate(values)}
        rows |= {f"loss/replica{r}": value for r, value in enumerate(record.losses)}
        rows |= {"converge/seconds": record.seconds, "converge/bytes": float(record.wire_bytes)}
        self.monitor.write_events(
            [(f"Train/HDET/{name}", value, self.global_samples) for name, value in rows.items()]
        )

    def _report_search(self, record: Record) -> None:
        """Trials, the end of a search and evaluations, to the same monitors."""
        if isinstance(record, RoundRecord) or not self.monitor.enabled or self.global_rank != 0:
            return
        rows = {k.removeprefix("hdet/"): v for k, v in record_scalars(record).items()}
        self.monitor.write_events(
            [(f"Train/HDET/{name}", value, self.global_samples) for name, value in rows.items()]
        )
