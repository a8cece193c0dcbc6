"""Which made-up examples do the cases train on? Tensors with the examples first, targets last."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Made = Callable[[int], tuple[Tensor, ...]]


def numbers(*shape: int, classes: int = 3) -> Made:
    """Normal numbers of a shape, and a class."""
    return lambda n: (torch.randn(n, *shape), torch.randint(classes, (n,)))


def regression(*shape: int, to: tuple[int, ...]) -> Made:
    return lambda n: (torch.randn(n, *shape), torch.randn(n, *to))


def copied(*shape: int) -> Made:
    """For an autoencoder: the target is the input."""

    def make(n: int) -> tuple[Tensor, ...]:
        x = torch.randn(n, *shape)
        return x, x.clone()

    return make


def tokens(length: int, words: int = 11, classes: int = 3, shortest: int = 1) -> Made:
    """Tokens from 1, padded by 0, and a class."""

    def make(n: int) -> tuple[Tensor, ...]:
        return padded(n, length, words, shortest), torch.randint(classes, (n,))

    return make


def language(length: int, words: int = 11) -> Made:
    """Tokens, and the next ones."""

    def make(n: int) -> tuple[Tensor, ...]:
        text = torch.randint(1, words, (n, length + 1))
        return text[:, :-1].clone(), text[:, 1:].clone()

    return make


def padded(n: int, length: int, words: int, shortest: int = 1) -> Tensor:
    text = torch.randint(1, words, (n, length))
    ends = torch.randint(shortest, length + 1, (n, 1))
    return torch.where(torch.arange(length) < ends, text, 0)


def sequences(length: int, width: int, classes: int = 3) -> Made:
    """Numbers over time, how long each lasts, and a class."""

    def make(n: int) -> tuple[Tensor, ...]:
        return torch.randn(n, length, width), torch.randint(1, length + 1, (n,)), torch.randint(classes, (n,))

    return make
