"""The tasks on which rules are judged, and which of them had a part in the rules.

What differs between them is what decides the best learning rate: the optimizer, the noise of the
gradient, the curvature, whether the data run out, whether the weights are random or trained, and
whether the examples of a batch depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.lr import adapted as lr_adapted
from benchmarks.lr import coupled as lr_coupled
from benchmarks.lr import images as lr_images
from benchmarks.lr import latent as lr_latent
from benchmarks.lr import plateaus as lr_plateaus
from benchmarks.lr import points as lr_points
from benchmarks.lr import regressions as lr_regressions
from benchmarks.lr import sequences as lr_sequences
from benchmarks.lr import tables as lr_tables
from benchmarks.lr import texts as lr_texts
from benchmarks.lr import transfer as lr_transfer
from benchmarks.lr import unstable as lr_unstable
from benchmarks.lr.problem import Task

DEVELOPED: Mapping[str, Task] = {
    task.name: task
    for task in (
        lr_texts.gpt(name="gpt", batch=24, around=0.008),
        lr_texts.gpt(name="gpt-small-batch", batch=8, around=0.006),
        lr_texts.conv(),
        lr_texts.lstm(),
        lr_tables.tab(),
        lr_images.digits(),
        lr_images.over(),
        lr_images.vit(),
        lr_tables.factor(),
        lr_tables.deep(),
        lr_images.few(),
        lr_images.denoise(),
        lr_texts.ngram(),
        lr_images.mixer(),
        lr_texts.gru(),
        lr_texts.short(),
        lr_images.cnn(),
        lr_tables.fields(),
        lr_tables.smooth(),
        lr_images.attend(),
        lr_texts.bilinear(),
        lr_images.logit(),
        lr_plateaus.sigmoid(),
        lr_plateaus.duels(),
        lr_unstable.stripes(),
        lr_texts.masked(),
        lr_images.tanh(),
        lr_texts.rnn(),
        lr_plateaus.parity(),
        lr_plateaus.recall(),
        lr_plateaus.twins(),
        lr_plateaus.counts(),
        lr_unstable.elman(),
        lr_unstable.adding(),
        lr_unstable.relu(),
        lr_regressions.regress(),
        lr_sequences.sort(),
        lr_latent.vae(),
        lr_adapted.finetune(),
        lr_adapted.finetune_few(),
        lr_adapted.adapters(),
        lr_coupled.contrast(),
        lr_coupled.clicks(),
        lr_coupled.graph(),
        lr_coupled.norms(),
    )
}
"""Tasks that had a part in the rules, or whose results were seen: constants were or may be chosen
on them."""
FIRST = [*DEVELOPED][:7]
"""Where everything is run from everywhere."""
JUDGED: Mapping[str, Task] = {
    task.name: task
    for task in (
        lr_points.full_batch(),
        lr_sequences.post_norm(),
        lr_transfer.lora_few(),
        lr_coupled.rank(),
        lr_regressions.poisson(),
        lr_coupled.batchnorm_sgd(),
        lr_points.distill(),
    )
}
"""Tasks on which earlier rules and the present one were run when they were done. Fixed learning
rates were run on them to set `around`. Of the present rule, the effect of the passes over the data
(FRESH, REPEATS) was set after the rates at which their trials are lowest were seen, and changed
once after a run of all tasks at 2,000 steps."""
TASKS: Mapping[str, Task] = {**DEVELOPED, **JUDGED}
