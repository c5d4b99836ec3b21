"""`hdet find`: search for the learning rate of a run of `hdet train`, print it, and end.

    hdet find --engine fsdp --config configs/fsdp_hdet.json --workers 4 --steps 10000

It takes the options of `hdet train` and does what that does until the search is over: on the same
engine, with the same batches. Nothing is trained afterwards and no checkpoint is written; the log
in the run's folder has the trials, for `hdet report`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hdet_scale.train import command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: options of `hdet train`. Default: those of this process.

    Returns:
        0, or the exit code of `hdet train`: 2 for options that cannot be used.
    """
    return command.main(["--find", *(sys.argv[1:] if argv is None else argv)])
