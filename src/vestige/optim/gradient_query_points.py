"""Where is the gradient taken? A probe chooses the point from parameters and releases; it never sees data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import nan, sqrt
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from vestige.checks import check_bound, check_number
from vestige.layerwise_scaling import Scales, inner, outer
from vestige.layout import Layout
from vestige.mechanism.adaptive_clipping import Thinned
from vestige.mechanism.clipping import Batch, Clip, Field, Parameters, Transform
from vestige.mechanism.gradient_transforms import Linear, Term, scaled
from vestige.priced_questions import SampledGaussian
from vestige.randomness.sum_and_release_types import Release

ProbeState = dict[str, Any]


@dataclass(frozen=True)
class At:
    """Where and how a noised clipped sum is taken; `part` numbers the questions of one step.

    With `then`, a second sum over the same sample is taken at the point computed from the first, and returned: the two
    are one question, and each carries sqrt(2) times the noise. `clip` replaces the method's; `boost` multiplies the
    sampling rate; `transform` changes each example's gradient before it is clipped.
    """

    point: Parameters
    part: int = 0
    transform: Transform | None = None
    then: Callable[[Release], Parameters] | None = None
    clip: Clip | None = None
    boost: float = 1.0


class AskGradient(Protocol):
    @property
    def population(self) -> int: ...

    @property
    def rate(self) -> float: ...

    def __call__(self, at: At) -> Release: ...

    def norms(self, point: Parameters, bound: float, *, part: int = 0, boost: float = 1.0) -> float:
        """Ask for a noised estimate of the sum of min(norm, bound) over all examples, with `boost` times the noise."""
        ...


class Probe(Protocol):
    at_parameters: bool
    """Whether it asks at the parameters themselves, so that the user's own backward pass is the answer."""

    @property
    def twice_on_one_sample(self) -> bool:
        """Whether it asks a second time about the same sample."""
        ...

    @property
    def one_question(self) -> bool:
        """Whether a step asks one question, at a point computed from releases, as a user's own loop can answer it."""
        ...

    solves: bool
    """Whether it asks once, for second moments, and solves for the parameters instead of stepping towards them."""

    @property
    def stackable(self) -> bool:
        """Whether it works along the last axis, so that a stack of runs can ask at once."""
        ...

    @property
    def copies(self) -> float:
        """Extra state, in copies of the parameters."""
        ...

    @property
    def passes(self) -> float:
        """How many gradients of each sampled example one step computes."""
        ...

    def init(self, layout: Layout, device: torch.device) -> ProbeState: ...

    def ask(self, gradient: AskGradient, point: Parameters, state: ProbeState) -> tuple[Release, ProbeState]:
        """Ask the questions of one step, at or around the parameters, and return the release to step on."""
        ...

    def questions(self, rate: float, multiplier: float, step: int = 0) -> tuple[SampledGaussian, ...]:
        """The questions that `ask` asks in step `step`, in order, for the accountant."""
        ...

    def period(self, rate: float) -> int:
        """The number of steps after which the questions repeat."""
        ...


def ask(
    probe: Probe, gradient: AskGradient, point: Parameters, state: ProbeState, scales: Scales | None
) -> tuple[Release, ProbeState]:
    """Ask a probe's questions about the model at `point`; the probe sees what balanced steps train, V = W / a."""
    if scales is None or probe.at_parameters:
        return probe.ask(gradient, point, state)
    return probe.ask(_Balanced(gradient, scales), inner(point, scales), state)


@dataclass(frozen=True)
class _Balanced:
    """Asks at W = a V what a probe asks at V."""

    gradient: AskGradient
    scales: Scales

    @property
    def population(self) -> int:
        return self.gradient.population

    @property
    def rate(self) -> float:
        return self.gradient.rate

    def __call__(self, at: At) -> Release:
        transform, then = at.transform, at.then
        return self.gradient(
            replace(
                at,
                point=outer(at.point, self.scales),
                transform=None if transform is None else scaled(transform, self.scales),
                then=None if then is None else lambda release: outer(then(release), self.scales),
            )
        )

    def norms(self, point: Parameters, bound: float, *, part: int = 0, boost: float = 1.0) -> float:
        return self.gradient.norms(outer(point, self.scales), bound, part=part, boost=boost)


def _one_question(self: object, rate: float, multiplier: float, step: int = 0) -> tuple[SampledGaussian, ...]:
    return (SampledGaussian(rate, multiplier),)


def _every_step(self: object, rate: float) -> int:
    return 1


@dataclass(frozen=True)
class Here:
    """At the parameters themselves, once."""

    at_parameters = one_question = stackable = shardable = True
    twice_on_one_sample = solves = False
    copies = 0.0
    passes = 1.0

    def init(self, layout: Layout, device: torch.device) -> ProbeState:
        return {}

    def ask(self, gradient: AskGradient, point: Parameters, state: ProbeState) -> tuple[Release, ProbeState]:
        return gradient(At(point)), state

    questions, period = _one_question, _every_step


@dataclass(frozen=True)
class AgainstLastRelease:
    """A step of length `radius` uphill along what is already public: the last release, or the last update (DP-SAT).

    Formal guarantees: the point is a function of earlier releases, so one step is one question, as in DP-SGD.
    """

    radius: float = 0.03
    along: Literal["release", "move"] = "release"
    at_parameters = twice_on_one_sample = solves = False
    one_question = stackable = True
    copies = 1.0
    passes = 1.0

    def __post_init__(self) -> None:
        _check_radius(self.radius)
        if self.along not in ("release", "move"):
            raise ValueError(f"along={self.along!r} must be 'release' or 'move'")

    def init(self, layout: Layout, device: torch.device) -> ProbeState:
        return {"last": torch.zeros(layout.size, device=device), "started": 0}

    def ask(self, gradient: AskGradient, point: Parameters, state: ProbeState) -> tuple[Release, ProbeState]:
        if self.along == "move":
            here = flatten(point, state["last"].shape[:-1])
            uphill = state["last"] - here if state["started"] else torch.zeros_like(here)
            return gradient(At(shifted(point, uphill, self.radius))), {"last": here, "started": 1}
        release = gradient(At(shifted(point, state["last"], self.radius)))
        return release, {"last": release.total.clone(), "started": 1}

    questions, period = _one_question, _every_step


@dataclass(frozen=True)
class Ascent:
    """At the top of a step of length `radius` along the gradient itself (SAM), which must be asked for too.

    `sample` says from which examples the ascent is computed. "fresh": another sample, a second question. "same": the
    step's own sample, so both answers are one question with sqrt(2) times the noise each. "own": every example climbs
    its own gradient before it is clipped, which is free.

    Formal guarantees: two questions ("fresh"), or one ("same", "own"), at the accounted multiplier.
    """

    radius: float = 0.05
    sample: Literal["fresh", "same", "own"] = "fresh"
    at_parameters = one_question = solves = False
    copies = 0.0
    passes = 2.0

    def __post_init__(self) -> None:
        _check_radius(self.radius)
        if self.sample not in ("fresh", "same", "own"):
            raise ValueError(f"sample={self.sample!r} must be 'fresh', 'same' or 'own'")

    @property
    def twice_on_one_sample(self) -> bool:
        return self.sample == "same"

    @property
    def stackable(self) -> bool:
        return self.sample != "own"  # with "own", each example climbs to a point of its own

    def init(self, layout: Layout, device: torch.device) -> ProbeState:
        return {}

    def ask(self, gradient: AskGradient, point: Parameters, state: ProbeState) -> tuple[Release, ProbeState]:
        def climb(release: Release) -> Parameters:
            return shifted(point, release.total, self.radius)

        if self.sample == "own":
            return gradient(At(point, transform=self.climb_alone if self.radius else None)), state
        if self.sample == "same":
            return gradient(At(point, then=climb)), state
        return gradient(At(climb(gradient(At(point))), part=1)), state

    def climb_alone(self, field: Field) -> Field:
        def above(parameters: Parameters, *example: Tensor) -> Parameters:
            uphill = field(parameters, *example)
            norm = torch.sqrt(sum(g.square().sum() for g in uphill.values())).clamp(min=1e-30)  # type: ignore[arg-type]
            return field({k: p + self.radius * (uphill[k] / norm) for k, p in parameters.items()}, *example)

        return above

    def questions(self, rate: float, multiplier: float, step: int = 0) -> tuple[SampledGaussian, ...]:
        return (SampledGaussian(rate, multiplier),) * (2 if self.sample == "fresh" else 1)

    period = _every_step


@dataclass(frozen=True)
class Forecast(Linear):
    """weight * gradient(ahead) + (1 - weight) * gradient(here), of each example."""

    ahead: Parameters
    weight: float

    def terms(self, point: Parameters, batch: Batch) -> list[Term]:
        return [Term(self.weight, self.ahead, batch), Term(1 - self.weight, point, batch)]


@dataclass(frozen=True)
class AlongLastStep:
    """Two gradients of each example, here and further along the last update, combined before clipping (DiSK).

    h_i = weight * grad(theta + reach * d) + (1 - weight) * grad(theta), d the last update. The weight that makes the
    combination a forecast is (1 - gain) / (gain * reach), for the gain of the filter that follows.

    Formal guarantees: the combination is one vector per example, clipped once: one question, as in DP-SGD.
    """

    reach: float
    weight: float
    at_parameters = twice_on_one_sample = solves = False
    one_question = shardable = True
    copies = 1.0

    def __post_init__(self) -> None:
        if not self.reach > 0:
            raise ValueError(f"reach={self.reach} must be positive: how far along the last move to look")

    @property
    def passes(self) -> float:
        return 1.0 if self.weight in (0, 1) else 2.0

    @property
    def stackable(self) -> bool:
        return self.passes == 1  # two gradients of each example are combined before they are clipped

    def init(self, layout: Layout, device: torch.device) -> ProbeState:
        return {"before": torch.zeros(layout.size, device=device), "started": 0}

    def ask(self, gradient: AskGradient, point: Parameters, state: ProbeState) -> tuple[Release, ProbeState]:
        here = flatten(point, state["before"].shape[:-1])
        after: ProbeState = {"before": here, "started": 1}
        if not state["started"] or self.weight == 0:
            return gradient(At(point)), after
        ahead = moved(point, here - state["before"], self.reach)
        if self.weight == 1:
            return gradient(At(ahead)), after

        return gradient(At(point, transform=Forecast(ahead, self.weight))), after

    questions, period = _one_question, _every_step


@dataclass(frozen=True)
class Importance:
    """Examples are sampled in proportion to the norm of their clipped gradient, and contribute unit vectors (DPIS).

    The proportion needs K, the sum of clipped norms over all examples: it is estimated once per epoch, on a sample,
    with `normaliser_noise` times the gradient's noise multiplier. Candidates are drawn at `boost` times the sampling
    rate and thinned, so K is taken to be at least bound * N / boost, and no inclusion probability exceeds the
    candidates' rate. With boost 1 there is nothing to estimate.

    Formal guarantees: given the released K, an example affects only its own inclusion, which has probability at most
    boost * rate; each step is a Poisson-subsampled Gaussian at that rate (the largest inclusion probability: the cost
    is monotone in it), each estimate of K another at the sampling rate.
    """

    bound: float = 1.0
    boost: float = 2.0
    normaliser_noise: float = 5.0
    at_parameters = one_question = stackable = twice_on_one_sample = solves = False
    copies = 0.0

    def __post_init__(self) -> None:
        check_bound(self.bound)
        if not self.boost >= 1:
            raise ValueError(f"boost={self.boost} must be at least 1: candidates over expected batch")
        if not self.normaliser_noise > 0:
            raise ValueError(f"normaliser_noise={self.normaliser_noise} must be positive")

    @property
    def passes(self) -> float:
        return self.boost

    def init(self, layout: Layout, device: torch.device) -> ProbeState:
        return {"step": 0, "norm_sum": 0.0}

    def ask(self, gradient: AskGradient, point: Parameters, state: ProbeState) -> tuple[Release, ProbeState]:
        boost = self._boost(gradient.rate)
        smallest, largest = self.bound * gradient.population / boost, self.bound * gradient.population
        norm_sum, part = state["norm_sum"], 0
        if boost == 1:
            norm_sum = largest
        elif self._asks_norms(state["step"], gradient.rate):
            norm_sum = gradient.norms(point, self.bound, boost=self.normaliser_noise)
            norm_sum, part = min(largest, max(smallest, norm_sum)), 1
        mean_norm = norm_sum / gradient.population
        clip = Thinned(self.bound, keep=1 / (boost * mean_norm), scale=mean_norm)
        release = gradient(At(point, part=part, clip=clip, boost=boost))
        return release, {"step": state["step"] + 1, "norm_sum": norm_sum}

    def questions(self, rate: float, multiplier: float, step: int = 0) -> tuple[SampledGaussian, ...]:
        boost = self._boost(rate)
        main = SampledGaussian(min(1.0, boost * rate), multiplier)
        if boost > 1 and self._asks_norms(step, rate):
            return SampledGaussian(rate, multiplier * self.normaliser_noise), main
        return (main,)

    def period(self, rate: float) -> int:
        return max(1, round(1 / rate))

    def _boost(self, rate: float) -> float:
        return min(self.boost, 1 / rate)

    def _asks_norms(self, step: int, rate: float) -> bool:
        return step % self.period(rate) == 0


@dataclass(frozen=True)
class LeastSquares:
    """Asks once for the second moments of the rows before a linear head and solves for the head's weights (ridge).

    The answer is a noised G = sum x x' and M = sum x y' (see `engines.least_squares_moments`); the weights are
    (G + ridge)^-1 M, with G made symmetric and its negative eigenvalues, which can only be noise, set to zero. The
    ridge is `ridge` times the largest eigenvalue that the noise in G is expected to have, sqrt(2 rows) times its
    standard deviation: a public number. To choose it by G's smallest eigenvalue, as AdaSSP does, would take a question.

    Formal guarantees: one question, and post-processing of its answer.
    """

    ridge: float = 0.3
    solves = True
    at_parameters = one_question = stackable = twice_on_one_sample = shardable = False
    copies = 0.0
    passes = 1.0

    def __post_init__(self) -> None:
        check_number("ridge", self.ridge)
        if self.ridge < 0:
            raise ValueError(f"ridge={self.ridge} must not be negative: it is counted in eigenvalues of the noise")

    def init(self, layout: Layout, device: torch.device) -> ProbeState:
        return {}

    def ask(self, gradient: AskGradient, point: Parameters, state: ProbeState) -> tuple[Release, ProbeState]:
        """The release is the way from the parameters to the solution: a step of length one along it is the answer."""
        release = gradient(At(point))
        (weight,) = point.values()
        classes, rows = weight.shape
        second, cross = release.total.double().split([rows * rows, rows * classes])
        found = ridge_solution(second.view(rows, rows), cross.view(rows, classes), self.penalty(release, rows))
        way = (weight.double() - found.t()).flatten() * release.expected_batch
        # What noise a solution carries is not one number for each weight, and it is not needed: the method has no
        # memory.
        return replace(release, total=way.float(), noise_std=nan), state

    def penalty(self, release: Release, rows: int) -> float:
        """What is added to every eigenvalue: public."""
        assert not isinstance(release.noise_std, Tensor), "Method has one flat clip"
        return float(self.ridge * release.noise_std * sqrt(2 * rows))

    questions, period = _one_question, _every_step


def ridge_solution(second: Tensor, cross: Tensor, penalty: float) -> Tensor:
    """(G + penalty)^-1 M, for the nearest G to `second` that has no negative eigenvalue; where G + penalty is singular,
    the shortest solution."""
    values, vectors = torch.linalg.eigh((second + second.t()) / 2)
    values = values.clamp(min=0.0) + penalty
    least = values.max() * len(values) * torch.finfo(values.dtype).eps
    inverse = torch.where(values > least, 1 / values, 0.0)
    return vectors @ (inverse[:, None] * (vectors.t() @ cross))


def flatten(point: Parameters, lead: tuple[int, ...] = ()) -> Tensor:
    """The parameters as one vector, [*lead, size]; `lead` are the leading axes of a stack of runs."""
    return torch.cat([p.detach().reshape(*lead, -1) for p in point.values()], dim=-1)


def moved(point: Parameters, vector: Tensor, factor: float | Tensor) -> Parameters:
    """The point plus `factor` times a flat vector, [..., size], in the parameters' order."""
    lead = vector.dim() - 1
    pieces = (factor * vector).split([p.shape[lead:].numel() for p in point.values()], dim=-1)
    return {name: p + piece.view_as(p) for (name, p), piece in zip(point.items(), pieces, strict=True)}


def shifted(point: Parameters, vector: Tensor, length: float) -> Parameters:
    """The point, moved by `length` in the direction of a flat vector; not moved if the vector is zero."""
    return moved(point, vector, length / (torch.linalg.vector_norm(vector, dim=-1, keepdim=True) + 1e-16))


def _check_radius(radius: float) -> None:
    if not radius >= 0:
        raise ValueError(f"radius={radius} must not be negative: the length of the ascent step")
