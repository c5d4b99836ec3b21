"""Problems on images: scikit-learn's digits, under noise, or few of them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lr.problem import Params, Task, cross_entropy, linear, normal, times

WHOLE = 1200


@functools.cache
def _digits(noisy: int) -> tuple[Tensor, Tensor]:
    """scikit-learn's digits in a fixed order; a fifth of the first `noisy` labels are wrong."""
    from sklearn.datasets import load_digits

    data = load_digits()
    g = torch.Generator().manual_seed(2)
    order = torch.randperm(len(data.target), generator=g)
    images = torch.tensor(data.images, dtype=torch.float32)[order] / 8.0 - 1.0
    labels = torch.tensor(data.target)[order]
    wrong = torch.rand(noisy, generator=g) < 0.2
    labels[:noisy][wrong] = torch.randint(10, (int(wrong.sum()),), generator=g)
    return images, labels


@functools.cache
def _speckle() -> Tensor:
    """A bank of noise images; its prime size pairs each digit with each of them in turn."""
    return torch.randn(1021, 8, 8, generator=torch.Generator().manual_seed(3))


def _which(indices: Tensor, train: int) -> Tensor:
    """The digit behind an example: the first 1200 are for training, the rest is held out."""
    images, _ = _digits(0)
    held = WHOLE + (indices - train) % (len(images) - WHOLE)
    return torch.where(indices < train, indices % WHOLE, held)


def clean_digits(indices: Tensor, train: int) -> tuple[Tensor, Tensor]:
    """Digits from -1 to 1, without noise, and their labels."""
    images, labels = _digits(0)
    which = _which(indices, train)
    return images[which], labels[which]


def noisy_digits(indices: Tensor, train: int) -> tuple[Tensor, Tensor]:
    """Digits under noise that hardly ever comes twice, so that they do not run out."""
    images, labels = clean_digits(indices, train)
    return images + 0.7 * _speckle()[indices % len(_speckle())], labels


def _patches(images: Tensor) -> Tensor:
    """[..., 8, 8] -> [..., 16, 4]: squares of two by two."""
    squares = images.unflatten(-1, (4, 2)).unflatten(-3, (4, 2)).transpose(-3, -2)
    return squares.reshape(*images.shape[:-2], 16, 4)


def digits(*, name: str = "digits", batch: int = 64, around: float = 0.2) -> Task:
    """A ConvNet on scikit-learn's digits under fresh noise."""
    width, train, held_out = 12, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, 9, width, 1.4),
            "two": linear(g, 9 * width, 2 * width, 1.4),
            "out": linear(g, 4 * 2 * width, 10),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = noisy_digits(indices, train)
        count, examples = indices.shape
        x = images.view(count * examples, 1, 8, 8)
        for kernel in ("one", "two"):
            patches = functional.unfold(x, 3, padding=1).transpose(1, 2)
            patches = patches.reshape(count, examples, -1, patches.shape[-1])
            mixed = times(patches, p[kernel])
            x = functional.relu(functional.layer_norm(mixed, mixed.shape[-1:])).transpose(2, 3)
            side = math.isqrt(x.shape[-1])
            x = functional.max_pool2d(x.reshape(count * examples, -1, side, side), 2)
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


def over(*, name: str = "over", batch: int = 64, around: float = 0.004) -> Task:
    """An MLP on 300 digits of which a fifth are wrong: it overfits."""
    hidden, train, held_out = 64, 300, 1497

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, 64, hidden, 1.4),
            "two": linear(g, hidden, hidden, 1.4),
            "out": linear(g, hidden, 10),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = _digits(train)
        x = images.flatten(1)[indices]
        x = functional.relu(times(x, p["one"]))
        x = functional.relu(times(x, p["two"]))
        return cross_entropy(times(x, p["out"]), labels[indices])

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


def few(*, name: str = "few", batch: int = 32, around: float = 0.0005) -> Task:
    """A wider MLP on 400 digits of which a fifth are wrong, by AdamW: it overfits too."""
    hidden, train, held_out = 96, 400, 1397

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, 64, hidden, 1.4),
            "two": linear(g, hidden, hidden, 1.4),
            "out": linear(g, hidden, 10),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = _digits(train)
        x = images.flatten(1)[indices]
        x = functional.gelu(times(x, p["one"]))
        x = functional.gelu(functional.layer_norm(times(x, p["two"]), (hidden,)))
        return cross_entropy(times(x, p["out"]), labels[indices])

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


def vit(*, name: str = "vit", batch: int = 32, around: float = 0.004) -> Task:
    """A decoder's block without its mask over the patches of noisy digits; AdamW."""
    width, patches, train, held_out = 24, 16, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "embed": linear(g, 4, width),
            "place": normal(g, patches, width, scale=0.3),
            "qkv": linear(g, width, 3 * width),
            "mix": linear(g, width, width, 0.5),
            "up": linear(g, width, 4 * width),
            "down": linear(g, 4 * width, width, 0.5),
            "out": linear(g, width, 10),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = noisy_digits(indices, train)
        x = times(_patches(images), p["embed"]) + p["place"][:, None]
        q, k, v = times(functional.layer_norm(x, (width,)), p["qkv"]).chunk(3, -1)
        x = x + times(functional.scaled_dot_product_attention(q, k, v), p["mix"])
        hidden = functional.gelu(times(functional.layer_norm(x, (width,)), p["up"]))
        x = x + times(hidden, p["down"])
        return cross_entropy(times(x.mean(2), p["out"]), labels)

    return Task(
        name=name,
        init=init,
        losses=losses,
        train=train,
        held_out=held_out,
        batch=batch,
        optimizer="adamw",
        around=around,
        weight_decay=0.05,
    )


def mixer(*, name: str = "mixer", batch: int = 64, around: float = 0.1) -> Task:
    """Patches of noisy digits, mixed by MLPs across places and channels; SGD with momentum."""
    width, patches, layers, train, held_out = 24, 16, 2, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        params = {"embed": linear(g, 4, width), "out": linear(g, width, 10)}
        for i in range(layers):
            params |= {
                f"across{i}": linear(g, patches, 2 * patches, 1.4),
                f"back{i}": linear(g, 2 * patches, patches, 0.5),
                f"up{i}": linear(g, width, 2 * width, 1.4),
                f"down{i}": linear(g, 2 * width, width, 0.5),
            }
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = noisy_digits(indices, train)
        x = times(_patches(images), p["embed"])
        for i in range(layers):
            places = functional.layer_norm(x, (width,)).transpose(2, 3)
            hidden = functional.gelu(times(places, p[f"across{i}"]))
            x = x + times(hidden, p[f"back{i}"]).transpose(2, 3)
            hidden = functional.gelu(times(functional.layer_norm(x, (width,)), p[f"up{i}"]))
            x = x + times(hidden, p[f"down{i}"])
        x = functional.layer_norm(x, (width,)).mean(2)
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
        weight_decay=1e-4,
    )


def denoise(*, name: str = "denoise", batch: int = 64, around: float = 0.004) -> Task:
    """An autoencoder that takes the noise off digits, by Adam on a squared error."""
    hidden, train, held_out = 48, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {
            "one": linear(g, 64, hidden, 1.4),
            "two": linear(g, hidden, 16),
            "three": linear(g, 16, hidden, 1.4),
            "out": linear(g, hidden, 64),
        }

    def losses(p: Params, indices: Tensor) -> Tensor:
        noisy, _ = noisy_digits(indices, train)
        clean, _ = clean_digits(indices, train)
        x = functional.relu(times(noisy.flatten(2), p["one"]))
        x = functional.relu(times(times(x, p["two"]), p["three"]))
        return (times(x, p["out"]) - clean.flatten(2)).square().mean((1, 2))

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


def cnn(*, name: str = "cnn", batch: int = 64, around: float = 0.05) -> Task:
    """Three convolutions and no normalisation on noisy digits; SGD with Nesterov momentum."""
    widths, train, held_out = (1, 8, 16, 24), 60_000, 2048

    def init(g: torch.Generator) -> Params:
        params = {"out": linear(g, widths[-1], 10)}
        for i in range(3):
            params[f"conv{i}"] = linear(g, 9 * widths[i], widths[i + 1], 1.4)
            params[f"bias{i}"] = torch.zeros(1, widths[i + 1])
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = noisy_digits(indices, train)
        count, examples = indices.shape
        x = images.view(count * examples, 1, 8, 8)
        for i in range(3):
            patches = functional.unfold(x, 3, padding=1).transpose(1, 2)
            patches = patches.reshape(count, -1, patches.shape[-1])
            mixed = functional.relu(times(patches, p[f"conv{i}"]) + p[f"bias{i}"])
            side = x.shape[-1]
            x = mixed.reshape(count * examples, side, side, -1).permute(0, 3, 1, 2)
            x = functional.avg_pool2d(x, 2)
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
        weight_decay=1e-4,
    )


def logit(*, name: str = "logit", batch: int = 32, around: float = 0.05) -> Task:
    """Softmax regression on noisy digits, which is convex; SGD with Nesterov momentum."""
    train, held_out = 60_000, 2048

    def init(g: torch.Generator) -> Params:
        return {"out": linear(g, 64, 10), "shift": torch.zeros(1, 10)}

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = noisy_digits(indices, train)
        return cross_entropy(times(images.flatten(2), p["out"]) + p["shift"], labels)

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


def tanh(*, name: str = "tanh", batch: int = 64, around: float = 0.004) -> Task:
    """Five layers of tanh and no normalisation on noisy digits; AdamW."""
    hidden, layers, train, held_out = 48, 4, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        params = {"enter": linear(g, 64, hidden), "out": linear(g, hidden, 10)}
        return params | {f"layer{i}": linear(g, hidden, hidden) for i in range(layers)}

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = noisy_digits(indices, train)
        x = times(images.flatten(2), p["enter"]).tanh()
        for i in range(layers):
            x = times(x, p[f"layer{i}"]).tanh()
        return cross_entropy(times(x, p["out"]), labels)

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


def attend(*, name: str = "attend", batch: int = 64, around: float = 0.1) -> Task:
    """The blocks of `vit`, two of them, over noisy digits; SGD with Nesterov momentum."""
    width, patches, layers, train, held_out = 24, 16, 2, 60_000, 2048

    def init(g: torch.Generator) -> Params:
        params = {
            "embed": linear(g, 4, width),
            "place": normal(g, patches, width, scale=0.3),
            "out": linear(g, width, 10),
        }
        for i in range(layers):
            params |= {
                f"qkv{i}": linear(g, width, 3 * width),
                f"mix{i}": linear(g, width, width, 0.5),
                f"up{i}": linear(g, width, 2 * width, 1.4),
                f"down{i}": linear(g, 2 * width, width, 0.5),
            }
        return params

    def losses(p: Params, indices: Tensor) -> Tensor:
        images, labels = noisy_digits(indices, train)
        x = times(_patches(images), p["embed"]) + p["place"][:, None]
        for i in range(layers):
            q, k, v = times(functional.layer_norm(x, (width,)), p[f"qkv{i}"]).chunk(3, -1)
            x = x + times(functional.scaled_dot_product_attention(q, k, v), p[f"mix{i}"])
            hidden = functional.gelu(times(functional.layer_norm(x, (width,)), p[f"up{i}"]))
            x = x + times(hidden, p[f"down{i}"])
        x = functional.layer_norm(x, (width,)).mean(2)
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
