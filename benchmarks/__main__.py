"""All benchmarks, one behind the other: `python -m benchmarks`, `--short` for a quick look."""

from __future__ import annotations

import argparse
import subprocess
import sys

SHORT = {
    "converge": ["--repeats", "3", "--shrink", "2", "--no-rows"],
    "fused_step": ["--repeats", "5", "--no-rows"],
    "factor_recovery": ["--short", "--only", "dropout"],
}


def main() -> int:
    """The worst exit code of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer repeats, smaller, no rows")
    short = parser.parse_args().short
    codes = []
    for name, options in SHORT.items():
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *(options if short else [])]
        codes.append(subprocess.run(command, check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
