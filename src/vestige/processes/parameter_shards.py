"""Where are the parameters of a sharded model? Each process has some rows of every one (FSDP2, `fully_shard`).

For the length of a question every process holds the whole parameters, and computes the gradients of its own examples;
their clipped sum is reduce-scattered parameter by parameter. Whatever follows the noise (memory, optimizer, average) is
about this process's rows alone. FSDP2's own hooks take no part: they would reduce gradients that are not clipped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from vestige.layout import Layout, Segment
from vestige.processes.group import Processes
from vestige.randomness import lattice
from vestige.randomness.sum_and_release_types import Cut

FINER = 14
"""Each part of a sum is rounded to steps so many powers of two finer than the lattice, and the total to the lattice:
what rounding can do stays that of one rounding, for up to 2^14 / 100 parts."""


LARGEST_SHARDED = 1 << 17
"""Examples of an expected sample whose clipped sum fits the integers of a sharded one, with room for chance."""
MOST_PARTS = 80
"""Parts of an expected sample in one process: with room for chance, half of what `FINER` allows."""


def require_summable(expected: float, physical_batch: int | None, group: Processes) -> None:
    """Refuse samples whose integers could not hold their sum, and those in too many parts: one example less moves all
    parts of its process that come after it, and each is rounded. `physical_batch` is None where nothing is."""
    if expected > LARGEST_SHARDED:
        raise ValueError(
            f"the expected sample is of {expected:,.0f} examples: a sharded model takes {LARGEST_SHARDED:,} a step at "
            "most, whose sum its integers can hold; take fewer (sample_rate, batch_size), or train replicas"
        )
    parts = expected / group.size / (physical_batch or expected)
    if parts > MOST_PARTS:
        raise ValueError(
            f"physical batches of {physical_batch} make about {parts:.0f} parts of a sample in each process, and the "
            f"rounding of {MOST_PARTS} is covered by the noise of a sharded model: let them be larger"
        )


@dataclass(frozen=True)
class Rows:
    """Which rows of a parameter this process has."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    each: int
    """Rows of a full share; the last processes may have fewer, or none."""

    @property
    def width(self) -> int:
        return prod(self.shape[1:])

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.stop - self.start, *self.shape[1:]

    def joined(self, local: Tensor, group: Processes) -> Tensor:
        """Together: the whole parameter."""
        mine = local.detach().reshape(-1)
        full = self.each * self.width
        if len(mine) < full:
            mine = torch.cat([mine, mine.new_zeros(full - len(mine))])
        return group.joined(mine)[: prod(self.shape)].view(self.shape)

    def scattered(self, whole: Tensor, group: Processes) -> Tensor:
        """Together: this process's rows of the sum over all processes, flat."""
        longer = whole.new_zeros(self.each * self.width * group.size)
        longer[: whole.numel()] = whole.reshape(-1)
        return group.scattered(longer)[: (self.stop - self.start) * self.width]


class Shards:
    """A model that `fully_shard` has divided among the processes of a group."""

    def __init__(self, model: nn.Module, group: Processes) -> None:
        resharded(model)
        check_sharding(model, group)
        self.model, self.group, self.size = model, group, 0
        self._rows = {name: _rows(name, p, group) for name, p in model.named_parameters()}
        self.skeleton = skeleton_of(model)
        self._husks = dict(self.skeleton.named_parameters())
        self.parameters = {
            name: nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad)  # type: ignore[attr-defined]
            for name, p in model.named_parameters()
        }
        """This process's rows of each parameter, in the model's own memory."""
        self._filled = False

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def lay_out(self, layout: Layout) -> Layout:
        """The layout of this process's rows of a release, from that of the whole."""
        self.layout, self.size = layout, layout.size
        segments: list[Segment] = []
        start = 0
        for segment in layout.segments:
            segments.append(replace(segment, start=start, shape=self._rows[segment.name].local_shape))
            start = segments[-1].stop
        self.local = Layout(tuple(segments))
        return self.local

    def cut(self, *, common: bool) -> Cut:
        places = []
        for segment in self.layout.segments:
            rows = self._rows[segment.name]
            places.append((segment.start + rows.start * rows.width, segment.start + rows.stop * rows.width))
        return Cut(tuple(places), self.layout.size, common=common)

    # --- the whole parameters ---------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Together: the skeleton holds the whole parameters, as they are now."""
        resharded(self.model)
        for name, husk in self._husks.items():
            husk.data = self._rows[name].joined(self.parameters[name], self.group)
        for (_, whole), (_, own) in zip(self.skeleton.named_modules(), self.model.named_modules(), strict=True):
            whole.training = own.training
        self._filled = True

    def empty(self) -> None:
        """The skeleton drops them."""
        for husk in self._husks.values():
            husk.data = torch.zeros((), dtype=husk.dtype, device=husk.device).expand(husk.shape)
        self._filled = False

    @contextmanager
    def filled(self) -> Iterator[None]:
        self.fill()
        try:
            yield
        finally:
            self.empty()

    def whole(self, point: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Together: the whole parameters at a point of which each process has its rows. The skeleton's own where the
        point is where the model is, and the skeleton holds them."""
        if self._filled and all(p.data_ptr() == self.parameters[n].data_ptr() for n, p in point.items()):
            return {name: self._husks[name].detach() for name in point}
        return {name: self._rows[name].joined(value, self.group) for name, value in point.items()}

    def one_by_one(self, point: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Together: the same, one after the other, in order."""
        for name, value in point.items():
            yield self._rows[name].joined(value, self.group)

    def weights(self) -> dict[str, Tensor]:
        """Together: the whole model as an ordinary state_dict has it, in the host's memory; of process 0 alone."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            whole = self._rows[name].joined(parameter, self.group)
            if self.group.rank == 0:
                found[name] = whole.cpu()
        kept = self.model.state_dict()
        return {name: found.get(name, value) for name, value in kept.items()} if self.group.rank == 0 else {}

    # --- what the training loop takes for the model -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """This process's rows of what is trained, and the buffers, which all processes have."""
        trained = {s.name: self.parameters[s.name].detach() for s in self.layout.segments}
        return trained | {f"{name} (buffer)": value for name, value in self.model.named_buffers()}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        for name, value in self.state_dict().items():
            value.copy_(saved[name])

    def rows_of(self, name: str) -> Rows:
        return self._rows[name]


class ShardedSum:
    """SENSITIVE: this process's rows of a clipped sum over all processes. Gradients are put in parameter by parameter,
    by all processes in the same order; `spacing` is that of the lattice, or None where floats are added up."""

    def __init__(self, shards: Shards, spacing: float | Tensor | None, device: torch.device) -> None:
        self._shards, self._spacing = shards, spacing
        self.like = torch.zeros(0, device=device)
        self._own = {segment.name: segment for segment in shards.local.segments}
        kind = torch.float32 if spacing is None else torch.int64
        self._local = torch.zeros(shards.local.size, dtype=kind, device=device)

    def place(self, rows: int) -> ShardedSum:
        return self

    @contextmanager
    def at(self, segment: Segment) -> Iterator[Tensor]:
        """Where the gradient of a parameter is put; together, when it is there."""
        whole = torch.zeros(segment.shape, device=self.like.device)
        yield whole
        self._add(segment, whole)

    def nothing(self) -> None:
        """Together: this process has no examples to add."""
        for segment in self._shards.layout.segments:
            self._add(segment, torch.zeros(segment.shape, device=self.like.device))

    def total(self) -> Tensor:
        """In steps of the lattice, or as numbers."""
        return self._local if self._spacing is None else (self._local + (1 << (FINER - 1))) >> FINER

    def _add(self, segment: Segment, whole: Tensor) -> None:
        flat = whole.reshape(-1)
        if self._spacing is not None:
            spacing = self._spacing
            if isinstance(spacing, Tensor):
                spacing = spacing[segment.start : segment.stop]
            flat = lattice.rounded(flat, spacing * 2.0**-FINER)
        own = self._own[segment.name]
        rows = self._shards.rows_of(segment.name)
        self._local[own.start : own.stop] += rows.scattered(flat, self._shards.group)


def check_sharding(model: nn.Module, group: Processes) -> None:
    """Refuse what is not sharded by rows over all processes: tensor and pipeline parallelism, and mixtures."""
    for name, parameter in model.named_parameters():
        placements, mesh = getattr(parameter, "placements", None), getattr(parameter, "device_mesh", None)
        if placements is None or mesh is None:
            raise ValueError(
                f"parameter {name!r} is not sharded, and others are: call fully_shard(model) on the whole model"
            )
        if mesh.ndim != 1:
            raise ValueError(
                f"parameter {name!r} lies on a mesh of {mesh.ndim} dimensions: tensor, pipeline and hybrid parallelism "
                "are not supported here; shard the model by fully_shard over all processes, on a mesh of one dimension"
            )
        if mesh.size() != group.size:
            raise ValueError(
                f"parameter {name!r} is sharded over {mesh.size()} of {group.size} processes: shard it over all of them"
            )
        if not placements[0].is_shard(0):
            raise ValueError(
                f"parameter {name!r} is placed as {placements[0]}: tensor parallelism is not supported here; shard "
                "rows, as fully_shard does"
            )


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps what runs around its passes."""


def resharded(model: nn.Module) -> None:
    """Free what FSDP2 has gathered for a pass of its own: it keeps the outermost module's parameters until a
    backward pass of its own, and would evaluate with them again though the rows have moved since."""
    for module in model.modules():
        if of_fsdp(type(module)):
            module.reshard()  # type: ignore[operator]


def skeleton_of(model: nn.Module) -> nn.Module:
    """The same modules without FSDP2's hooks and without parameters of their own: each is a husk of the right shape,
    which takes no memory until it is filled. Buffers are the model's."""
    made: dict[int, nn.Module] = {}
    husks: dict[int, nn.Parameter] = {}

    def husk(parameter: Any) -> nn.Parameter:
        if id(parameter) not in husks:
            like = parameter.to_local()
            empty = torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(parameter.shape))
            husks[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        return husks[id(parameter)]

    def plain(module: nn.Module) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        kind: Any = next(kind for kind in type(module).__mro__ if not of_fsdp(kind))
        twin: nn.Module = kind.__new__(kind)
        twin.__dict__ = copy.copy(module.__dict__)
        made[id(module)] = twin
        for hooks in HOOKS:
            kept = {key: hook for key, hook in getattr(module, hooks).items() if not of_fsdp(hook)}
            twin.__dict__[hooks] = type(getattr(module, hooks))(kept)
        twin.__dict__["_parameters"] = {k: None if p is None else husk(p) for k, p in module._parameters.items()}
        twin.__dict__["_modules"] = {k: None if m is None else plain(m) for k, m in module._modules.items()}
        return twin

    return plain(model)


def of_fsdp(thing: object) -> bool:
    """Whether a class or a hook is FSDP2's: its classes are made from FSDPModule, its hooks are its state's methods."""
    if isinstance(thing, type):
        return _class_of_fsdp(thing)
    owner = getattr(thing, "__self__", None)
    module = type(owner).__module__ if owner is not None else getattr(thing, "__module__", None) or ""
    inner = getattr(getattr(thing, "func", None), "__module__", None) or ""
    return module.startswith("torch.distributed") or inner.startswith("torch.distributed")


@cache
def _class_of_fsdp(kind: type) -> bool:
    return any(each.__module__.startswith("torch.distributed.fsdp") for each in kind.__mro__)


def _rows(name: str, parameter: Any, group: Processes) -> Rows:
    shape = tuple(parameter.shape)
    each = -(-shape[0] // group.size)
    start = min(group.rank * each, shape[0])
    found = Rows(name, shape, start, min(start + each, shape[0]), each)
    local = tuple(parameter.to_local().shape)
    assert local == found.local_shape or (0 in local and 0 in found.local_shape), (name, local, found)
    return found
