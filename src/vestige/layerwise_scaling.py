"""By how much does a step of noise change each layer? Balanced steps: the same share of every layer's own weights.

DP-SGD's noise is as large in a layer of small weights as in one of large ones, and its gradient takes what it takes of
the clip. Train V with W = a V instead, for a public constant a of each parameter, and both follow the layer's scale:
the gradient with respect to V is a times that with respect to W, and what V moves by, W moves a times. Everything but
the model's own passes, the clip, the noise, memories, rules and probes, then sees V; `Layout` carries the constants.
A balanced run is, to rounding, the plain run of a model whose parameters are V and which multiplies them by a; where
the constants are powers of two, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2, prod
from numbers import Real

import torch
from torch import Tensor, nn

LEAST = 2.0**-10
"""No parameter is slowed further: beyond this its gradient would count for nothing in the clip."""
FINENESS = 8
"""Constants are rounded to so many values per factor of two, so that layers of one size share one, whatever their
weights happened to be: an optimizer has a group of parameters for each."""
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
"""Layers whose weights are gains, whatever dimensions they have."""

Constants = dict[str, float]
"""The constant a of each trainable parameter, by its name."""
Balance = Callable[[nn.Module], Constants]
"""From a model's initial weights, which are public, to the constants."""


@dataclass(frozen=True)
class Relative:
    """a = rms of the initial weights over the largest such rms: the noise of every layer walks the same share of its
    weights.

    - A weight that starts at zero (the second factor of LoRA, a new head) has no rms: it gets that of torch's default
      initialisation, 1 / sqrt(3 fan-in).
    - Biases, the gains of norm layers and whatever else has one dimension are no share of anything: they get the
      largest constant of the weights that are no embeddings, which is 1 where there is no embedding.

    Formal guarantees: a function of the initial weights alone. They must be public, drawn from a generator or
    pretrained on public data, as the start of any private run must be.
    """

    def __call__(self, model: nn.Module) -> Constants:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gains, embeddings = _owned(model, NORMS), _owned(model, (nn.Embedding, nn.EmbeddingBag))
        sizes = {name: _rms(p) for name, p in trainable.items() if p.dim() >= 2 and id(p) not in gains}
        largest = max(sizes.values(), default=1.0)
        constants = {name: rounded(size / largest) for name, size in sizes.items()}
        inner = [constants[name] for name in sizes if id(trainable[name]) not in embeddings]
        other = max(inner, default=1.0)
        return {name: constants.get(name, other) for name in trainable}


BALANCES: dict[str, Balance | None] = {"plain": None, "relative": Relative()}


def named(balance: str) -> Balance | None:
    """A balance as the command line names it."""
    if balance not in BALANCES:
        raise ValueError(f"balance={balance!r} is unknown; choose from {', '.join(BALANCES)}")
    return BALANCES[balance]


def rounded(value: float) -> float:
    """The nearest eighth of an octave, in [LEAST, 1].

    >>> [round(rounded(value), 4) for value in (1.0, 0.99, 0.7, 0.5, 0.1, 0.0)]
    [1.0, 1.0, 0.7071, 0.5, 0.0991, 0.001]
    """
    return min(1.0, 2.0 ** (round(FINENESS * log2(max(value, LEAST))) / FINENESS))


def check_constants(constants: Mapping[str, float], trainable: Mapping[str, object]) -> None:
    """Refuse constants that are not one number in [LEAST, 1] for each trainable parameter."""
    if constants.keys() != trainable.keys():
        odd = sorted(constants.keys() ^ trainable.keys())[0]
        raise ValueError(f"balance: parameter {odd!r} has a constant or is trainable, not both; give each one constant")
    for name, constant in constants.items():
        if not isinstance(constant, Real) or not LEAST <= constant <= 1:
            found = constant if isinstance(constant, Real) else f"of type {type(constant).__name__}"
            raise ValueError(f"balance: the constant of {name!r} is {found}; it must be a number in [2^-10, 1]")


Scales = Mapping[str, float | Tensor]
"""Constants by name, as numbers, or as tensors that have one for each run of a stack."""


def inner(point: Mapping[str, Tensor], scales: Scales) -> dict[str, Tensor]:
    """V = W / a."""
    return {name: value / scales[name] for name, value in point.items()}


def outer(point: Mapping[str, Tensor], scales: Scales) -> dict[str, Tensor]:
    """W = a V."""
    return {name: value * scales[name] for name, value in point.items()}


def _owned(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[int]:
    """Which tensors are parameters of modules of these kinds."""
    return {id(p) for module in model.modules() if isinstance(module, kinds) for p in module.parameters(recurse=False)}


def _rms(weight: Tensor) -> float:
    size = float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float64)) / weight.numel() ** 0.5
    return size if size > 0 else (3 * prod(weight.shape[1:])) ** -0.5
