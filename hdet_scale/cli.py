"""`hdet COMMAND [options]`: the command line of the package.

    hdet train --engine fsdp --config configs/fsdp_hdet.json --workers 4 --run runs/first
    hdet report runs/first -o report.html
    hdet plan 70B --gpus 1024

Each command has a `main(argv)` in a module of its own, which is imported only when it is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": ("train a GPT with replicas, on DDP, FSDP2 or DeepSpeed", "train.command"),
    "find": ("find the learning rate of such a run, print it, and end", "train.search_only"),
    "report": ("write an HTML report of a run", "runs.report"),
    "replay": ("write the learning rates of a run, to train with them again", "runs.replay"),
    "doctor": ("try what this machine can run, and say what to do about failures", "doctor"),
    "demo": ("train with plain DDP and with HDET on this CPU, and compare them", "demo"),
    "plan": ("estimate memory and time on a cluster, and recommend a layout", "plan.__main__"),
    "kernels": ("compile every kernel ahead of time: registers, spills, bytes", "kernels.inspect"),
}
"""Name: what the command does, and the module in hdet_scale that has its `main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; 2 if there is no such command.

    Args:
        argv: the command and its options. Default: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print("usage: hdet COMMAND [options]\n")
        print("\n".join(f"  {n:8} {text}" for n, (text, _) in COMMANDS.items()))
        print("\nexample: hdet train --run runs/first && hdet report runs/first -o report.html")
        print("hdet COMMAND --help lists the options of a command.")
        return 0
    if name not in COMMANDS:
        print(f"hdet: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"hdet_scale.{COMMANDS[name][1]}")
    code: int = module.main(words[1:])
    return code


if __name__ == "__main__":
    raise SystemExit(main())
