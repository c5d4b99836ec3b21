"""How long a converge takes, against what the wire allows and against what others do.

    python -m benchmarks.speed.converge                 # 2 ranks, gloo, GPT-2-small shapes
    python -m benchmarks.speed.converge --ranks 4 --repeats 9
    torchrun --nproc-per-node 8 -m benchmarks.speed.converge --backend nccl

Every variant averages the same parameters across ranks; the variants take turns, so that noise
hits all alike, and each is divided by the limit of its own turn.

    limit       one all-reduce of one preallocated flat tensor, and the scaling
    (a)         an all-reduce and a division for each parameter, as the authors of the method do
    (c)         torch.distributed.algorithms.model_averaging
    (d)         a clone and an all-reduce for each parameter, as torchft's LocalSGD does
    separate    ours, on separate tensors: the finite check and the exchange of flags included
    flat        ours, on tensors that lie in one flat buffer
    overlap     ours in the background: only what it adds to the training thread

Between ranks of one machine the wire is memory too, and bytes saved there are paid for in memory
traffic. So the table ends with what a network would see: the bytes of each format against fp32,
and the bandwidth below which it is faster, *computed* from what packing and unpacking take here:

    bytes / bandwidth + local < bytes of fp32 / bandwidth + local of fp32
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks import rows
from benchmarks.speed.shapes import gpt2_small
from hdet_scale.converge.bf16 import mean_into
from hdet_scale.converge.int8 import Codec, message_bytes
from hdet_scale.converge.pipeline import Converge
from hdet_scale.converge.remembered import Memory
from hdet_scale.converge.wires import WIRES
from hdet_scale.topology import Replicas

Variant = Callable[[], None]


def variants(device: torch.device, shapes: list[tuple[int, ...]]) -> dict[str, Variant]:
    """What takes turns. Each has tensors of its own, made once."""
    replicas = Replicas.world()
    n = replicas.size

    def fresh() -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(replicas.rank)
        return [torch.randn(s, generator=generator, device=device) for s in shapes]

    def flat_of() -> list[Tensor]:
        flat = torch.cat([t.flatten() for t in fresh()])
        return [
            p.view(s) for p, s in zip(flat.split([_size(s) for s in shapes]), shapes, strict=True)
        ]

    separate, flat, whole = fresh(), flat_of(), torch.cat([t.flatten() for t in fresh()])
    ours = {w: Converge(separate, replicas, wire=w) for w in WIRES}
    lying = Converge(flat, replicas)

    def limit() -> None:
        dist.all_reduce(whole)
        whole.mul_(1.0 / n)

    def each() -> None:
        for t in separate:
            dist.all_reduce(t)
            t.div_(n)

    def cloned() -> None:
        works = [(c := t.clone(), dist.all_reduce(c, async_op=True), t) for t in separate]
        for c, work, t in works:
            work.wait()
            t.copy_(c.div_(n))

    named: dict[str, Variant] = {"limit": limit, "(a) per parameter": each}
    named["(c) model_averaging"] = _model_averaging(separate)
    named["(d) clone per parameter"] = cloned
    named["flat fp32"] = lambda: _ignore(lying())
    return named | {f"separate {w}": partial(_call, c) for w, c in ours.items()}


def _model_averaging(tensors: list[Tensor]) -> Variant:
    from torch.distributed.algorithms.model_averaging.utils import average_parameters

    params = [torch.nn.Parameter(t) for t in tensors]
    group = dist.group.WORLD
    assert group is not None
    for p in params:
        p.grad = torch.zeros(()).expand_as(p)  # it skips parameters without a gradient
    return lambda: average_parameters(iter(params), group)


def measure(named: dict[str, Variant], repeats: int) -> dict[str, list[float]]:
    """Seconds of each variant, in turns; the slowest rank counts."""
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for turn in range(repeats + 1):
        for name, run in named.items():
            took = _timed(run)
            if turn:  # the first turn touches fresh memory
                seconds[name].append(took)
    return seconds


def _timed(run: Variant) -> float:
    _settle()
    begin = time.perf_counter()
    run()
    _settle()
    return time.perf_counter() - begin


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def local_work(device: torch.device, numel: int, repeats: int) -> dict[str, float]:
    """Seconds an element that each format costs beside its transfer, two replicas, bucket by
    bucket; all ranks at once."""
    flat, point, residual = torch.randn(3, numel, device=device)
    rows16 = torch.zeros(2, numel, dtype=torch.bfloat16, device=device)
    messages = torch.zeros(2, message_bytes(numel), dtype=torch.uint8, device=device)
    codec, memory = Codec(), Memory(point, residual)

    def bf16() -> None:
        rows16[0].copy_(flat)
        mean_into(flat, rows16, [True, True], flat)

    def int8() -> None:
        codec.pack(flat, memory, messages[0])
        codec.mean(messages, [0.5, 0.5], flat, point, move=True)

    works: dict[str, Variant] = {"fp32": lambda: _ignore(flat.mul_(0.5)), "bf16": bf16}
    taken = measure({**works, "int8": int8}, repeats)
    return {name: rows.quantiles(v)[1] / numel for name, v in taken.items()}


def computed(device: torch.device, numel: int, repeats: int) -> list[dict[str, Any]]:
    """For each smaller format: its bytes against fp32, and the bandwidth below which it wins."""
    local = local_work(device, 2**22, repeats)
    replicas = Replicas.world()
    sent = {name: wire.build(replicas, device).sent_bytes(numel, 4) for name, wire in WIRES.items()}
    return [
        {
            "variant": f"{name} wire, computed",
            "byte_ratio": sent[name] / sent["fp32"],
            "local_ns_per_element": local[name] * 1e9,
            "fp32_ns_per_element": local["fp32"] * 1e9,
            "faster_below_gbit_s": 8e-9
            * (sent["fp32"] - sent[name])
            / (numel * max(local[name] - local["fp32"], 1e-15)),
        }
        for name in ("bf16", "int8")
    ]


def overlapped(
    device: torch.device, shapes: list[tuple[int, ...]], repeats: int
) -> dict[str, float]:
    """Seconds that a converge adds to training, blocking and overlapped, in turns.

    A step is a wait that is longer than an averaging, as a host that waits for its GPU: on a CPU
    a computing step would share its cores with the transfers.
    """
    replicas = Replicas.world()
    tensors = [torch.randn(s, device=device) for s in shapes]
    blocking = Converge(tensors, replicas)
    background = Converge(tensors, replicas, background=True)
    everyone = [True] * replicas.size
    step = 3 * max(_timed(lambda: _ignore(blocking())) for _ in range(2))
    added: dict[str, list[float]] = {"blocking": [], "overlap": []}

    def in_background() -> None:
        background.healthy(snapshot=True)
        pending = background.start(everyone)
        time.sleep(step)
        pending.finish()

    def at_once() -> None:
        blocking()
        time.sleep(step)

    for turn in range(repeats + 1):
        for name, run in (("blocking", at_once), ("overlap", in_background)):
            took = _timed(run) - step
            if turn:
                added[name].append(took)
    return {name: rows.quantiles(v)[1] for name, v in added.items()}


def peak_extra(device: torch.device, shapes: list[tuple[int, ...]], bucket_bytes: int) -> int:
    """Bytes by which a blocking fp32 converge raises the peak of this process's memory."""
    tensors = [torch.randn(s, device=device) for s in shapes]
    converge = Converge(tensors, Replicas.world(), bucket_bytes)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        converge()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _status("VmRSS")
    converge()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith(key)).split()[1])


def main() -> None:
    """Parse, start the ranks unless a launcher has, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--shrink", type=int, default=1, help="divide the width of the model")
    parser.add_argument("--no-rows", action="store_true", help="print only")
    options = parser.parse_args()
    if "RANK" in os.environ:
        _rank(int(os.environ["RANK"]), options, "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{folder}/rendezvous"
        mp.spawn(_rank, args=(options, place), nprocs=options.ranks)


def _rank(rank: int, options: argparse.Namespace, place: str) -> None:
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", options.ranks))
    if options.backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(options.backend, init_method=place, rank=rank, world_size=size)
    device = torch.device("cuda" if options.backend == "nccl" else "cpu")
    shapes = gpt2_small(options.shrink)
    seconds = measure(variants(device, shapes), options.repeats)
    added = overlapped(device, shapes, max(3, options.repeats // 3))
    bucket = 32 * 2**20
    extra = peak_extra(device, shapes, bucket)
    network = computed(device, sum(_size(s) for s in shapes), options.repeats)
    if rank == 0:
        report(seconds, added, extra / bucket, network, options, size)
    dist.destroy_process_group()


def report(
    seconds: dict[str, list[float]],
    added: dict[str, float],
    buckets: float,
    network: list[dict[str, Any]],
    options: argparse.Namespace,
    size: int,
) -> None:
    """Print the table and append a row for each variant."""
    limit = seconds["limit"]
    lines, results = [], []
    for name, took in seconds.items():
        ratio = [t / b for t, b in zip(took, limit, strict=True)]
        low, middle, high = rows.quantiles(ratio)
        lines.append(
            [
                name,
                f"{rows.quantiles(took)[1] * 1e3:.0f}",
                f"{middle:.2f}",
                f"{low:.2f} - {high:.2f}",
            ]
        )
        results.append(
            {
                "variant": name,
                "ms": rows.quantiles(took)[1] * 1e3,
                "ratio_to_limit": middle,
                "ratio_low": low,
                "ratio_high": high,
            }
        )
    share = added["overlap"] / added["blocking"]
    results.append({"variant": "overlap, added to training / blocking", "ratio": share})
    results.append({"variant": "peak extra memory in buckets", "ratio": buckets})
    results += network
    parameters = sum(_size(s) for s in gpt2_small(options.shrink))
    print(
        f"{parameters / 1e6:.0f} M parameters, {size} ranks, {options.backend}, "
        f"median of {options.repeats}"
    )
    print(rows.table(["variant", "ms", "x limit", "20 - 80 %"], lines))
    print(
        f"bf16 / fp32 {_ratio(seconds, 'separate bf16'):.2f}, "
        f"int8 / fp32 {_ratio(seconds, 'separate int8'):.2f}"
    )
    ours = rows.quantiles([t / b for t, b in zip(seconds["separate fp32"], limit, strict=True)])[1]
    print(f"figure: converge / one flat all-reduce {ours:.2f}")
    print(f"overlap adds {share:.2f} of what the blocking converge adds")
    print(f"peak extra memory of the fp32 converge: {buckets:.2f} buckets of 32 MiB")
    for row in network:
        print(
            f"{row['variant']}: {row['byte_ratio']:.2f} of the bytes, "
            f"{row['local_ns_per_element']:.2f} ns an element beside the transfer (fp32 "
            f"{row['fp32_ns_per_element']:.2f}); "
            f"faster below {row['faster_below_gbit_s']:.1f} Gbit/s"
        )
    if not options.no_rows:
        common = {
            "ranks": size,
            "backend": options.backend,
            "parameters": parameters,
            "repeats": options.repeats,
        }
        print("rows:", rows.append("converge", [{**common, **r} for r in results]))


def _ratio(seconds: dict[str, list[float]], name: str) -> float:
    return rows.quantiles(
        [a / b for a, b in zip(seconds[name], seconds["separate fp32"], strict=True)]
    )[1]


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _call(converge: Converge) -> None:
    converge()


def _ignore(_: object) -> None:
    return None


if __name__ == "__main__":
    main()
