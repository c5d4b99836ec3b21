"""`hdet`: the commands.

hdet train --engine fsdp --config configs/fsdp_hdet.json --workers 4
hdet demo
hdet plan 70B --gpus 1024
hdet kernels
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train a byte-level GPT with replicas, on DDP, FSDP2 or DeepSpeed",
    "report": "one page that shows what the replicas of a run found",
    "replay": "the schedule that a run discovered, to be run again without HDET",
    "demo": "plain DDP beside HDET on this machine's CPU: a table and a picture",
    "plan": "what HDET costs a model on a cluster, and what to choose",
    "kernels": "compile every kernel ahead of time and print registers, spills, bytes",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command; 2 for a command that is not there."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print("usage: hdet COMMAND [options]\n")
        print("\n".join(f"  {n:8} {text}" for n, text in COMMANDS.items()))
        print("\nhdet COMMAND --help tells the options of one.")
        return 0
    if name == "train":
        from hdet_scale import train

        return train.main(words[1:])
    if name == "report":
        from hdet_scale import report

        return report.main(words[1:])
    if name == "replay":
        from hdet_scale import replay

        return replay.main(words[1:])
    if name == "demo":
        from hdet_scale import demo

        return demo.main(words[1:])
    if name == "plan":
        from hdet_scale import plan

        return plan.main(words[1:])
    if name == "kernels":
        from hdet_scale.kernels import inspect

        return inspect.main(words[1:])
    print(f"hdet: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
