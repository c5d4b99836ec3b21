"""The random words of the stochastic rounding: uniform, and different wherever they must be."""

import torch

from hdet_scale.kernels.random_words import random_words, tensor_key

MILLION = 10**6
KEY = tensor_key(3, 7)


def test_words_are_uniform_and_do_not_repeat_between_steps_parameters_or_arrays() -> None:
    base = random_words(MILLION, key=KEY, step=1, offset=0, slot=0)
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((base >> shift) & 0xFF, minlength=256).double()
        expected = MILLION / 256
        chi2 = ((counts - expected) ** 2 / expected).sum().item()
        assert chi2 < 330.5, f"byte {shift // 8}: chi2 {chi2:.0f}, 0.1 % point is 330.5"
    others = {
        "step": random_words(MILLION, key=KEY, step=2, offset=0, slot=0),
        "parameter": random_words(MILLION, key=tensor_key(3, 8), step=1, offset=0, slot=0),
        "seed": random_words(MILLION, key=tensor_key(4, 7), step=1, offset=0, slot=0),
        "array": random_words(MILLION, key=KEY, step=1, offset=0, slot=1),
        "neighbour": random_words(MILLION, key=KEY, step=1, offset=1, slot=0),
        "far": random_words(MILLION, key=KEY, step=1, offset=2**32, slot=0),
    }
    for name, words in others.items():
        pair = torch.stack([base.double(), words.double()])
        correlation = torch.corrcoef(pair)[0, 1].item()
        assert abs(correlation) < 4 / MILLION**0.5, f"{name}: {correlation:.4f}"
        low = torch.corrcoef(pair.remainder(65536.0))[0, 1].item()
        assert abs(low) < 4 / MILLION**0.5, f"{name}, low bits: {low:.4f}"
