"""Problems that mostly begin on a plateau: next to nothing is learnt in the first steps, at any
learning rate, so that short trials differ little."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.images import noisy_digits
from benchmarks.lr.problem import Params, Task, cross_entropy, linear, look_up, normal, times


def sigmoid(*, name: str = "sigmoid", batch: int = 64, around: float = 0.8) -> Task:
    """Two layers of sigmoids on digits under fresh noise, by SGD."""
    hidden, train, held_out = 48, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, 64, hidden),
            "two": linear(g, hidden, hidden),
            "out": linear(g, hidden, 10),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = noisy_digits(indices, train)
        x = torch.sigmoid(times(images.flatten(2), p["one"]))
        x = torch.sigmoid(times(x, p["two"]))
        return cross_entropy(times(x, p["out"]), labels)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="sgd",
        around=around,
    )


@functools.cache
def _bits(count: int, examples: int) -> Tensor:
    g = torch.Generator().manual_seed(6)
    return torch.randint(2, (examples, count), generator=g).float() * 2 - 1


def parity(*, name: str = "parity", batch: int = 256, around: float = 0.005) -> Task:
    """The parity of three of twelve bits, one answer in ten wrong; AdamW."""
    count, hidden, train, held_out = 12, 96, 120_000, 4096

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, count, hidden),
            "bias": normal(g, hidden, scale=0.5),
            "two": linear(g, hidden, hidden, 1.4),
            "out": linear(g, hidden, 1),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        bits = _bits(count, train + held_out)[indices]
        label = bits[..., :3].prod(-1) > 0
        wrong = (indices * 2654435761 % 1000) < 100
        x = functional.relu(times(bits, p["one"]) + p["bias"][:, None])
        x = functional.relu(times(x, p["two"]))
        logit = times(x, p["out"]).squeeze(-1)
        target = (label ^ wrong).float()
        lost = functional.binary_cross_entropy_with_logits(logit, target, reduction="none")
        return lost.mean(1)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
    )


@functools.cache
def _duels(players: int, examples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Who beat whom: strength in a style against the other's weakness in it."""
    g = torch.Generator().manual_seed(7)
    one, two = (torch.randint(players, (examples,), generator=g) for _ in range(2))
    attack, defence = (torch.randn(players, 3, generator=g) for _ in range(2))
    edge = (attack[one] * defence[two]).sum(1) - (attack[two] * defence[one]).sum(1)
    won = torch.rand(examples, generator=g) < torch.sigmoid(1.5 * edge)
    return one, two, won.float()


def duels(
    *, name: str = "duels", batch: int = 256, around: float = 4.0, train: int = 120_000
) -> Task:
    """Games between players, as products of their embeddings, which begin near zero; SGD."""
    players, width, held_out = 120, 8, 4096

    def init(g: torch.Generator) -> Params:
        return {
            "attack": normal(g, players, width, scale=0.1),
            "defence": normal(g, players, width, scale=0.1),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        one, two, won = (x[indices] for x in _duels(players, train + held_out))
        there = look_up(p["attack"], one) * look_up(p["defence"], two)
        back = look_up(p["attack"], two) * look_up(p["defence"], one)
        logit = (there - back).sum(-1)
        lost = functional.binary_cross_entropy_with_logits(logit, won, reduction="none")
        return lost.mean(1)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="sgd",
        around=around,
    )


def recall(*, name: str = "recall", batch: int = 64, around: float = 0.008) -> Task:
    """What stood behind the letter that is asked for, one answer in ten at random; two blocks of
    attention, AdamW."""
    letters, pairs, width, train, held_out = 8, 3, 32, 60_000, 2048
    places = 2 * pairs + 1

    def init(g: torch.Generator) -> Params:
        params = {
            "embed": normal(g, 2 * letters, width, scale=0.3),
            "place": normal(g, places, width, scale=0.3),
            "head": linear(g, width, letters, 0.5),
        }
        for i in range(2):
            params |= {f"qkv{i}": linear(g, width, 3 * width), f"out{i}": linear(g, width, width)}
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, answer = (x[indices] for x in _recall(letters, pairs, train + held_out))
        x = look_up(p["embed"], tokens) + p["place"][:, None]
        for i in range(2):
            qkv = times(functional.layer_norm(x, (width,)), p[f"qkv{i}"])
            q, k, v = qkv.chunk(3, -1)
            weight = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(width), -1)
            x = x + times(weight @ v, p[f"out{i}"])
        last = functional.layer_norm(x[:, :, -1], (width,))
        return cross_entropy(times(last, p["head"]), answer)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
    )


@functools.cache
def _recall(letters: int, pairs: int, examples: int) -> tuple[Tensor, Tensor]:
    """Keys without repetition, each with its value, then one of the keys; and the answer."""
    g = torch.Generator().manual_seed(8)
    keys = torch.rand(examples, letters, generator=g).argsort(1)[:, :pairs]
    values = torch.randint(letters, (examples, pairs), generator=g)
    asked = torch.randint(pairs, (examples,), generator=g)
    guess = torch.randint(letters, (examples,), generator=g)
    wrong = torch.rand(examples, generator=g) < 0.1
    answer = torch.where(wrong, guess, values.gather(1, asked[:, None]).squeeze(1))
    rows = torch.stack([keys, values + letters], -1).flatten(1)
    return torch.cat([rows, keys.gather(1, asked[:, None])], 1), answer


def twins(*, name: str = "twins", batch: int = 96, around: float = 0.004) -> Task:
    """Whether two digits under fresh noise are the same, one answer in twenty wrong; AdamW."""
    hidden, width, train, held_out = 48, 16, 60_000, 4096

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, 64, hidden, 1.4),
            "two": linear(g, hidden, width),
            "join": linear(g, 2 * width, hidden, 1.4),
            "out": linear(g, hidden, 1),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        here, label = noisy_digits(indices, train)
        size, first = (train, 0) if bool((indices < train).all()) else (held_out, train)
        other = first + (indices - first + 7919 * (indices % 13)) % size
        there, beside = noisy_digits(other, train)
        code = [
            times(functional.relu(times(x.flatten(2), p["one"])), p["two"]) for x in (here, there)
        ]
        both = torch.cat([code[0] * code[1], (code[0] - code[1]).abs()], -1)
        logit = times(functional.relu(times(both, p["join"])), p["out"]).squeeze(-1)
        wrong = (indices * 2654435761 % 1000) < 50
        target = ((label == beside) ^ wrong).float()
        return functional.binary_cross_entropy_with_logits(logit, target, reduction="none").mean(1)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
    )


@functools.cache
def _counts(fields: int, examples: int) -> tuple[Tensor, Tensor]:
    """Events in an hour, by a product of effects."""
    g = torch.Generator().manual_seed(9)
    x = torch.randn(examples, fields, generator=g)
    rate = 0.8 * x[:, 0] + 1.2 * torch.tanh(x[:, 1] * x[:, 2]) + 0.5 * x[:, 3].abs()
    return x, torch.poisson(rate.exp(), generator=g)


def counts(
    *, name: str = "counts", batch: int = 128, around: float = 0.05, train: int = 60_000
) -> Task:
    """Counts of events, by a Poisson regression of an MLP, whose loss has no natural zero; SGD."""
    fields, hidden, held_out = 10, 48, 4096

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, fields, hidden, 1.4),
            "two": linear(g, hidden, hidden, 1.4),
            "out": linear(g, hidden, 1, 0.5),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        x, count = (v[indices] for v in _counts(fields, train + held_out))
        x = torch.tanh(times(x, p["one"]))
        x = torch.tanh(times(x, p["two"]))
        log_rate = times(x, p["out"]).squeeze(-1)
        return (log_rate.exp() - count * log_rate + torch.lgamma(count + 1)).mean(1)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="sgd",
        around=around,
    )
