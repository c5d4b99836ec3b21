"""rule="auto": the search for a learning rate before a run, and the watch over the run.

Read in this order:

    schedule    the shape of the user's schedule, and how to go back to a position of it
    probe       losses on held-out batches that all replicas have in common
    snapshot    weights and optimizer state, kept to go back to
    trials      the stages, which replica runs which rate, the schedule of a trial
    curve       losses by learning rate: the minimum and the edge
    law         how the best rate of a trial relates to that of a run, by batch and length
    ledger      how far a search has come, and the losses it has seen
    decision    what the losses mean: the next stage, or the proposed rate
    watch       when the run restarts at another rate

These are the rules; hdet_scale.phases carries them out (searching, watched).
"""

from hdet_scale.search.decision import RateSearch
from hdet_scale.search.law import translation
from hdet_scale.search.probe import Probe, common_batches
from hdet_scale.search.snapshot import Snapshot
from hdet_scale.search.watch import Watch

__all__ = ["Probe", "RateSearch", "Snapshot", "Watch", "common_batches", "translation"]
