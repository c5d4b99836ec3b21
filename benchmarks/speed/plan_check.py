"""Does the alpha-beta model hold? Constants fitted at three sizes predict a fourth.

    python -m benchmarks.speed.plan_check                        # 2 ranks, gloo
    torchrun --nproc-per-node 8 -m benchmarks.speed.plan_check --backend nccl

Each size is a GPT's shapes, averaged by a real converge: its buckets give the hops and the bytes,
the clock the seconds. The sizes take turns; the medians of three are fitted, and the largest, which
the fit has not seen, is predicted. --check exits with 1 when the prediction is off by more than
25 %.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from benchmarks import ranks, rows
from benchmarks.speed.shapes import gpt2_small
from hdet_scale.converge.costs import Cost, ring
from hdet_scale.converge.pipeline import Converge
from hdet_scale.plan.links import Link, fit
from hdet_scale.topology import Replicas

LIMIT = 0.25
SHRINKS = (12, 6, 3, 1)
"""Widths of GPT-2 small divided by these; the last is predicted."""


def cost_of(converge: Converge) -> Cost:
    """Hops and bytes of a converge, an all-reduce priced as a ring: on gloo it is one."""
    return sum((t.cost(ring) for t in converge.transfers()), Cost(0, 0))


def measure(send: ranks.Send, options: argparse.Namespace) -> None:
    """In each rank: (cost, seconds of each turn) of every size."""
    device, replicas = ranks.device(), Replicas.world()
    converges = [
        Converge([torch.randn(s, device=device) for s in gpt2_small(k)], replicas)
        for k in options.shrinks
    ]
    seconds: list[list[float]] = [[] for _ in converges]
    for turn in range(options.repeats + 1):
        for i, converge in enumerate(converges):
            took = ranks.timed(converge)
            if turn:  # the first turn touches fresh memory
                seconds[i].append(took)
    if replicas.rank == 0:
        send([(cost_of(c), s) for c, s in zip(converges, seconds, strict=True)])


def predicted(costs: list[Cost], seconds: list[float]) -> tuple[Link, float]:
    """The link fitted on all but the last, and what it says of the last over what was measured."""
    link = fit(costs[:-1], seconds[:-1])
    return link, link.seconds(costs[-1]) / seconds[-1]


def main(arguments: list[str] | None = None) -> int:
    """Measure, fit, predict."""
    parser = ranks.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--shrinks", type=int, nargs=4, default=SHRINKS, help="divide the width")
    parser.add_argument("--check", action="store_true", help="exit with 1 if it is off by 25 %%")
    options = parser.parse_args(arguments)
    found = ranks.run(measure, options)
    if found is None:
        return 0
    costs = [cost for cost, _ in found[0]]
    medians = [rows.quantiles(s)[1] for _, s in found[0]]
    link, ratio = predicted(costs, medians)
    lines, results = [], []
    for k, cost, median in zip(options.shrinks, costs, medians, strict=True):
        said = link.seconds(cost)
        row: dict[str, Any] = {
            "parameters": sum(torch.Size(s).numel() for s in gpt2_small(k)),
            "hops": cost.hops,
            "bytes": cost.nbytes,
            "measured_ms": median * 1e3,
            "model_ms": said * 1e3,
            "model_over_measured": said / median,
            "fitted": k != options.shrinks[-1],
        }
        results.append(row)
        lines.append(
            [
                f"{row['parameters'] / 1e6:.1f} M",
                "fitted" if row["fitted"] else "predicted",
                f"{row['measured_ms']:.1f}",
                f"{row['model_ms']:.1f}",
                f"{row['model_over_measured']:.2f}",
            ]
        )
    print(rows.table(["parameters", "", "measured ms", "model ms", "model / measured"], lines))
    print(f"alpha {link.latency * 1e6:.0f} us, 1 / beta {link.bandwidth / 1e9:.2f} GB/s")
    print(f"figure: predicted / measured {ratio:.2f}")
    if not options.no_rows:
        common = {"alpha_us": link.latency * 1e6, "gigabytes_a_second": link.bandwidth / 1e9}
        common |= {"ranks": options.ranks, "backend": options.backend, "repeats": options.repeats}
        print("rows:", rows.append("plan_check", [{**common, **r} for r in results]))
    missed = abs(ratio - 1) > LIMIT
    if missed:
        print(f"MISSED the prediction is {ratio:.2f} of what was measured, beyond {LIMIT:.0%}")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
