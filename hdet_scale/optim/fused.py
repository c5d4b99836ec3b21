"""What the fused optimizers have in common: collect and check everything, then write.

On a GPU one Triton launch updates all tensors of all groups that share a dtype combination
(`kernel_step.py`). On a CPU torch's own fused kernels do, through torch's functional optimizers
(`torch_step.py`). A GPU without Triton falls back to them as well, and says so once.

A checkpoint is torch's: the same state keys, loading from and into `torch.optim.AdamW` and `SGD`.
It does not carry `lr_multiplier`, which belongs to a replica and not to the run: a file written by
one replica and loaded by all must not make them all that replica. A multiplier found in a file is
ignored for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from hdet_scale.kernels.random_words import tensor_key
from hdet_scale.kernels.scalars import Number, ScalarTable, scalar_row
from hdet_scale.kernels.table import Combination
from hdet_scale.optim.backends import choose_backend
from hdet_scale.optim.batches import (
    Batch,
    Graded,
    Group,
    check_capture,
    check_one_device,
    check_param,
    list_batch,
    matching,
    with_gradients,
)
from hdet_scale.optim.controls import Controls
from hdet_scale.optim.listings import Listing, Listings
from hdet_scale.optim.precision import create_master, master_key, restore, widened
from hdet_scale.optim.rates import check_multiplier
from hdet_scale.optim.shards import local_shard
from hdet_scale.optim.shared_options import (
    KEPT_ON_LOAD,
    SharedOptions,
    check_group,
    complete,
    describe,
)
from hdet_scale.optim.torch_step import step_batch
from hdet_scale.optim.uncompiled import uncompiled

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

    from hdet_scale.kernels.update import Update


class FusedOptimizer(Optimizer):
    """The base of the fused optimizers. A subclass FusedX, in a file fused_x.py, gives

    - `_update`: its rule, reference and moments (`hdet_scale.kernels.update.Update`);
    - `__init__`: its own arguments, and `**options: Unpack[SharedOptions]` handed on;

    and may override

    - `_own_scalars`: what its rule reads of a group beside LR and weight decay;
    - `_check_group`: what it refuses of a group beside what no kernel does;
    - `_slots_of`: the moments of a group, where not every group has them;
    - `_step_plain`: a faster step than its reference where no kernel runs.

    Args:
        params: Parameters or param groups.
        defaults: The subclass's own options; "lr" and "weight_decay" must be among them.
        options: What it received as `**options`.
    """

    _update: ClassVar[Update]
    _corrects_bias: ClassVar[bool] = False
    """Whether the rule divides its moments by 1 - beta^t, with beta from group["betas"]."""
    _counts_steps: ClassVar[bool] = True
    """Whether `_step_plain` needs a step count in the state, and advances it."""
    _step_supports_amp_scaling = True
    """GradScaler then hands over its scale and found_inf, and makes no pass of its own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        describe(cls)

    def __init__(self, params: ParamsT, defaults: Group, options: SharedOptions) -> None:
        shared = complete(type(self), options)
        backend = shared.pop("backend")
        self._forget()
        super().__init__(params, {**defaults, **shared})
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

    def state_dict(self) -> StateDict:
        """torch's state without `lr_multiplier`: that one is the replica's, not the run's. 8-bit
        codes are decoded to fp32."""
        state = super().state_dict()
        for at, param, combination in self._members(state):
            if at in state["state"]:
                entry = state["state"][at]
                state["state"][at] = widened(entry, param, combination, self._update.moments)
        for group in state["param_groups"]:
            group.pop("lr_multiplier", None)
        return state

    def _members(self, state: StateDict) -> Iterator[tuple[Any, torch.Tensor, Combination]]:
        """The parameters with their names in a state dict and their dtypes."""
        names = [i for group in state["param_groups"] for i in group["params"]]
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        for name, (param, group) in zip(names, params, strict=True):
            yield name, param, self._combination(param, group)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state of this class or of its torch counterpart.

        The replica's multiplier and how this optimizer runs (master, rounding, dtype of the
        moments, seed) stay; hyperparameters and state come from the file. fp32 moments and masters
        of 16-bit parameters keep their precision, where torch would cast them to the parameter's.
        """
        for group in state_dict["param_groups"]:
            self._check_group(
                {**self.defaults, **{k: v for k, v in group.items() if k != "params"}}
            )
        kept = [{k: group[k] for k in KEPT_ON_LOAD if k in group} for group in self.param_groups]
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

    def _restore_precision(self, incoming: StateDict) -> None:
        for name, param, combination in self._members(incoming):
            saved = incoming["state"].get(name)
            if saved is not None:
                restore(self.state[param], saved, param, combination, self._update.moments)

    def _forget(self) -> None:
        """Drop what was built for the groups and states as they were."""
        self._listings = Listings()
        self._scalars: dict[torch.device, ScalarTable] = {}

    def _check_group(self, group: Group) -> None:
        """Refuse what no kernel does; `group` has every key."""
        check_group(group)

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
        return self._update.moments

    # --- the step -----------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None, *, clip_factor: torch.Tensor | None = None) -> None: ...

    @overload
    def step(
        self, closure: Callable[[], float], *, clip_factor: torch.Tensor | None = None
    ) -> float: ...

    @uncompiled
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        clip_factor: torch.Tensor | None = None,
    ) -> float | None:
        """Step every parameter that has a gradient. All is checked before anything is written.

        Args:
            closure: Recomputes the loss and returns it.
            clip_factor: A tensor of one element that multiplies every gradient inside the pass:
                min(1, max_norm / norm) clips without another pass over memory and without waiting
                for the device. The kernels leave the gradients themselves alone; torch's fused
                kernels write the scaled gradient back, as they do under a GradScaler.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        listing, grads = self._collect()
        scaler = (getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        controls = Controls(*scaler, clip_factor)
        by_device: dict[torch.device, list[Graded]] = {}
        for graded in zip(listing.batches, grads, strict=True):
            by_device.setdefault(graded[0].device, []).append(graded)
        for device, together in by_device.items():
            if choose_backend(self.defaults["backend"], device) == "triton":
                self._step_kernels(device, listing, together, controls)
            else:
                self._step_torch(device, together, controls)
        return loss

    def write_scalars(self) -> None:
        """Bring the devices' tables of LRs, multipliers and other numbers up to date without a
        step: what captured CUDA graphs will read at their next replay. The schedulers of this
        package call it after each write; with another one call it before a replay."""
        for table in self._scalars.values():
            table.write(self._scalar_rows())

    def _collect(self) -> tuple[Listing, list[list[torch.Tensor]]]:
        """The batches, and the gradients of each; raises before anything was written."""
        found = []
        for index, group in enumerate(self.param_groups):
            check_multiplier(group["lr_multiplier"])
            params, grads = with_gradients(group["params"])
            if params:
                found.append((index, group, params, grads))
        listing = self._listing_of([entry[:3] for entry in found])
        pairs = zip(found, listing.batches, strict=True)
        return listing, [matching(grads, batch) for (_, _, _, grads), batch in pairs]

    def _listing_of(self, found: list[tuple[int, Group, list[torch.Tensor]]]) -> Listing:
        """The listing of these groups' parameters: kept from an earlier step, or listed now."""
        # Ids tell parameters apart for as long as the listing that holds them is kept.
        key = tuple((index, *map(id, params)) for index, _, params in found)
        listing = self._listings.get(key)
        if listing is not None:
            groups = zip(listing.batches, found, strict=True)
            if all(b.holds(g, self._slots_of(g), self.state) for b, (_, g, _) in groups):
                return listing
            self._listings.clear()
        for _, group, params in found:
            self._check_params(group, params)
        listing = Listing([self._build(*entry) for entry in found])
        self._listings.keep(key, listing)
        return listing

    def _check_params(self, group: Group, params: list[torch.Tensor]) -> None:
        shards = [local_shard(p) for p in params]
        check_one_device(shards)
        check_capture(shards[0].device)
        backend = choose_backend(self.defaults["backend"], shards[0].device)
        known = self._update.combinations if backend == "triton" else []
        for param, shard in zip(params, shards, strict=True):
            check_param(param, shard)
            combination = self._combination(param, group)
            if backend == "triton" and combination not in known:
                raise ValueError(
                    f"no kernel for {combination}: parameters are fp32, bf16 or fp16. "
                    "Use backend='torch', or set moment_dtype."
                )

    def _build(self, index: int, group: Group, params: list[torch.Tensor]) -> Batch:
        """List the tensors of a group, creating the state that is missing."""
        chosen = [self._combination(p, group) for p in params]
        plain = self._is_plain(chosen, local_shard(params[0]).device)
        before = sum(len(g["params"]) for g in self.param_groups[:index])
        position = {id(p): before + i for i, p in enumerate(group["params"])}
        return list_batch(
            index,
            group,
            params,
            chosen,
            self.state,
            names=self._slots_of(group),
            keys=[tensor_key(int(group["seed"]), position[id(p)]) for p in params],
            plain=plain,
            counted=self._counts_steps or not plain,
        )

    @torch.no_grad()
    def create_masters(self) -> None:
        """Make the fp32 masters that a first step would make, of every parameter it may step: for
        a replica that has skipped its steps and is to be averaged with others' masters."""
        for group in self.param_groups:
            for param in group["params"]:
                combination, entry = self._combination(param, group), self.state[param]
                wanted = param.requires_grad and combination.master
                if wanted and master_key(combination) not in entry:
                    create_master(entry, param, combination)

    def _is_plain(self, chosen: list[Combination], device: torch.device) -> bool:
        """Whether `_step_plain` does it all: no master, no rounding, its own dtypes."""
        on_torch = choose_backend(self.defaults["backend"], device) == "torch"
        return (
            on_torch
            and self._has_plain
            and all(
                not c.master and not c.stochastic and c.moment in (None, c.param) for c in chosen
            )
        )

    # --- on kernels ---------------------------------------------------------------------------

    def _step_kernels(
        self, device: torch.device, listing: Listing, together: list[Graded], controls: Controls
    ) -> None:
        from hdet_scale.optim.kernel_step import plan_launches

        launches = listing.launches.get(device)
        if launches is None:
            batches = [batch for batch, _ in together]
            launches = listing.launches[device] = plan_launches(self._update, device, batches)
        if device not in self._scalars:
            self._scalars[device] = ScalarTable(len(self.param_groups), device)
        scalars = self._scalars[device]
        scalars.write(self._scalar_rows())
        launches.step([g for _, grads in together for g in grads], scalars.values, controls)

    def _scalar_rows(self) -> list[list[Number]]:
        return [self._scalar_row(group) for group in self.param_groups]

    def _scalar_row(self, group: Group) -> list[Number]:
        return scalar_row(
            group["lr"],
            group["lr_multiplier"],
            group["weight_decay"],
            group["maximize"],
            self._own_scalars(group),
            [float(beta) for beta in group["betas"]] if self._corrects_bias else (0.0, 0.0),
        )

    def _own_scalars(self, group: Group) -> list[float]:
        """What the rule reads from column `scalars.OWN` on: nothing, unless overridden."""
        return []

    # --- on torch -----------------------------------------------------------------------------

    def _step_torch(self, device: torch.device, together: list[Graded], controls: Controls) -> None:
        plain = self._step_plain if self._has_plain else None
        controls = controls.clip_folded(device)
        for batch, grads in together:
            step_batch(batch, grads, controls, self._update, plain, counts_steps=self._counts_steps)

    @property
    def _has_plain(self) -> bool:
        return type(self)._step_plain is not FusedOptimizer._step_plain

    def _step_plain(
        self,
        batch: Batch,
        targets: list[torch.Tensor],
        grads: list[torch.Tensor],
        controls: Controls,
    ) -> None:
        """torch's functional step on arrays that share a dtype, its clip factor folded in. An
        optimizer without one runs its reference, which computes in fp32, tensor by tensor."""
        raise NotImplementedError
