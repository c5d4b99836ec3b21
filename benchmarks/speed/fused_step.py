"""The optimizer step against torch's own, in one run: time of a step, and host time of a step.

    python -m benchmarks.speed.fused_step [--repeats 15] [--threads 1] [--check]

GPT-2-small shapes: 148 tensors, 124 M fp32 parameters, in 4 groups. The contenders take turns, so
that whatever else the machine does falls on all of them; a ratio is the median of the ratios of
neighbouring steps. On a GPU the same contenders, and DeepSpeed's FusedAdam and Apex's where they
are installed.

Host time: as many tensors of 16 elements each, where the arithmetic is nothing. "warm": the
gradients stay where they are. "moving": after zero_grad(set_to_none=True) they come back at other
addresses before every step, as they do in training. "FusedAdamW kernels" is the path of a GPU. On a
machine that cannot start a kernel it runs up to there (`host_time.py`). At Llama's 6.7 B shapes it
runs on views of one memory map, and again with 1/64 of the width.

--check exits with 1 unless, on a CPU, a step takes at most 1.05 times that of
torch.optim.AdamW(fused=True) and is at least 5 times faster than foreach, its host time is at most
1.1 times torch's, on either path, warm and moving, and at Llama's shapes below 5 ms.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median, quantiles

import torch

from benchmarks import rows
from benchmarks.speed.host_time import Llama, Moving, without_starts
from benchmarks.speed.shapes import gpt2_small
from hdet_scale.optim.fused_adamw import FusedAdamW

KERNELS = "FusedAdamW kernels"
LIMITS = {
    "step vs torch fused": 1.05,
    "step vs torch foreach": 0.2,
    "host warm vs torch fused": 1.1,
    "host moving vs torch fused": 1.1,
    f"{KERNELS}: host warm vs torch fused": 1.1,
    f"{KERNELS}: host moving vs torch fused": 1.1,
}
LLAMA_MS = 5.0


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
    prepare: Callable[[torch.optim.Optimizer], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Seconds of each step, the contenders taking turns, in an order that rotates: none of them
    always follows the one that leaves the cache in the worst state. `prepare` is called before
    each step and not timed."""
    for optimizer in optimizers.values():
        for _ in range(2):
            optimizer.step()
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    names = list(optimizers)
    for turn in range(repeats):
        for at in range(len(names)):
            name = names[(at + turn) % len(names)]
            prepare(optimizers[name])
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
    return [
        *_measured("step", step),
        *measure_host(device, len(params), 20 * repeats),
        *measure_llama(20 * repeats),
    ]


def _measured(quantity: str, seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for name, values in seconds.items():
        cuts = quantiles(values, n=10)
        row: dict[str, object] = {
            "quantity": quantity,
            "contender": name,
            "p10_ms": round(cuts[0] * 1e3, 4),
            "median_ms": round(median(values) * 1e3, 4),
            "p90_ms": round(cuts[-1] * 1e3, 4),
            "repeats": len(values),
        }
        if "FusedAdamW" in seconds:
            row["FusedAdamW_over_it"] = round(ratio(seconds["FusedAdamW"], values), 4)
        if KERNELS in seconds:
            row["kernels_over_it"] = round(ratio(seconds[KERNELS], values), 4)
        if name == KERNELS or quantity.startswith("llama"):
            row["kernels_started"] = torch.cuda.is_available() and "llama" not in quantity
        found.append(row)
    return found


def measure_host(device: torch.device, tensors: int, repeats: int) -> list[dict[str, object]]:
    """Host time with gradients that stay and gradients that move."""
    small = make_params([(16,)] * tensors, device)
    makers = {n: make for n, make in contenders(device).items() if n != "torch foreach"}
    makers[KERNELS] = lambda groups: FusedAdamW(groups, lr_multiplier=1.05, backend="triton")
    move = Moving(small, lambda p, turn: torch.full_like(p, 1e-3 * (1 + turn % 2)))
    found = []
    with nullcontext() if device.type == "cuda" else without_starts():
        for quantity, prepare in (("host warm", lambda _: None), ("host moving", move)):
            few = {n: make(in_groups(small)) for n, make in makers.items()}
            seconds = take_turns(few, repeats, host_timed, device, prepare)
            found += _measured(quantity, seconds)
    return found


def measure_llama(repeats: int) -> list[dict[str, object]]:
    """Host time at 6.7 B parameters, and with a 64th of the width, in turns; moving gradients."""
    runs = {f"{llama.elements / 1e9:.3g} B": llama for llama in (Llama(1), Llama(64))}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu = torch.device("cpu")
    with without_starts():
        for name, llama in runs.items():
            llama.move(llama.optimizer)
            first = host_timed(llama.optimizer.step, cpu)
            print(f"llama {name}: the first step, which lists the tensors: {first * 1e3:.1f} ms")
        for _ in range(repeats):
            for name, llama in runs.items():
                llama.move(llama.optimizer)
                seconds[name].append(host_timed(llama.optimizer.step, cpu))
    return _measured("llama host moving", seconds)


def failures(measured: list[dict[str, object]]) -> list[str]:
    """The limits that were missed."""
    found: dict[str, object] = {}
    for r in measured:
        name = f"{r['quantity']} vs {r['contender']}"
        found[name] = r.get("FusedAdamW_over_it")
        found[f"{KERNELS}: {name}"] = r.get("kernels_over_it")
    slow = [
        f"{r['quantity']} {r['contender']}: {r['median_ms']} ms is above {LLAMA_MS}"
        for r in measured
        if str(r["quantity"]).startswith("llama") and float(str(r["median_ms"])) > LLAMA_MS
    ]
    return slow + [
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
            f"{r.get('FusedAdamW_over_it', '')}",
            f"{r.get('kernels_over_it', '')}",
        ]
        for r in measured
    ]
    header = ["", "contender", "10 - 90 % ms", "median", "FusedAdamW / it", "kernels / it"]
    print(rows.table(header, lines))
    for r in measured:
        if r["contender"] == "torch fused":
            print(f"figure: {r['quantity']} / torch's fused AdamW {r['FusedAdamW_over_it']:.3f}")
        if r["contender"] == "torch fused" and "kernels_over_it" in r:
            print(f"figure: {r['quantity']}, kernels / torch's fused {r['kernels_over_it']:.3f}")
        if str(r["quantity"]).startswith("llama"):
            print(f"figure: {r['quantity']} at {r['contender']} parameters {r['median_ms']:.2f} ms")
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
