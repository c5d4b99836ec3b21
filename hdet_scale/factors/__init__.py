"""Factors: the scalars that a run explores, and how a value is written to each.

    from hdet_scale.factors import dropout, learning_rates, weight_decay

    scheduler = AutoLR(
        CosineAnnealingLR(optimizer, T_max=steps),
        HDETConfig(rule="slope", spread=0.3, gradients="local"),
        model=model,
        factors=[*learning_rates(optimizer), weight_decay(optimizer), dropout(model)],
        probe=lambda: (loss_of(model, batch) for batch in fresh_held_out_batches()),
    )

A factor is one number that training reads and does not train. All replicas share its base b. In
each round every replica has a multiplier rho and trains with

    value = space^-1(space(b) + ln rho), clipped to the bounds

where the space is the scale on which values of the factor are compared:

    log      b rho                          learning rates, weight decays, temperatures
    linear   b + unit ln rho                numbers that may be zero or negative
    logit    b rho / (1 - b + b rho)        rates between 0 and 1: rho multiplies the odds

rho = 1 gives b itself, bit for bit, in every space. `ln rho` is called the offset.

Read `space` first (the protocol and the arithmetic), then `learning_rate`, `pair` (any scalar with
a getter and a setter), `options` (numbers of a param group), `attributes` (numbers held by modules
and losses), hdet_scale.optim.rates (how a multiplier reaches an optimizer).

A factor of your own
--------------------
Nothing is registered: an object with the members of `Factor` can be passed in `factors=[...]`.

- A number that an object holds: `Attribute(loss, "margin", bounds=(0.01, 10.0))`.
- A number that you can read and write: `Pair("margin", get, set)`.
- A kind of factor that others will use: one new file with a subclass of `Pair`. For the largest
  gradient norm of a training loop that reads `clip.norm` in each step:

      class ClipNorm(Pair):
          in_step = True         # acts after the all-reduce: shared gradients can explore it
          moves_moments = True   # replicas' moments differ: the converge averages them

          def __init__(self, clip: Clip, *, bounds: Bounds = (0.01, 100.0)) -> None:
              super().__init__(
                  "clip_norm", lambda: clip.norm, lambda x: setattr(clip, "norm", x), bounds=bounds
              )

The name is the same on every rank and differs from that of every other factor. It selects the
random stream of the assignment and the keys of the log.

Compiled models
---------------
torch.compile treats a Python float that a module holds as a constant and compiles again when it
changes. A 0-dim tensor is an input instead. A value that is held in a tensor is therefore filled in
place and never replaced, and `as_tensor=True` turns a float into such a tensor; call it before the
model is compiled. torch's own dropout modules cannot hold a tensor: `tensor_dropout(model)`
replaces them.
"""

from hdet_scale.factors.attributes import (
    Attribute,
    TensorDropout,
    dropout,
    hold_as_tensor,
    label_smoothing,
    module_attribute,
    tensor_dropout,
)
from hdet_scale.factors.learning_rate import LearningRate, learning_rates
from hdet_scale.factors.options import GroupOption, beta, weight_decay
from hdet_scale.factors.pair import Pair
from hdet_scale.factors.space import SPACES, Bounds, Factor, Space, check_factors
from hdet_scale.optim.rates import check_multiplier, effective_lr, write_lr

__all__ = [
    "SPACES",
    "Attribute",
    "Bounds",
    "Factor",
    "GroupOption",
    "LearningRate",
    "Pair",
    "Space",
    "TensorDropout",
    "beta",
    "check_factors",
    "check_multiplier",
    "dropout",
    "effective_lr",
    "hold_as_tensor",
    "label_smoothing",
    "learning_rates",
    "module_attribute",
    "tensor_dropout",
    "weight_decay",
    "write_lr",
]
