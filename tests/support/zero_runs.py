"""DeepSpeed engines with replicas, for the workers of a fleet: configs, a model, and a run of it.

DeepSpeed is imported inside the workers only. The process group is the fleet's: DeepSpeed takes
the one that is up.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.fleet import Fleet

T, STEPS, MICRO, PARTS = 6, 30, 4, 2
STAGES = [0, 1, 2, 3]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_LR = 0.02


def on(fleet: Fleet, case: Any, *args: Any) -> list[Any]:
    """Every rank's result of a case, which may take longer than those of other tests."""
    return fleet.run(case, *args, seconds=250)


def settings(stage: int, dtype: str = "fp32", shards: int = 2, **hdet: Any) -> dict[str, Any]:
    """A small config; keyword arguments go into the hdet block."""
    values: dict[str, Any] = {
        "train_batch_size": MICRO * PARTS * 4,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**5},
        "optimizer": {"type": "AdamW", "params": {"lr": MAX_LR, "eps": 1e-3, "torch_adam": True}},
        "scheduler": {
            "type": "HDETOneCycle",
            "params": {"max_lr": MAX_LR, "total_steps": STEPS + 1},
        },
        "hdet": {"rule": "paper", "shards": shards, "interval": T, "spread": 0.5},
    }
    values["hdet"] |= {"warmup_steps": 1, **hdet}
    if dtype != "fp32":
        values[dtype] = {"enabled": True}
    if dtype == "fp16":
        values[dtype]["initial_scale_power"] = 8
    return values


def prepare(rank: int, size: int) -> None:
    """What a launcher would have set; fp16 on any CPU, which torch computes and DeepSpeed asks
    oneDNN for."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({k: str(v) for k, v in here.items()})
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups, logger

    logger.setLevel("ERROR")
    get_accelerator().is_fp16_supported = lambda: True
    groups.mpu = None


def network(seed: int = 0, *, frozen: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    if frozen:
        model[0].bias.requires_grad_(False)
    return model


def batch(step: int, part: int, rank: int) -> Tensor:
    g = torch.Generator().manual_seed(10000 * step + 100 * part + rank)
    return torch.randn(MICRO, 8, generator=g)


def loss_of(model: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return (model(x) - x.sum(1, keepdim=True)).float().square().mean()


class Run:
    """An engine with replicas and what is asked of it."""

    def __init__(self, config: dict[str, Any], **arguments: Any) -> None:
        from hdet_scale.deepspeed import initialize

        rank = dist.get_rank()
        self.rank = rank
        self.model = arguments.pop("model", None) or network(seed=rank)  # made equal by the engine
        arguments.setdefault("model_parameters", self.model.parameters())
        self.engine, self.optimizer, _, self.scheduler = initialize(
            model=self.model, config=config, **arguments
        )
        self.dtype = next(
            (t for name, t in DTYPES.items() if config.get(name, {}).get("enabled")), torch.float32
        )

    def train(self, first: int, last: int, bad: dict[int, int] | None = None) -> None:
        """bad: at step s replica bad[s] gets a loss that overflows."""
        for step in range(first, last):
            for part in range(self.engine.gradient_accumulation_steps()):
                loss = loss_of(self.engine, batch(step, part, self.rank), self.dtype)
                if bad and bad.get(step) == self.engine.replicas.rank:
                    loss = loss * 1e30
                self.engine.backward(loss)
                self.engine.step()

    @torch.no_grad()
    def output(self) -> float:
        x = torch.linspace(-1, 1, 32).view(4, 8).to(self.dtype)
        return float(self.engine(x).double().sum())

    def parameters(self) -> list[Tensor]:
        """The whole model, gathered where it is partitioned."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            return [p.detach().clone() for p in self.model.parameters()]

    def counters(self) -> tuple[int, ...]:
        """Steps of the schedule, rounds, steps of the round, steps of the engine."""
        scheduler = self.scheduler
        return (
            scheduler.last_epoch,
            scheduler.round,
            scheduler._run.round_step,
            self.engine.global_steps,
        )

    def bits(self) -> list[Tensor]:
        """Everything that a resumed run must have again."""
        own = self.engine.partitions
        rates = [*self.scheduler.get_last_lr(), *self.scheduler.get_base_lr()]
        tensors = own.masters() + own.moments()
        told = torch.tensor(rates, dtype=torch.float64)
        return [*(t.detach().clone() for t in tensors), *self.parameters(), told]


def warm_up(rank: int, size: int) -> str:
    """The first import and the op that DeepSpeed compiles once for a machine."""
    prepare(rank, size)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    return str(deepspeed.__version__)


def common(run: Run, batches: int = 16) -> Any:
    """Losses of batches that all ranks have in common, for a probe."""

    def losses() -> Any:
        for i in range(batches):
            yield loss_of(run.engine.module, batch(10_000 + i, 0, 0), run.dtype)

    return losses


def held(run: Run) -> list[Tensor]:
    """What going back to a snapshot must restore on this rank, and adopting make equal."""
    own = run.engine.partitions
    return [t.detach().clone() for t in own.masters() + own.moments()]


def said(action: Any) -> str:
    """What an action is refused with."""
    try:
        action()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
