"""How much may one example move a sum? Clips, and what an engine that enforces them must do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from vestige.checks import check_bound
from vestige.layout import Layout
from vestige.randomness.streams import Stream
from vestige.randomness.sum_and_release_types import Release

Loss = Callable[..., Tensor]
"""(outputs, targets...) -> a number, or one for each example."""
Parameters = dict[str, Tensor]
Batch = Sequence[Tensor]
"""Inputs and, last, targets; every tensor has the examples on its first axis."""
Field = Callable[..., Parameters]
"""The gradient of one example as a function of the parameters: field(parameters, *example)."""

LARGEST_NORM = 1e30
"""Beyond this float32 cannot rescale a gradient accurately; such an example counts as non-finite and is zeroed."""


LARGEST_SUM = 4096
"""How many clipped gradients are summed in float32; see `RunningSum`."""
MOST_PARTS = 16
"""In how many parts: each is rounded once more as it is added, and one example fewer moves all that follow."""
SMALLEST_NORM = 1e-10
"""Below this the squares of float32 underflow, so a norm may be far too small: a clip that divides by it must not
magnify such a gradient."""

Coins = Callable[[], Stream]
Value = float | Tensor
"""A number; or, where many runs are stacked, one for each of them."""
ClipState = dict[str, Any]
"""What a clip has learned from releases: numbers only, so that it can be checkpointed and rewound."""


class Clip(Protocol):
    """A bound on one example's contribution. An adaptive clip keeps what it learned from releases in a state."""

    adaptive: bool
    """Whether the bound follows releases."""
    stackable: bool
    """Whether it works along the last axis, so that a stack of runs can be clipped at once."""

    def factors(self, norms: Tensor) -> Tensor:
        """Per-example factors in [0, bound / norm], from norms by group: [..., groups] -> the same shape."""
        ...

    def sensitivity(self, layout: Layout) -> float | Tensor:
        """Noise per unit of noise multiplier; see `BoundedSum`."""
        ...

    def init(self) -> ClipState: ...

    def now(self, state: ClipState) -> Clip:
        """The clip of this step."""
        ...

    def pace(self, state: ClipState) -> Value:
        """The factor on the learning rate at this step."""
        ...

    def learn(self, fraction: Value | None, state: ClipState) -> ClipState:
        """The state after a step that released this noised fraction of unclipped examples."""
        ...

    def heard(self, release: Release, layout: Layout, state: ClipState) -> ClipState:
        """The state after a step with this release."""
        ...

    def with_bound(self, bound: float) -> Clip:
        """The same clip with another bound."""
        ...

    def shown(self, state: ClipState) -> dict[str, Value]:
        """Diagnostics of the state: all of it comes from releases."""
        ...

    def drawn(self, coins: Coins) -> Clip:
        """The clip with the coins that it flips, if any: only the curator provides them."""
        ...

    def count_deviation(self, multiplier: float, expected_batch: float) -> float:
        """The noise, in examples, of the count of unclipped examples; infinite if nothing is counted."""
        ...

    def gradient_multiplier(self, multiplier: float, expected_batch: float) -> float:
        """The gradient's own noise multiplier when the whole release has this one."""
        ...

    def noise_ratios(self, layout: Layout) -> Tensor:
        """Each group's noise over its bound, per unit of the whole step's noise multiplier."""
        ...

    @property
    def recording(self) -> Hashable | None:
        """What a recorded CUDA graph fixes of the clip; None if its factors cannot be recorded."""
        ...

    @property
    def flat_bound(self) -> Value | None:
        """The bound, where the factors are those of a flat clip: it may change between replays of a CUDA graph."""
        ...


class FixedClip:
    """The defaults of a clip: a bound that never changes, no coins, no count."""

    adaptive = False
    stackable = shardable = True

    def init(self) -> ClipState:
        return {}

    def now(self, state: ClipState) -> Any:
        return self

    def pace(self, state: ClipState) -> Value:
        return 1.0

    def learn(self, fraction: Value | None, state: ClipState) -> ClipState:
        return state

    def heard(self, release: Release, layout: Layout, state: ClipState) -> ClipState:
        return state

    def with_bound(self, bound: float) -> Clip:
        raise ValueError(f"{type(self).__name__} has no bound of its own that could be set to {bound}")

    def shown(self, state: ClipState) -> dict[str, Value]:
        return {}

    def drawn(self, coins: Coins) -> Any:
        return self

    def count_deviation(self, multiplier: float, expected_batch: float) -> float:
        return inf

    def gradient_multiplier(self, multiplier: float, expected_batch: float) -> float:
        return multiplier

    def noise_ratios(self, layout: Layout) -> Tensor:
        return torch.ones(1, dtype=torch.float64)

    @property
    def recording(self) -> Hashable | None:
        return None

    @property
    def flat_bound(self) -> Value | None:
        return None


@dataclass(frozen=True)
class Flat(FixedClip):
    """Each example's whole gradient is scaled to norm at most `bound`.

    Formal guarantees: adding or removing one example moves the sum by at most `bound` in the 2-norm.
    """

    bound: float = 1.0

    def __post_init__(self) -> None:
        check_bound(self.bound)

    def factors(self, norms: Tensor) -> Tensor:
        return within(self.bound, norms)

    def sensitivity(self, layout: Layout) -> float:
        return self.bound

    def with_bound(self, bound: float) -> Flat:
        return replace(self, bound=bound)

    @property
    def recording(self) -> Hashable:
        return "flat"

    @property
    def flat_bound(self) -> Value:
        return self.bound


@dataclass(frozen=True)
class Without(FixedClip):
    """Another clip, without the examples that are not `kept`: they are in the batch so that it is as large as ever."""

    clip: Clip
    kept: Tensor

    def factors(self, norms: Tensor) -> Tensor:
        return self.clip.factors(norms) * self.kept[:, None]

    def sensitivity(self, layout: Layout) -> float | Tensor:
        return self.clip.sensitivity(layout)


def within(bound: float | Tensor, norms: Tensor) -> Tensor:
    """Factors that scale each example's whole gradient, [..., groups], to norm at most `bound`."""
    whole = torch.linalg.vector_norm(norms, dim=-1, keepdim=True)
    return (bound / whole).clamp(max=1.0).expand_as(norms)


def sensitivity_on(device: torch.device, clip: Clip, layout: Layout) -> tuple[float | Tensor, float]:
    """The clip's sensitivity, on the device, and its largest value."""
    sensitivity = clip.sensitivity(layout)
    if isinstance(sensitivity, Tensor):
        return sensitivity.to(device), float(sensitivity.max())
    return sensitivity, sensitivity


class GradientEngine(Protocol):
    """Adds the clipped gradients of a batch to a flat vector. Built once from public facts, called with data."""

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        """Add sum_i clip(gradient_i) to `into`; return the norms before clipping, [examples, groups], float64.

        `parameters` are those of the layout, by name: the point at which the gradients are taken. A row of infinite
        norms marks an example whose gradient was not finite; it contributed exactly zero.
        """
        ...


Transform = Callable[[Field], Field]
"""What is clipped of each example in place of its gradient at `parameters` (see `transforms`)."""


def usable_norms(squares: Tensor) -> Tensor:
    """Norms from squared norms by group, with every group of a non-finite or absurdly large example set to infinity."""
    norms = squares.sqrt()
    usable = (norms < LARGEST_NORM).all(dim=-1, keepdim=True)  # False for NaN
    return torch.where(usable, norms, torch.inf)


def weights(clip: Clip, norms: Tensor) -> Tensor:
    """The clip's factors, with unusable examples at exactly zero."""
    usable = norms.isfinite()
    return torch.where(usable, clip.factors(torch.where(usable, norms, 1.0).clamp(min=SMALLEST_NORM)), 0.0)


class RunningSum:
    """SENSITIVE: clipped gradients added up. The rounding of a float32 sum grows with the number of its summands and
    depends on each of them, so sums of few are added up in float64."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._shape: tuple[Any, ...] = size, device, dtype
        self._made: Tensor | None = None
        self._all: Tensor | None = None
        self._rows = self._parts = 0
        self._lent = False

    def place(self, rows: int) -> Tensor:
        """Where to add the next so many gradients: at most `LARGEST_SUM`."""
        self.settle()
        if self._rows + rows > LARGEST_SUM or self._parts == MOST_PARTS:
            self._all = self.total().double()
            self._made = None
            self._rows = self._parts = 0
        self._rows += rows
        self._parts += 1
        return self._few

    def lend(self, rows: int, gradients: Tensor) -> None:
        """Add the sum of so many, at most `LARGEST_SUM`. If it is the first, it stays where it is, and `total` may be
        changed in place: `settle` comes before that memory is used for anything else."""
        if self._parts or gradients.dtype != self._shape[2]:
            self.place(rows).add_(gradients)
        else:
            self._made, self._rows, self._parts, self._lent = gradients, rows, 1, True

    def settle(self) -> None:
        """Copy what was lent into memory of its own."""
        if self._lent:
            assert self._made is not None
            self._made, self._lent = self._made.clone(), False

    @property
    def _few(self) -> Tensor:
        if self._made is None:
            size, device, dtype = self._shape
            self._made = torch.zeros(size, device=device, dtype=dtype)
        return self._made

    def total(self) -> Tensor:
        """Float32 where few were added, float64 where many were, or it was asked for."""
        return self._few if self._all is None else self._all + self._few
