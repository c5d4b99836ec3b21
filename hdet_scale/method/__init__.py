"""The published method: fan-out, converge, and the paper's rule.

Read in this order:

    spread     the multipliers of N replicas, and which replica gets which
    losses     the mean loss of a replica over a round
    paper      the paper's rule, and the shared base that it moves
    round      the averaging at the end of a round
    records    what a round, a trial, a search or an evaluation did, for logs and callbacks

The steps of a round are counted by hdet_scale.phases.exploring.
"""

from hdet_scale.method.paper import PaperRule
from hdet_scale.method.spread import assignment, multipliers

__all__ = ["PaperRule", "assignment", "multipliers"]
