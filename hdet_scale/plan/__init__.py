"""What HDET costs a model on a cluster, computed before anything is started: `hdet plan`.

Read in this order:

    shapes          the tensors of a model, known without making it
    links           seconds of a transfer; the clusters that people have
    workload        what is to be trained, and on what
    rank_memory     the bytes that a rank keeps
    estimates       memory, bytes and seconds under an HDETConfig
    recommendation  the simplest choice below a target
    __main__        the command
"""

from hdet_scale.plan.estimates import Estimate, estimate
from hdet_scale.plan.links import PRESETS, Cluster, Link, fit
from hdet_scale.plan.rank_memory import RankMemory
from hdet_scale.plan.recommendation import recommend
from hdet_scale.plan.shapes import Shapes
from hdet_scale.plan.workload import Workload

__all__ = [
    "PRESETS",
    "Cluster",
    "Estimate",
    "Link",
    "RankMemory",
    "Shapes",
    "Workload",
    "estimate",
    "fit",
    "recommend",
]
