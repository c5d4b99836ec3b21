"""The state of every global random generator, to see that nothing was drawn from it."""

from __future__ import annotations

import random

import numpy as np
import torch


def rng_states() -> tuple[object, ...]:
    """Comparable snapshots of random, numpy and torch."""
    numpy_state = np.random.get_state(legacy=False)
    return random.getstate(), repr(numpy_state), tuple(torch.get_rng_state().tolist())
