"""Problems on text: the bytes of Python's own source."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.problem import Params, Task, cross_entropy, linear, look_up, normal, times
from hdet_scale.models.text import Text, standard_library

VOCABULARY = 128
BLOCK = 4096


@functools.cache
def _text(context: int, train: int, held_out: int) -> Tensor:
    """Windows of the standard library's source, [examples, context + 1]; every tenth block of it
    is held out, so that both parts are of one kind."""
    data = Text.read(standard_library(), held_out=0.0).train.clamp(max=VOCABULARY - 1).long()
    blocks = data[: len(data) // BLOCK * BLOCK].view(-1, BLOCK)
    generator = torch.Generator().manual_seed(0)
    held = torch.arange(len(blocks)) % 10 == 9

    def draw(source: Tensor, count: int) -> Tensor:
        row = torch.randint(len(source), (count,), generator=generator)
        start = torch.randint(BLOCK - context, (count,), generator=generator)
        return source[row[:, None], start[:, None] + torch.arange(context + 1)]

    return torch.cat([draw(blocks[~held], train), draw(blocks[held], held_out)])


def windows(context: int, indices: Tensor, train: int, held_out: int) -> tuple[Tensor, Tensor]:
    """The bytes of these examples, and those that come next."""
    drawn = _text(context, train, held_out)[indices]
    return drawn[..., :-1], drawn[..., 1:]


def gpt(
    *, name: str, batch: int, around: float, width: int = 32, layers: int = 2, context: int = 24
) -> Task:
    """A byte-level decoder with pre-norm blocks."""
    heads, train, held_out = 2, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        params = {
            "embed": normal(g, VOCABULARY, width, scale=0.1),
            "place": normal(g, context, width, scale=0.1),
            "head": linear(g, width, VOCABULARY, 0.5),
        }
        for i in range(layers):
            params |= {
                f"qkv{i}": linear(g, width, 3 * width),
                f"out{i}": linear(g, width, width, 0.5),
                f"up{i}": linear(g, width, 4 * width),
                f"down{i}": linear(g, 4 * width, width, 0.5),
            }
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, target = windows(context, indices, train, held_out)
        x = look_up(p["embed"], tokens) + p["place"][:, None]
        count, examples = indices.shape
        for i in range(layers):
            qkv = times(functional.layer_norm(x, (width,)), p[f"qkv{i}"])
            q, k, v = (
                qkv.view(count * examples, context, 3, heads, width // heads)
                .permute(2, 0, 3, 1, 4)
                .unbind(0)
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(count, examples, context, width)
            x = x + times(mixed, p[f"out{i}"])
            hidden = functional.gelu(times(functional.layer_norm(x, (width,)), p[f"up{i}"]))
            x = x + times(hidden, p[f"down{i}"])
        return cross_entropy(times(functional.layer_norm(x, (width,)), p["head"]), target)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
        weight_decay=0.1,
    )


def conv(*, name: str = "conv", batch: int = 32, around: float = 0.4) -> Task:
    """A byte-level causal ConvNet, dilations 1, 2, 4, by SGD with Nesterov momentum."""
    width, context, train, held_out = 32, 16, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        params = {
            "embed": normal(g, VOCABULARY, width, scale=1.0),
            "head": linear(g, width, VOCABULARY, 0.5),
        }
        return params | {f"conv{i}": linear(g, 3 * width, width) for i in range(3)}

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, target = windows(context, indices, train, held_out)
        x = look_up(p["embed"], tokens)
        for i in range(3):
            gap = 2**i
            taps = [functional.pad(x, (0, 0, k * gap, 0))[:, :, :context] for k in range(3)]
            x = x + functional.relu(times(torch.cat(taps, -1), p[f"conv{i}"]))
            x = functional.layer_norm(x, (width,))
        return cross_entropy(times(x, p["head"]), target)

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


def lstm(*, name: str = "lstm", batch: int = 24, around: float = 0.03) -> Task:
    """A byte-level LSTM of one layer."""
    width, context, train, held_out = 48, 12, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "embed": normal(g, VOCABULARY, width, scale=0.3),
            "input": linear(g, width, 4 * width),
            "state": linear(g, width, 4 * width),
            "bias": torch.cat([torch.zeros(width), torch.ones(width), torch.zeros(2 * width)]),
            "head": linear(g, width, VOCABULARY, 0.5),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, target = windows(context, indices, train, held_out)
        drive = times(look_up(p["embed"], tokens), p["input"]) + p["bias"][:, None, None]
        hidden = cell = drive.new_zeros(*indices.shape, width)
        seen = []
        for moment in drive.unbind(2):
            gates = moment + torch.bmm(hidden, p["state"])
            keep = gates[..., : 3 * width].sigmoid()
            enter, forget, leave = keep.chunk(3, -1)
            cell = forget * cell + enter * gates[..., 3 * width :].tanh()
            hidden = leave * cell.tanh()
            seen.append(hidden)
        return cross_entropy(times(torch.stack(seen, 2), p["head"]), target)

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


def gru(*, name: str = "gru", batch: int = 32, around: float = 0.02) -> Task:
    """A byte-level GRU of one layer, by AdamW."""
    width, context, train, held_out = 40, 12, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "embed": normal(g, VOCABULARY, width, scale=0.3),
            "gates": linear(g, 2 * width, 2 * width),
            "enter": linear(g, width, width),
            "state": linear(g, width, width),
            "head": linear(g, width, VOCABULARY, 0.5),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, target = windows(context, indices, train, held_out)
        drive = look_up(p["embed"], tokens)
        hidden = drive.new_zeros(*indices.shape, width)
        seen = []
        for moment in drive.unbind(2):
            gates = torch.bmm(torch.cat([moment, hidden], -1), p["gates"]).sigmoid()
            keep, reset = gates.chunk(2, -1)
            fresh = torch.bmm(moment, p["enter"]) + torch.bmm(reset * hidden, p["state"])
            hidden = keep * hidden + (1 - keep) * fresh.tanh()
            seen.append(hidden)
        return cross_entropy(times(torch.stack(seen, 2), p["head"]), target)

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


def ngram(*, name: str = "ngram", batch: int = 128, around: float = 0.2) -> Task:
    """The next byte from the six before it, by an MLP and SGD with Nesterov momentum."""
    width, hidden, context, train, held_out = 16, 96, 6, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "embed": normal(g, VOCABULARY, width, scale=1.0),
            "one": linear(g, context * width, hidden, 1.4),
            "out": linear(g, hidden, VOCABULARY, 0.5),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, target = windows(context, indices, train, held_out)
        x = look_up(p["embed"], tokens).flatten(2)
        hidden_state = functional.relu(times(x, p["one"]))
        return cross_entropy(times(hidden_state, p["out"]), target[..., -1])

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


def short(*, name: str = "short", batch: int = 64, around: float = 0.002) -> Task:
    """The next byte from the eight before it, by an MLP and AdamW on 3,000 windows: it overfits."""
    width, hidden, context, train, held_out = 16, 128, 8, 3000, 4096

    def init(g: torch.Generator) -> Params:
        return {
            "embed": normal(g, VOCABULARY, width, scale=1.0),
            "one": linear(g, context * width, hidden, 1.4),
            "out": linear(g, hidden, VOCABULARY, 0.5),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, target = windows(context, indices, train, held_out)
        x = look_up(p["embed"], tokens).flatten(2)
        return cross_entropy(times(functional.relu(times(x, p["one"])), p["out"]), target[..., -1])

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


def masked(*, name: str = "masked", batch: int = 32, around: float = 0.008) -> Task:
    """An encoder of two blocks that guesses every fourth byte from those around it; AdamW."""
    width, layers, context, train, held_out = 32, 2, 24, 60_000, 2048
    hidden = torch.arange(context) % 4 == 1

    def init(g: torch.Generator) -> Params:
        params = {
            "embed": normal(g, VOCABULARY, width, scale=0.1),
            "place": normal(g, context, width, scale=0.1),
            "blank": normal(g, 1, width, scale=0.1),
            "head": linear(g, width, VOCABULARY, 0.5),
        }
        for i in range(layers):
            params |= {
                f"qkv{i}": linear(g, width, 3 * width),
                f"out{i}": linear(g, width, width, 0.5),
                f"up{i}": linear(g, width, 4 * width),
                f"down{i}": linear(g, 4 * width, width, 0.5),
            }
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, _ = windows(context, indices, train, held_out)
        x = torch.where(hidden[:, None], p["blank"][:, None], look_up(p["embed"], tokens))
        x = x + p["place"][:, None]
        for i in range(layers):
            q, k, v = times(functional.layer_norm(x, (width,)), p[f"qkv{i}"]).chunk(3, -1)
            x = x + times(functional.scaled_dot_product_attention(q, k, v), p[f"out{i}"])
            up = functional.gelu(times(functional.layer_norm(x, (width,)), p[f"up{i}"]))
            x = x + times(up, p[f"down{i}"])
        x = functional.layer_norm(x[:, :, hidden], (width,))
        return cross_entropy(times(x, p["head"]), tokens[:, :, hidden])

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
        weight_decay=0.1,
    )


def bilinear(*, name: str = "bilinear", batch: int = 64, around: float = 0.2) -> Task:
    """The next byte from a weighted sum of the eight before it; SGD with Nesterov momentum."""
    width, context, train, held_out = 24, 8, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "embed": normal(g, VOCABULARY, width, scale=0.5),
            "mix": linear(g, context * width, width),
            "out": linear(g, width, VOCABULARY),
            "shift": torch.zeros(1, VOCABULARY),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, target = windows(context, indices, train, held_out)
        mixed = times(look_up(p["embed"], tokens).flatten(2), p["mix"])
        return cross_entropy(times(mixed, p["out"]) + p["shift"], target[..., -1])

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


def rnn(*, name: str = "rnn", batch: int = 48, around: float = 0.004) -> Task:
    """A byte-level recurrent network of two tanh layers, by AdamW."""
    width, context, train, held_out = 48, 10, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        params = {
            "embed": normal(g, VOCABULARY, width, scale=0.3),
            "head": linear(g, width, VOCABULARY, 0.5),
        }
        for i in range(2):
            params |= {
                f"enter{i}": linear(g, width, width),
                f"state{i}": linear(g, width, width, 0.9),
                f"shift{i}": torch.zeros(1, width),
            }
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        tokens, target = windows(context, indices, train, held_out)
        x = look_up(p["embed"], tokens)
        for i in range(2):
            drive = times(x, p[f"enter{i}"]) + p[f"shift{i}"][:, None]
            hidden, seen = drive.new_zeros(*indices.shape, width), []
            for moment in drive.unbind(2):
                hidden = (moment + torch.bmm(hidden, p[f"state{i}"])).tanh()
                seen.append(hidden)
            x = torch.stack(seen, 2)
        return cross_entropy(times(x, p["head"]), target)

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
