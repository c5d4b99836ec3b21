"""The tuned numbers of the search and the watch: all of them, each with what it rests on.

What happens when one of them is halved or doubled is in docs/search.md (python -m
benchmarks.lr.sensitivity).
"""

from __future__ import annotations

STEP = 10.0
"""Factor between neighbouring rates, and by which the watch lowers a rate. People guess rates in
powers of ten, and a trial of 10 % of a run cannot resolve less: the best rate of such a trial is
off from that of the run by a factor of 2.5 (standard deviation over small tasks)."""
SIGNIFICANT = 2.0
"""Standard errors by which one rate must be ahead of another. With 3 fewer rates that are ten times
too high are found, and from the right rate nothing is gained: there a trial errs by its length and
its batch, and not by the noise of 64 batches."""
CLIP = 3.0
"""Differences are clipped at so many times their median size: one batch must not decide."""
FIRST_SHARE = 0.04
"""Of the run's steps, for the first stage, which may show that the initial rate is right."""
SECOND_SHARE = 0.08
"""Of the run's steps, for the second stage. Trials of 6 % moved twice as many right rates away as
trials of 10 %."""
TEAMS = 4
"""Teams that the replicas are divided into. With an eighth of the batch the best rates of SGD are
up to eight times too low, with a quarter of it half as far off."""
MOST_STEPS = 1000
"""Of both stages together: the best rate of a language model hardly depends on the number of steps
from there on (benchmarks/lr/steplaw.py)."""
LEAST_STEPS = 12
"""Steps of the shortest trial that can tell rates apart."""
HEAD_START = 0.25
"""Rate of the team that goes on with the run during a search, over the initial rate. A rate that is
too low costs hardly anything in the first 12 % of a run, and one that is too high a lot."""
CLEAR = 0.3
"""Share of what the initial rate learnt that a tenth of it must have lost for the search to end
after its first stage: what has hardly begun to learn likes a rate that is far too high."""
GAIN = 0.1
"""Share of what the better one learnt that is much. A higher rate must gain it, because a short
trial exaggerates what a low rate costs, and for the search to end after its first stage, a higher
rate must lose it."""

BATCH = 1 / 3
"""Exponent of the batch: 0.2 to 0.36 on small models by AdamW, 0.36 on language models, and 0.5 to
0.7, about twice as much, on small models by SGD."""
EXTRA = 2.0
"""The best rate of the shortest schedules is 1 + EXTRA times that of the longest: trials of 10 to
80 steps are best 0.7 to 0.9 octaves above runs of 800 steps, and 1.1 to 1.5 above runs of 2,000."""
TURN = 300.0
"""Steps of a schedule whose best rate has lost half of EXTRA: on small models it does not change
from 10 to 80 steps, and on language models hardly from 1,000 to 600,000."""

FRESH = 8.0
"""Passes over the data up to which they count as fresh. With the root of the passes in place of
this, right rates were lowered in runs of 2,000 steps with two to four passes."""
REPEATS = 64.0
"""Passes from which on more of them change nothing. A trial sees the data too few times to overfit:
on tasks of 64 to 171 passes its best rate is 2.8 to 4.5 octaves above that of the run."""

FIRST = 0.1
"""Share of the run before the watch first evaluates it: earlier, runs at their best rate lose what
they learnt and learn it again."""
GROWTH = 1.3
"""Steps of an evaluation over those of the one before."""
UNTIL = 0.75
"""Share of the run after which there are no evaluations."""
LOST = 0.1
"""Share of what was learnt that a run must have lost again."""
PATIENCE = 2
"""Evaluations in a row that must show it."""
