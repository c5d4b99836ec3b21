"""The law that turns the best learning rate of a short trial into that of the run.

A trial and its run differ in three ways:

    batch    A trial has 1/M of the run's batch. Its gradients are noisier, and its best rate is
             lower by a power of M. The power of SGD is twice that of optimizers that divide by the
             gradient's size, as linear scaling is twice square-root scaling.
    steps    A trial has h steps, the run S. The best peak of a complete schedule (warm-up, cosine
             to zero) is measured to be the same from 10 to 80 steps, in the median of small tasks,
             and lower but nearly the same for all lengths of a language model's run. The shape
             assumes two bounds that do not depend on h, which nothing here has measured: the
             curvature at the initial weights for a few steps, the noise of the gradient for many.
             Between them it falls, around h = TURN:

                 g(h) = 1 + EXTRA / (1 + h / TURN)

    passes   A run that goes over its data P times overfits, and a trial is over before that. Where
             it begins to overfit is a matter of rate times steps: with more passes than FRESH the
             best rate falls in proportion to them, up to REPEATS.

                 p(P) = min(max(P, FRESH), REPEATS) / FRESH

    c = M^BATCH g(S) / g(h) / p(P)          adaptive
    c = M^(2 BATCH) g(S) / g(h) / p(P)      SGD

A trial that is the run (M = 1, h = S) of fresh data has c = 1. The constants of batch and steps
were fitted once, for all tasks: on trials and runs of 10 to 20,000 steps of small models
(benchmarks/lr/bridge.py) and on pre-training runs of language models, 950 steps and longer
(benchmarks/lr/steplaw.py); those of the passes on five small tasks.

Pure: no torch, no process group.
"""

from __future__ import annotations

import math

from hdet_scale.search.constants import BATCH, EXTRA, FRESH, REPEATS, TURN


def translation(
    batch_ratio: float,
    trial_steps: float,
    run_steps: float,
    *,
    adaptive: bool = True,
    passes: float = 1.0,
) -> float:
    """The factor c that turns the best learning rate of a trial into that of the run.

    Args:
        batch_ratio: M, the run's batch over that of the trial; at least 1.
        trial_steps: h, the steps of the trial's complete schedule; at least 1.
        run_steps: S, the steps of the run; at least trial_steps.
        adaptive: whether the optimizer divides by the gradient's size, like AdamW; False for SGD.
        passes: P, how often the run goes over its data; up to FRESH it makes no difference.

    Returns:
        c, which rises with M and h and falls with S and P.

    Raises:
        ValueError: if an argument is not finite or outside of its range.

    Limitations:
        This is the law of the median task: single small tasks are off by 1.2 to 2 octaves. Small
        models that converge are best 1 to 4 octaves lower at 20,000 steps than at 800, which c does
        not follow. How much a run overfits depends on more than its passes: with 17 to 171 of
        them tasks differ by 2 octaves. A rate that a trial survives may diverge in a long run.
    """
    if not (math.isfinite(batch_ratio) and batch_ratio >= 1):
        raise ValueError(
            f"batch_ratio is the run's batch over the trial's, at least 1, got {batch_ratio}: "
            "give trials at most the batch of the run"
        )
    if not (math.isfinite(trial_steps) and trial_steps >= 1):
        raise ValueError(
            f"trial_steps must be at least 1, got {trial_steps}: "
            "lengthen the trials or the run that they are a share of"
        )
    if not (math.isfinite(run_steps) and run_steps >= trial_steps):
        raise ValueError(
            f"run_steps must be at least trial_steps, {trial_steps}, got {run_steps}: "
            "shorten the trials"
        )
    if not (math.isfinite(passes) and passes > 0):
        raise ValueError(
            f"passes must be a finite number above 0, got {passes}: give the examples of all "
            "steps over the examples of the data set"
        )
    power = BATCH if adaptive else 2 * BATCH
    repeated = min(max(passes, FRESH), REPEATS) / FRESH
    return float(batch_ratio**power * (_peak(run_steps) / _peak(trial_steps)) / repeated)


def _peak(steps: float) -> float:
    """g: the best peak of a schedule over that of an endless one."""
    return 1 + EXTRA / (1 + steps / TURN)
