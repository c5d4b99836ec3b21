"""Tokens a second of a GPT under vanilla DDP, HDET, FSDP2 and DeepSpeed, taking turns.

    python -m benchmarks.speed.throughput --size tiny                        # 2 ranks, gloo
    python -m benchmarks.speed.throughput --size 124m --batch 1 --context 64 --modes ddp,local
    torchrun --nproc-per-node 8 -m benchmarks.speed.throughput --backend nccl --size 1.3b --shards 4

Each turn makes one step in every mode, in an order that rotates, so that noise hits all alike; the
slowest rank counts. A ratio is the median over the turns of (step of the mode / step of ddp in the
same turn), with a bootstrapped 95 % interval. HDET modes end a round every --interval turns: steps
without a converge make the ratio, and what a round's converge adds beside them is told as a share
of T = 1000 steps. Tokens a second are of all ranks, that share included. Exposed communication is
the step less that of the same model with local gradients. Bytes are counted by torch's profiler.
--profile FOLDER writes a Chrome trace of one step a mode. The modes: benchmarks/speed/modes.py.

--check exits with 1 unless: shared without the converge takes at most 1.01 of ddp's step, its
converge at most 0.1 % at T = 1000 (overlap 0.03 %), local-own sends at most 1.05 / T of ddp's
bytes a step, and, at 124 M, local trains at least 1.25 times as many tokens a second.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks import ranks, rows
from benchmarks.speed.modes import NAMES, ON_DDP, SIZES, Mode, build, draw

T = 1000
COUNTED = ("ddp", "shared", "local", "local-own")
"""Modes whose bytes the profiler sees whole: groups of all ranks, no thread in the background."""
WARM = 3
"""Turns that are not counted: fresh memory, and DDP orders its buckets anew after the first."""


class Sampler:
    """Draws the next batch outside of the clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.config = options, SIZES[options.size]
        self.device = ranks.device()
        self.drawn = 0

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.drawn += 1
        o = self.options
        inputs, targets = draw(self.config, batch=o.batch, context=o.context, step=self.drawn)
        return inputs.to(self.device), targets.to(self.device)


def work(send: ranks.Send, options: argparse.Namespace) -> None:
    """In each rank; the first sends what it found."""
    modes = [
        build(
            name,
            SIZES[options.size],
            interval=options.interval,
            batch=options.batch,
            shards=options.shards,
            device=ranks.device(),
        )
        for name in options.modes
    ]
    sample = Sampler(options)
    seconds = take_turns(modes, sample, options)
    found: dict[str, Any] = {"seconds": seconds, "modes": {}}
    for mode in modes:
        found["modes"][mode.name] = {
            "kept_bytes": mode.kept_bytes,
            "peak_bytes": mode.kept_bytes + peak_extra(mode, sample),
            "bytes": sent_bytes(mode, sample, options) if mode.name in COUNTED else None,
        }
        if options.profile:
            trace(mode, sample, Path(options.profile))
    if dist.get_rank() == 0:
        send(found)


def take_turns(
    modes: list[Mode], sample: Sampler, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of every counted step, in turns. Turn 0 begins a round of every mode."""
    seconds: dict[str, list[float]] = {mode.name: [] for mode in modes}
    warm = -(-WARM // options.interval) * options.interval
    for turn in range(warm + options.turns):
        for at in range(len(modes)):
            mode, batch = modes[(at + turn) % len(modes)], sample()
            took = ranks.timed(lambda m=mode, b=batch: m.step(*b))  # type: ignore[misc]
            if turn >= warm:
                seconds[mode.name].append(took)
    return seconds


def touched(turn: int, interval: int, name: str) -> bool:
    """Whether a converge is in this step: at a round's end, and where an overlap is folded in."""
    place = turn % interval
    return place == interval - 1 or (name == "overlap" and place == 0)


def peak_extra(mode: Mode, sample: Sampler) -> int:
    """Bytes by which a step raises the memory of this process."""
    batch = sample()
    if sample.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        mode.step(*batch)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _status("VmRSS")
    mode.step(*batch)
    return max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith(key)).split()[1])


def sent_bytes(mode: Mode, sample: Sampler, options: argparse.Namespace) -> dict[str, float]:
    """What this rank sends in a step and, in a round's last, beyond that: from the collectives
    that the profiler sees, priced as rings over all ranks; 4 bytes an element."""
    steps = options.interval if mode.converges else 1
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        for _ in range(steps):
            mode.step(*sample())
        ranks.settle()
    n = dist.get_world_size()
    a_round = 0.0
    for event in seen.events() or []:
        kind, _, op = event.name.partition(":")
        if kind in ("gloo", "nccl") and op in FACTORS and event.input_shapes:
            elements = torch.Size(event.input_shapes[0]).numel()
            a_round += 4 * elements * FACTORS[op](n)
    a_step = float(4 * sum(p.numel() for p in mode.model.parameters()) * 2 * (n - 1) / n)
    if mode.name.startswith("local"):
        a_step = 0.0
    return {"round": a_round, "steps": steps, "gradients": a_step}


FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "send": lambda n: 1,
}


def trace(mode: Mode, sample: Sampler, folder: Path) -> None:
    """A Chrome trace of one step, by the first rank."""
    batch = sample()
    with profile(activities=_activities()) as seen:
        mode.step(*batch)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(folder / f"{mode.name}.json"))


def _activities() -> list[ProfilerActivity]:
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *gpu]


# -- what it says --------------------------------------------------------------------------------


def interval_of_median(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """Bootstrapped 95 % interval; the same numbers give the same interval."""
    data = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (draws, len(values)), generator=generator)
    low, high = data[picks].median(1).values.quantile(torch.tensor([0.025, 0.975]).double())
    return float(low), float(high)


def summary(found: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each mode."""
    seconds: dict[str, list[float]] = found["seconds"]
    base = seconds[options.modes[0]]
    steps: dict[str, float] = {}
    for name, took in seconds.items():
        plain = [t for i, t in enumerate(took) if not touched(i, options.interval, name)]
        steps[name] = median(plain)
    alone = next((m for m in ("local-own", "local") if m in seconds), None)
    results = []
    for name, took in seconds.items():
        plain = [i for i in range(len(took)) if not touched(i, options.interval, name)]
        ratios = [took[i] / base[i] for i in plain]
        low, high = interval_of_median(ratios)
        added = added_by_converge(took, name, options.interval) if _is_hdet(name) else 0.0
        share = added / (T * steps[name])
        tokens = options.ranks * options.batch * options.context
        info = found["modes"][name]
        row = {
            "mode": name,
            "step_ms": 1e3 * steps[name],
            "step_over_first": median(ratios),
            "ratio_low": low,
            "ratio_high": high,
            "converge_adds_ms": 1e3 * added,
            "converge_share_at_1000": share,
            "tokens_a_second": tokens / (steps[name] * (1 + share)),
            "exposed_ms": None
            if alone is None
            else 1e3 * exposed(took, seconds[alone], options.interval),
            "peak_bytes": info["peak_bytes"],
            "kept_bytes": info["kept_bytes"],
        }
        row |= _bytes(info["bytes"])
        results.append(row)
    first = results[0]
    for row in results:
        row["tokens_over_first"] = (1 / row["step_over_first"]) / (
            1 + row["converge_share_at_1000"]
        )
        if row["bytes_a_step_at_1000"] is not None and first["bytes_a_step_at_1000"]:
            row["bytes_over_first"] = row["bytes_a_step_at_1000"] / first["bytes_a_step_at_1000"]
    return results


def exposed(took: list[float], alone: list[float], interval: int) -> float:
    """Median over the turns without any converge of what a step takes beyond one that sends
    nothing, turn by turn."""
    quiet = [i for i in range(len(took)) if not touched(i, interval, "overlap")]
    return median(took[i] - alone[i] for i in quiet)


def _is_hdet(name: str) -> bool:
    return name not in ("ddp", "hsdp", "zero2", "zero3")


def added_by_converge(took: list[float], name: str, interval: int) -> float:
    """Median over the rounds of what its converge adds to the steps around it.

    The steps that a converge touches less as many of the plain ones of the same round.
    """
    added = []
    for start in range(0, len(took) - interval + 1, interval):
        whole = range(start, start + interval)
        plain = [took[i] for i in whole if not touched(i, interval, name)]
        end = [took[start + interval - 1]]
        if name == "overlap":
            end += took[start + interval : start + interval + 1]
            if len(end) < 2:
                continue
        added.append(sum(end) - len(end) * median(plain))
    return max(0.0, median(added))


def _bytes(counted: dict[str, float] | None) -> dict[str, Any]:
    if counted is None:
        return {"bytes_a_step_at_1000": None, "bytes_over_first": None}
    converge = counted["round"] - counted["steps"] * counted["gradients"]
    a_step = counted["gradients"] + (converge / T if counted["steps"] > 1 else converge)
    return {"bytes_a_step_at_1000": a_step, "bytes_over_first": None}


def failures(results: list[dict[str, Any]], size: str) -> list[str]:
    """The limits that were missed, of the modes that ran."""
    found = {r["mode"]: r for r in results}
    limits = [
        ("shared", "step_over_first", 1.01, True),
        ("shared", "converge_share_at_1000", 1e-3, True),
        ("overlap", "converge_share_at_1000", 3e-4, True),
        ("local-own", "bytes_over_first", 1.05 / T, True),
    ]
    if size == "124m":
        limits += [(name, "tokens_over_first", 1.25, False) for name in ("local", "local-own")]
    return [
        f"{name}: {key} {found[name][key]:.5g}, limit {limit:.5g}"
        for name, key, limit, below in limits
        if name in found and (found[name][key] > limit) == below
    ]


def report(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The table."""

    def cell(value: float | None, pattern: str) -> str:
        return "" if value is None else pattern.format(value)

    lines = [
        [
            r["mode"],
            f"{r['step_ms']:.1f}",
            f"{r['step_over_first']:.3f}",
            f"{r['ratio_low']:.3f} - {r['ratio_high']:.3f}",
            f"{r['tokens_over_first']:.3f}",
            f"{r['tokens_a_second']:.0f}",
            f"{r['converge_adds_ms']:.1f}",
            f"{r['converge_share_at_1000']:.4%}",
            cell(r["exposed_ms"], "{:.1f}"),
            f"{r['peak_bytes'] / 1e6:.0f}",
            cell(r["bytes_a_step_at_1000"], "{:.3g}"),
            cell(r["bytes_over_first"], "{:.5f}"),
        ]
        for r in results
    ]
    print(
        f"{options.size}, {options.ranks} ranks, {options.backend}, batch {options.batch} x "
        f"{options.context} a rank, {options.turns} turns"
    )
    head = ["mode", "step ms", "x first", "95 %", "tokens x first", "tokens/s", "converge ms"]
    head += ["share, T=1000", "exposed ms", "peak MB", "bytes/step", "x first"]
    print(rows.table(head, lines))
    for r in results[1:]:
        print(
            f"figure: {r['mode']} / {results[0]['mode']}: step {r['step_over_first']:.3f}, tokens "
            f"{r['tokens_over_first']:.3f}, converge {r['converge_share_at_1000']:.4%} at T = 1000"
        )


def main(arguments: list[str] | None = None) -> int:
    """Start the ranks, tell."""
    parser = ranks.parser(__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--modes", type=lambda s: s.split(","), default=list(ON_DDP))
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--interval", type=int, default=10, help="steps of a round here")
    parser.add_argument("--shards", type=int, default=1, help="of a replica, FSDP2 and DeepSpeed")
    parser.add_argument("--profile", help="folder for Chrome traces")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    options = parser.parse_args(arguments)
    wrong = [m for m in options.modes if m not in NAMES]
    if wrong:
        parser.error(f"no mode called {wrong[0]!r}: choose among {', '.join(NAMES)}")
    if options.interval < 3:
        parser.error(f"--interval must be at least 3, got {options.interval}")
    if options.turns < 2 * options.interval:
        parser.error(f"--turns must be at least two rounds, got {options.turns}")
    found = ranks.run(work, options)
    if found is None:
        return 0
    results = summary(found[0], options)
    report(results, options)
    if not options.no_rows:
        keys = ("size", "ranks", "backend", "batch", "context", "turns", "interval", "shards")
        common = {key: getattr(options, key) for key in keys}
        print("rows:", rows.append("throughput", [{**common, **r} for r in results]))
    missed = failures(results, options.size)
    for line in missed:
        print(f"MISSED {line}")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
