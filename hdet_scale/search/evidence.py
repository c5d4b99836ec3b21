"""Evidence: by how many standard errors one rate is ahead of another.

Two trials, or a trial and the initial weights, are evaluated on the same held-out batches. The
difference is taken batch by batch, so that what makes a batch hard cancels out:

    d_j = a_j - b_j          lead of b over a = mean(d) / (sd(d) / sqrt(M))

The d_j are clipped at CLIP times the median of their sizes: where a rate diverges on some batches,
these would make the error as large as the difference.

This is the one test of the search and of the watch: a lead of SIGNIFICANT standard errors counts,
whatever the scale of the loss and wherever it started. A loss that is not finite loses to any that
is. With a single batch the error is not known, and nothing is significant.

Pure: no torch, no process group.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hdet_scale.search.constants import CLIP, SIGNIFICANT


def mean_loss(losses: Sequence[float]) -> float:
    """The mean over the batches; infinite where one is not finite."""
    finite = bool(losses) and all(map(math.isfinite, losses))
    return math.fsum(losses) / len(losses) if finite else math.inf


def standard_error(losses: Sequence[float]) -> float:
    """Of the mean over the batches; infinite where it is not known."""
    if len(losses) < 2 or not math.isfinite(mean_loss(losses)):
        return math.inf
    return statistics.stdev(losses) / math.sqrt(len(losses))


def lead(behind: Sequence[float], ahead: Sequence[float]) -> float:
    """Standard errors by which `ahead` is below `behind`, batch by batch; negative if it is above.

    Args:
        behind: the losses of one rate on the probe's batches.
        ahead: those of another on the same batches.
    """
    one, two = mean_loss(behind), mean_loss(ahead)
    if not (math.isfinite(one) and math.isfinite(two)):
        return 0.0 if one == two else math.copysign(math.inf, one - two)
    differences = [a - b for a, b in zip(behind, ahead, strict=False)]
    limit = CLIP * statistics.median(map(abs, differences))
    if limit > 0:
        differences = [min(limit, max(-limit, d)) for d in differences]
    error, difference = standard_error(differences), math.fsum(differences)
    if error == 0.0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / len(differences) / error


def ahead(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `one` is significantly below `other`, batch by batch."""
    return lead(other, one) >= SIGNIFICANT
