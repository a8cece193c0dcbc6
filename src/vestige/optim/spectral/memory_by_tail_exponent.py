"""How deep should each layer's memory of past releases reach? Its own spectrum decides: the memory of SMA-DP-SGD."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, exp
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vestige.checks import require
from vestige.layout import Layout
from vestige.mechanism.clipping import Parameters
from vestige.optim.memory import Filtered, MemoryState, unknown_noise
from vestige.optim.spectral import tail_exponent
from vestige.optim.spectral.tail_exponent import Convention
from vestige.optim.window import MOST_ROWS, rising, weighted_sum
from vestige.randomness.sum_and_release_types import Divided, Release
from vestige.tf32 import triton_available

TINY = 1e-12
GateKind = Literal["paper", "disjoint", "open"]
Sections = Sequence[tuple[int, int, int]]
"""Slices of the flat vector that belong to one group: (start, stop, group)."""


@dataclass(frozen=True)
class Spectral:
    """fresh_weight * fresh + (1 - fresh_weight) * warmth * gate * scale * recalled, group by group.

    `recalled` is a weighted mean of the group's last `window - 1` blends. The weights are a power law of the lag,
    tempered the more the further the exponent of the group's weights lies outside `interval`; an undefined exponent
    tempers nothing. The gate is how far `recalled` points along the trend (a running mean of all blends), the scale
    shrinks it to the trend's norm, and the warmth grows from 0 to 1 over `warm_up` steps (None: one epoch; 0: at once).

    `refresh` is the number of steps between spectra (None: one epoch). A spectrum is used from `lag` steps after the
    parameters it is of, so that it can be computed while training continues; until then the one before it is, and the
    first is never late. Which spectrum a step uses depends on its number alone. The paper's schedule is a refresh of 1
    with a lag of 0: it is found while the gradients at the same parameters are computed (`prepare`), and awaited after
    them.

    `shuffled` gives each group the exponent of another one, by a permutation that follows from the step's number: the
    paper's ablation of whether it matters which layer a spectrum is of.

    `gate="disjoint"` compares even lags with odd ones instead, which have no noise in common; "open" is always 1.
    `largest_scale=None` leaves the scale at 1.

    Formal guarantees: none needed. It sees only releases and the parameters computed from them: post-processing.
    """

    fresh_weight: float = 0.95
    order: float = 0.7
    window: int = 4
    interval: tuple[float, float] = (2.0, 6.0)
    strictness: float = 1.0
    smoothing: float = 0.1
    warm_up: int | None = None
    largest_scale: float | None = 1.0
    refresh: int | None = 1
    convention: Convention = "flatten"
    gate: GateKind = "paper"
    lag: int = 0
    shuffled: bool = False
    stackable = shardable = True
    knows_noise = False
    noise_std = unknown_noise

    def __post_init__(self) -> None:
        require("fresh_weight", self.fresh_weight, 0 < self.fresh_weight <= 1, "lie in (0, 1]")
        require("order", self.order, 0 < self.order <= 1, "lie in (0, 1]")
        require("window", self.window, isinstance(self.window, int) and self.window >= 1, "be a whole number from 1 up")
        low, high = self.interval
        require("interval", self.interval, low <= high, "be two numbers, the smaller first")
        require("strictness", self.strictness, self.strictness >= 0, "be at least 0")
        require("smoothing", self.smoothing, 0 < self.smoothing <= 1, "lie in (0, 1]")
        require("warm_up", self.warm_up, self.warm_up is None or self.warm_up >= 0, "be a number of steps, 0 or more")
        cap = self.largest_scale
        require("largest_scale", cap, cap is None or cap >= 0, "be at least 0, or 'off'")
        require("refresh", self.refresh, self.refresh is None or self.refresh >= 1, "be at least 1 step")
        require("convention", self.convention, self.convention in get_args(Convention), "be flatten or per-position")
        require("lag", self.lag, isinstance(self.lag, int) and self.lag >= 0, "be a number of steps, 0 or more")
        require("gate", self.gate, self.gate in get_args(GateKind), "be paper, disjoint or open")
        if self.gate == "disjoint" and self.window < 3:
            raise ValueError(f"window={self.window} leaves the disjoint gate no even lag; it needs 3 or more")

    @property
    def fresh_share(self) -> float:
        return self.fresh_weight

    @property
    def steady_gain(self) -> float:
        """A constant input opens the gate fully, and its scale is 1 or the cap."""
        if self.window == 1:
            return self.fresh_weight
        return self.fresh_weight / (
            1 - (1 - self.fresh_weight) * min(1.0, 1.0 if self.largest_scale is None else self.largest_scale)
        )

    @property
    def copies(self) -> float:
        """The window's rows and the trend, and the parameters whose spectrum is awaited (an epoch is not shorter than
        the lag, where `refresh` is one)."""
        awaited = ceil(self.lag / (self.refresh or max(1, self.lag)))
        return float((self.window if self.window > 1 else 0) + awaited)

    def init(self, layout: Layout, device: torch.device) -> MemoryState:
        depth = self.window - 1
        return {
            "count": 0,
            "groups": [segment.group for segment in layout.segments],
            "lengths": [segment.stop - segment.start for segment in layout.segments],
            "past": torch.zeros(depth, layout.size, device=device),
            "trend": torch.zeros(layout.size if depth else 0, device=device),
            "exponent": torch.full((layout.groups,), torch.nan, dtype=torch.float64, device=device),
            "tempering": torch.zeros(layout.groups, dtype=torch.float64, device=device),
            "weights": torch.zeros(layout.groups, depth, dtype=torch.float64, device=device),
        }

    def prepare(self, state: MemoryState, parameters: Parameters, sample_rate: float) -> None:
        """Start to find the spectrum of these parameters, where the next step needs it; they may not change before it
        has been made. Whether this was called makes no difference to what the step finds."""
        every = self.refresh or max(1, round(1 / sample_rate))
        if not self.lag and state["count"] % every == 0:
            weights, _ = _weights(parameters, state["groups"], state["exponent"].shape[:-1])
            _begun[state["exponent"]] = {
                (os.getpid(), state["count"]): tail_exponent.Background(weights, self.convention)
            }

    def step(self, release: Release, state: MemoryState, parameters: Parameters) -> Filtered:
        fresh, count, depth = release.total, state["count"], self.window - 1
        epoch = max(1, round(1 / release.sample_rate))
        every = self.refresh or epoch
        if release.divided is None:
            found = self._due(state, parameters, every, fresh.shape[:-1])
        else:
            found = self._due_divided(state, parameters, every, release.divided)
        if found is not None:
            if self.shuffled:
                found = found[..., _permutation(found.shape[-1], count)]
            state["exponent"] = found.to(fresh.device)
        changed = found is not None or count <= depth  # otherwise the weights have not changed
        pull = (1 - self.fresh_weight) * self._warmth(count, epoch)
        if count and self._fused(release, state):
            return self._step_fused(fresh, state, pull, changed)
        if found is not None:
            state["tempering"] = self.tempering(state["exponent"])
        if changed:
            state["weights"] = self.weigh(state["tempering"], min(count, depth))
        gate = scale = ratio = share = torch.zeros_like(state["exponent"])
        if not depth:
            state["count"] += 1
            return Filtered(fresh * self.fresh_weight, state, _shown(state, gate, scale, ratio, share))
        sections, recalled = _sections(state["lengths"], state["groups"]), None
        if count:
            recalled, names, products = self._recall(fresh, state, sections)
            inner = dict(zip(names, release.totalled(products).unbind(), strict=True))
            gate, scale = self._gate(inner), self._scale(inner)
            share = pull * gate * scale
            ratio = _ratio(share, inner, self.fresh_weight)
        direction = state["past"][..., count % depth, :]  # in the place of the oldest one, which is in `recalled`
        torch.mul(fresh, self.fresh_weight, out=direction)
        if recalled is not None:
            rounded = share.to(fresh.dtype)
            for start, stop, group in sections:
                direction[..., start:stop].addcmul_(recalled[..., start:stop], rounded[..., group, None])
        state["trend"].lerp_(direction, self.smoothing if count else 1.0)
        state["count"] += 1
        depths = state["weights"] @ rising(depth, fresh.device)
        return Filtered(direction, state, _shown(state, gate, scale, ratio, depths))

    def _fused(self, release: Release, state: MemoryState) -> bool:
        """Whether a step is one of a single run on a GPU, with a window that our kernels hold."""
        past = state["past"]
        single = release.divided is None and past.dim() == 2 and past.is_cuda and past.dtype == torch.float32
        return single and 0 < len(past) <= MOST_ROWS and triton_available()

    def _step_fused(self, fresh: Tensor, state: MemoryState, pull: float, changed: bool) -> Filtered:
        from vestige.optim.spectral import triton_steps

        if changed:
            triton_steps.weigh(self, state)
        direction, numbers = triton_steps.step(self, fresh, state, pull)
        state["count"] += 1
        return Filtered(direction, state, _shown(state, *numbers))

    def _due(self, state: MemoryState, parameters: Parameters, every: int, lead: tuple[int, ...]) -> Tensor | None:
        """The exponents that this step is the first to use, if any; and the next ones are begun where it is time."""
        count, groups = state["count"], state["groups"]
        begins = count % every == 0
        if not self.lag or not count:
            return self._now(state, parameters, lead) if begins else None
        if "awaited" not in state:
            slots = ceil(self.lag / every)
            state["awaited"] = torch.zeros(*lead, slots, sum(state["lengths"]), device=state["exponent"].device)
        spectra = Awaited(state["awaited"], every, parameters, groups, self.convention)
        spectra.go_on()
        begun = count - self.lag
        found = spectra.take(begun) if begun > 0 and begun % every == 0 else None
        if begins:
            spectra.begin(count)
        return found

    def _now(self, state: MemoryState, parameters: Parameters, lead: tuple[int, ...]) -> Tensor:
        """The exponents at these parameters: begun by `prepare`, or found at once."""
        weights, owners = _weights(parameters, state["groups"], lead)
        begun = _begun.pop(state["exponent"], {}).get((os.getpid(), state["count"]))
        found = begun or tail_exponent.Background(weights, self.convention)
        return _by_group(found.result(), owners, 1 + max(state["groups"]), lead)

    def _due_divided(self, state: MemoryState, parameters: Parameters, every: int, divided: Divided) -> Tensor | None:
        """The same for sharded parameters: each weight is gathered in turn, and one process computes its exponent;
        training waits."""
        count, groups = state["count"], state["groups"]
        find = partial(_exponents_divided, groups=groups, convention=self.convention, divided=divided)
        if not self.lag or not count:
            return find(parameters) if count % every == 0 else None
        slots = ceil(self.lag / every)
        if "awaited" not in state:
            state["awaited"] = torch.zeros(slots, sum(state["lengths"]), device=state["trend"].device)
        begun, found = count - self.lag, None
        if begun > 0 and begun % every == 0:
            kept = state["awaited"][begun // every % slots].split(state["lengths"])
            found = find({n: part.view_as(p) for (n, p), part in zip(parameters.items(), kept, strict=True)})
        if count % every == 0:
            torch.cat(
                [p.detach().reshape(-1) for p in parameters.values()], out=state["awaited"][count // every % slots]
            )
        return found

    def tempering(self, exponents: Tensor) -> Tensor:
        """In [0, 1): 0 for an exponent inside the interval, or undefined; rising with its distance from it."""
        low, high = self.interval
        distance = torch.maximum(low - exponents, exponents - high).clamp(min=0)
        return torch.where(exponents.isnan(), 0.0, -torch.expm1(-self.strictness * distance))

    def weigh(self, tempering: Tensor, filled: int) -> Tensor:
        """Weights over lags 1, 2, ...: [..., groups, window - 1], rows summing to one, or zero if nothing is there."""
        lags = rising(self.window - 1, tempering.device)
        if not filled:
            return tempering.new_zeros(*tempering.shape, len(lags))
        scores = (self.order - 1) * torch.log1p(lags) - tempering[..., None] * lags
        return torch.softmax(torch.where(lags <= filled, scores, -torch.inf), dim=-1)

    def _warmth(self, count: int, epoch: int) -> float:
        steps = epoch if self.warm_up is None else self.warm_up
        return 1 - exp(-count / steps) if steps else 1.0

    def _recall(self, fresh: Tensor, state: MemoryState, sections: Sections) -> tuple[Tensor, list[str], Tensor]:
        """The recalled vector, and the inner products by group that the gate, the scale and the records need: their
        names, and [names, ..., groups]."""
        past, trend = state["past"], state["trend"]
        by_lag = state["weights"]
        recalled = _combine(by_lag, state, sections)
        pairs = {"rr": (recalled, recalled), "tr": (trend, recalled), "tt": (trend, trend)}
        pairs |= {"ff": (fresh, fresh), "fr": (fresh, recalled)}
        if self.gate == "disjoint":
            lags = torch.arange(1, self.window, device=past.device)
            fading = ((1 - self.smoothing) ** lags.double()).expand_as(by_lag)
            odd = _combine(torch.where(lags % 2 == 1, by_lag, 0.0), state, sections)
            even = _combine(torch.where(lags % 2 == 0, fading, 0.0), state, sections)
            pairs |= {"oo": (odd, odd), "eo": (even, odd), "ee": (even, even)}
        return recalled, list(pairs), _inner_products(list(pairs.values()), sections, by_lag.shape[-2])

    def _gate(self, inner: Mapping[str, Tensor]) -> Tensor:
        if self.gate == "open":
            return torch.ones_like(inner["rr"])
        across, one, other = ("tr", "tt", "rr") if self.gate == "paper" else ("eo", "ee", "oo")
        cosine = inner[across] / (inner[one].sqrt() * inner[other].sqrt() + TINY)
        return cosine.clamp(0.0, 1.0)

    def _scale(self, inner: Mapping[str, Tensor]) -> Tensor:
        if self.largest_scale is None:
            return torch.ones_like(inner["rr"])
        return (inner["tt"].sqrt() / (inner["rr"].sqrt() + TINY)).clamp(max=self.largest_scale)


def _shown(state: MemoryState, gate: Tensor, scale: Tensor, ratio: Tensor, depths: Tensor) -> dict[str, Tensor]:
    """The diagnostics of a step; means over groups first."""
    return {
        "effective_depth": depths.mean(-1),
        "memory_ratio": ratio.mean(-1),
        "effective_depth_by_group": depths,
        "memory_ratio_by_group": ratio,
        "gate": gate,
        "scale": scale,
        "exponent": state["exponent"],
        "tempering": state["tempering"],
    }


def group_exponents(
    parameters: Parameters, groups: Sequence[int], convention: Convention, lead: tuple[int, ...] = ()
) -> Tensor:
    """The exponent of each group at these parameters, [*lead, groups] in float64: the mean over its weights of two or
    more dimensions whose exponent is defined, NaN where there is none. `lead` are the leading axes of a stack of
    runs."""
    weights, owners = _weights(parameters, groups, lead)
    return _by_group(tail_exponent.exponents(weights, convention), owners, 1 + max(groups), lead)


def _exponents_divided(
    parameters: Parameters, groups: Sequence[int], convention: Convention, divided: Divided
) -> Tensor:
    """`group_exponents`, each weight's by one process, and sent to all."""
    members = [(name, group) for (name, w), group in zip(parameters.items(), groups, strict=True) if w.dim() >= 2]
    found = torch.zeros(2, len(members), dtype=torch.float64)
    wholes = divided.one_by_one({name: parameters[name] for name, _ in members})
    for place, whole in enumerate(wholes):
        if divided.mine(place):
            exponent = tail_exponent.exponent(whole, convention)
            found[:, place] = torch.tensor([1.0, 0.0] if exponent != exponent else [0.0, exponent])
    undefined, exponents = divided.total(found)
    exponents = torch.where(undefined > 0, torch.nan, exponents)
    return _by_group(exponents, [group for _, group in members], 1 + max(groups), ())


def _weights(parameters: Parameters, groups: Sequence[int], lead: tuple[int, ...]) -> tuple[list[Tensor], list[int]]:
    """Each run's weights of two or more dimensions, run after run for each of them, and the groups these belong to."""
    members = [(w, group) for w, group in zip(parameters.values(), groups, strict=True) if w.dim() >= 2 + len(lead)]
    alone = [matrix for weight, _ in members for matrix in weight.reshape(-1, *weight.shape[len(lead) :])]
    return alone, [group for _, group in members]


def _by_group(exponents: Tensor, owners: Sequence[int], groups: int, lead: tuple[int, ...]) -> Tensor:
    """The mean of the defined exponents of each group: [weights and runs] -> [*lead, groups]."""
    total = torch.zeros(*lead, groups, dtype=torch.float64, device=exponents.device)
    each = exponents.view(len(owners), *lead).movedim(0, -1)
    places = torch.tensor(owners, dtype=torch.long, device=each.device)
    defined = each.isfinite()
    number = total.index_add(-1, places, defined.double())
    return total.index_add(-1, places, torch.where(defined, each, 0.0)) / number


_begun = WeakTensorKeyDictionary()
"""Spectra that are being found, by a tensor of the state that awaits them (the ring with their parameters, or the
exponents that they will replace), the process and the step they are of."""


def _permutation(groups: int, step: int) -> list[int]:
    """An order of the groups that every machine finds from the number of the step."""
    return random.Random(step).sample(range(groups), groups)


@dataclass(frozen=True)
class Awaited:
    """Spectra that later steps will use. Their parameters lie in `ring`, [*lead, slots, size], while they are found.

    The ring is all that a checkpoint holds of them. A copy of it, after a rollback or in another process,
    has no spectrum begun, and finds it when it is taken: the same one.
    """

    ring: Tensor
    every: int
    point: Parameters
    """The parameters at this step."""
    groups: Sequence[int]
    convention: Convention

    def begin(self, step: int) -> None:
        """Keep the parameters of this step, and start to find their spectrum."""
        flat = [p.detach().reshape(*self._lead, -1) for p in self.point.values()]
        torch.cat(flat, dim=-1, out=self._row(step))
        self._begun[os.getpid(), step] = self._find(step)

    def go_on(self) -> None:
        for found in self._begun.values():
            found.go_on()

    def take(self, step: int) -> Tensor:
        """The exponents of the groups at the parameters that an earlier step kept; waits until they are found."""
        found = self._begun.pop((os.getpid(), step), None) or self._find(step)
        _, owners = _weights(self.point, self.groups, self._lead)
        return _by_group(found.result(), owners, 1 + max(self.groups), self._lead)

    def _find(self, step: int) -> tail_exponent.Background:
        each = zip(self.point.items(), self._row(step).split(self._lengths, dim=-1), strict=True)
        kept = {name: part.view(now.shape) for (name, now), part in each}
        return tail_exponent.Background(_weights(kept, self.groups, self._lead)[0], self.convention)

    def _row(self, step: int) -> Tensor:
        return self.ring[..., step // self.every % self.ring.shape[-2], :]

    @property
    def _lead(self) -> tuple[int, ...]:
        return self.ring.shape[:-2]

    @property
    def _lengths(self) -> list[int]:
        return [p.shape[len(self._lead) :].numel() for p in self.point.values()]

    @property
    def _begun(self) -> dict[tuple[int, int], tail_exponent.Background]:
        return _begun.setdefault(self.ring, {})


def _sections(lengths: Sequence[int], groups: Sequence[int]) -> Sections:
    """The slices of each group, adjacent ones joined, from the length and group of each parameter in order."""
    return list(_joined(lengths, groups))


def _joined(lengths: Sequence[int], groups: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    start = stop = 0
    current = groups[0]
    for length, group in zip(lengths, groups, strict=True):
        if group != current:
            yield start, stop, current
            start, current = stop, group
        stop += length
    yield start, stop, current


def _combine(by_lag: Tensor, state: MemoryState, sections: Sections) -> Tensor:
    """The sum over lags of weight * past vector, each group with its own weights."""
    past = state["past"]
    # The window is a ring: slot i holds the vector of lag ((count - 1 - i) mod depth) + 1.
    by_slot = by_lag.flip(-1).roll(state["count"], -1).to(past.dtype)
    combined = torch.empty_like(past[..., 0, :])
    for start, stop, group in sections:
        weighted_sum(past[..., start:stop], by_slot[..., group, :], out=combined[..., start:stop])
    return combined


def _inner_products(pairs: Sequence[tuple[Tensor, Tensor]], sections: Sections, groups: int) -> Tensor:
    """Each pair's inner product over each group's coordinates, in float64: [..., size] -> [pairs, ..., groups]."""
    one = pairs[0][0]
    if one.dim() == 1 and one.device.type == "cpu":  # products that are never written cost half as much
        cut = [[(a[start:stop], b[start:stop]) for start, stop, _ in sections] for a, b in pairs]
        parts = torch.tensor([[torch.dot(a, b).item() for a, b in row] for row in cut], dtype=torch.float64)
        return _by_owner(parts, sections, groups)
    products = torch.empty(len(pairs), *one.shape, dtype=one.dtype, device=one.device)
    for row, (a, b) in zip(products, pairs, strict=True):
        torch.mul(a, b, out=row)
    parts = torch.stack([products[..., start:stop].sum(-1) for start, stop, _ in sections], dim=-1).double()
    return _by_owner(parts, sections, groups)


def _by_owner(parts: Tensor, sections: Sections, groups: int) -> Tensor:
    """The sums of each group, from those of its sections: [..., sections] -> [..., groups]."""
    if len(sections) == groups and all(group == index for index, (_, _, group) in enumerate(sections)):
        return parts
    owners = torch.tensor([group for _, _, group in sections], device=parts.device)
    return torch.zeros(*parts.shape[:-1], groups, dtype=parts.dtype, device=parts.device).index_add(-1, owners, parts)


def _ratio(pull: Tensor, inner: Mapping[str, Tensor], fresh_weight: float) -> Tensor:
    """The norm of the memory's term over that of the blend fresh_weight * fresh + pull * recalled."""
    branch = pull * inner["rr"].sqrt()
    blend = fresh_weight**2 * inner["ff"] + 2 * fresh_weight * pull * inner["fr"] + branch.square()
    return branch / blend.clamp(min=0).sqrt().clamp(min=1e-300)
