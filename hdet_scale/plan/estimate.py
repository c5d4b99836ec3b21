"""Plan: what HDET costs a model on a cluster, before anything is started.

    hdet plan 70B --gpus 1024
    hdet plan path/to/config.json --gpus 512 --shards 32 --on a100 --json

The buckets, the wires and the bytes are those of `Converge` itself, made over meta tensors of one
rank's shard; only the seconds come from a model (`hdet_scale.plan.links`). Overhead is what a
converge adds to T steps:

    blocking    check + exchange of losses + transfers
    overlap     exchange + copy with its check + fold, and what the overlap steps do not hide
    overhead  = added / (T x seconds of a step)

A step is forward and backward alone, 6 x parameters x tokens at the rate that the cluster's preset
says; with a measured step (--step-seconds) the overhead is yours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hdet_scale.config import GRADIENTS, ConvergePolicy, HDETConfig
from hdet_scale.converge.int8 import message_bytes
from hdet_scale.converge.pipeline import IN_FLIGHT, WIRES, Converge, Transfer
from hdet_scale.converge.wires import AllReduce, Bf16, Int8
from hdet_scale.plan import shapes
from hdet_scale.plan.links import GBIT, PRESETS, Cluster, Cost, Link, direct, ring, tree
from hdet_scale.plan.shapes import Shapes
from hdet_scale.topology import Replicas, shard_size_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}
"""Moments of an optimizer, fp32 each."""
TOKENS = 8192
"""Tokens that a GPU trains on in a step, where no step time is given."""
ROOM = 0.6
"""Share of a GPU for weights, gradients, moments and the converge; activations take the rest."""
TARGET = 1e-3
"""Overhead that a recommendation stays below."""
LONGER = (2000, 5000, 10000)
"""T that are tried where the one asked for costs too much."""
MOST_FRAGMENTS = 8
EXCHANGED_BYTES = 5 * 8
"""What a replica tells the others at a converge: five float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be trained, and on what."""

    model: Shapes
    """The tensors."""
    gpus: int
    """World size."""
    cluster: Cluster = PRESETS["h100"]
    """GPUs and links."""
    dtype: str = "fp32"
    """Of the parameters and gradients that are kept; 16-bit ones have an fp32 master."""
    optimizer: str = "adamw"
    """Decides the moments."""
    step_seconds: float | None = None
    """Of one optimizer step; from the parameters and `tokens` where it is not given."""
    tokens: int = TOKENS
    """Tokens of a GPU in a step."""

    def __post_init__(self) -> None:
        for name, valid in (("dtype", DTYPES), ("optimizer", MOMENTS)):
            if getattr(self, name) not in valid:
                raise ValueError(
                    f"{name} must be one of {sorted(valid)}, got {getattr(self, name)!r}"
                )
        if self.gpus < 2:
            raise ValueError(f"gpus must be at least 2, got {self.gpus}: one is one replica")
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")
        if self.step_seconds is not None and not self.step_seconds > 0:
            raise ValueError(f"step_seconds must be above 0, got {self.step_seconds}")

    @property
    def seconds_a_step(self) -> float:
        """Given, or 6 x parameters x tokens of a GPU over its rate."""
        if self.step_seconds is not None:
            return self.step_seconds
        return 6 * self.model.parameters * self.tokens / self.cluster.flops

    @property
    def room(self) -> float:
        """Bytes of a GPU that are not for activations."""
        return ROOM * self.cluster.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a rank, by kind. Activations are not in it."""

    parameters: int
    """The shard."""
    gradients: int
    """The same again."""
    optimizer: int
    """Moments, and fp32 masters of 16-bit parameters."""
    gathered: int
    """Two units that fully_shard has gathered; nothing where a replica is one GPU."""
    converge: int
    """Staging, copies and points that the converge keeps."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.converge


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a job costs under an HDETConfig."""

    config: HDETConfig
    """With the number of shards."""
    replicas: int
    """World size over shards."""
    memory: Memory
    """Of a rank."""
    elements: int
    """Elements that a rank averages in a round."""
    buckets: int
    """Collectives of a round."""
    converge_bytes: int
    """Bytes that a rank sends for them."""
    gradient_bytes: int
    """Bytes that a rank sends to other replicas in a step for its gradients: 0 when local."""
    gradient_seconds: float
    """The same as time of the link; a backward pass hides what is shorter than itself."""
    ring_seconds: float
    """The transfers of a round, if every all-reduce were a ring."""
    tree_seconds: float
    """If every one were a tree."""
    transfer_seconds: float
    """The cheaper of the two for each bucket."""
    added_seconds: float
    """What a round's converge adds to training."""
    step_seconds: float
    """Of one optimizer step."""
    fits: bool
    """Whether the memory leaves room for activations."""

    @property
    def overhead(self) -> float:
        """What is added, as a share of the round."""
        return self.added_seconds / (self.config.interval * self.step_seconds)

    @property
    def bytes_a_step(self) -> float:
        """To other replicas, over a round: gradients and converge."""
        return self.gradient_bytes + self.converge_bytes / self.config.interval

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with what is derived."""
        values = dataclasses.asdict(self)
        values["memory"]["total"] = self.memory.total
        return values | {"overhead": self.overhead, "bytes_a_step": self.bytes_a_step}


def estimate(job: Job, config: HDETConfig) -> Estimate:
    """Plan one rank's converge and price it; `config.shards` must be a number."""
    shards = shard_size_of(job.gpus, shard_size=_shards(config), replicas=None)
    n = job.gpus // shards
    if n < 2:
        raise ValueError(
            f"{shards} shards of {job.gpus} GPUs are one replica, and there is nobody to explore "
            f"with: give at most {job.gpus // 2} shards"
        )
    link = job.cluster.between_replicas(replicas=n, shards=shards)
    transfers = planned(job, config, shards).transfers()
    memory = _memory(job, config, transfers, shards)
    shared = memory.gradients if config.gradients == "shared" else 0
    return Estimate(
        config=config,
        replicas=n,
        memory=memory,
        elements=sum(t.elements for t in transfers),
        buckets=len(transfers),
        converge_bytes=sum(t.sent_bytes for t in transfers),
        gradient_bytes=round(ring(n, shared).nbytes),
        gradient_seconds=link.seconds(link.all_reduce(n, shared)) if shared else 0.0,
        ring_seconds=sum(link.seconds(_reduced(t, ring(n, 4 * t.elements))) for t in transfers),
        tree_seconds=sum(link.seconds(_reduced(t, tree(n, 4 * t.elements))) for t in transfers),
        transfer_seconds=_seconds(transfers, n, link),
        added_seconds=_added(job, config, transfers, n, link),
        step_seconds=job.seconds_a_step,
        fits=memory.total <= job.room,
    )


def planned(job: Job, config: HDETConfig, shards: int) -> Converge:
    """The converge of rank 0, over meta tensors.

    fp32 tensors are averaged, parameters or their masters. With local gradients the moments come
    apart too, and are averaged with them.
    """
    policy = config.converge
    moments = config.gradients == "local" if policy.moments is None else policy.moments
    copies = MOMENTS[job.optimizer] if moments else 0
    return Converge(
        job.model.shard(shards, torch.float32),
        Replicas(rank=0, size=job.gpus // shards),
        policy.bucket_bytes,
        wire=policy.wire,
        fragments=policy.fragments,
        outer=policy.outer,
        background=policy.overlap,
        plain=[t for _ in range(copies) for t in job.model.shard(shards, torch.float32)],
    )


def price(transfer: Transfer, n: int, link: Link) -> Cost:
    """Hops and bytes of one bucket among n replicas."""
    return _reduced(transfer, link.all_reduce(n, 4 * transfer.elements))


def _reduced(transfer: Transfer, reduced: Cost) -> Cost:
    if isinstance(transfer.wire, AllReduce):
        return reduced
    return direct(transfer.wire.replicas.size, transfer.sent_bytes)


def _seconds(transfers: Iterable[Transfer], n: int, link: Link) -> float:
    return sum(link.seconds(price(t, n, link)) for t in transfers)


def _added(
    job: Job, config: HDETConfig, transfers: Sequence[Transfer], n: int, link: Link
) -> float:
    """Seconds that the converges of a round add to its steps.

    The exchange is an all-gather around a ring. On the device: the check reads an element and a
    staged one is copied in and out; overlap copies it, the check riding on the copy (a read, a
    write), and folds it in (two reads, a write).
    """
    policy = config.converge
    rate = job.cluster.memory_bandwidth
    exchange = link.seconds(Cost(n - 1, (n - 1) * EXCHANGED_BYTES))
    total = 0.0
    for fragment in range(policy.fragments):
        part = [t for t in transfers if t.fragment == fragment]
        elements, staged = _elements(part), _elements(t for t in part if t.staged)
        total += exchange
        if policy.overlap:
            hidden = policy.overlap_steps * job.seconds_a_step
            total += 20 * elements / rate + max(0.0, _seconds(part, n, link) - hidden)
        else:
            total += (4 * elements + 16 * staged) / rate + _seconds(part, n, link)
    return total


def _elements(transfers: Iterable[Transfer]) -> int:
    return sum(t.elements for t in transfers)


# -- memory --------------------------------------------------------------------------------------


def _memory(job: Job, config: HDETConfig, transfers: Sequence[Transfer], shards: int) -> Memory:
    local = job.model.shard(shards, DTYPES[job.dtype])
    kept = sum(t.nbytes for t in local)
    elements = sum(t.numel() for t in local)
    masters = 4 * elements if job.dtype != "fp32" else 0
    unit = DTYPES[job.dtype].itemsize * job.model.largest_unit
    return Memory(
        parameters=kept,
        gradients=kept,
        optimizer=4 * elements * MOMENTS[job.optimizer] + masters,
        gathered=2 * unit if shards > 1 else 0,
        converge=converge_bytes_kept(config.converge, transfers),
    )


def converge_bytes_kept(policy: ConvergePolicy, transfers: Sequence[Transfer]) -> int:
    """Buffers of the transfers in the air, a copy of what overlaps, points and residuals."""
    parts = [[t for t in transfers if t.fragment == f] for f in range(policy.fragments)]
    kept = max(_airborne(part, overlap=policy.overlap) for part in parts)
    if policy.overlap:
        kept += max(4 * _elements(part) for part in parts)
    remembered = _elements(t for t in transfers if isinstance(t.wire, Int8))
    if policy.wire == "int8":
        kept += 8 * remembered
    if policy.outer is not None:
        kept += (4 if policy.wire == "int8" else 8) * _elements(transfers)
    return kept


def _airborne(transfers: Iterable[Transfer], *, overlap: bool) -> int:
    """The most buffer bytes that the pipeline of a converge holds at once: two staged transfers,
    or up to IN_FLIGHT of those that are reduced where they lie."""
    in_air: deque[tuple[bool, int]] = deque()
    most = 0
    for t in transfers:
        staged = t.staged or not isinstance(t.wire, AllReduce)
        while len(in_air) >= IN_FLIGHT or (staged and sum(s for s, _ in in_air) >= 2):
            in_air.popleft()
        flat = 4 * t.elements if t.staged or overlap else 0
        in_air.append((staged, flat + _messages(t)))
        most = max(most, sum(size for _, size in in_air))
    return most


def _messages(transfer: Transfer) -> int:
    """Bytes that a wire sends from and receives into."""
    numel = transfer.elements
    if isinstance(transfer.wire, Bf16):
        return 4 * numel
    if isinstance(transfer.wire, Int8):
        down = 2 * numel if transfer.wire.replicas.size > 2 else 0
        return 2 * message_bytes(numel) + down
    return 0


# -- what to choose ------------------------------------------------------------------------------


def fitting_shards(job: Job, config: HDETConfig) -> int:
    """The fewest GPUs that hold a replica and leave room for activations."""
    allowed = [s for s in range(1, job.gpus // 2 + 1) if job.gpus % s == 0]
    for shards in allowed:
        found = estimate(job, dataclasses.replace(config, shards=shards))
        if found.fits:
            return shards
    raise ValueError(
        f"{job.model.name} does not fit {job.gpus} GPUs as two replicas: {allowed[-1]} shards need "
        f"{found.memory.total / 1e9:.0f} GB a GPU and {job.room / 1e9:.0f} GB are there beside "
        "activations; take more GPUs, or bf16 parameters"
    )


def recommend(job: Job, config: HDETConfig) -> tuple[Estimate, list[str]]:
    """The simplest choice below the target, and why.

    Tried in this order: blocking fp32; overlap; a narrower wire with overlap; then the same with
    a longer T. Where none stays below the target, the cheapest that fits.
    """
    reasons = []
    if config.shards == "auto":
        config = dataclasses.replace(config, shards=fitting_shards(job, config))
        reasons.append(
            f"shards {config.shards}: the fewest GPUs that hold a replica in {ROOM:.0%} of their "
            f"{job.cluster.memory_bytes / 1e9:.0f} GB"
        )
    tried: list[Estimate] = []
    for candidate in _candidates(job, config):
        tried.append(estimate(job, candidate))
        if tried[-1].fits and tried[-1].overhead <= TARGET:
            break
    chosen = tried[-1]
    if not (chosen.fits and chosen.overhead <= TARGET):
        chosen = min(tried, key=lambda e: (not e.fits, e.overhead))
    return chosen, reasons + _reasons(tried[0], chosen)


def _candidates(job: Job, config: HDETConfig) -> Iterator[HDETConfig]:
    intervals = [config.interval, *(t for t in LONGER if t > config.interval)]
    for interval in intervals:
        plain = dataclasses.replace(config, interval=interval, converge=ConvergePolicy())
        yield plain
        for wire in WIRES:
            yield _overlapped(job, plain, wire)


def _overlapped(job: Job, config: HDETConfig, wire: str) -> HDETConfig:
    """Overlap for as many steps as the transfers last; longer than a step, in fragments, so that
    the network is used evenly and a part is folded in soon after it was taken."""
    narrow = dataclasses.replace(config, converge=ConvergePolicy(wire=wire))
    steps = math.ceil(estimate(job, narrow).transfer_seconds / job.seconds_a_step)
    fragments = max(1, min(MOST_FRAGMENTS, steps, config.interval))
    lasting = max(1, min(config.interval // fragments, math.ceil(steps / fragments)))
    policy = ConvergePolicy(wire=wire, overlap=True, overlap_steps=lasting, fragments=fragments)
    return dataclasses.replace(config, converge=policy)


def _reasons(simple: Estimate, chosen: Estimate) -> list[str]:
    policy = chosen.config.converge
    said = [
        f"T {chosen.config.interval}, wire {policy.wire}, "
        + (
            f"overlap of {policy.overlap_steps} steps in {policy.fragments} fragments"
            if policy.overlap
            else "blocking"
        )
        + f": {chosen.overhead:.3%} of the time"
        + ("" if chosen.overhead <= TARGET else f", above the target of {TARGET:.1%}")
    ]
    if chosen is not simple:
        said.append(f"blocking fp32 at T {simple.config.interval} would take {simple.overhead:.3%}")
    if chosen.gradient_seconds > chosen.step_seconds:
        said.append(
            f"shared gradients take {chosen.gradient_seconds:.3g} s of the link at each step of "
            f"{chosen.step_seconds:.3g} s: with local gradients nothing crosses replicas between "
            "converges"
        )
    if not chosen.fits:
        said.append("the memory leaves too little for activations: take more shards")
    return said


def _shards(config: HDETConfig) -> int:
    if isinstance(config.shards, str):
        raise ValueError(f"shards must be a number to estimate, got {config.shards!r}")
    return config.shards


# -- the command ---------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of `hdet plan`."""
    parser = argparse.ArgumentParser(
        prog="hdet plan",
        description=__doc__.splitlines()[0],
        epilog="example: hdet plan 70B --gpus 1024",
    )
    add = parser.add_argument
    add("model", help="70B, gpt:125m, a config.json, or package.module:function")
    add("--gpus", type=int, required=True, help="world size")
    add("--shards", type=int, help="GPUs of a replica; left out, the fewest that fit")
    add("--dtype", choices=sorted(DTYPES), default="fp32", help="of the parameters that are kept")
    add("--optimizer", choices=sorted(MOMENTS), default="adamw")
    add("--gradients", choices=GRADIENTS, default="shared")
    add("--interval", type=int, default=1000, metavar="T", help="steps of a round")
    add("--wire", choices=WIRES, default="fp32")
    add("--overlap", action="store_true")
    add("--overlap-steps", type=int, default=1)
    add("--fragments", type=int, default=1)
    add("--on", choices=sorted(PRESETS), default="h100", help="GPUs and links")
    add("--gbit", type=float, help="bandwidth of a GPU between nodes that transfers reach, Gb/s")
    add("--latency-us", type=float, help="latency of a hop between nodes, microseconds")
    add("--memory-gb", type=float, help="memory of a GPU")
    add("--gpus-per-node", type=int)
    add("--tokens", type=int, default=TOKENS, help="tokens of a GPU in a step")
    add("--step-seconds", type=float, help="a measured step, instead of tokens")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is asked for beside what is recommended."""
    args = parse(argv)
    try:
        job = Job(
            model=shapes.of(args.model),
            gpus=args.gpus,
            cluster=_cluster(args),
            dtype=args.dtype,
            optimizer=args.optimizer,
            step_seconds=args.step_seconds,
            tokens=args.tokens,
        )
        config = HDETConfig(
            interval=args.interval,
            gradients=args.gradients,
            shards=args.shards or "auto",
            converge=ConvergePolicy(
                wire=args.wire,
                overlap=args.overlap,
                overlap_steps=args.overlap_steps,
                fragments=args.fragments,
            ),
        )
        chosen, reasons = recommend(job, config)
        asked = estimate(job, dataclasses.replace(config, shards=chosen.config.shards))
    except (ValueError, TypeError) as wrong:
        print(f"hdet plan: {wrong}", file=sys.stderr)
        return 2
    print(
        as_json(job, asked, chosen, reasons) if args.json else as_text(job, asked, chosen, reasons)
    )
    return 0


def _cluster(args: argparse.Namespace) -> Cluster:
    preset = PRESETS[args.on]
    across = Link(
        latency=preset.across.latency if args.latency_us is None else args.latency_us * 1e-6,
        bandwidth=preset.across.bandwidth if args.gbit is None else args.gbit * GBIT,
    )
    changes: dict[str, Any] = {"across": across}
    for name, value in (
        ("memory_bytes", args.memory_gb and args.memory_gb * 1e9),
        ("gpus_per_node", args.gpus_per_node),
    ):
        if value is not None:
            if value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
            changes[name] = value
    return dataclasses.replace(preset, **changes)


def as_json(job: Job, asked: Estimate, chosen: Estimate, reasons: Sequence[str]) -> str:
    """Everything, for programs."""
    whole = {
        "model": job.model.name,
        "parameters": job.model.parameters,
        "gpus": job.gpus,
        "cluster": dataclasses.asdict(job.cluster),
        "asked": asked.to_dict(),
        "recommended": chosen.to_dict(),
        "reasons": list(reasons),
        "hdet": block(chosen),
    }
    return json.dumps(whole, indent=2)


def block(chosen: Estimate) -> dict[str, Any]:
    """The "hdet" block of a config: what is chosen and differs from the defaults."""
    values, plain = chosen.config.to_dict(), HDETConfig().to_dict()
    converge = {k: v for k, v in values["converge"].items() if v != plain["converge"][k]}
    found = {"shards": values["shards"], "interval": values["interval"]}
    if values["gradients"] != plain["gradients"]:
        found["gradients"] = values["gradients"]
    return found | ({"converge": converge} if converge else {})


def as_text(job: Job, asked: Estimate, chosen: Estimate, reasons: Sequence[str]) -> str:
    """What is asked for beside what is recommended."""
    head = (
        f"{job.model.name}: {job.model.parameters / 1e9:.3g} B parameters on {job.gpus} GPUs "
        f"({job.cluster.name}), {job.dtype}, {job.optimizer}, {asked.config.gradients} gradients"
    )
    columns = [_column(asked), _column(chosen)]
    wide = max(len(cell) for cell in columns[0].values()) + 2
    lines = [f"{'':28}{'as asked':{wide}}recommended"]
    lines += [f"{key:28}{columns[0][key]:{wide}}{columns[1][key]}" for key in columns[0]]
    why = ["", *reasons, f'"hdet": {json.dumps(block(chosen))}']
    note = "Memory is without activations; seconds are a model's, not measured."
    return "\n".join([head, "", *lines, *why, note])


def _column(e: Estimate) -> dict[str, str]:
    policy, memory = e.config.converge, e.memory
    overlapped = f"{policy.overlap_steps} steps" if policy.overlap else "no"
    cells = {"replicas x shards": f"{e.replicas} x {e.config.shards}"}
    cells |= {"T": str(e.config.interval), "wire": policy.wire, "overlap": overlapped}
    cells |= {"fragments": str(policy.fragments)}
    for f in dataclasses.fields(memory):
        cells[f"memory: {f.name}"] = f"{getattr(memory, f.name) / 1e9:.2f} GB"
    cells["memory a GPU"] = f"{memory.total / 1e9:.1f} GB" + ("" if e.fits else ", too much")
    cells["collectives a round"] = str(e.buckets)
    cells["bytes a round"] = f"{e.converge_bytes / 1e9:.2f} GB"
    cells["bytes a step"] = f"{e.bytes_a_step / 1e9:.4f} GB"
    cells["gradients a step"] = f"{e.gradient_seconds:.3g} s"
    cells["transfers, ring / tree"] = f"{e.ring_seconds:.3g} / {e.tree_seconds:.3g} s"
    cells["transfers, cheaper"] = f"{e.transfer_seconds:.3g} s"
    cells["a converge adds"] = f"{e.added_seconds:.3g} s"
    cells["a step"] = f"{e.step_seconds:.3g} s"
    cells["overhead"] = f"{e.overhead:.4%}"
    return cells
