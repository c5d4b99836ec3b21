"""All benchmarks, one behind the other: `python -m benchmarks`, `--short` for a quick run.

Each prints its own table as it goes. What a benchmark says in lines that start with "figure:"
stands in the one table at the end, with the seconds it took and the limits it missed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks import rows

SHORT = {
    "speed.converge": ["--repeats", "3", "--shrink", "2", "--no-rows"],
    "speed.fused_step": ["--repeats", "5", "--no-rows"],
    "speed.int8_loss": ["--seeds", "2", "--steps", "40", "--no-rows"],
    "speed.plan_check": ["--repeats", "3", "--no-rows"],
    "speed.scale": ["--no-rows"],
    "speed.throughput": ["--turns", "60", "--no-rows"],
    "paper.ablation": [
        "--ranks",
        "4",
        "--steps",
        "30",
        "--seeds",
        "1",
        "--high",
        "0.3",
        "--no-rows",
    ],
    "paper.time_to_loss": ["--ranks", "2", "--steps", "60", "--seeds", "1", "--no-rows"],
    "lr.factors": ["--short", "--only", "dropout", "--no-rows"],
    "lr.recovery": ["--short"],
}
TOLD = ("figure:", "MISSED")


def run(name: str, options: list[str]) -> tuple[int, list[list[str]]]:
    """The exit code, and the benchmark's lines of the table."""
    print(f"== {name}", flush=True)
    begin = time.perf_counter()
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    told: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if line.startswith(TOLD):
                told.append(line.removeprefix("figure:").strip())
    seconds = f"{time.perf_counter() - begin:.0f} s"
    if process.returncode:
        told.append(f"FAILED with exit code {process.returncode}")
    lines = [
        [name if i == 0 else "", text, seconds if i == 0 else ""] for i, text in enumerate(told)
    ]
    return process.returncode, lines or [[name, "", seconds]]


def main() -> int:
    """The worst exit code of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer repeats, smaller, no rows")
    short = parser.parse_args().short
    found = [run(name, options if short else []) for name, options in SHORT.items()]
    print("== all")
    print(rows.table(["benchmark", "figure", "took"], [line for _, some in found for line in some]))
    return max(code for code, _ in found)


if __name__ == "__main__":
    sys.exit(main())
