"""`hdet plan`: what HDET costs a model on a cluster, before anything is started.

    hdet plan 70B --gpus 1024
    hdet plan path/to/config.json --gpus 512 --shards 32 --on a100 --json

Prints what is asked for beside what is recommended. Exit codes: 0 done, 2 refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from hdet_scale.config import GRADIENTS, HDETConfig
from hdet_scale.converge.policy import ConvergePolicy
from hdet_scale.converge.wires import WIRES
from hdet_scale.plan import shapes
from hdet_scale.plan.estimates import Estimate, estimate
from hdet_scale.plan.links import GBIT, PRESETS, Cluster, Link
from hdet_scale.plan.recommendation import recommend
from hdet_scale.plan.workload import MOMENTS, PARAMETER_DTYPES, TOKENS, Workload


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
    add(
        "--dtype",
        choices=sorted(PARAMETER_DTYPES),
        default="fp32",
        help="of the parameters that are kept",
    )
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
    """Print what is asked for beside what is recommended.

    Args:
        argv: the options (default None: those of the process).

    Returns:
        The exit code: 0, or 2 for options that cannot be planned.
    """
    args = parse(argv)
    try:
        work, config = _workload(args), _config(args)
        chosen, reasons = recommend(work, config)
        asked = estimate(work, dataclasses.replace(config, shards=chosen.config.shards))
    except (ValueError, TypeError) as wrong:
        print(f"hdet plan: {wrong}", file=sys.stderr)
        return 2
    show = as_json if args.json else as_text
    print(show(work, asked, chosen, reasons))
    return 0


def _workload(args: argparse.Namespace) -> Workload:
    return Workload(
        model=shapes.of(args.model),
        gpus=args.gpus,
        cluster=_cluster(args),
        dtype=args.dtype,
        optimizer=args.optimizer,
        step_seconds=args.step_seconds,
        tokens=args.tokens,
    )


def _config(args: argparse.Namespace) -> HDETConfig:
    return HDETConfig(
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


def as_json(work: Workload, asked: Estimate, chosen: Estimate, reasons: Sequence[str]) -> str:
    """Everything, for programs."""
    whole = {
        "model": work.model.name,
        "parameters": work.model.parameters,
        "gpus": work.gpus,
        "cluster": dataclasses.asdict(work.cluster),
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


def as_text(work: Workload, asked: Estimate, chosen: Estimate, reasons: Sequence[str]) -> str:
    """What is asked for beside what is recommended."""
    head = (
        f"{work.model.name}: {work.model.parameters / 1e9:.3g} B parameters on {work.gpus} GPUs "
        f"({work.cluster.name}), {work.dtype}, {work.optimizer}, {asked.config.gradients} gradients"
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


if __name__ == "__main__":
    raise SystemExit(main())
