"""`hdet`: the commands.

hdet train --engine fsdp --config configs/fsdp_hdet.json --workers 4 --run runs/first
hdet report runs/first -o report.html
hdet plan 70B --gpus 1024
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": ("train a GPT with replicas, on DDP, FSDP2 or DeepSpeed", "train.command"),
    "report": ("one page that shows what the replicas of a run found", "runs.report"),
    "replay": ("the schedule that a run discovered, to be run again without HDET", "runs.replay"),
    "doctor": ("try what this machine can run, and say what to do about what fails", "doctor"),
    "demo": ("plain DDP beside HDET on this machine's CPU: a table and a picture", "demo"),
    "plan": ("what HDET costs a model on a cluster, and what to choose", "plan.__main__"),
    "kernels": ("compile every kernel ahead of time: registers, spills, bytes", "kernels.inspect"),
}
"""Name: what it does, and the module whose `main` it is; imported only when it is asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command; 2 for a command that is not there."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print("usage: hdet COMMAND [options]\n")
        print("\n".join(f"  {n:8} {text}" for n, (text, _) in COMMANDS.items()))
        print("\nexample: hdet train --run runs/first && hdet report runs/first -o report.html")
        print("hdet COMMAND --help tells the options of one.")
        return 0
    if name not in COMMANDS:
        print(f"hdet: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"hdet_scale.{COMMANDS[name][1]}")
    code: int = module.main(words[1:])
    return code


if __name__ == "__main__":
    raise SystemExit(main())
