"""Problems whose examples depend on each other: through negatives, shared rows, a graph or the
statistics of a batch."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.images import WHOLE, noisy_digits
from benchmarks.lr.problem import Params, Task, cross_entropy, linear, look_up, normal, times

HELD_DIGITS = 597
"""Digits that images.py holds out, which is the period of held-out examples."""


def _other_view(indices: Tensor, train: int) -> Tensor:
    """Examples of the same digits with other noise; `train` is a multiple of WHOLE."""
    turns = 1 + indices % 47
    held = indices + HELD_DIGITS * turns
    return torch.where(indices < train, (indices + WHOLE * turns) % train, held)


def contrast(*, name: str = "contrast", batch: int = 64, around: float = 0.05) -> Task:
    """Which two noisy views show the same digit, among all digits of the batch; SGD."""
    hidden, width, train, held_out = 96, 24, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, 64, hidden, 1.4),
            "shift": torch.zeros(1, hidden),
            "two": linear(g, hidden, hidden, 1.4),
            "out": linear(g, hidden, width),
        }

    def encode(p: Params, indices: Tensor) -> Tensor:
        images, _ = noisy_digits(indices, train)
        x = functional.relu(times(images.flatten(2), p["one"]) + p["shift"])
        x = functional.relu(times(x, p["two"]))
        return times(x, p["out"])

    def losses(p: Params, indices: Tensor) -> Tensor:
        one, two = encode(p, indices), encode(p, _other_view(indices, train))
        alike = torch.bmm(one, two.transpose(1, 2)) / math.sqrt(width)
        same = torch.arange(indices.shape[1]).expand_as(indices)
        return (cross_entropy(alike, same) + cross_entropy(alike.transpose(1, 2), same)) / 2

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
def _clicks(users: int, items: int, examples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Who saw what and whether they clicked; ids follow Zipf's law, and tastes have rank 4."""
    g = torch.Generator().manual_seed(6)
    who, what = (
        torch.multinomial(1.0 / torch.arange(1, n + 1), examples, True, generator=g)
        for n in (users, items)
    )
    taste, kind = (torch.randn(n, 4, generator=g) for n in (users, items))
    score = (taste[who] * kind[what]).sum(1) + torch.randn(items, generator=g)[what] - 2.0
    return who, what, (torch.rand(examples, generator=g) < score.sigmoid()).float()


def clicks(*, name: str = "clicks", batch: int = 256, around: float = 0.03) -> Task:
    """Clicks of users on items, from two embedding tables and an MLP, in one pass; AdamW."""
    users, items, width, hidden = 4000, 2000, 8, 32
    train, held_out = 200_000, 8192

    def init(g: torch.Generator) -> Params:
        return {
            "user": normal(g, users, width, scale=1.0),
            "item": normal(g, items, width, scale=1.0),
            "one": linear(g, 2 * width, hidden, 1.4),
            "out": linear(g, hidden, 1),
            "shift": torch.zeros(1),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        who, what, clicked = _clicks(users, items, train + held_out)
        user, item = look_up(p["user"], who[indices]), look_up(p["item"], what[indices])
        x = functional.relu(times(torch.cat([user, item], -1), p["one"]))
        logit = (user * item).sum(-1) + times(x, p["out"]).squeeze(-1) + p["shift"]
        return functional.binary_cross_entropy_with_logits(
            logit, clicked[indices], reduction="none"
        ).mean(1)

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
def _graph(nodes: int, classes: int, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """A stochastic block model: its normalized adjacency (sparse, with self-loops), the noisy
    features of its nodes and their classes."""
    g = torch.Generator().manual_seed(7)
    label = torch.randint(classes, (nodes,), generator=g)
    share = torch.where(label[:, None] == label, 3.0 * classes, 3.0) / nodes
    edges = (torch.rand(nodes, nodes, generator=g) < share).triu(1)
    matrix = (edges | edges.T).float() + torch.eye(nodes)
    scale = matrix.sum(1).rsqrt()
    center = torch.randn(classes, features, generator=g)
    x = 0.4 * center[label] + torch.randn(nodes, features, generator=g)
    return (scale[:, None] * matrix * scale).to_sparse(), x, label


def graph(*, name: str = "graph", batch: int = 32, around: float = 0.005) -> Task:
    """Two graph convolutions with dropout on 150 labelled nodes: it overfits; AdamW."""
    classes, features, hidden = 6, 48, 32
    train, held_out = 150, 1450

    def init(g: torch.Generator) -> Params:
        return {"one": linear(g, features, hidden, 1.4), "out": linear(g, hidden, classes)}

    def spread(x: Tensor) -> Tensor:
        """Each node's weighted mean of its neighbours, [R, nodes, d]."""
        matrix, *_ = _graph(train + held_out, classes, features)
        flat: Tensor = torch.sparse.mm(matrix, x.transpose(0, 1).flatten(1))
        return flat.view(len(flat), len(x), -1).transpose(0, 1)

    def loss(p: Params, indices: Tensor, *, training: bool) -> Tensor:
        _, x, label = _graph(train + held_out, classes, features)
        x = functional.dropout(x.expand(len(indices), -1, -1), 0.5, training)
        x = functional.relu(spread(times(x, p["one"])))
        x = spread(times(functional.dropout(x, 0.5, training), p["out"]))
        return cross_entropy(look_up(x, indices), label[indices])

    return Task(
        name=name,
        init=init,
        losses=functools.partial(loss, training=True),
        evaluate=functools.partial(loss, training=False),
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
        weight_decay=0.01,
    )


def norms(*, name: str = "norms", batch: int = 64, around: float = 0.1) -> Task:
    """A ConvNet on digits under noise, with BatchNorm by the batch's own statistics; SGD."""
    width, train, held_out = 12, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        params = {"out": linear(g, 4 * 2 * width, 10)}
        for i, (fan_in, fan_out) in enumerate([(9, width), (9 * width, 2 * width)]):
            params |= {
                f"conv{i}": linear(g, fan_in, fan_out),
                f"gain{i}": torch.ones(fan_out),
                f"shift{i}": torch.zeros(fan_out),
            }
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = noisy_digits(indices, train)
        count, examples = indices.shape
        x = images.view(count * examples, 1, 8, 8)
        for i in range(2):
            patches = functional.unfold(x, 3, padding=1).transpose(1, 2)
            mixed = times(patches.unflatten(0, (count, examples)), p[f"conv{i}"])
            variance, mean = torch.var_mean(mixed, (1, 2), correction=0, keepdim=True)
            gain, shift = (p[f"{kind}{i}"][:, None, None] for kind in ("gain", "shift"))
            x = functional.relu((mixed - mean) * (variance + 1e-5).rsqrt() * gain + shift)
            side = math.isqrt(x.shape[2])
            x = x.flatten(0, 1).transpose(1, 2).unflatten(2, (side, side))
            x = functional.max_pool2d(x, 2)
        return cross_entropy(times(x.reshape(count, examples, -1), p["out"]), labels)

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
def _purchases(users: int, items: int, examples: int) -> tuple[Tensor, Tensor]:
    """Who bought what: each user takes items near their taste, and popular ones more often."""
    g = torch.Generator().manual_seed(8)
    taste, kind = (torch.randn(n, 3, generator=g) for n in (users, items))
    score = 1.2 * taste @ kind.T - 0.5 * torch.arange(1, items + 1).log()
    who = torch.randint(users, (examples,), generator=g)
    what = torch.empty_like(who)
    for part in torch.arange(examples).split(8192):
        chosen = torch.multinomial(score[who[part]].softmax(1), 1, generator=g)
        what[part] = chosen.squeeze(1)
    return who, what


def rank(*, name: str = "rank", batch: int = 128, around: float = 0.04) -> Task:
    """Which item of the batch a user bought, by a tower for users and one for items; AdamW."""
    users, items, width, hidden = 1500, 600, 12, 24
    train, held_out = 100_000, 4096

    def init(g: torch.Generator) -> Params:
        params: Params = {}
        for kind, count in (("user", users), ("item", items)):
            params |= {
                kind: normal(g, count, width, scale=0.5),
                f"{kind}_one": linear(g, width, hidden, 1.4),
                f"{kind}_out": linear(g, hidden, width),
            }
        return params

    def tower(p: Params, kind: str, index: Tensor) -> Tensor:
        x = functional.relu(times(look_up(p[kind], index), p[f"{kind}_one"]))
        return times(x, p[f"{kind}_out"])

    def losses(p: Params, indices: Tensor) -> Tensor:
        who, what = (v[indices] for v in _purchases(users, items, train + held_out))
        alike = torch.bmm(tower(p, "user", who), tower(p, "item", what).transpose(1, 2))
        # An item that others of the batch bought too is no negative.
        again = (what[:, None] == what[:, :, None]) & ~torch.eye(what.shape[1], dtype=torch.bool)
        same = torch.arange(what.shape[1]).expand_as(what)
        return cross_entropy(alike.masked_fill(again, -math.inf), same)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
        weight_decay=0.01,
    )


@functools.cache
def _measured(features: int, classes: int, examples: int) -> tuple[Tensor, Tensor]:
    """Measurements in units of very different size, and classes by a random network and noise."""
    g = torch.Generator().manual_seed(9)
    x = torch.randn(examples, features, generator=g)
    score = torch.relu(x @ linear(g, features, 32, 1.4)) @ linear(g, 32, classes, 3.0)
    label = torch.multinomial(score.softmax(1), 1, generator=g).squeeze(1)
    unit = 10 ** (torch.rand(features, generator=g) * 4 - 2)
    return (x + torch.randn(features, generator=g)) * unit, label


def batchnorm_sgd(*, name: str = "batchnorm-sgd", batch: int = 64, around: float = 0.2) -> Task:
    """An MLP with BatchNorm on measurements in units of very different size; SGD.

    Training takes the statistics of the batch. Evaluation takes those of 256 training examples.
    """
    features, classes, width, layers = 16, 5, 48, 2
    train, held_out = 60_000, 4096

    def init(g: torch.Generator) -> Params:
        params = {"out": linear(g, width, classes), "level": torch.zeros(1, classes)}
        for i in range(layers):
            params |= {
                f"layer{i}": linear(g, width if i else features, width, 1.4),
                f"gain{i}": torch.ones(1, width),
                f"shift{i}": torch.zeros(1, width),
            }
        return params

    def logits(p: Params, x: Tensor, known: int) -> Tensor:
        """Logits of rows [R, b, features]; the statistics are those of the first `known` rows."""

        def normed(x: Tensor) -> Tensor:
            variance, mean = torch.var_mean(x[:, :known], 1, correction=0, keepdim=True)
            return (x - mean) * (variance + 1e-5).rsqrt()

        x = normed(x)
        for i in range(layers):
            x = normed(times(x, p[f"layer{i}"]))
            x = functional.relu(x * p[f"gain{i}"] + p[f"shift{i}"])
        return times(x, p["out"]) + p["level"]

    def losses(p: Params, indices: Tensor) -> Tensor:
        rows, label = (v[indices] for v in _measured(features, classes, train + held_out))
        return cross_entropy(logits(p, rows, rows.shape[1]), label)

    def evaluate(p: Params, indices: Tensor) -> Tensor:
        rows, label = _measured(features, classes, train + held_out)
        known = torch.arange(256).expand(len(indices), -1)
        guess = logits(p, rows[torch.cat([known, indices], 1)], 256)[:, 256:]
        return cross_entropy(guess, label[indices])

    return Task(
        name=name,
        init=init,
        losses=losses,
        evaluate=evaluate,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="sgd",
        around=around,
    )
