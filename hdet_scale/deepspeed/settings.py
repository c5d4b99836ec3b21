"""Settings: the DeepSpeed config with its "hdet" block, the layout it asks for, what is refused.

    "hdet": {"replicas": 2, "shards": "auto", "gradients": "shared", "spread": 0.11, ...}

World size = replicas x shards. DeepSpeed is given a data-parallel group of one replica's ranks,
so its own batch arithmetic is that of one replica; the user writes the batch of the whole world,
and it is divided here and multiplied back in the engine.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hdet_scale.config import HDETConfig

TYPES = ("HDETOneCycle", "HDETAutoLR")
"""The scheduler types that a config may name."""
KEYS = tuple(f.name for f in dataclasses.fields(HDETConfig) if f.name != "total_steps")
"""HDET's keys allowed among a scheduler's params; total_steps is the schedule's own there."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A DeepSpeed config whose HDET part has been read."""

    deepspeed: dict[str, Any]
    """What DeepSpeed is given: a copy of the user's."""
    hdet: HDETConfig
    """The block, together with the HDET keys among the scheduler's params."""

    @classmethod
    def read(cls, config: str | Path | Mapping[str, Any]) -> Settings:
        """From a dict or the path of a JSON file; the user's dict is not changed."""
        values = _load(config)
        scheduler = values.get("scheduler") or {}
        ours = scheduler.get("type") in TYPES
        if "hdet" not in values and not ours:
            raise ValueError(
                'the config has no "hdet" block: add e.g. "hdet": {"replicas": 2, "rule": "auto"}, '
                "or train with deepspeed.initialize"
            )
        params = scheduler.get("params", {}) if ours else {}
        return cls(values, HDETConfig.from_dict(merged(values.get("hdet", {}), params)))

    @property
    def stage(self) -> int:
        """ZeRO's stage."""
        return int(self._zero.get("stage", 0))

    @property
    def _zero(self) -> Mapping[str, Any]:
        return self.deepspeed.get("zero_optimization") or {}

    def shards(self, world: int) -> int:
        """Ranks of one replica, from "replicas" and "shards" and the world."""
        replicas, shards = self.hdet.replicas, self.hdet.shards
        if replicas == "auto" and shards == "auto":
            return _automatic(world, self.stage)
        if replicas == "auto":
            replicas = world // int(shards) if world % int(shards) == 0 else "world / shards"
        if shards == "auto":
            shards = world // int(replicas) if world % int(replicas) == 0 else "world / replicas"
        if isinstance(replicas, str) or isinstance(shards, str) or replicas * shards != world:
            layouts = [f"{n} x {world // n}" for n in range(1, world + 1) if world % n == 0]
            raise ValueError(
                f"world size = replicas x shards: {replicas} x {shards} is not the world of "
                f'{world} ranks; write "replicas" and "shards" as one of {layouts}'
            )
        return shards

    def check(self, world: int, shards: int) -> None:
        """Refuse what cannot be right, each with what to write instead."""
        replicas = world // shards
        if replicas == 1 and world > 1 and self.hdet.diverges:
            raise ValueError(
                f'"replicas": 1 in a world of {world} ranks: all {world} ranks are ZeRO shards of '
                "one model, and HDET needs at least two replicas to compare. Set "
                f'"replicas": {_smallest_factor(world)}, or "rule": "none", "spread": 0 and '
                '"gradients": "shared" for plain training'
            )
        for found, advice in self._unfit():
            raise ValueError(f"{found} does not go with HDET: {advice}")
        self._check_batch(world, replicas)

    def _unfit(self) -> list[tuple[str, str]]:
        """(what was found, what to write instead), for options that make other groups."""
        zero, top = self._zero, self.deepspeed
        offload = [zero.get(k) or {} for k in ("offload_optimizer", "offload_param")]
        shards = 'write "shards" in the "hdet" block, which gives groups of any size'
        cases = [
            (zero.get("mics_shard_size", 0) > 0, '"mics_shard_size"', shards),
            (zero.get("zero_hpz_partition_size", 1) > 1, '"zero_hpz_partition_size"', shards),
            (zero.get("zero_quantized_gradients"), '"zero_quantized_gradients"', "leave it out"),
            (zero.get("zenflow"), '"zenflow"', 'use "offload_optimizer": {"device": "cpu"}'),
            (
                any(o.get("device") == "nvme" for o in offload),
                'offload to "nvme"',
                'use "device": "cpu": the converge needs the fp32 partitions in memory',
            ),
            (
                any(o.get("super_offload") for o in offload),
                '"super_offload"',
                'use "offload_optimizer": {"device": "cpu"}',
            ),
            (
                (top.get("hybrid_engine") or {}).get("enabled"),
                '"hybrid_engine"',
                "train with the plain engine",
            ),
            (
                (top.get("tensor_parallel") or {}).get("autotp_size", 0) > 1,
                '"autotp_size"',
                "shard with ZeRO instead",
            ),
            (top.get("sequence_parallel_size", 1) > 1, '"sequence_parallel_size"', "leave it out"),
            (
                (top.get("data_efficiency") or {}).get("enabled"),
                '"data_efficiency"',
                "its sampler would give every replica the same samples; pass your own data loader",
            ),
            (
                (top.get("compile") or {}).get("deepcompile"),
                '"deepcompile"',
                "compile the model with torch.compile before initialize",
            ),
        ]
        return [(found, advice) for present, found, advice in cases if present]

    def _check_batch(self, world: int, replicas: int) -> None:
        whole = self.deepspeed.get("train_batch_size")
        if not isinstance(whole, int):
            return
        micro = self.deepspeed.get("train_micro_batch_size_per_gpu")
        steps = self.deepspeed.get("gradient_accumulation_steps")
        if isinstance(micro, int) and isinstance(steps, int) and micro * steps * world != whole:
            raise ValueError(
                f"train_batch_size={whole} is the batch of all {world} ranks, and "
                f"train_micro_batch_size_per_gpu={micro} x gradient_accumulation_steps={steps} x "
                f"{world} ranks is {micro * steps * world}: change one of them, or leave one out"
            )
        if whole % replicas:
            raise ValueError(
                f"train_batch_size={whole} cannot be divided among {replicas} replicas: write a "
                f"multiple of {world}"
            )

    def for_replica(self, replicas: int) -> dict[str, Any]:
        """The config as DeepSpeed needs it: the batch of one replica, and a scheduler of torch's
        own, which would refuse the ZeRO optimizer, inside HDETAutoLR."""
        values = copy.deepcopy(self.deepspeed)
        named = values.get("scheduler") or {}
        kind = getattr(torch.optim.lr_scheduler, str(named.get("type")), None)
        if isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
            values["scheduler"] = {"type": "HDETAutoLR", "params": {"scheduler": named}}
        if isinstance(values.get("train_batch_size"), int):
            values["train_batch_size"] //= replicas
        return values


def merged(block: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The HDET keys of the block and of the scheduler's params; a contradiction is an error."""
    if not isinstance(block, Mapping):
        raise TypeError(f'"hdet" must be a mapping of options, got {block!r}')
    found = {k: params[k] for k in KEYS if k in params}
    for key, value in found.items():
        if key in block and block[key] != value:
            raise ValueError(
                f'{key} is {block[key]!r} in the "hdet" block and {value!r} in the scheduler\'s '
                'params: write it once, best in the "hdet" block'
            )
    return {**block, **found}


def refuse_model(model: nn.Module, shard_ranks: list[int]) -> None:
    """Refuse a pipeline, and parameters that zero.Init has partitioned over other ranks."""
    from deepspeed.pipe import PipelineModule

    if isinstance(model, PipelineModule):
        raise ValueError(
            "a PipelineModule passes its loss inside train_batch, and its stages are no replicas: "
            "pass the model as a plain nn.Module and shard it with ZeRO stage 3"
        )
    for name, p in model.named_parameters():
        group = getattr(p, "ds_process_group", None)
        if group is None:
            continue
        ranks = dist.get_process_group_ranks(group)
        if ranks != shard_ranks:
            raise ValueError(
                f"zero.Init partitioned {name} over ranks {ranks}, and the ranks of this replica "
                f"are {shard_ranks}: build the model under deepspeed.zero.Init("
                "data_parallel_group=hdet_scale.deepspeed.shard_group(config))"
            )


def refuse_unit(mpu: object) -> None:
    """Refuse a model-parallel unit of the user's that splits the model; one that does not is
    replaced, since it says nothing that the layout does not."""
    size = getattr(mpu, "get_model_parallel_world_size", lambda: 1)()
    if size > 1:
        raise ValueError(
            f"the mpu splits the model over {size} ranks, and replicas of such a model are not "
            'supported: shard with ZeRO ("shards" in the "hdet" block) and pass mpu=None'
        )


def _load(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, str | Path):
        raise TypeError(f"config must be a dict or the path of a JSON file, got {config!r}")
    import hjson  # DeepSpeed's own: a config may have comments

    text = Path(config).read_text(encoding="utf-8")
    values = hjson.loads(text, object_pairs_hook=_distinct)
    if not isinstance(values, dict):
        raise TypeError(f"{config} must hold a JSON object, got {type(values).__name__}")
    return values


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the config has the keys {twice} twice in one block: keep one of each")
    return found


def _automatic(world: int, stage: int) -> int:
    """Without ZeRO every rank is a replica. With it a replica is as large as can be while there
    are two or more: a node where there are several, else the world over its smallest factor."""
    if stage == 0 or world == 1:
        return 1
    node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if node < world and world % node == 0:
        return node
    return world // _smallest_factor(world)


def _smallest_factor(world: int) -> int:
    return next(n for n in range(2, world + 1) if world % n == 0)
