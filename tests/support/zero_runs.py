"""Runs of DeepSpeed engines with replicas, for the workers of a fleet: a case is a function here.

DeepSpeed is imported inside the workers only. The process group is the fleet's: DeepSpeed takes
the one that is up.
"""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hdet_scale import OneCycleAutoLR, Replicas
from tests.support.searched import long_stage, short_runs

T, STEPS, MICRO, PARTS = 6, 30, 4, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_LR = 0.02


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
        "hdet": {"shards": shards, "interval": T, "spread": 0.5, "warmup_steps": 1, **hdet},
    }
    if dtype != "fp32":
        values[dtype] = {"enabled": True}
    if dtype == "fp16":
        values[dtype]["initial_scale_power"] = 8
    return values


COSINE = {"type": "CosineAnnealingLR", "params": {"T_max": STEPS}}


def job_settings(stage: int, dtype: str, gradients: str, schedule: str) -> dict[str, Any]:
    """With HDETOneCycle, or HDETAutoLR around a cosine."""
    values = settings(stage, dtype, gradients=gradients)
    if schedule == "HDETAutoLR":
        values["scheduler"] = {"type": schedule, "params": {"scheduler": COSINE}}
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
        engine = self.engine
        return (
            self.scheduler.last_epoch,
            self.scheduler.round,
            engine.round.steps,
            engine.global_steps,
        )

    def bits(self) -> list[Tensor]:
        """Everything that a resumed run must have again."""
        own = self.engine.partitions
        rates = [*self.scheduler.get_last_lr(), *self.scheduler.get_base_lr()]
        tensors = own.masters() + own.moments()
        told = torch.tensor(rates, dtype=torch.float64)
        return [*(t.detach().clone() for t in tensors), *self.parameters(), told]


def reference(rank: int, shards: int, gradients: str) -> tuple[list[Tensor], list[float]]:
    """The same run with DDP and OneCycleAutoLR: shards are ranks of a replica that stay equal."""
    replicas = Replicas.of(shard_size=shards)
    model: nn.Module = network()
    group = None if gradients == "shared" else replicas.shard_group
    if gradients == "shared" or shards > 1:
        model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=MAX_LR, eps=1e-3)
    scheduler = OneCycleAutoLR(
        optimizer,
        MAX_LR,
        total_steps=STEPS + 1,
        ensemble_lr_spread_ratio=0.5,
        model_sync_interval=T,
        auto_lr_warmup_steps=1,
        enable_auto_lr=True,
        gradients="shared",  # the group above says which; DDP's own all-reduce does it
        replicas=replicas,
        converge=None if gradients == "shared" else _with_moments(),
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for part in range(PARTS):
            loss = loss_of(model, batch(step, part, rank), torch.float32)
            (loss / PARTS).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step(torch.stack(losses).mean())
    return [p.detach().clone() for p in model.parameters()], scheduler.get_base_lr()


def _with_moments() -> Any:
    from hdet_scale import ConvergePolicy

    return ConvergePolicy(moments=True)


# -- cases --------------------------------------------------------------------------------------


def warm_up(rank: int, size: int) -> str:
    """The first import and the op that DeepSpeed compiles once for a machine."""
    prepare(rank, size)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    return str(deepspeed.__version__)


def a_round(rank: int, size: int, stage: int, dtype: str, shards: int, gradients: str) -> Any:
    """Output and moments in the middle of a round, outputs after converges, the distance from
    the reference."""
    prepare(rank, size)
    run = Run(settings(stage, dtype, shards, gradients=gradients))
    run.train(0, T - 1)
    middle = run.output(), [m.clone() for m in run.engine.partitions.moments()]
    run.train(T - 1, T)
    outputs = [run.output()]
    distance, rates = 0.0, (0.0, 0.0)
    if dtype == "fp32":
        run.train(T, STEPS)
        outputs.append(run.output())
        wanted, base = reference(rank, shards, gradients)
        pairs = zip(run.parameters(), wanted, strict=True)
        distance = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        rates = (run.scheduler.get_base_lr()[0], base[0])
    return middle, outputs, distance, rates, run.engine.train_batch_size()


def plain(rank: int, size: int, stage: int) -> float:
    """Spread 0 with shared gradients against plain DeepSpeed over the whole world."""
    prepare(rank, size)
    config = settings(stage, spread=0.0)
    run = Run(config)
    run.train(0, 8)
    mine = run.parameters()
    import deepspeed
    from deepspeed.utils import groups

    groups.mpu = None
    own = {k: v for k, v in config.items() if k not in ("hdet", "scheduler")}
    model = network()
    params = config["scheduler"]["params"]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=own,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, **params),
    )
    for step in range(8):
        for part in range(PARTS):
            loss = loss_of(engine, batch(step, part, rank), torch.float32)
            engine.backward(loss)
            engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        pairs = zip(mine, model.parameters(), strict=True)
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def overflow(rank: int, size: int, stage: int, gradients: str, offload: bool) -> Any:
    """Replica 1 overflows at step 2 and replica 0 at step 7."""
    prepare(rank, size)
    config = settings(stage, "fp16", gradients=gradients)
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    run = Run(config)
    run.train(0, 2 * T, bad={2: 1, 7: 0})
    engine = run.engine
    finite = all(bool(p.isfinite().all()) for p in run.parameters())
    return run.counters(), engine.skipped_steps, engine.optimizer.loss_scale, run.output(), finite


def offloaded(rank: int, size: int, stage: int, torch_adam: bool) -> Any:
    """CPU offload against the same run without it."""
    prepare(rank, size)
    config = settings(stage)
    config["optimizer"]["params"]["torch_adam"] = torch_adam
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    run = Run(config)
    run.train(0, T)
    found = run.output(), type(run.engine.basic_optimizer).__name__
    other = Run(settings(stage))
    other.train(0, T)
    pairs = zip(run.parameters(), other.parameters(), strict=True)
    return *found, max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def accumulated_wide(rank: int, size: int) -> Any:
    """Stage 1 in bf16 with fp32 gradient accumulation, which DeepSpeed does in another class."""
    prepare(rank, size)
    config = settings(1, "bf16")
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    run = Run(config)
    run.train(0, T - 1)
    middle = run.output()
    run.train(T - 1, T)
    return type(run.optimizer).__name__, middle, run.output()


def flat(rank: int, size: int, dtype: str) -> Any:
    """Stage 0 with a fused optimizer, whose masters DeepSpeed lays flat. torch's AdamW stands in
    for FusedAdam, which would have to be compiled."""
    prepare(rank, size)
    from deepspeed.runtime import engine

    kept, engine.FusedAdam = engine.FusedAdam, torch.optim.AdamW
    try:
        run = Run(settings(0, dtype))
    finally:
        engine.FusedAdam = kept
    run.train(0, T - 1, bad={2: 1})
    middle = run.output(), [m.clone() for m in run.engine.partitions.moments()]
    run.train(T - 1, T)
    return type(run.optimizer).__name__, middle, run.output(), run.engine.skipped_steps


def save_and_go_on(
    rank: int, size: int, home: str, jobs: list[tuple[Any, ...]]
) -> list[list[Tensor]]:
    """For each job: train, save at `at`, train to the end; what the end looks like."""
    prepare(rank, size)
    ends = []
    for number, (stage, dtype, gradients, schedule, at) in enumerate(jobs):
        run = Run(job_settings(stage, dtype, gradients, schedule))
        run.train(0, at)
        run.engine.save_checkpoint(str(Path(home, str(number))))
        run.train(at, 2 * T + 3)
        ends.append(run.bits())
    return ends


def killed(rank: int, size: int) -> None:
    """Killed between a backward and its step."""
    prepare(rank, size)
    run = Run(settings(2))
    run.train(0, 2)
    run.engine.backward(loss_of(run.engine, batch(2, 0, rank), torch.float32))
    os.kill(os.getpid(), signal.SIGKILL)


def resume(rank: int, size: int, home: str, jobs: list[tuple[Any, ...]]) -> list[list[Tensor]]:
    """The same ends from the checkpoints, in new processes."""
    prepare(rank, size)
    ends = []
    for number, (stage, dtype, gradients, schedule, at) in enumerate(jobs):
        run = Run(job_settings(stage, dtype, gradients, schedule))
        path, _ = run.engine.load_checkpoint(str(Path(home, str(number))))
        assert path is not None
        assert run.counters() == (at, at // T, at % T, at)
        run.train(at, 2 * T + 3)
        ends.append(run.bits())
    return ends


def files(rank: int, size: int, home: str, stage: int, at: int) -> tuple[list[str], bool]:
    """The files that this rank writes, and whether zero_to_fp32 gives the converged model."""
    prepare(rank, size)
    run = Run(settings(stage))
    run.train(0, at)
    written: list[str] = []
    engine = run.engine.checkpoint_engine
    save = engine.save

    def noting(state_dict: Any, path: str) -> Any:
        written.append(path)
        return save(state_dict, path)

    engine.save = noting
    before = run.bits()
    run.engine.save_checkpoint(home)
    if stage < 3:
        run.engine.save_16bit_model(home)
        dist.barrier()  # rank 0 writes, and DeepSpeed does not make the others wait
    assert all(torch.equal(a, b) for a, b in zip(before, run.bits(), strict=True))
    run.scheduler.finalize()
    same = True
    if stage < 3:
        whole = torch.load(Path(home, "pytorch_model.bin"), weights_only=True)
        same = all(torch.equal(whole[n], p) for n, p in run.model.named_parameters())
    if stage > 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        saved = get_fp32_state_dict_from_zero_checkpoint(home)
        names = [n for n, _ in run.model.named_parameters()]
        wanted = dict(zip(names, run.parameters(), strict=True))
        same = same and all(torch.equal(saved[n], wanted[n]) for n in names)
    return written, same


def wrong_layouts(rank: int, size: int, home: str) -> list[str]:
    """What is said to a run that cannot continue a checkpoint."""
    prepare(rank, size)
    run = Run(settings(2, shards=2))
    run.train(0, 2)
    run.engine.save_checkpoint(home)
    said = []
    for other in (settings(2, shards=1), settings(1, shards=2), settings(0, shards=1)):
        try:
            Run(other).engine.load_checkpoint(home)
        except ValueError as error:
            said.append(str(error))
    zero = Run(settings(0, shards=2))
    zero.train(0, 2)
    zero.engine.save_checkpoint(home, tag="whole")
    try:
        Run(settings(0, shards=1)).engine.load_checkpoint(home, tag="whole")
    except ValueError as error:
        said.append(str(error))
    return said


def more_replicas(rank: int, size: int, home: str) -> bool:
    """Saved right after a converge by two replicas, continued by four (stage 0)."""
    prepare(rank, size)
    run = Run(settings(0, shards=2))
    run.train(0, T)
    run.engine.save_checkpoint(home)
    fresh = Run(settings(0, shards=1))
    fresh.engine.load_checkpoint(home)
    return all(torch.equal(a, b) for a, b in zip(run.parameters(), fresh.parameters(), strict=True))


def refused(rank: int, size: int, changes: list[dict[str, Any]]) -> list[str]:
    """What is said to each config."""
    prepare(rank, size)
    said = []
    for change in changes:
        config = settings(2)
        for key, value in change.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        said.append(_said(lambda config=config: Run(config)))
    return said


def _said(action: Any) -> str:
    try:
        action()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused_models(rank: int, size: int) -> dict[str, str]:
    prepare(rank, size)
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from hdet_scale.deepspeed import initialize, shard_group

    class Unit:
        def get_model_parallel_world_size(self) -> int:
            return 2

    def made(group: Any) -> nn.Module:
        with deepspeed.zero.Init(data_parallel_group=group, dtype=torch.float32):
            return network()

    config = settings(3)
    alone = network()
    said = {
        "pipeline": _said(lambda: Run(config, model=PipelineModule([nn.Linear(8, 1)], 1))),
        "unit": _said(lambda: Run(config, mpu=Unit())),
        "zero.Init": _said(lambda: Run(config, model=made(None))),
        "plain initialize": _said(
            lambda: deepspeed.initialize(
                model=alone, model_parameters=alone.parameters(), config=config
            )
        ),
        "no model": _said(lambda: initialize(config=config)),
        "two configs": _said(lambda: Run(config, config_params=config)),
        "own exploring": _said(
            lambda: Run(
                {k: v for k, v in config.items() if k != "scheduler"},
                lr_scheduler=lambda o: OneCycleAutoLR(o, 0.1, total_steps=9),
            )
        ),
    }
    run = Run(config, model=made(shard_group(config)))
    run.train(0, T)
    said["ours"] = f"{run.output():.9f}"
    return said


def other_version(rank: int, size: int) -> str:
    """A DeepSpeed that lacks what is relied on."""
    prepare(rank, size)
    from hdet_scale.deepspeed.partitions import Stages12

    kept = Stages12.needs
    Stages12.needs = (*kept, "a_name_of_tomorrow")
    try:
        return _said(lambda: Run(settings(2)))
    finally:
        Stages12.needs = kept


def losses(rank: int, size: int) -> dict[str, Any]:
    """Which losses the scheduler hears, and what becomes of an error inside its step."""
    prepare(rank, size)
    run = Run(settings(1))
    heard: list[float | None] = []
    step = run.scheduler.step
    run.scheduler.step = lambda loss=None: (
        heard.append(None if loss is None else float(loss)),
        step(loss),
    )
    run.train(0, 1)
    wanted = []
    with torch.no_grad():
        fresh = network().float()
        wanted = [
            float(loss_of(fresh, batch(0, part, rank), torch.float32)) for part in range(PARTS)
        ]
    for part in range(PARTS):
        run.engine.backward(loss_of(run.engine, batch(1, part, rank), torch.float32))
        run.engine.step(lr_kwargs={"loss": 1.25})
    calls = []

    def failing(loss: Any = None) -> None:
        calls.append(loss)
        raise TypeError("inside the step")

    run.scheduler.step = failing
    said = _said(lambda: run.train(2, 3))
    run.scheduler.step = step
    return {
        "heard": heard,
        "wanted": sum(wanted) / PARTS,
        "said": said,
        "calls": len(calls),
        "integer": _said(lambda: run.scheduler.step(16)),
    }


def schedules(rank: int, size: int) -> dict[str, Any]:
    """Each way to name a schedule, and the learning rates that come of it."""
    prepare(rank, size)
    found: dict[str, Any] = {}
    quiet = {"spread": 0.0, "rule": "none"}

    def rates(name: str, scheduler: dict[str, Any] | None, **arguments: Any) -> None:
        config = settings(2, **quiet)
        config.pop("scheduler")
        if scheduler is not None:
            config["scheduler"] = scheduler
        model = network()
        groups = [
            {"params": [p for n, p in model.named_parameters() if "bias" not in n]},
            {"params": [p for n, p in model.named_parameters() if "bias" in n], "lr": MAX_LR / 4},
        ]
        run = Run(config, model=model, model_parameters=groups, **arguments)
        seen = []
        for step in range(4):
            seen.append(run.engine.get_lr())
            run.train(step, step + 1)
        found[name] = (type(run.scheduler).__name__, seen)

    warm = {"warmup_min_lr": 0.004, "warmup_max_lr": MAX_LR, "warmup_num_steps": 2}
    rates("auto warmup", {"type": "HDETAutoLR", "params": {**warm, "total_num_steps": 6}})
    rates("one cycle warmup", {"type": "HDETOneCycle", "params": {**warm, "total_num_steps": 6}})
    exponential = {"type": "ExponentialLR", "params": {"gamma": 0.5}}
    rates("named inside", {"type": "HDETAutoLR", "params": {"scheduler": exponential}})
    rates("torch's own", exponential)
    rates("a callable", None, lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    rates("none", None)
    return found


def batches(rank: int, size: int) -> dict[str, Any]:
    """Batch arithmetic, the loader's samples, and the layouts of "auto"."""
    prepare(rank, size)
    from hdet_scale.deepspeed import initialize
    from hdet_scale.deepspeed.settings import Settings

    config = settings(2)
    data = torch.utils.data.TensorDataset(torch.arange(32).float())
    model = network()
    engine, _, loader, _ = initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=data
    )
    seen = sorted(int(v) for v in loader.data_sampler)

    def numbers() -> tuple[int, int, int]:
        return (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )

    start = numbers()
    engine.set_train_batch_size(MICRO * 4 * 3)
    changed = numbers()
    engine.set_train_micro_batch_size(2)
    small = numbers()
    said = _said(lambda: engine.set_train_batch_size(9))
    auto = {
        (stage, world): Settings.read(settings(stage, shards="auto")).shards(world)
        for stage, world in ((0, 4), (2, 4), (3, 9), (2, 1))
    }
    found = {"start": start, "changed": changed, "small": small}
    return {**found, "seen": seen, "auto": auto, "said": said}


def padded(rank: int, size: int, stage: int) -> tuple[float, tuple[int, ...], bool]:
    """NaN in every element that pads a partition, as uninitialised memory may hold it."""
    prepare(rank, size)
    run = Run(settings(stage, gradients="local"))
    z, shard = run.optimizer, run.engine.replicas.shard_rank
    poisoned = 0
    for params, flat in zip(z.fp16_groups, z.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for p in params:
            length = p.partition_numel()
            pad = length - min(max(p.ds_numel - shard * length, 0), length)
            with torch.no_grad():
                flat[start + length - pad : start + length] = float("nan")
            poisoned += pad
            start += length
    run.train(0, T)
    return run.output(), run.counters(), poisoned > 0


def alone(rank: int, size: int) -> tuple[float, int, bool]:
    """One rank: one replica, for trying a script out."""
    prepare(rank, size)
    run = Run(settings(2, shards=1))
    before = run.output()
    run.train(0, T)
    return abs(run.output() - before), run.engine.train_batch_size(), run.scheduler.at_boundary


def monitored(rank: int, size: int, home: str) -> None:
    """A run with the csv monitor."""
    prepare(rank, size)
    config = settings(1)
    config["csv_monitor"] = {"enabled": True, "output_path": home, "job_name": "job"}
    run = Run(config)
    run.train(0, T)


def frozen(rank: int, size: int, stage: int) -> tuple[float, list[Tensor]]:
    """A frozen parameter that started different on every rank, and a buffer."""
    prepare(rank, size)
    model = network(seed=rank, frozen=True)
    model.register_buffer("mean", torch.full((3,), float(rank)))
    run = Run(settings(stage), model=model)
    run.train(0, T)
    return run.output(), [*run.parameters(), model.mean]


def common(run: Run) -> Any:
    """Four batches that all ranks have in common, for a probe."""

    def losses() -> Any:
        for i in range(4):
            yield loss_of(run.engine.module, batch(10_000 + i, 0, 0), run.dtype)

    return losses


def held(run: Run) -> list[Tensor]:
    """What a rewind must bring back on this rank."""
    own = run.engine.partitions
    return [t.detach().clone() for t in own.masters() + own.moments()]


def same(*lists: list[Tensor]) -> bool:
    return all(
        len(one) == len(lists[0])
        and all(torch.equal(a, b) for a, b in zip(one, lists[0], strict=True))
        for one in lists
    )


RACE_STEPS = 600
"""About the shortest run that two replicas can race in: heats of 4 and 5 steps."""


def racing(stage: int, dtype: str = "fp32", total: int = RACE_STEPS) -> Run:
    config = settings(stage, dtype, rule="race", spread=0.0)
    params = {"max_lr": MAX_LR / 50, "total_steps": total, "cycle_momentum": False}
    config["scheduler"]["params"] = params
    run = Run(config)
    run.scheduler.probe_with(common(run), run.model)
    return run


def after_each_trial(run: Run, work: Any) -> None:
    run.scheduler.on_record(lambda record: work() if record.kind == "trial" else None)


def raced(rank: int, size: int, stage: int) -> Any:
    """The race; then ten steps against plain DeepSpeed over the whole world at the rates found."""
    prepare(rank, size)
    run, step, back = racing(stage), 0, []
    start, whole = held(run), run.parameters()
    after_each_trial(run, lambda: back.append(same(held(run), start)))
    while run.scheduler.searching:
        run.train(step, step + 1)
        step += 1
    back.append(same(run.parameters(), whole))
    rates = []
    for i in range(10):
        rates.append(run.scheduler.get_last_lr()[0])
        run.train(step + i, step + i + 1)
    mine, found = run.parameters(), run.scheduler._round.steering.found[0]
    import deepspeed
    from deepspeed.utils import groups

    groups.mpu = None
    own = {k: v for k, v in settings(stage).items() if k not in ("hdet", "scheduler")}
    model = network()
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=own
    )
    for i, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for part in range(PARTS):
            engine.backward(loss_of(engine, batch(step + i, part, rank), torch.float32))
            engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        pairs = zip(mine, model.parameters(), strict=True)
        distance = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return back, (step, found, run.scheduler.verdict, rates), distance


def teams(rank: int, size: int, stage: int) -> Any:
    """Four replicas that race in teams of two in the long stage: five steps of it against torch's
    own AdamW on the batches of the team."""
    prepare(rank, size)
    config = settings(stage, "fp32", 1, rule="race", spread=0.0)
    params = {"max_lr": MAX_LR, "total_steps": RACE_STEPS, "cycle_momentum": False}
    config["scheduler"]["params"] = params
    run = Run(config)
    run.scheduler.probe_with(common(run), run.model)
    reference = network()
    plain = torch.optim.AdamW(reference.parameters(), eps=1e-3)
    first, search, step = rank // 2 * 2, run.scheduler._search, 0
    with long_stage(parts=2):
        while search.rule.team == 1:
            run.train(step, step + 1)
            step += 1
        for _ in range(5):
            plain.param_groups[0]["lr"] = run.scheduler.get_last_lr()[0]
            run.train(step, step + 1)
            drawn = [
                batch(step, part, mate) for part in range(PARTS) for mate in (first, first + 1)
            ]
            plain.zero_grad()
            torch.stack([loss_of(reference, x, torch.float32) for x in drawn]).mean().backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            plain.step()
            step += 1
        early = run.parameters()
        while run.scheduler.searching:
            run.train(step, step + 1)
            step += 1
    run.train(step, step + 3)
    return early, [p.detach().clone() for p in reference.parameters()], run.parameters()


GUARDED_STEPS = 800
"""Of a run of two replicas under a watch."""


def guarded(rank: int, size: int, home: str, stage: int, shards: int) -> Any:
    """A run under a watch that overfits as soon as the weights are some way from their start; and
    the same from a checkpoint after its first look."""
    prepare(rank, size)
    config = settings(stage, "bf16", shards, rule="auto", spread=0.0)
    replicas = 4 // shards
    total = GUARDED_STEPS if replicas == 2 else GUARDED_STEPS // 2
    params = {"max_lr": 1e-4, "total_steps": total, "cycle_momentum": False}
    config["scheduler"]["params"] = params
    config["train_batch_size"] = MICRO * 4  # one part a step

    def fresh() -> tuple[Run, Any]:
        with short_runs():
            run = Run(config)
        start = [m.detach().clone() for m in run.engine.partitions.masters()]

        def gone() -> float:
            masters = zip(run.engine.partitions.masters(), start, strict=True)
            squares = torch.stack([(m.detach() - s).square().sum() for m, s in masters]).sum()
            if run.engine.replicas.shard_group is not None:
                dist.all_reduce(squares, group=run.engine.replicas.shard_group)
            return float(squares) ** 0.5

        def losses() -> Any:
            far = 0.5 + math.log((gone() + 1e-3) / 0.3) ** 2
            return (far + 0.01 * i for i in range(8))

        run.scheduler.probe_with(losses, run.model)
        return run, gone

    def train(run: Run, gone: Any, first: int, until: Any) -> int:
        step = first
        while not until(step):
            run.engine.backward(loss_of(run.engine, batch(step, 0, rank), run.dtype))
            run.engine.step(lr_kwargs={"loss": 1.0 / (0.1 + gone())})
            step += 1
        return step

    (run, gone), records = fresh(), []
    run.scheduler.on_record(records.append)
    start = held(run)
    step = train(run, gone, 0, lambda _: records and records[-1].kind == "evaluation")
    run.engine.save_checkpoint(home)
    saved = step
    step = train(run, gone, step, lambda _: records[-1].restart)
    back = same(held(run), start)
    end = step + 20
    train(run, gone, step, lambda at: at == end)
    again, gone = fresh()
    again.engine.load_checkpoint(home)
    watched = again.scheduler.watching
    train(again, gone, saved, lambda at: at == end)
    scales = [r.scheduler._round.steering.found[0] for r in (run, again)]
    return back, watched, same(run.bits(), again.bits()), scales


def raced_in_fp16(rank: int, size: int, stage: int) -> Any:
    """Replica 1 overflows twice in the first heat, which halves its loss scale."""
    prepare(rank, size)
    run, scales = racing(stage, "fp16"), []
    start = run.engine.partitions.scale_state()
    after_each_trial(run, lambda: scales.append(run.engine.partitions.scale_state() == start))
    run.train(0, 3, bad={1: 1, 2: 1})
    moved = float(run.optimizer.loss_scale)
    step = 3
    while run.scheduler.searching:
        run.train(step, step + 1)
        step += 1
    run.train(step, step + 3)
    return moved, scales, float(run.optimizer.loss_scale), run.output(), start


def climbed(rank: int, size: int, home: str, stage: int, shards: int, at: int) -> Any:
    """A climb that is lost on all replicas in its third round and goes back; and the same from a
    checkpoint after `at` steps."""
    prepare(rank, size)
    config = settings(stage, "fp16", shards, rule="climb", spread=0.3, interval=2, total_steps=200)
    config["scheduler"] = {"type": "HDETAutoLR", "params": {}}

    def fresh() -> Run:
        run = Run(config)
        run.scheduler.probe_with(common(run), run.model)
        return run

    def lost(run: Run) -> tuple[list[Tensor], list[Tensor]]:
        run.train(at, 5)
        with torch.no_grad():
            run.engine.partitions.masters()[0].fill_(float("nan"))
        run.train(5, 6)
        back = held(run)
        run.train(6, 9)
        return back, run.bits()

    run = fresh()
    start, scale = held(run), run.engine.partitions.scale_state()
    run.train(0, at)
    run.engine.save_checkpoint(home)
    back, end = lost(run)
    again = fresh()
    again.engine.load_checkpoint(home)
    back_again, end_again = lost(again)
    scales = [r.engine.partitions.scale_state()["cur_scale"] for r in (run, again)]
    told = run.scheduler._round.steering.rule.cuts, scales[0] == scales[1] == scale["cur_scale"]
    return same(start, back, back_again), same(end, end_again), told


def after_the_search(rank: int, size: int, home: str, stage: int) -> Any:
    """A slope search that is over: one checkpoint is right for all replicas."""
    prepare(rank, size)

    def fresh(shards: int) -> Run:
        run = Run(settings(stage, shards=shards, rule="slope", spread=0.3, interval=2, patience=1))
        run.scheduler.probe_with(common(run), run.model)
        run.scheduler._round.steering.rule.false_moves = 1e-300  # it ends at once
        return run

    run = fresh(2)
    run.train(0, 7)
    phase = run.scheduler._round.steering.decision.phase
    run.engine.save_checkpoint(home)
    saved = run.parameters()
    run.train(7, 11)
    again = fresh(2)
    again.engine.load_checkpoint(home)
    again.train(7, 11)
    equal = same(run.bits(), again.bits())
    wider = True
    if stage == 0:
        other = fresh(1)
        other.engine.load_checkpoint(home)
        wider = same(other.parameters(), saved)
    return phase, equal, wider


def policies(rank: int, size: int, stage: int, policy: dict[str, Any]) -> Any:
    """Another converge policy, resumed in the middle of a round."""
    import tempfile

    prepare(rank, size)
    config = settings(stage, "bf16", gradients="local", converge=policy)
    home = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(home)
    run = Run(config)
    run.train(0, T + 2)
    run.engine.save_checkpoint(home[0])
    run.train(T + 2, 3 * T - 1)
    ended = run.bits()
    fresh = Run(config)
    fresh.engine.load_checkpoint(home[0])
    fresh.train(T + 2, 3 * T - 1)
    same = all(torch.equal(a, b) for a, b in zip(ended, fresh.bits(), strict=True))
    run.scheduler.finalize()
    return same, run.output()


def from_file(rank: int, size: int, path: str, batch_size: int) -> Any:
    """A config of the repository at a small size: a tiny GPT over bytes."""
    import json

    prepare(rank, size)
    from hdet_scale.deepspeed import initialize
    from hdet_scale.models.gpt import GPT, GPTConfig

    config = json.loads(Path(path).read_text())
    config |= {"train_micro_batch_size_per_gpu": batch_size, "gradient_accumulation_steps": 1}
    config["scheduler"]["params"]["total_steps"] = 100  # too short for a race
    model = GPT(GPTConfig(layers=1, width=16, heads=2, context=8))
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = torch.randint(256, (batch_size, 8), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(2):
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        output = float(engine(tokens.new_zeros(1, 8), tokens.new_zeros(1, 8)))
    return losses, output, engine.global_steps, type(engine.basic_optimizer).__name__
