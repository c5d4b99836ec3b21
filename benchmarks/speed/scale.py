"""Overhead of HDET against the number of replicas, 8 to 16,384, by `hdet plan`: computed, not run.

    python -m benchmarks.speed.scale        # results/scale.md, scale.png, scale.jsonl

For 1 B, 7 B, 70 B and 405 B parameters with the fewest shards that fit, T = 1000, fp32 on the wire,
blocking, on each cluster; AdamW, fp32 parameters, 8192 tokens a GPU and step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import rows
from hdet_scale.config import HDETConfig
from hdet_scale.plan import shapes
from hdet_scale.plan.estimates import Estimate, estimate
from hdet_scale.plan.links import PRESETS
from hdet_scale.plan.recommendation import TARGET, fitting_shards
from hdet_scale.plan.workload import Workload

SIZES = ("1B", "7B", "70B", "405B")
REPLICAS = tuple(8 * 2**i for i in range(12))
CLUSTERS = ("h100", "a100", "25gbe")
# Okabe and Ito's palette: told apart by every kind of colour vision.
COLOURS = dict(zip(SIZES, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=True))

Table = dict[tuple[str, str, int], Estimate]


def computed(clusters: Sequence[str] = CLUSTERS, sizes: Sequence[str] = SIZES) -> Table:
    """An estimate for each cluster, size and number of replicas."""
    found: Table = {}
    config = HDETConfig(rule="paper", interval=1000)
    for on in clusters:
        for size in sizes:
            model = shapes.of(size)
            # The layout of a replica does not depend on how many there are: found once.
            shards = fitting_shards(Workload(model=model, gpus=2**15, cluster=PRESETS[on]), config)
            for n in REPLICAS:
                work = Workload(model=model, gpus=n * shards, cluster=PRESETS[on])
                found[on, size, n] = estimate(
                    work, HDETConfig(rule="paper", interval=1000, shards=shards, replicas=n)
                )
    return found


def markdown(found: Table) -> str:
    """A table for each cluster."""
    lines = [
        "# Overhead of a blocking converge at T = 1000, by `hdet plan`",
        "",
        "Computed by `python -m benchmarks.speed.scale` from the real bucket planner and an",
        "alpha-beta model of ring and tree; no GPU has been used. AdamW, fp32 parameters, fp32 on",
        "the wire, 8192 tokens a GPU and step.",
    ]
    for on in CLUSTERS:
        lines += ["", f"## {PRESETS[on].name}", ""]
        shards = {s: found[on, s, REPLICAS[0]].config.shards for s in SIZES}
        lines.append("| replicas | " + " | ".join(f"{s}, {shards[s]} shards" for s in SIZES) + " |")
        lines.append("|---|" + "---|" * len(SIZES))
        for n in REPLICAS:
            cells = [f"{found[on, s, n].overhead:.4%}" for s in SIZES]
            lines.append(f"| {n:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(found: Table, path: Path) -> None:
    """A panel for each cluster, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(CLUSTERS), sharey=True)
    for axes, on in zip(panels, CLUSTERS, strict=True):
        for size, mark in zip(SIZES, "osD^", strict=True):
            share = [100 * found[on, size, n].overhead for n in REPLICAS]
            shards = found[on, size, REPLICAS[0]].config.shards
            label = f"{size}, {shards} GPU{'s' if shards != 1 else ''} a replica"
            axes.plot(REPLICAS, share, mark + "-", color=COLOURS[size], markersize=4, label=label)
        axes.axhline(100 * TARGET, color="#666666", linewidth=0.8, linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="replicas")
        axes.set_xticks(REPLICAS[::3], [f"{n:,}" for n in REPLICAS[::3]], minor=False)
        axes.set_title(PRESETS[on].name, loc="left", fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    panels[0].set_ylabel("overhead at T = 1000, % of the time")
    panels[0].legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def as_rows(found: Table) -> list[dict[str, Any]]:
    """One for each estimate."""
    return [
        {
            "cluster": on,
            "model": size,
            "replicas": n,
            "shards": e.config.shards,
            "overhead": e.overhead,
            "transfer_seconds": e.transfer_seconds,
            "step_seconds": e.step_seconds,
            "converge_bytes": e.converge_bytes,
        }
        for (on, size, n), e in found.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    """Compute, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-rows", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    found = computed()
    text = markdown(found)
    print(text)
    for size in SIZES:
        share = found["h100", size, 1024].overhead
        print(f"figure: {size} on 1,024 replicas of H100, computed: {share:.4%} at T = 1000")
    if not options.no_rows:
        (rows.RESULTS / "scale.jsonl").unlink(missing_ok=True)  # computed anew, not added to
        print("rows:", rows.append("scale", as_rows(found)))
        (rows.RESULTS / "scale.md").write_text(text, encoding="utf-8")
        draw(found, rows.RESULTS / "scale.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
