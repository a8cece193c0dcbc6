"""What do all releases of a run say about a canary? The log-likelihood ratio of its presence, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vestige.randomness.correlated import Noise


class Evidence:
    """Answers as they come, each against the canary's share, for one run or for a stack of runs along leading axes.

    With independent noise, an answer x on a sample in which the canary is with probability q has the likelihood ratio
    1 - q + q exp((x.c - |c|^2 / 2) / s^2), where c is the canary's share and s the noise's deviation; answers on one
    sample add up in the exponent, samples add up in the logarithm. It is the best score there is where the other
    examples add nothing along c (Neyman & Pearson). With noise that is correlated over steps, the products x.c / |c|
    are weighed by the inverse of its covariance.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._exponents: dict[int, Tensor] = {}
        self._products: dict[int, Tensor] = {}
        self._rates: dict[int, float] = {}

    def add(
        self, index: int, total: Tensor, share: Tensor, noise_std: float | Tensor, rate: float | None = None
    ) -> None:
        std = noise_std.double() if isinstance(noise_std, Tensor) else noise_std
        share, total = share.double() / std, total.double() / std
        product, square = (total * share).sum(-1), share.square().sum(-1)
        exponent = (product - square / 2).cpu()
        self._exponents[index] = self._exponents.get(index, torch.zeros_like(exponent)) + exponent
        self._products[index] = (product / square.clamp(min=1e-300).sqrt()).cpu()
        self._rates[index] = self._rate if rate is None else rate

    def forget(self, index: int) -> None:
        """Leave an answer out that was never published."""
        for kept in (self._exponents, self._products, self._rates):
            kept.pop(index, None)  # type: ignore[attr-defined]

    def scores(self, noise: Noise, steps: int, correlated: bool) -> np.ndarray:
        """One score for each run; larger where the canary is likelier to be there."""
        if correlated:
            return self._weighed(noise, steps)
        ratios = []
        for index, exponent in self._exponents.items():
            q = self._rates[index]
            out = torch.full_like(exponent, np.log1p(-q) if q < 1 else -torch.inf)
            ratios.append(torch.logaddexp(out, np.log(q) + exponent))
        return torch.stack(ratios).sum(0).numpy() if ratios else np.zeros(0)

    def _weighed(self, noise: Noise, steps: int) -> np.ndarray:
        products = torch.stack([self._products[index] for index in sorted(self._products)])  # [steps, ...]
        matrix = noise_matrix(noise.start(self._rate, steps), steps)
        scale = matrix.square().sum(1).sqrt()  # each product is in units of its own step's deviation
        weight = torch.linalg.solve(matrix @ matrix.t(), torch.ones(steps, dtype=torch.float64))
        return torch.einsum("t,t...->...", (weight * scale)[: len(products)], products).numpy()


def noise_matrix(sequence: Any, steps: int) -> Tensor:
    """The noise of each step as a combination of all steps' fresh noise, [steps, steps]."""
    units = torch.eye(steps)
    return torch.stack([sequence.next(units[step].clone()) for step in range(steps)]).double()
