"""rule="auto": the search for a learning rate before a run, and the watch over the run.

Read in this order:

    constants   the tuned numbers, each with what it rests on
    schedule    the shape of the user's schedule
    probe       losses on held-out batches that all replicas have in common
    evidence    by how many standard errors one rate is ahead of another
    snapshot    weights and optimizer state, kept to go back to
    law         how the best rate of a trial relates to that of a run: batch, length, passes
    trials      the two stages, which replica runs which rate, the schedule of a trial
    decision    what the losses mean: the next stage, or the rate of the run
    result      what a search found, for people and notebooks
    watch       when the rate of a run is lowered

These are the rules; hdet_scale.phases carries them out (searching, watched).
"""

from hdet_scale.search.decision import RateSearch
from hdet_scale.search.law import translation
from hdet_scale.search.probe import Probe, common_batches
from hdet_scale.search.result import SearchResult
from hdet_scale.search.snapshot import Snapshot
from hdet_scale.search.watch import Watch

__all__ = [
    "Probe",
    "RateSearch",
    "SearchResult",
    "Snapshot",
    "Watch",
    "common_batches",
    "translation",
]
