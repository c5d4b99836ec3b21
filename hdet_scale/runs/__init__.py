"""What a run leaves behind: its log, and what is made from it.

Read in this order: log (one JSON line for each record and sampled step), boards (the same numbers
on TensorBoard and W&B), search_log (a search and its watch, read back), report (one page with
figures, which the scripts of page/ draw) and replay (the run's schedule as a torch scheduler).
docs/runlog.md has the format.
"""

from hdet_scale.runs.boards import Board, TensorBoard, WandB
from hdet_scale.runs.log import Log, RunLog, read
from hdet_scale.runs.replay import ReplayLR

__all__ = ["Board", "Log", "ReplayLR", "RunLog", "TensorBoard", "WandB", "read"]
