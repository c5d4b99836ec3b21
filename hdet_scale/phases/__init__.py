"""The phases of a run, and the scheduler that holds the present one.

Read in this order:

    run              what the phases share, and the interface of a phase
    plain            training as without HDET, bit for bit
    exploring        fan-out, converge, steering: the published method
    searching        the trials before a run
    search_news      what a search tells while it runs
    watched          the run after a search, evaluated on held-out batches
    build            a run and its phases from a config
    snapshot_files   the watch's snapshot in checkpoints of sharded replicas
    phased           what both schedulers offer on top of a torch scheduler
    arguments        what the schedulers refuse

Searching is followed by Watched, or by Exploring where gradients are local; Watched by Plain;
Exploring by Plain once nothing is left to explore.
"""

from hdet_scale.phases.phased import PhasedScheduler

__all__ = ["PhasedScheduler"]
