"""DeepSpeed: `initialize` with replicas, at ZeRO stages 0 to 3.

    engine, optimizer, loader, scheduler = hdet_scale.deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), config="ds_hdet.json")

Same arguments and result as deepspeed.initialize; the rest of a script stays as it is. The
replicas are groups of consecutive ranks: DeepSpeed is given a data-parallel group of one
replica's ranks, so that ZeRO shards within a replica and nothing of it crosses replicas.
Importing this module makes the scheduler types HDETOneCycle and HDETAutoLR known to DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from hdet_scale.deepspeed.settings import Settings, refuse_model, refuse_unit
from hdet_scale.topology import Group, Replicas

try:
    import deepspeed
except ImportError as missing:
    raise ImportError(
        "hdet_scale.deepspeed needs DeepSpeed: pip install hdet_scale[deepspeed]"
    ) from missing

from deepspeed.accelerator import get_accelerator

from hdet_scale.deepspeed.engine import HDETEngine
from hdet_scale.deepspeed.scheduler_types import (
    Building,
    HDETAutoLR,
    HDETOneCycle,
    building,
    explored,
    register,
)

__all__ = ["HDETAutoLR", "HDETEngine", "HDETOneCycle", "initialize", "shard_group"]

register()

Config = str | Path | Mapping[str, Any]


class ShardUnit:
    """The "mpu" that DeepSpeed asks for its groups: data-parallel within a replica, the model not
    split."""

    def __init__(self, replicas: Replicas, alone: Group) -> None:
        self.replicas = replicas
        self.alone = alone

    def get_data_parallel_group(self) -> Group:
        return self.replicas.shard_group or self.alone

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.get_data_parallel_group())

    def get_data_parallel_rank(self) -> int:
        return self.replicas.shard_rank

    def get_data_parallel_world_size(self) -> int:
        return self.replicas.shard_size

    def get_model_parallel_group(self) -> Group:
        return self.alone

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1


_units: dict[tuple[int, int], tuple[Group | None, ShardUnit]] = {}


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Config | None = None,
    mesh_param: Any = None,
    config_params: Config | None = None,
) -> tuple[HDETEngine, Any, Any, Any]:
    """deepspeed.initialize with the config's "hdet" block.

    Args:
        args: of a script; `args.deepspeed_config` may name the config.
        model: the module to train, built before or under `zero.Init` (see `shard_group`).
        optimizer, model_parameters, training_data, distributed_port, dist_init_required,
            collate_fn: as in deepspeed.initialize.
        lr_scheduler: a torch scheduler, or a callable that makes one of an optimizer; it is
            wrapped in AutoLR with the "hdet" block. Or name HDETOneCycle or HDETAutoLR in the
            config.
        mpu: refused where it splits the model, otherwise ignored: the block makes the groups.
        config, config_params: a dict, or the path of a JSON file; one of them. Batch sizes are
            those of the whole world.
        mesh_param: refused: write "replicas" and "shards" in the block.

    Returns:
        (engine, optimizer, loader, scheduler).

    Raises:
        ValueError, TypeError: for a config or a model that replicas cannot have; the error says
            what to write instead.
    """
    if model is None:
        raise ValueError("initialize needs model=, the nn.Module to train")
    if mesh_param is not None:
        raise ValueError(
            f'mesh_param={mesh_param!r} would make other groups: write "replicas" and "shards" in '
            'the "hdet" block instead'
        )
    refuse_unit(mpu)
    settings = Settings.read(_config(args, config, config_params))
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
    )
    unit = _unit(settings)
    refuse_model(model, unit.get_data_parallel_group_ranks())
    with _without_config(args), _build(Building(settings.hdet, unit.replicas, model)):
        engine, _, _, scheduler = deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            mpu=unit,
            dist_init_required=False,
            collate_fn=collate_fn,
            config=settings.for_replica(unit.replicas.size),
        )
        found = explored(scheduler, engine.optimizer, engine.basic_optimizer)
    adopted = HDETEngine.adopt(engine, found, unit.replicas, settings.hdet)
    adopted.begin_equal()
    if training_data is not None:
        adopted.training_dataloader = adopted.deepspeed_io(training_data)
    return adopted, adopted.optimizer, adopted.training_dataloader, found


def shard_group(config: Config) -> Group:
    """The ranks of this replica, to build a model on: deepspeed.zero.Init(data_parallel_group=...).

    Collective: every rank calls it. Starts torch.distributed where it is not up yet.
    """
    settings = Settings.read(config)
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    return _unit(settings).get_data_parallel_group()


def _unit(settings: Settings) -> ShardUnit:
    """The groups of the config's layout, made once for each size."""
    world = dist.get_world_size()
    shards = settings.shards(world)
    settings.check(world, shards)
    made = _units.get((world, shards))
    if made is None or made[0] is not dist.group.WORLD:  # a new process group has new members
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        made = (dist.group.WORLD, ShardUnit(Replicas.of(shard_size=shards), alone))
        _units[world, shards] = made
    return made[1]


def _config(args: Any, *given: Config | None) -> Config:
    """The one config among the arguments, as deepspeed.initialize looks for it."""
    found = [c for c in (*given, getattr(args, "deepspeed_config", None)) if c is not None]
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} configs were given: pass one, as config= or as --deepspeed_config"
        )
    return found[0]


@contextmanager
def _build(now: Building) -> Iterator[None]:
    token = building.set(now)
    try:
        yield
    finally:
        building.reset(token)


@contextmanager
def _without_config(args: Any) -> Iterator[None]:
    """DeepSpeed refuses a config in args beside config=: hide it meanwhile."""
    kept = getattr(args, "deepspeed_config", None)
    if kept is not None:
        args.deepspeed_config = None
    try:
        yield
    finally:
        if kept is not None:
            args.deepspeed_config = kept
