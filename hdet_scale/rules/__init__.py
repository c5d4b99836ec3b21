"""Rules that are fed by a probe at each converge, for any factor.

Read in this order:

    designs    which replica gets which level of which factor
    sums       the statistics of a round over all replicas, and the fit of slopes
    guided     the base of each factor, as a rule's decisions have it
    slope      the slope rule: evidence over rounds, and a gate
"""

from hdet_scale.rules.slope import Slope

__all__ = ["Slope"]
