"""How does the noise of one step depend on earlier steps'? White, banded, buffered, or the nodes of a tree.

Correlated noise cancels in the sum of the releases, which is where the parameters end. Past noise is secret: knowing it
would uncover the past sums. So it lives in the curator alone, and no checkpoint ever holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, sqrt
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from vestige.priced_questions import CyclicGaussian, Question, SampledGaussian
from vestige.randomness import gaussian, lattice
from vestige.randomness.gaussian import normal_part
from vestige.randomness.sampling import CyclicPoisson, Poisson, Sampling
from vestige.randomness.streams import Stream
from vestige.randomness.sum_and_release_types import BoundedSum

Array = NDArray[np.float64]


class NoiseSequence(Protocol):
    """The noise of one run, in order of its steps."""

    keeps: bool
    """Whether noise of earlier steps is kept, and so must never be written down."""
    scale: float
    """Standard deviation of the fresh noise, over the accounted multiplier."""
    arithmetic: str
    """In which numbers noise is added: one of `ARITHMETICS`."""

    def add(
        self, sensitive: BoundedSum, multiplier: float, stream: Stream, *, nonprivate_keep: bool = False
    ) -> tuple[float | Tensor, Tensor | None]:
        """Add the noise of the next step to a bounded sum, in place and once: its standard deviation per coordinate,
        and the noise if asked for."""
        ...

    def next(self, fresh: Tensor) -> Tensor:
        """The noise of the next step from its fresh unit noise, which it may keep."""
        ...

    def replay(self, fresh: Tensor) -> None:
        """Meet the noise of a step again that a run now continues after."""
        ...

    def gain(self, index: int) -> float:
        """The standard deviation of step `index`'s noise over that of the fresh noise."""
        ...

    def held(self) -> int:
        """How many vectors are kept between steps."""
        ...


class Noise(Protocol):
    one_fixed_question: bool
    """Whether its theorem is for runs that ask one question a step, the same at every step."""

    def settled(self, rate: float, steps: int, epsilon: Callable[[], float]) -> Noise:
        """The noise of a run of this rate, length and budget, where it leaves a parameter to these public facts."""
        ...

    def sampling(self, rate: float) -> Sampling:
        """The sampling that its theorem supposes."""
        ...

    def question(self, asked: SampledGaussian) -> Question:
        """What a step asks with this noise that would ask `asked` with independent noise."""
        ...

    def start(self, rate: float, steps: int, arithmetic: str = "lattice") -> NoiseSequence:
        """The noise of a run; in the numbers asked for, where it is independent."""
        ...

    def walk(self, rate: float, steps: int) -> float:
        """How far the noise of a run moves the parameters, over the accounted multiplier: sqrt(steps) if independent.

        Correlated noise is large at each step and cancels over steps, and it is the sum that the parameters keep: what
        counts is the error of A C^-1, in the words of matrix factorization, in units in which white noise has
        sqrt(steps). A adds up the steps, each forgotten a little as the gradient pulls the parameters back (`FORGETS`):
        noise that cancels only over much of the run has disturbed it before. The form is derived; the constant is
        fitted to our trials.
        """
        ...

    def copies(self, rate: float, steps: int) -> float:
        """Extra state, in copies of the parameters."""
        ...


@dataclass(frozen=True)
class White:
    """Independent noise at every step."""

    one_fixed_question = False

    def settled(self, rate: float, steps: int, epsilon: Callable[[], float]) -> Noise:
        return self

    def sampling(self, rate: float) -> Sampling:
        return Poisson(rate)

    def question(self, asked: SampledGaussian) -> Question:
        return asked

    def start(self, rate: float, steps: int, arithmetic: str = "lattice") -> NoiseSequence:
        return Independent(arithmetic)

    def walk(self, rate: float, steps: int) -> float:
        return sqrt(steps)

    def copies(self, rate: float, steps: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Banded:
    """n = C^-1 z with a banded Toeplitz strategy C (Choquette-Choo et al. 2023), amplified by cyclic Poisson sampling.

    The coefficients minimise the mean squared error of the prefix sums over `steps` steps at unit column norm.

    Formal guarantees: visits of one example lie `bands` steps apart, so its columns are orthogonal, and a run costs
    ceil(steps / bands) sampled Gaussians at the rate within a part (their Theorem 4). `bands="auto"` is a number that
    follows from public facts alone (`rule_of_thumb`), fixed before the first question.
    """

    bands: int | Literal["auto"] = "auto"
    one_fixed_question = True

    def __post_init__(self) -> None:
        if self.bands != "auto" and not (type(self.bands) is int and self.bands >= 1):
            raise ValueError(f"bands={self.bands} must be a whole number from 1 up, or 'auto'; 1 is white noise")

    def settled(self, rate: float, steps: int, epsilon: Callable[[], float]) -> Noise:
        return self if self.bands != "auto" else Banded(rule_of_thumb(epsilon(), rate, steps))

    def sampling(self, rate: float) -> Sampling:
        return CyclicPoisson(rate, self._count)

    def question(self, asked: SampledGaussian) -> Question:
        return CyclicGaussian(min(1.0, self.sampling(asked.rate).rate * self._count), asked.multiplier, self._count)

    def start(self, rate: float, steps: int, arithmetic: str = "lattice") -> NoiseSequence:
        return _Toeplitz(banded_coefficients(self._count, steps), 1.0, steps)

    def walk(self, rate: float, steps: int) -> float:
        return _walk(1.0, steps, _forgetful_error(_inverse(banded_coefficients(self._count, steps), steps)))

    def copies(self, rate: float, steps: int) -> float:
        return min(self._count, steps) - 1

    @property
    def _count(self) -> int:
        if self.bands == "auto":
            raise ValueError("bands='auto' follows from a run's budget, rate and length, which are not known here")
        return self.bands


@dataclass(frozen=True)
class Buffered:
    """A buffered linear Toeplitz strategy: coefficients sum_j scale_j decay_j^(k-1) (Dvijotham et al. 2024).

    Formal guarantees: the data are split once into floor(1 / rate) parts that take turns. No entry of the strategy is
    negative, so its sensitivity is that of the first part's visits, and the whole run is one Gaussian mechanism
    (Denisov et al. 2022, Theorem 2.1). It is charged in equal shares per visit, as many as every prefix needs.
    """

    buffers: int = 2
    one_fixed_question = True

    def __post_init__(self) -> None:
        if not (isinstance(self.buffers, int) and 0 <= self.buffers <= 6):
            raise ValueError(f"buffers={self.buffers} must be a whole number from 0 (white noise) to 6")

    def settled(self, rate: float, steps: int, epsilon: Callable[[], float]) -> Noise:
        return self

    def sampling(self, rate: float) -> Sampling:
        return CyclicPoisson(rate, turns(rate))

    def question(self, asked: SampledGaussian) -> Question:
        return CyclicGaussian(1.0, asked.multiplier, turns(asked.rate))

    def start(self, rate: float, steps: int, arithmetic: str = "lattice") -> NoiseSequence:
        scales, decays = buffered_coefficients(self.buffers, steps, turns(rate))
        share = sqrt(per_visit(_unrolled(scales, decays, steps), turns(rate)))
        return _Buffers(np.array(scales), np.array(decays), share, steps)

    def walk(self, rate: float, steps: int) -> float:
        scales, decays = buffered_coefficients(self.buffers, steps, turns(rate))
        return _walk(self.start(rate, steps).scale, steps, _forgetful_error(_inverse_unrolled(scales, decays, steps)))

    def copies(self, rate: float, steps: int) -> float:
        return self.buffers


@dataclass(frozen=True)
class Tree:
    """Tree aggregation (Kairouz et al. 2021): the sum of releases carries the noise of the nodes that cover [1, t].

    A new tree starts every `restart` epochs; 0 chooses the length with the least error.

    Formal guarantees: the data are split once into floor(1 / rate) parts that take turns. The vector of all nodes is
    one Gaussian mechanism whose sensitivity counts an example's visits in every node; it is charged in equal shares per
    visit, as many as every prefix needs.
    """

    restart: int = 0
    one_fixed_question = True

    def __post_init__(self) -> None:
        if not (isinstance(self.restart, int) and self.restart >= 0):
            raise ValueError(f"restart={self.restart} must be a whole number of epochs, or 0 to choose the best")

    def settled(self, rate: float, steps: int, epsilon: Callable[[], float]) -> Noise:
        return self

    def sampling(self, rate: float) -> Sampling:
        return CyclicPoisson(rate, turns(rate))

    def question(self, asked: SampledGaussian) -> Question:
        return CyclicGaussian(1.0, asked.multiplier, turns(asked.rate))

    def start(self, rate: float, steps: int, arithmetic: str = "lattice") -> NoiseSequence:
        epochs = self.restart or best_restart(turns(rate), steps)
        length = epochs * turns(rate)
        return _Nodes(length, sqrt(tree_per_visit(turns(rate), epochs)))

    def walk(self, rate: float, steps: int) -> float:
        epochs = self.restart or best_restart(turns(rate), steps)
        return _walk(self.start(rate, steps).scale, steps, _forgetful_tree(epochs * turns(rate), steps))

    def copies(self, rate: float, steps: int) -> float:
        epochs = self.restart or best_restart(turns(rate), steps)
        last = min(epochs * turns(rate), steps + 1)  # after its last step a tree is dropped
        return max((place.bit_count() for place in range(1, last)), default=0)


def rule_of_thumb(epsilon: float, rate: float, steps: int) -> int:
    """How many bands suit a run of n steps and k epochs: about epsilon sqrt(n) / k (arXiv:2405.15913).

    At least one, which is white noise; at most as many as there are steps, and as the parts of the data that a sample
    of this rate can be drawn from (`CyclicPoisson`).
    """
    most = min(turns(rate), steps)
    wanted = epsilon * sqrt(steps) / (rate * steps)
    return min(max(1, round(wanted)), most) if isfinite(wanted) else most


def turns(rate: float) -> int:
    """Into how many parts the data are split when each part is used whole."""
    return max(1, int(1 / rate + 1e-9))


# --- the noise, step by step -----------------------------------------------------------------------------------------


ARITHMETICS = {"lattice": lattice.add_noise, "float32": gaussian.add_noise}


class Independent:
    """Fresh noise, unchanged."""

    keeps = False
    scale = 1.0

    def __init__(self, arithmetic: str = "lattice") -> None:
        self.arithmetic, self.add = arithmetic, ARITHMETICS[arithmetic]

    def next(self, fresh: Tensor) -> Tensor:
        return fresh

    def replay(self, fresh: Tensor) -> None:
        """Nothing is kept."""

    def gain(self, index: int) -> float:
        return 1.0

    def held(self) -> int:
        return 0


class _Correlated(NoiseSequence):
    """What correlated sequences share: fresh unit noise is mixed with the past, then scaled and added."""

    keeps = True
    added = 0
    arithmetic = "float32"

    def add(
        self, sensitive: BoundedSum, multiplier: float, stream: Stream, *, nonprivate_keep: bool = False
    ) -> tuple[float | Tensor, Tensor | None]:
        total, std = sensitive.total, sensitive.sensitivity * (multiplier * self.scale)
        noise = self.next(normal_part(sensitive, stream)).mul_(std)
        total.add_(noise)
        index, self.added = self.added, self.added + 1
        return std * self.gain(index), noise if nonprivate_keep else None

    def replay(self, fresh: Tensor) -> None:
        self.next(fresh)
        self.added += 1


class _Toeplitz(_Correlated):
    """n_t = (z_t - sum_k c_k n_(t-k)) / c_0: the recursion of C n = z."""

    def __init__(self, coefficients: Array, scale: float, steps: int) -> None:
        self.scale, self._coefficients = scale, coefficients
        self._past: list[Tensor] = []
        self._gains = np.sqrt(np.cumsum(_inverse(coefficients, steps) ** 2))

    def next(self, fresh: Tensor) -> Tensor:
        first, *others = (float(c) for c in self._coefficients)
        if others:
            noise = fresh.clone()
            for coefficient, past in zip(others, self._past, strict=False):
                noise.add_(past, alpha=-coefficient)
            noise.div_(first)
            self._past = [noise, *self._past][: len(others)]
            return noise.clone()
        return fresh if first == 1 else fresh / first

    def gain(self, index: int) -> float:
        return float(self._gains[min(index, len(self._gains) - 1)])

    def held(self) -> int:
        return len(self._past)


class _Buffers(_Correlated):
    """n_t = z_t - sum_j scale_j B_j, then B_j = decay_j B_j + n_t."""

    def __init__(self, scales: Array, decays: Array, scale: float, steps: int) -> None:
        self.scale, self._scales, self._decays = scale, scales, decays
        self._buffers: list[Tensor] = []
        self._gains = np.sqrt(np.cumsum(_inverse_unrolled(tuple(scales), tuple(decays), steps) ** 2))

    def next(self, fresh: Tensor) -> Tensor:
        noise = fresh.clone()
        for scale, buffer in zip(self._scales, self._buffers, strict=False):
            noise -= float(scale) * buffer
        if not self._buffers:
            self._buffers = [noise.clone() for _ in self._decays]
        else:
            for decay, buffer in zip(self._decays, self._buffers, strict=True):
                buffer.mul_(float(decay)).add_(noise)
        return noise

    def gain(self, index: int) -> float:
        return float(self._gains[min(index, len(self._gains) - 1)])

    def held(self) -> int:
        return len(self._buffers)


class _Nodes(_Correlated):
    """The change of the sum over the nodes that cover [1, t]: one new node in, the smaller ones it replaces out."""

    def __init__(self, length: int, scale: float) -> None:
        self.scale, self._length, self._place = scale, length, 0
        self._active: dict[int, Tensor] = {}

    def next(self, fresh: Tensor) -> Tensor:
        self._place += 1
        level = (self._place & -self._place).bit_length() - 1
        change = fresh.clone()
        for lower in range(level):
            change -= self._active.pop(lower)
        self._active[level] = fresh
        if self._place == self._length:  # a finished tree stays in the sum, and the next one starts
            self._place, self._active = 0, {}
        return change

    def gain(self, index: int) -> float:
        place = index % self._length + 1
        return sqrt((place & -place).bit_length())

    def held(self) -> int:
        return len(self._active)


# --- strategies: coefficients, errors, sensitivities -----------------------------------------------------------------


def square_root_coefficients(count: int) -> Array:
    """The series of (1 - x)^(-1/2): c_k = prod_{i<=k} (2i - 1) / (2i), the best Toeplitz strategy for long runs."""
    index = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((2 * index - 1) / (2 * index))])


@lru_cache(maxsize=64)
def _banded(bands: int, steps: int) -> tuple[float, ...]:
    bands = min(bands, steps)

    def cost(others: Array) -> float:
        coefficients = np.concatenate([[1.0], others])
        with np.errstate(over="ignore", invalid="ignore"):
            error = float(prefix_variances(coefficients, steps).mean() * (coefficients @ coefficients))
        return np.log(error) if np.isfinite(error) else 1e6

    start = square_root_coefficients(bands)
    best = minimize(cost, start[1:], method="L-BFGS-B").x if bands > 1 else start[1:]
    coefficients = np.concatenate([[1.0], best])
    return tuple(coefficients / np.linalg.norm(coefficients))


def banded_coefficients(bands: int, steps: int) -> Array:
    """The banded Toeplitz strategy of unit column norm with the least mean squared prefix error."""
    return np.array(_banded(bands, steps))


def _inverse(coefficients: Array, steps: int) -> Array:
    """The first column of the inverse of the Toeplitz matrix with this first column."""
    return _response(np.ones(1), coefficients, steps)


def _prefix(inverse: Array) -> Array:
    """The variance of the prefix sums when the noise is the Toeplitz filter with this first column."""
    return np.asarray(np.cumsum(np.cumsum(inverse) ** 2))


def prefix_variances(coefficients: Array, steps: int) -> Array:
    """The variance of sum_{k<=t} n_k for unit fresh noise, t = 1 .. steps."""
    return _prefix(_inverse(coefficients, steps))


FORGETS = 3.0
"""How often, in time constants, a parameter forgets during a run where it was, when a learning rate is chosen. At 0 the
sum of all noise counts, which gave rates far too large where the noise cancels over much of the run (30 steps); at 10,
rates too small in long runs."""


def _forgetting(steps: int) -> float:
    return float(np.exp(-FORGETS / steps))


def _walk(scale: float, steps: int, error: float) -> float:
    """`error` is the mean over the steps of the variance of sum_{k<=t} decay^(t-k) n_k, for unit fresh noise."""
    white = float(np.cumsum(_forgetting(steps) ** (2 * np.arange(steps))).mean())
    return scale * sqrt(steps * error / white)


def _forgetful_error(inverse: Array) -> float:
    """That error where the noise is the Toeplitz filter with this first column."""
    from scipy.signal import lfilter

    kept = lfilter([1.0], [1.0, -_forgetting(len(inverse))], inverse)
    return float(np.cumsum(kept**2).mean())


def _forgetful_tree(length: int, steps: int) -> float:
    """That error where the noise is a tree's: a node is in the sum from its step on until a larger one replaces it."""
    decay, born = _forgetting(steps), np.arange(steps)
    place = born % length + 1
    lasts = place & -place
    stays = place + lasts > length  # of a finished tree nothing is replaced
    gone = np.where(stays, steps, np.minimum(born + lasts, steps))

    def squares(count: Array) -> Array:
        return (1 - decay ** (2 * count)) / (1 - decay**2)

    left = (1 - decay ** (gone - born)) ** 2  # taken out again, of what was put in and partly forgotten
    return float((squares(gone - born) + left * squares(steps - gone)).sum() / steps)


def _polynomials(scales: tuple[float, ...], decays: tuple[float, ...]) -> tuple[Array, Array]:
    """1 + sum_j scale_j x / (1 - decay_j x) as a quotient of polynomials in x."""
    bottom = np.array([1.0])
    for decay in decays:
        bottom = np.convolve(bottom, [1.0, -decay])
    top = bottom.copy()
    for j, scale in enumerate(scales):
        rest = np.array([0.0, scale])
        for i, decay in enumerate(decays):
            if i != j:
                rest = np.convolve(rest, [1.0, -decay])
        top = top + np.pad(rest, (0, len(top) - len(rest)))
    return top, bottom


def _response(top: Array, bottom: Array, steps: int) -> Array:
    from scipy.signal import lfilter  # half a second to import, which every command would wait for

    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return np.asarray(lfilter(top, bottom, impulse))


def _unrolled(scales: tuple[float, ...], decays: tuple[float, ...], steps: int) -> Array:
    lags = np.arange(steps - 1)[:, None]
    return np.concatenate([[1.0], (np.array(scales) * np.array(decays) ** lags).sum(1)])


def _inverse_unrolled(scales: tuple[float, ...], decays: tuple[float, ...], steps: int) -> Array:
    top, bottom = _polynomials(scales, decays)
    return _response(bottom, top, steps)


def per_visit(strategy: Array, separation: int) -> float:
    """The largest squared sensitivity per visit over all prefixes, for visits `separation` steps apart."""
    assert strategy.min() >= 0, "with negative entries, the first part's visits need not be the worst"
    touched, worst = np.zeros_like(strategy), 0.0
    for visit in range(-(-len(strategy) // separation)):
        start = visit * separation
        touched[start:] += strategy[: len(strategy) - start]
        worst = max(worst, float(touched @ touched) / (visit + 1))
    return worst


@lru_cache(maxsize=64)
def buffered_coefficients(buffers: int, steps: int, separation: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Scales and decays with the least mean squared prefix error at unit sensitivity per visit."""
    if buffers == 0:
        return (), ()

    def unpack(raw: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return tuple(np.exp(raw[:buffers])), tuple(1 / (1 + np.exp(-raw[buffers:])))

    def cost(raw: Array) -> float:
        scales, decays = unpack(raw)
        with np.errstate(over="ignore", invalid="ignore"):
            error = float(_prefix(_inverse_unrolled(scales, decays, steps)).mean())
            error *= per_visit(_unrolled(scales, decays, steps), separation)
        return np.log(error) if np.isfinite(error) and sum(scales) <= 1 else 1e6

    start = np.concatenate([np.log(np.full(buffers, 0.5 / buffers)), np.linspace(0.5, 3, buffers)])
    best = minimize(cost, start, method="Nelder-Mead", options={"maxiter": 150 * buffers, "xatol": 1e-3, "fatol": 1e-5})
    return unpack(best.x)


def tree_variances(length: int, steps: int) -> Array:
    """The variance of the prefix sums of a tree that restarts every `length` steps: one per node in the cover."""
    done, place = np.divmod(np.arange(1, steps + 1), length)
    ones = np.array([int(p).bit_count() for p in place])
    return np.asarray(done * length.bit_count() + ones, dtype=np.float64)


@lru_cache(maxsize=64)
def tree_per_visit(separation: int, epochs: int) -> float:
    """The largest squared sensitivity per visit of the vector of nodes, over parts and prefixes of the visits."""
    length = separation * epochs
    ends = np.arange(1, length + 1)
    starts = ends - (ends & -ends)
    worst = 0.0
    for first in range(separation):
        before = np.zeros(length + 1)
        for visit in range(epochs):
            before[first + visit * separation + 1 :] += 1
            counts = before[ends] - before[starts]
            worst = max(worst, float(counts @ counts) / (visit + 1))
    return worst


LONGEST_TREE = 2048
"""Longer trees are not considered when the length is chosen: their sensitivity takes quadratic time to compute."""


@lru_cache(maxsize=64)
def best_restart(separation: int, steps: int) -> int:
    """The number of epochs per tree, a power of two, with the least mean squared prefix error at equal privacy."""
    choices = [1]
    while 2 * choices[-1] * separation <= min(LONGEST_TREE, 2 * steps):
        choices.append(2 * choices[-1])
    error: Callable[[int], float] = lambda epochs: (  # noqa: E731
        tree_per_visit(separation, epochs) * float(tree_variances(epochs * separation, steps).mean())
    )
    return min(choices, key=error)
