"""DistributedDataParallel: gradients that stay local, noise that survives, slices refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hdet_scale.engines.gradient_mean import GradientMean, gradient_of
from hdet_scale.method.spread import stream_seed
from hdet_scale.topology import Replicas

NOISE_SCALES = ("vector", "tensor")


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


def share_gradients(
    params: Sequence[Tensor], sharers: Callable[[], Replicas], bucket_bytes: int
) -> Callable[[], None]:
    """g <- mean of g over `sharers()` at the end of each backward; returns the call that undoes it.

    At the end of the backward, where DDP's own mean is ready too, and not at the step: clipping and
    a loss scaler then see what they would see, and an infinity makes all sharers skip alike. With
    accumulation, the mean of what is accumulated: mean(mean(g_1) + g_2) = mean(g_1 + g_2).
    """
    mean, last = GradientMean(bucket_bytes), [-1]

    def finish() -> None:
        mean([gradient_of(p) for p in params], sharers())

    def queue(_: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != last[0]:
            last[0] = backward
            torch.autograd.Variable._execution_engine.queue_callback(finish)

    hooks = [p.register_post_accumulate_grad_hook(queue) for p in params]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

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

    scale="vector": s = nu ||theta_0|| / sqrt(d_theta) over the whole model (the paper).
    scale="tensor": s from each tensor's own norm and size (the authors' README).

    Call it after DDP has wrapped the model: wrapping broadcasts rank 0's parameters. The global
    random generators are not touched.
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
