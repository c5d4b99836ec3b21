"""The optimizer step against torch's own, in one run: time of a step, and host time of a step.

    python -m benchmarks.speed.fused_step [--repeats 15] [--threads 1] [--check]

GPT-2-small shapes: 148 tensors, 124 M fp32 parameters, in 4 groups. The contenders take turns, so
that whatever else the machine does falls on all of them; a ratio is the median of the ratios of
neighbouring steps. Host time: as many tensors of 16 elements each, where the arithmetic is nothing.
On a GPU the same contenders, and DeepSpeed's FusedAdam and Apex's where they are installed.

--check exits with 1 unless, on a CPU, a step takes at most 1.05 times that of
torch.optim.AdamW(fused=True), is at least 5 times faster than foreach, and its host time is at most
torch's.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch

from benchmarks import rows
from benchmarks.speed.shapes import gpt2_small
from hdet_scale.optim.fused_adamw import FusedAdamW

LIMITS = {"step vs torch fused": 1.05, "step vs torch foreach": 0.2, "host vs torch fused": 1.0}


def in_groups(params: list[torch.nn.Parameter], count: int = 4) -> list[dict[str, object]]:
    """Groups that differ in their LR, as a per-factor controller makes them."""
    return [{"params": params[i::count], "lr": 1e-4 * (i + 1)} for i in range(count)]


def make_params(shapes: list[tuple[int, ...]], device: torch.device) -> list[torch.nn.Parameter]:
    generator = torch.Generator(device=device).manual_seed(0)
    params = []
    for shape in shapes:
        values = torch.randn(shape, device=device, generator=generator)
        param = torch.nn.Parameter(values * 0.02)
        param.grad = values * 1e-3
        params.append(param)
    return params


def contenders(device: torch.device) -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Constructors by name; the first is ours."""
    found: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "FusedAdamW": lambda groups: FusedAdamW(groups, lr_multiplier=1.05),
        "torch fused": lambda groups: torch.optim.AdamW(groups, fused=True),
        "torch foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    }
    if device.type == "cuda":
        for name, module in (("deepspeed", "deepspeed.ops.adam"), ("apex", "apex.optimizers")):
            try:
                found[name] = importlib.import_module(module).FusedAdam
            except ImportError:
                print(f"{name}: not installed, left out")
    return found


def timed(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def host_timed(step: Callable[[], object], device: torch.device) -> float:
    """Until the step returns: on a GPU its kernels are then still running."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def take_turns(
    optimizers: dict[str, torch.optim.Optimizer],
    repeats: int,
    timer: Callable[[Callable[[], object], torch.device], float],
    device: torch.device,
) -> dict[str, list[float]]:
    """Seconds of each step, the contenders taking turns, in an order that rotates: none of them
    always follows the one that leaves the cache in the worst state."""
    for optimizer in optimizers.values():
        for _ in range(2):
            optimizer.step()
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    names = list(optimizers)
    for turn in range(repeats):
        for at in range(len(names)):
            name = names[(at + turn) % len(names)]
            seconds[name].append(timer(optimizers[name].step, device))
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def measure(device: torch.device, repeats: int) -> list[dict[str, object]]:
    """One row for each contender and quantity."""
    makers = contenders(device)
    params = make_params(gpt2_small(), device)
    step = take_turns(
        {n: make(in_groups(params)) for n, make in makers.items()}, repeats, timed, device
    )
    small = make_params([(16,)] * len(params), device)
    few = {n: make(in_groups(small)) for n, make in makers.items() if n != "torch foreach"}
    host = take_turns(few, 20 * repeats, host_timed, device)
    found: list[dict[str, object]] = []
    for quantity, seconds in (("step", step), ("host", host)):
        for name, values in seconds.items():
            cuts = quantiles(values, n=10)
            found.append(
                {
                    "quantity": quantity,
                    "contender": name,
                    "p10_ms": round(cuts[0] * 1e3, 4),
                    "median_ms": round(median(values) * 1e3, 4),
                    "p90_ms": round(cuts[-1] * 1e3, 4),
                    "FusedAdamW_over_it": round(ratio(seconds["FusedAdamW"], values), 4),
                    "repeats": len(values),
                }
            )
    return found


def failures(measured: list[dict[str, object]]) -> list[str]:
    """The limits that were missed."""
    found = {f"{r['quantity']} vs {r['contender']}": r["FusedAdamW_over_it"] for r in measured}
    return [
        f"{name}: {found[name]} is above {limit}"
        for name, limit in LIMITS.items()
        if float(str(found[name])) > limit
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The optimizer step against torch's own.")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is missed")
    parser.add_argument("--no-rows", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    measured = measure(device, options.repeats)
    lines = [
        [
            str(r["quantity"]),
            str(r["contender"]),
            f"{r['p10_ms']:.3f} - {r['p90_ms']:.3f}",
            f"{r['median_ms']:.3f}",
            f"{r['FusedAdamW_over_it']:.3f}",
        ]
        for r in measured
    ]
    print(rows.table(["", "contender", "10 - 90 % ms", "median", "FusedAdamW / it"], lines))
    for r in measured:
        if r["contender"] == "torch fused":
            print(f"figure: {r['quantity']} / torch's fused AdamW {r['FusedAdamW_over_it']:.3f}")
    if not options.no_rows:
        print(
            "rows:",
            rows.append("fused_step", [{**r, "threads": options.threads} for r in measured]),
        )
    missed = failures(measured) if device.type == "cpu" else []
    for line in missed:
        print(f"MISSED {line}")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
