"""Replicas: which ranks form a whole copy of the model, and which hold the same shard of it.

World size = replicas x shards. A replica is one whole copy of the model; its `shard_size` ranks
hold a slice each. The learning rate belongs to the replica, and the converge averages over the
ranks that hold the *same* slice:

                 shard 0   shard 1
    replica 0      0          1        shard_group of rank 0: {0, 1}
    replica 1      2          3        group of rank 0:       {0, 2}

Resolved once into this small typed object; nothing else in the package asks for a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup


def is_distributed() -> bool:
    """True when a process group is up in this process."""
    return dist.is_available() and dist.is_initialized()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of a tensor.

    Args:
        tensor: any tensor; of a DTensor only this rank's shard is returned.

    Returns:
        A detached view: writing to it writes the tensor.
    """
    inner = getattr(tensor, "_local_tensor", None)
    return (tensor if inner is None else inner).detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """This rank's place among replicas x shards."""

    rank: int = 0
    """Which replica this rank belongs to: the index that gets a learning rate."""
    size: int = 1
    """How many replicas there are."""
    group: Group | None = None
    """The ranks that hold the same shard in every replica: where the converge runs."""
    shard_rank: int = 0
    """Which shard of its replica this rank holds."""
    shard_size: int = 1
    """How many ranks hold one replica."""
    shard_group: Group | None = None
    """The ranks of this replica; None when a replica is one rank."""

    def __post_init__(self) -> None:
        _check_place("rank", self.rank, "size", self.size)
        _check_place("shard_rank", self.shard_rank, "shard_size", self.shard_size)

    @classmethod
    def world(cls) -> Replicas:
        """Every rank a replica (DDP). Without torch.distributed: one replica."""
        if not is_distributed():
            return cls()
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), group=dist.group.WORLD)

    @classmethod
    def of(cls, *, shard_size: int | None = None, replicas: int | None = None) -> Replicas:
        """Replicas of `shard_size` consecutive ranks each; collective: every rank calls it.

        Consecutive ranks share a replica, so that the busy traffic of a shard group stays on
        the fast links of a node and only the converge crosses them.

        Args:
            shard_size: ranks of one replica; give this or replicas.
            replicas: how many replicas.

        Raises:
            ValueError: where it does not divide the world, or both or none are given.
        """
        world = dist.get_world_size() if is_distributed() else 1
        shards = shard_size_of(world, shard_size=shard_size, replicas=replicas)
        if shards == 1:
            return cls.world()
        me = dist.get_rank()
        columns = [range(s, world, shards) for s in range(shards)]
        rows = [range(r, r + shards) for r in range(0, world, shards)]
        return cls(
            rank=me // shards,
            size=world // shards,
            group=_new_group(columns, me),
            shard_rank=me % shards,
            shard_size=shards,
            shard_group=_new_group(rows, me),
        )

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh, replica: str = "replica", shard: str = "shard"
    ) -> Replicas:
        """From a DeviceMesh with a dimension of replicas and, optionally, one of shards.

        Args:
            mesh: with named dimensions, such as `hdet_scale.fsdp.build_mesh` makes.
            replica: name of the dimension over which replicas are averaged.
            shard: name of the dimension over which a replica is sharded.

        Raises:
            ValueError: where the mesh has no dimension of that name, or others of more than one
                rank.
        """
        names = mesh.mesh_dim_names or ()
        if replica not in names:
            raise ValueError(
                f"the mesh has dimensions {names or 'without names'}, none called {replica!r}: "
                f"build it with init_device_mesh(device, (replicas, shards), "
                f'mesh_dim_names=("{replica}", "{shard}")), or pass replica=/shard= with your names'
            )
        extra = [n for n in names if n not in (replica, shard)]
        if any(mesh.get_group(n).size() > 1 for n in extra):
            raise ValueError(
                f"the mesh has further dimensions {extra}: pass the sub-mesh of replicas and "
                f'shards alone, mesh["{replica}", "{shard}"]'
            )
        group = mesh.get_group(replica)
        if shard in names:
            return cls._from_groups(group, mesh.get_group(shard))
        return cls(rank=group.rank(), size=group.size(), group=group)

    @classmethod
    def of_sharded(cls, params: Iterable[torch.Tensor]) -> Replicas:
        """The replicas behind DTensor parameters, from the mesh that they lie on; collective.

        HSDP: a mesh of replicas x shards. A mesh of shards alone that is smaller than the world:
        the other ranks hold the other replicas.
        """
        lying: list[Any] = [p for p in params if hasattr(p, "device_mesh")]
        meshes = {p.device_mesh: p.placements for p in lying}
        if len(meshes) != 1:
            raise ValueError(
                f"the parameters lie on {len(meshes)} device meshes: one mesh of replicas x shards "
                "is needed for all of them; pass replicas=Replicas.from_mesh(mesh)"
            )
        ((mesh, placements),) = meshes.items()
        world = dist.get_world_size()
        if mesh.ndim == 2 and placements[0].is_replicate():
            return cls._from_groups(mesh.get_group(0), mesh.get_group(1))
        if mesh.ndim == 1 and (mesh.size() < world or world == 1):
            first = mesh.mesh.flatten().tolist()
            if first == list(range(first[0], first[0] + mesh.size())):
                return cls.of(shard_size=mesh.size())
        raise ValueError(
            f"the parameters are sharded over a mesh of shape {tuple(mesh.shape)} with placements "
            f"{placements} in a world of {world} ranks: there are no replicas to diverge. "
            + advise_mesh(world, mesh.device_type)
        )

    def check_shards(self, params: Iterable[torch.Tensor]) -> None:
        """Refuse DTensors whose slices lie on other ranks than those of this replica: the converge
        would average slices of different places."""
        lying: list[Any] = [p for p in params if hasattr(p, "device_mesh")]
        mine = [dist.get_rank()] if is_distributed() else [0]
        if self.shard_group is not None:
            mine = dist.get_process_group_ranks(self.shard_group)
        for mesh, placements in {p.device_mesh: p.placements for p in lying}.items():
            ranks = {dist.get_rank()}
            for dim, placement in enumerate(placements):
                if not placement.is_replicate() and mesh.size(dim) > 1:
                    ranks |= set(dist.get_process_group_ranks(mesh.get_group(dim)))
            if sorted(ranks) != sorted(mine):
                raise ValueError(
                    f"a replica is made of ranks {sorted(mine)}, and the parameters are sharded "
                    f"over ranks {sorted(ranks)}: shard over the replica's ranks, mesh['shard'] of "
                    "the mesh given (hdet_scale.fsdp.attach), or pass the replicas of your mesh"
                )

    @classmethod
    def _from_groups(cls, group: Group, shard_group: Group) -> Replicas:
        sharded = shard_group.size() > 1
        return cls(
            rank=group.rank(),
            size=group.size(),
            group=group,
            shard_rank=shard_group.rank() if sharded else 0,
            shard_size=shard_group.size(),
            shard_group=shard_group if sharded else None,
        )

    def exchange(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        """Every replica's `numbers`, a row each, the mean over the shards of a replica.

        The one small collective of a round (two where replicas are sharded). Float64, so that
        losses which differ in the fifth digit are still told apart. Blocks the host: it is
        called at a converge only. NaN survives the mean, so one bad shard marks its replica.
        """
        mine = torch.tensor(list(numbers), dtype=_wide(device), device=device)
        if self.shard_group is not None:
            dist.all_reduce(mine, group=self.shard_group)
            mine /= self.shard_size
        if self.size == 1:
            return [mine.tolist()]
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.connected())
        return [row.tolist() for row in rows]

    def shard_means(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """The mean of each number over the ranks of this replica; one NaN makes it NaN."""
        if self.shard_group is None:
            return [float(x) for x in numbers]
        mine = torch.tensor(list(numbers), dtype=_wide(device), device=device)
        dist.all_reduce(mine, group=self.shard_group)
        return [float(x) / self.shard_size for x in mine.tolist()]

    def sum(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """The sum over replicas of each number: one all-reduce, whatever their number."""
        if self.size == 1:
            return list(numbers)
        mine = torch.tensor(list(numbers), dtype=_wide(device), device=device)
        dist.all_reduce(mine, group=self.connected())
        return [float(x) for x in mine.tolist()]

    def team(self, size: int) -> Replicas:
        """This replica among the `size` consecutive ones that it works with; alone where the last
        of them are too few. Collective among them.

        Consecutive replicas share a node where a node holds several: their traffic stays there.
        """
        first = self.rank // size * size
        whole = size > 1 and first + size <= self.size
        group = None
        if size > 1:
            # Also for those who are too few: torch names groups by how many a rank has made.
            ranks = dist.get_process_group_ranks(self.connected())[first : first + size]
            group = dist.new_group(ranks, use_local_synchronization=True)
        return replace(
            self,
            rank=self.rank - first if whole else 0,
            size=size if whole else 1,
            group=group,
        )

    def connected(self) -> Group:
        """The replicas' group, or an error when there is none to reach them."""
        if self.group is None:
            raise RuntimeError(
                f"{self.size} replicas were declared but there is no process group to reach "
                "them: call torch.distributed.init_process_group before the first converge"
            )
        return self.group


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def advise_mesh(world: int, device: str) -> str:
    """What a user can write: the layouts that the world allows, and the line of one of them."""
    layouts = [(world // s, s) for s in range(1, world + 1) if world % s == 0 and world // s > 1]
    replicas, shards = layouts[len(layouts) // 2] if layouts else (1, world)
    allowed = ", ".join(f"{r} x {s}" for r, s in layouts) or "none: start more ranks"
    return (
        f"{world} ranks allow replicas x shards = {allowed}; write "
        f'mesh = init_device_mesh("{device}", ({replicas}, {shards}), '
        'mesh_dim_names=("replica", "shard")) '
        "and fully_shard(module, mesh=mesh), then hdet_scale.fsdp.attach"
    )


def _check_place(rank_name: str, rank: int, size_name: str, size: int) -> None:
    for name, value in ((rank_name, rank), (size_name, size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
    if size < 1:
        raise ValueError(f"{size_name} must be at least 1, got {size}")
    if not 0 <= rank < size:
        raise ValueError(f"{rank_name} must be in [0, {size_name}) = [0, {size}), got {rank}")


def shard_size_of(world: int, *, shard_size: int | None, replicas: int | None) -> int:
    """Ranks of one replica, from either number; both must divide the world."""
    if (shard_size is None) == (replicas is None):
        raise ValueError(
            f"give exactly one of shard_size and replicas, got shard_size={shard_size!r}, "
            f"replicas={replicas!r}"
        )
    name, value = ("shard_size", shard_size) if replicas is None else ("replicas", replicas)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1 or world % value:
        valid = [d for d in range(1, world + 1) if world % d == 0]
        raise ValueError(
            f"world size = replicas x shards: {name}={value} does not divide the world of "
            f"{world} ranks; choose one of {valid}"
        )
    return value if replicas is None else world // value


def _new_group(groups: Sequence[Sequence[int]], me: int) -> Group:
    """Create every group on every rank (new_group is collective over the world); return mine."""
    made: list[Group] = [dist.new_group(list(ranks)) for ranks in groups]
    return next(group for ranks, group in zip(groups, made, strict=True) if me in ranks)
