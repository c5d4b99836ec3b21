"""What the fused optimizers have in common: collect and check everything, then write.

On a GPU one Triton launch updates all tensors of all groups that share a dtype combination
(`hdet_scale.kernels`). On a CPU torch's own fused kernels do, through torch's functional
optimizers: they are near the memory limit, and the result is torch's to the last bit. A GPU
without Triton falls back to them as well, and says so once.
"""

import functools
import importlib.util
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from hdet_scale.kernels import scalars
from hdet_scale.kernels.advance import CORRECTIONS, advance
from hdet_scale.kernels.launch import check_device, constant, device_block_size
from hdet_scale.kernels.rounding import tensor_key
from hdet_scale.kernels.table import Combination, Row, TensorTable, combinations
from hdet_scale.optim.batches import (
    Batch,
    Group,
    check_one_device,
    fit,
    matching,
    unfit_grads,
)
from hdet_scale.optim.rates import check_multiplier
from hdet_scale.optim.shards import is_dense, is_sharded, local_shard, shard_offset

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

Number = float | torch.Tensor

_log = logging.getLogger(__name__)

# What a group says about how this optimizer runs, and not about what it has learned: kept when a
# state is loaded.
_OWN = ("lr_multiplier", "master_weights", "stochastic_rounding", "moment_dtype", "seed")


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)


def _choose_backend(wanted: str | None, device: torch.device) -> str:
    """Triton on a GPU, torch's fused kernels on a CPU; what the user asked for, where it can be."""
    if wanted == "triton":
        check_device(device)
    if wanted is not None:
        return wanted
    if device.type == "cpu":
        return "torch"
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return "triton"
    _say_once(
        f"no Triton kernels on {device.type}: stepping with torch's fused kernels instead, one "
        "launch a group and dtype. `pip install hdet_scale[triton]` on a CUDA or ROCm device."
    )
    return "torch"


@dataclass(slots=True)
class _Launches:
    """What the kernels need for all batches of one device."""

    batches: list[Batch]
    table: TensorTable
    scalars: scalars.ScalarTable
    corrections: torch.Tensor


class FusedOptimizer(Optimizer):
    """What the three have in common: collect and check everything, then write."""

    _slot_names: ClassVar[tuple[str, ...]] = ()
    _counts_steps: ClassVar[bool] = True
    """Whether torch's functional step needs a step count in the state."""
    _kernel: ClassVar[Any]
    _step_supports_amp_scaling = True
    """GradScaler then hands over its scale and found_inf, and makes no pass of its own."""

    def __init__(
        self,
        params: ParamsT,
        defaults: Group,
        *,
        lr_multiplier: Number,
        master_weights: bool,
        stochastic_rounding: bool,
        moment_dtype: torch.dtype | None,
        seed: int,
        backend: str | None,
    ) -> None:
        if backend not in (None, "triton", "torch"):
            raise ValueError(f"backend={backend!r}: valid are None (choose), 'triton', 'torch'")
        own = (lr_multiplier, master_weights, stochastic_rounding, moment_dtype, seed)
        self._forget()
        super().__init__(params, {**defaults, **dict(zip(_OWN, own, strict=True))})
        self.defaults["backend"] = backend

    # --- groups and state ---------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch does, after checking that every number and tensor can be stepped."""
        if isinstance(param_group, dict):
            merged = {**self.defaults, **param_group}
            self._check_group(merged)
            params = merged["params"]
            if not isinstance(params, torch.Tensor):
                params = param_group["params"] = list(params)
                tensors = [p[1] if isinstance(p, tuple) else p for p in params]
                check_one_device([p for p in tensors if isinstance(p, torch.Tensor)])
        super().add_param_group(param_group)
        self._forget()

    def state_dict(self) -> "StateDict":
        """torch's state without `lr_multiplier`: that one is the replica's, not the run's."""
        state = super().state_dict()
        for group in state["param_groups"]:
            group.pop("lr_multiplier", None)
        return state

    def load_state_dict(self, state_dict: "StateDict") -> None:
        """Load a state of this class or of its torch counterpart.

        The replica's multiplier and how this optimizer runs (master, rounding, dtype of the
        moments, seed) stay; hyperparameters and state come from the file. fp32 moments and masters
        of 16-bit parameters keep their precision, where torch would cast them to the parameter's.
        """
        for group in state_dict["param_groups"]:
            self._check_group(
                {**self.defaults, **{k: v for k, v in group.items() if k != "params"}}
            )
        kept = [{name: group[name] for name in _OWN} for group in self.param_groups]
        # Registered last, so that it sees what the user's own hooks have made of the state.
        handle = self.register_load_state_dict_pre_hook(
            lambda _, state: self.__dict__.update(_incoming=(state, kept))
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.__dict__.pop("_incoming", None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        incoming, kept = self.__dict__.pop("_incoming", (None, None))
        for at, group in enumerate(self.param_groups):
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group.update({"fused": True, "foreach": None}, **(kept[at] if kept else {}))
        if incoming is not None:
            self._restore_precision(incoming)
        for param, entry in self.state.items():
            if "step" in entry:
                step = torch.as_tensor(entry["step"], dtype=torch.float32)
                entry["step"] = step.to(local_shard(param).device)
        self._forget()

    def _restore_precision(self, incoming: "StateDict") -> None:
        names = [i for group in incoming["param_groups"] for i in group["params"]]
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        for name, (param, group) in zip(names, params, strict=True):
            saved = incoming["state"].get(name, {})
            combination = self._combination(param, group)
            wanted = dict.fromkeys(self._slot_names, combination.moment)
            for slot in self._slot_names:
                if isinstance(saved.get(slot), torch.Tensor) and wanted[slot] is not None:
                    self.state[param][slot] = saved[slot].to(param.device, wanted[slot])
            if not combination.master:
                self.state.get(param, {}).pop("master", None)
            elif "master" in saved:
                self.state[param]["master"] = saved["master"].to(param.device, torch.float32)

    def _forget(self) -> None:
        """Drop what was built for the groups and states as they were."""
        self._batches: dict[int, Batch] = {}
        self._launches: dict[torch.device, _Launches] = {}

    def _check_group(self, group: Group) -> None:
        """Refuse what no kernel does; `group` has every key."""
        check_multiplier(group["lr_multiplier"])
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"lr of shape {tuple(lr.shape)}: give a number or a tensor of one")
        if not isinstance(lr, torch.Tensor) and not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"lr={lr}: valid is a finite number of at least 0")
        if not 0 <= group["weight_decay"] < math.inf:
            raise ValueError(f"weight_decay={group['weight_decay']}: give a number of at least 0")
        if group["master_weights"] and group["stochastic_rounding"]:
            raise ValueError(
                "master_weights and stochastic_rounding are two ways to keep small updates of "
                "16-bit parameters: choose one (a master costs 4 bytes a parameter)"
            )
        if group["moment_dtype"] not in (None, torch.float32, torch.bfloat16):
            raise ValueError(
                f"moment_dtype={group['moment_dtype']}: valid are None (torch's choice, the dtype "
                "of what is stepped), torch.float32, torch.bfloat16"
            )
        for name, why in (
            ("amsgrad", "it would be one more array to read and write"),
            ("differentiable", "the step is made in place by one kernel"),
        ):
            if group.get(name):
                raise ValueError(f"{name}=True is not supported: {why}. Use torch's optimizer.")

    def _combination(self, param: torch.Tensor, group: Group) -> Combination:
        narrow = param.dtype in (torch.bfloat16, torch.float16)
        master = bool(group["master_weights"]) and narrow
        moment = group["moment_dtype"] or (torch.float32 if master else param.dtype)
        if not self._slots_of(group):
            moment = None
        rounded = narrow or (moment is not None and moment.itemsize < 4)
        return Combination(
            param=param.dtype,
            moment=moment,
            master=master,
            stochastic=bool(group["stochastic_rounding"]) and rounded,
        )

    def _slots_of(self, group: Group) -> tuple[str, ...]:
        """The names of the moments that this group keeps."""
        return self._slot_names

    # --- the step -----------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None, *, clip_factor: torch.Tensor | None = None) -> None: ...

    @overload
    def step(
        self, closure: Callable[[], float], *, clip_factor: torch.Tensor | None = None
    ) -> float: ...

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        clip_factor: torch.Tensor | None = None,
    ) -> float | None:
        """One step. `clip_factor`, a tensor of one element, multiplies every gradient inside the
        pass: min(1, max_norm / norm) clips without another pass over memory and without waiting
        for the device. The gradients themselves are left alone by the kernels; torch's fused
        kernels write the scaled gradient back, as they do under a GradScaler.

        Everything is checked before anything is written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = self._collect()
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        by_device: dict[torch.device, list[Batch]] = {}
        for batch in batches:
            by_device.setdefault(batch.device, []).append(batch)
        for device, together in by_device.items():
            controls = (found_inf, grad_scale, clip_factor)
            if _choose_backend(self.defaults["backend"], device) == "triton":
                self._step_kernels(device, together, *controls)
            else:
                self._step_torch(device, together, *controls)
        return loss

    def write_scalars(self) -> None:
        """Bring the device's table of LRs, multipliers and other numbers up to date without a step:
        what a captured CUDA graph will read at its next replay."""
        for launches in self._launches.values():
            self._write(launches)

    def _collect(self) -> list[Batch]:
        """The batches with their gradients; raises before anything was created or written."""
        found = []
        for index, group in enumerate(self.param_groups):
            check_multiplier(group["lr_multiplier"])
            params = group["params"]
            grads = [param.grad for param in params]
            if any(grad is None for grad in grads):
                params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
                grads = [grad for grad in grads if grad is not None]
            if not fit(params, grads):
                raise unfit_grads(params, grads)
            if params:
                found.append((index, group, params, grads))
        stale = [entry for entry in found if not self._is_listed(entry[0], entry[1], entry[2])]
        for _, group, params, _ in stale:
            self._check_params(group, params)
        for index, group, params, _ in stale:
            self._batches[index] = self._build(index, group, params)
            self._launches.clear()
        batches = []
        for index, _, _, grads in found:
            batch = self._batches[index]
            batch.grads = matching(grads, batch)
            batches.append(batch)
        return batches

    def _is_listed(self, index: int, group: Group, params: list[torch.Tensor]) -> bool:
        batch = self._batches.get(index)
        if batch is None or batch.group is not group or len(self.state) == 0:
            return False
        return batch.holds(params, self._slots_of(group))

    def _check_params(self, group: Group, params: list[torch.Tensor]) -> None:
        shards = [local_shard(p) for p in params]
        check_one_device(shards)
        backend = _choose_backend(self.defaults["backend"], shards[0].device)
        known = combinations(momentless=True)
        for param, shard in zip(params, shards, strict=True):
            if not param.is_floating_point():
                raise TypeError(
                    f"a parameter of shape {tuple(param.shape)} is {param.dtype}: valid are real "
                    "floating point dtypes. View a complex parameter as real (torch.view_as_real)."
                )
            if not is_dense(shard):
                raise ValueError(
                    f"a parameter of shape {tuple(shard.shape)} has strides {shard.stride()}, with "
                    "gaps between its elements: make it contiguous before the optimizer sees it"
                )
            combination = self._combination(param, group)
            if backend == "triton" and combination not in known:
                raise ValueError(
                    f"no kernel for {combination}: parameters are fp32, bf16 or fp16. "
                    "Use backend='torch', or set moment_dtype."
                )

    def _build(self, index: int, group: Group, params: list[torch.Tensor]) -> Batch:
        """List the tensors of a group, creating the state that is missing."""
        names = self._slots_of(group)
        before = sum(len(g["params"]) for g in self.param_groups[:index])
        position = {id(p): before + i for i, p in enumerate(group["params"])}
        chosen = [self._combination(p, group) for p in params]
        shards = [local_shard(p) for p in params]
        plain = self._is_plain(chosen, shards[0].device)
        counted = self._counts_steps or not plain
        fresh = [
            self._create(self.state[param], param, combination, names, counted)
            for param, combination in zip(params, chosen, strict=True)
        ]
        entries = [self.state[p] for p in params]
        masters = [e.get("master") for e in entries]
        return Batch(
            group=group,
            index=index,
            params=list(params),
            locals=shards,
            entries=entries,
            slots=[[local_shard(e[name]) for e in entries] for name in names],
            steps=[e["step"] for e in entries] if counted else [],
            masters=[None if m is None else local_shard(m) for m in masters],
            combinations=chosen,
            keys=[tensor_key(int(group["seed"]), position[id(p)]) for p in params],
            fresh=fresh,
            sharded=any(map(is_sharded, params)),
            contiguous=all(shard.is_contiguous() for shard in shards),
            plain=plain,
        )

    def _create(
        self,
        entry: dict[str, Any],
        param: torch.Tensor,
        combination: Combination,
        names: tuple[str, ...],
        counted: bool,
    ) -> bool:
        """Fill a parameter's state; True if it had no moments."""
        new = [name for name in names if entry.get(name) is None]
        if counted and "step" not in entry:
            # A torch state without a count but with a momentum has taken its first step.
            taken = 0.0 if new or not names else 1.0
            entry["step"] = torch.full(
                (), taken, dtype=torch.float32, device=local_shard(param).device
            )
        for name in new:
            entry[name] = torch.zeros_like(param, dtype=combination.moment).detach()
        if combination.master and "master" not in entry:
            entry["master"] = _master_of(param)
        return bool(new)

    @torch.no_grad()
    def create_masters(self) -> None:
        """The fp32 masters that a first step would make, of every parameter it may step: for a
        replica that has skipped its steps and is to be averaged with others' masters."""
        for group in self.param_groups:
            for param in group["params"]:
                wanted = param.requires_grad and self._combination(param, group).master
                if wanted and "master" not in self.state[param]:
                    self.state[param]["master"] = _master_of(param)

    def _is_plain(self, chosen: list[Combination], device: torch.device) -> bool:
        """Whether torch's functional step does it all: no master, no rounding, its own dtypes."""
        return _choose_backend(self.defaults["backend"], device) == "torch" and all(
            not c.master and not c.stochastic and c.moment in (None, c.param) for c in chosen
        )

    # --- on kernels ---------------------------------------------------------------------------

    def _step_kernels(
        self,
        device: torch.device,
        batches: list[Batch],
        found_inf: torch.Tensor | None,
        grad_scale: torch.Tensor | None,
        clip_factor: torch.Tensor | None,
    ) -> None:
        """Advance the step counts, then one launch for each dtype combination."""
        launches = self._launches.get(device)
        if launches is None or not (
            len(batches) == len(launches.batches) and all(map(is_, batches, launches.batches))
        ):
            launches = self._launches[device] = self._plan(device, batches)
        launches.table.refresh([grad for batch in batches for grad in batch.grads])
        self._write(launches)
        skip = _device_scalar(found_inf, 0.0, device)
        scale = _device_scalar(grad_scale, 1.0, device)
        clip = _device_scalar(clip_factor, 1.0, device)
        values = launches.scalars.values
        advance(launches.table.tensors, values, launches.corrections, skip)
        for combination in launches.table.chunks:
            type(self)._kernel(
                launches.table, combination, values, launches.corrections, skip, scale, clip
            )

    def _plan(self, device: torch.device, batches: list[Batch]) -> _Launches:
        rows = []
        for at, batch in enumerate(batches):
            for i, shard in enumerate(batch.locals):
                slots = [listed[i] for listed in batch.slots] + [None, None]
                rows.append(
                    Row(
                        param=shard,
                        first=slots[0],
                        second=slots[1],
                        master=batch.masters[i],
                        step=batch.steps[i],
                        group=at,
                        key=batch.keys[i],
                        offset=shard_offset(batch.params[i]),
                        combination=batch.combinations[i],
                    )
                )
        return _Launches(
            batches=batches,
            table=TensorTable(rows, device_block_size(device)),
            scalars=scalars.ScalarTable(len(batches), device),
            corrections=torch.zeros(len(rows), CORRECTIONS, device=device),
        )

    def _write(self, launches: _Launches) -> None:
        launches.scalars.write([self._scalar_row(batch.group) for batch in launches.batches])

    def _scalar_row(self, group: Group) -> list[Number]:
        raise NotImplementedError

    # --- on torch -----------------------------------------------------------------------------

    def _step_torch(
        self,
        device: torch.device,
        batches: list[Batch],
        found_inf: torch.Tensor | None,
        grad_scale: torch.Tensor | None,
        clip_factor: torch.Tensor | None,
    ) -> None:
        """torch's fused kernels where they know the dtypes, the torch reference elsewhere."""
        if clip_factor is not None:
            # torch divides by its scale: fold the factor in as its inverse.
            clip = clip_factor.to(device, torch.float32)
            grad_scale = (1.0 if grad_scale is None else grad_scale.to(device)) / clip
        for batch in batches:
            if batch.plain:
                self._step_plain(batch, batch.locals, batch.grads, found_inf, grad_scale)
            elif all(c.master and c.moment in (None, torch.float32) for c in batch.combinations):
                masters = [m for m in batch.masters if m is not None]
                grads = [g.float() for g in batch.grads]
                self._step_plain(batch, masters, grads, found_inf, grad_scale)
                torch._foreach_copy_(batch.locals, masters)
                if not self._counts_steps and (found_inf is None or not bool(found_inf)):
                    torch._foreach_add_(batch.steps, 1)
            elif found_inf is None or not bool(found_inf):
                self._step_reference(batch, 1.0 if grad_scale is None else 1.0 / float(grad_scale))

    def _step_plain(
        self,
        batch: Batch,
        targets: list[torch.Tensor],
        grads: list[torch.Tensor],
        found_inf: torch.Tensor | None,
        grad_scale: torch.Tensor | None,
    ) -> None:
        """torch's functional step on tensors whose arrays share a dtype."""
        raise NotImplementedError

    def _step_reference(self, batch: Batch, factor: float) -> None:
        """The reference beside the kernel, tensor by tensor."""
        torch._foreach_add_(batch.steps, 1)
        for i, shard in enumerate(batch.locals):
            stochastic = batch.combinations[i].stochastic
            type(self)._reference(
                shard,
                batch.grads[i],
                *([listed[i] for listed in batch.slots] or self._no_slots),
                master=batch.masters[i],
                step=int(batch.steps[i]),
                lr=float(batch.group["lr"]),
                lr_multiplier=float(batch.group["lr_multiplier"]),
                factor=factor,
                key=batch.keys[i] if stochastic else None,
                offset=shard_offset(batch.params[i]) if stochastic else 0,
                **{name: batch.group[name] for name in self._reference_options},
            )

    _reference: ClassVar[Any]
    _reference_options: ClassVar[tuple[str, ...]] = ()
    _no_slots: ClassVar[tuple[None, ...]] = ()


def _master_of(param: torch.Tensor) -> torch.Tensor:
    return param.detach().to(torch.float32, copy=True)


def _device_scalar(
    value: torch.Tensor | None, default: float, device: torch.device
) -> torch.Tensor:
    if value is None:
        return constant(default, device)
    return value.to(device, torch.float32, non_blocking=True)
