"""DistributedDataParallel: each rank is a replica.

    model = DistributedDataParallel(model)
    hdet_scale.ddp.warm_init(model)                             # optional
    scheduler = OneCycleAutoLR(optimizer, ..., model=model)     # finds the DDP module by itself

`warm_init` adds different noise to each replica. Call it after wrapping in DDP.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet_scale.engines.protocol import Engine
from hdet_scale.method.spread import stream_seed
from hdet_scale.topology import Replicas, is_distributed

NOISE_SCALES = ("vector", "tensor")


class DDPEngine(Engine):
    """Replicas in one or more DistributedDataParallel modules, whose all-reduce can be stopped."""

    separable = True

    def share_within(self, size: int | None, bucket_bytes: int) -> None:
        super().share_within(size, bucket_bytes)
        if size is not None:
            self._undo += [keep_gradients_local(module) for module in wrapped_in(self.model)]

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without DDP's broadcast of buffers, a collective that a replica without a batch of its
        own would not enter."""
        modules = wrapped_in(self.model)
        syncs = [m.require_forward_param_sync for m in modules]
        for module in modules:
            module.require_forward_param_sync = False
        try:
            with super().evaluating():
                yield
        finally:
            for module, sync in zip(modules, syncs, strict=True):
                module.require_forward_param_sync = sync


def engine_for(
    optimizer: Optimizer,
    model: nn.Module | None = None,
    replicas: Replicas | None = None,
    rank: int = 0,
    world_size: int = 1,
    *,
    buffers: bool = True,
) -> Engine:
    """The engine of a model that one process holds whole, wrapped in DDP or not.

    Args:
        optimizer: steps the parameters.
        model: plain or wrapped.
        replicas: this rank's place; found from the mesh of sharded parameters, or each rank is a
            replica, where it is None.
        rank, world_size: the place to declare before init_process_group.
        buffers: whether the model's float buffers are averaged.
    """
    where = _place(optimizer, replicas, rank, world_size)
    kind = DDPEngine if wrapped_in(model) else Engine
    return kind(optimizer, model, where, buffers=buffers)


def _place(optimizer: Optimizer, replicas: Replicas | None, rank: int, world_size: int) -> Replicas:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is not an Optimizer: pass a torch.optim.Optimizer (for "
            "DeepSpeed use hdet_scale.deepspeed.initialize)"
        )
    params = [p for g in optimizer.param_groups for p in g["params"]]
    if replicas is None and any(hasattr(p, "device_mesh") for p in params):
        return Replicas.of_sharded(params)
    if replicas is not None:
        if not isinstance(replicas, Replicas):
            raise TypeError(f"replicas must be a Replicas, got {replicas!r}: use Replicas.world()")
        replicas.check_shards(params)
        return replicas
    refuse_sharded(params)
    declared = Replicas(rank=rank, size=world_size)
    if not is_distributed():
        return declared
    world = Replicas.world()
    if world_size != 1 and (rank, world_size) != (world.rank, world.size):
        raise ValueError(
            f"rank={rank}, world_size={world_size} do not fit this process, rank {world.rank} of "
            f"{world.size}: leave them out, or pass replicas= for another layout"
        )
    return world


def wrapped_in(model: nn.Module | None) -> list[DistributedDataParallel]:
    """The DDP modules of a model, itself included."""
    modules = model.modules() if model is not None else ()
    return [m for m in modules if isinstance(m, DistributedDataParallel)]


def keep_gradients_local(model: DistributedDataParallel) -> Callable[[], None]:
    """Stop DDP's all-reduce of gradients and broadcast of buffers; returns the call that undoes it.

    What `no_sync()` does, for good: every replica steps with its own gradient, and nothing
    crosses replicas between converges.
    """
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = False
    model.require_forward_param_sync = False

    def undo() -> None:
        model.require_backward_grad_sync, model.require_forward_param_sync = before

    return undo


def refuse_sharded(params: Iterable[Tensor]) -> None:
    """An error when a parameter is a slice: its mean with another rank's slice is nonsense."""
    for p in params:
        if hasattr(p, "_local_tensor"):
            raise ValueError(
                f"a DTensor parameter of shape {list(p.shape)} is a slice of the model, and the "
                "replicas given are whole ranks: attach with hdet_scale.fsdp.attach, or pass "
                "replicas=Replicas.from_mesh(mesh)"
            )
        if hasattr(p, "ds_id"):
            raise ValueError(
                f"a ZeRO parameter (ds_id {p.ds_id}) is a slice of the model: start with "
                "hdet_scale.deepspeed.initialize"
            )
        if type(p).__name__ == "FlatParameter" or hasattr(p, "_is_flat_param"):
            raise ValueError(
                "an FSDP1 FlatParameter is a slice of the model: use torch's fully_shard and "
                "hdet_scale.fsdp.attach"
            )


@torch.no_grad()
def warm_init(
    model: nn.Module,
    replicas: Replicas | None = None,
    *,
    nu: float = 0.01,
    seed: int = 0,
    scale: str = "vector",
    gradients: str = "shared",
) -> None:
    """Warm noisy initialisation: theta_r <- theta_0 + s N(0, 1), a stream for each replica.

    Call it after DDP has wrapped the model: wrapping broadcasts rank 0's parameters. The global
    random generators are not touched.

    Args:
        model: its trained parameters get the noise; wrapped, unless gradients are local.
        replicas: this rank's place; each rank is a replica where it is None.
        nu: size of the noise, relative to the parameters (default 0.01, the paper's).
        seed: of the streams (default 0).
        scale: "vector" (default): s = nu ||theta_0|| / sqrt(d_theta) over the whole model, as in
            the paper. "tensor": s from each tensor's own norm and size, as in the authors' README.
        gradients: "local" where the model is trained without DDP (default "shared").

    Raises:
        ValueError: for a value that is not valid, sharded parameters, or a model that DDP has not
            wrapped yet.
    """
    if not (isinstance(nu, int | float) and math.isfinite(nu) and nu >= 0):
        raise ValueError(
            f"nu must be a finite number of 0 or more, got {nu!r}; the paper uses 0.01"
        )
    if scale not in NOISE_SCALES:
        raise ValueError(f"scale must be one of {list(NOISE_SCALES)}, got {scale!r}")
    where = replicas or Replicas.world()
    wrapped = isinstance(model, DistributedDataParallel)
    if where.size > 1 and gradients == "shared" and not wrapped:
        raise ValueError(
            f"got an unwrapped {type(model).__name__} and {where.size} replicas: wrapping it in "
            "DistributedDataParallel would broadcast rank 0's parameters over the noise; call "
            "warm_init on the wrapped model, or pass gradients='local' if you train without DDP"
        )
    params = [p for p in model.parameters() if p.requires_grad]
    refuse_sharded(params)
    for index, (p, s) in enumerate(zip(params, _noise_scales(params, nu, scale), strict=True)):
        p.add_(_noise(p, stream_seed(seed, where.rank, index)).mul_(s))


def _noise_scales(params: list[nn.Parameter], nu: float, scale: str) -> Iterator[float]:
    squares = [float(p.double().square().sum()) for p in params]
    sizes = [p.numel() for p in params]
    if scale == "vector":
        s = nu * math.sqrt(sum(squares) / max(1, sum(sizes)))
        yield from (s for _ in params)
    else:
        yield from (nu * math.sqrt(q / max(1, d)) for q, d in zip(squares, sizes, strict=True))


def _noise(like: Tensor, seed: int) -> Tensor:
    """Standard normal numbers that depend on the seed alone, not on the device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float32)
    return drawn.to(device=like.device, dtype=like.dtype)
