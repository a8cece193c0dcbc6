"""Which coordinates of the flat vector belong to which parameter, and to which group? The layout of a release."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from vestige.layerwise_scaling import Constants, check_constants

Grouping = Callable[[nn.Module], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Segment:
    """The slice of the flat vector that holds one parameter."""

    name: str
    start: int
    shape: tuple[int, ...]
    group: int = 0
    scale: float = 1.0
    """The constant of balanced steps: the parameter is this times what is trained (see `layerwise_scaling`)."""

    @cached_property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The place of each trainable parameter in a release: every one once (tied weights too), in order."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, model: nn.Module, grouping: Grouping | None = None, constants: Constants | None = None) -> Layout:
        """Lay out a model's trainable parameters; `grouping` names those of each group (default: one group), and
        `constants` are those of balanced steps (default: 1)."""
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError("the model has no trainable parameter: set requires_grad on what should be trained")
        wrong = {name: p.dtype for name, p in trainable.items() if p.dtype != torch.float32}
        if wrong:
            name, dtype = next(iter(wrong.items()))
            way = "keep two real ones (torch.view_as_complex)" if dtype.is_complex else "call model.float() first"
            raise ValueError(f"parameter {name!r} is {dtype}; releases are float32: {way}")
        apple = [name for name, p in trainable.items() if p.device.type == "mps"]
        if apple:
            raise ValueError(
                f"parameter {apple[0]!r} is on mps, which has no float64, and norms and noise are computed in float64: "
                "call model.cpu() first"
            )
        group_of = _group_of(trainable, grouping(model)) if grouping else dict.fromkeys(trainable, 0)
        scales = dict.fromkeys(trainable, 1.0) if constants is None else constants
        check_constants(scales, trainable)
        segments, start = [], 0
        for name, parameter in trainable.items():
            segments.append(Segment(name, start, tuple(parameter.shape), group_of[name], scales[name]))
            start = segments[-1].stop
        return cls(tuple(segments))

    @cached_property
    def size(self) -> int:
        return self.segments[-1].stop

    @cached_property
    def lengths(self) -> list[int]:
        """How many numbers each segment has."""
        return [segment.stop - segment.start for segment in self.segments]

    @cached_property
    def constants(self) -> Constants | None:
        """The constants of balanced steps; None where all are 1, and there is nothing to do."""
        found = self.constants_of_all
        return found if any(scale != 1 for scale in found.values()) else None

    @cached_property
    def distinct_constants(self) -> tuple[tuple[float, ...], dict[float, int]]:
        """The constants of all parameters, each once, and the place of each among them."""
        found = tuple(dict.fromkeys(segment.scale for segment in self.segments))
        return found, {scale: place for place, scale in enumerate(found)}

    @property
    def constants_of_all(self) -> Constants:
        return {segment.name: segment.scale for segment in self.segments}

    @cached_property
    def groups(self) -> int:
        return 1 + max(segment.group for segment in self.segments)

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        sizes = [0] * self.groups
        for segment in self.segments:
            sizes[segment.group] += segment.stop - segment.start
        return tuple(sizes)

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        """Each group by the name of its largest parameter."""
        largest: dict[int, Segment] = {}
        for segment in self.segments:
            best = largest.setdefault(segment.group, segment)
            if segment.stop - segment.start > best.stop - best.start:
                largest[segment.group] = segment
        return tuple(largest[group].name for group in range(self.groups))

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The vector's segments, in the parameters' shapes, sharing its memory."""
        return {s.name: vector[..., s.start : s.stop].view((*vector.shape[:-1], *s.shape)) for s in self.segments}

    def pack(self, tensors: Mapping[str, Tensor], lead: tuple[int, ...] = ()) -> Tensor:
        """A new flat vector with a copy of the named tensors, [*lead, size]; `lead` are their common leading axes."""
        return torch.cat([tensors[s.name].detach().reshape(*lead, -1) for s in self.segments], dim=-1)

    @cached_property
    def _paths(self) -> list[tuple[str, list[str], str]]:
        return [(s.name, s.name.split(".")[:-1], s.name.rpartition(".")[2]) for s in self.segments]

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """By their names; asked several times a step, so they are looked up and not searched for."""
        found: dict[str, Any] = {}
        for name, path, key in self._paths:
            owner: Any = model
            for part in path:
                owner = owner._modules[part]
            found[name] = owner._parameters[key]
        return found

    def expand(self, per_group: Tensor) -> Tensor:
        """A value per group, repeated over that group's coordinates: [..., groups] -> [..., size].

        >>> Layout((Segment("a", 0, (2,), group=1), Segment("b", 2, (1,), group=0))).expand(torch.tensor([5, 7]))
        tensor([7, 7, 5])
        """
        lengths = torch.tensor(self.lengths, device=per_group.device)
        owners = torch.tensor([s.group for s in self.segments], device=per_group.device)
        return per_group[..., owners].repeat_interleave(lengths, dim=-1)

    def summed(self, vector: Tensor) -> Tensor:
        """The sum over each group's coordinates: [..., size] -> [..., groups].

        >>> Layout((Segment("a", 0, (2,), group=1), Segment("b", 2, (1,), group=0))).summed(torch.tensor([1, 2, 4]))
        tensor([4, 3])
        """
        total = vector.new_zeros((*vector.shape[:-1], self.groups))
        for s in self.segments:
            total[..., s.group] += vector[..., s.start : s.stop].sum(-1)
        return total


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter; needed at every step, so faster than `next(model.parameters())`."""
    found = _first_parameter(model)
    if found is None:
        raise ValueError("the model has no parameter")
    return found.device


def _first_parameter(module: nn.Module) -> Tensor | None:
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():
        found = None if child is None else _first_parameter(child)
        if found is not None:
            return found
    return None


def compiled_in(model: nn.Module) -> bool:
    """Whether a module, or one inside it, was compiled."""
    return any(m._compiled_call_impl is not None or type(m).__name__ == "OptimizedModule" for m in model.modules())


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Every module of a model, each once; asked at every step, so faster than `model.modules()`."""
    modules, met = [model], {id(model)}
    for module in modules:  # which grows meanwhile
        for child in module._modules.values():
            if child is not None and id(child) not in met:
                met.add(id(child))
                modules.append(child)
    return modules


def call_with(
    model: nn.Module, values: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """A call of a model with these values in place of its parameters and buffers of the same names.

    Not `torch.func.functional_call`: where a module has two names, that leaves the values in the model. A forward pass
    that parametrises a weight for as long as it runs, as adapters of experts do, puts the value back as a buffer.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    wanted = {id(tensor): values[name] for name, tensor in named if name in values}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in modules_of(model):
        pairs += [(module._parameters, module._buffers), (module._buffers, module._parameters)]
    held = [(*pair, key, tensor) for pair in pairs for key, tensor in pair[0].items() if id(tensor) in wanted]
    try:
        for holder, _, key, tensor in held:
            holder[key] = wanted[id(tensor)]
        return model(*args, **(kwargs or {}))
    finally:
        for holder, other, key, tensor in held:
            other.pop(key, None)
            holder[key] = tensor


def _group_of(trainable: Mapping[str, Tensor], groups: Sequence[Sequence[str]]) -> dict[str, int]:
    group_of: dict[str, int] = {}
    for index, names in enumerate(groups):
        if not names:
            raise ValueError(f"group {index} is empty: it would take a share of the bound for nothing")
        for name in names:
            if name in group_of:
                raise ValueError(f"parameter {name!r} is in groups {group_of[name]} and {index}; it must be in one")
            group_of[name] = index
    left_out = [name for name in trainable if name not in group_of]
    if left_out:
        raise ValueError(f"parameter {left_out[0]!r} is in no group: it would be updated without noise; add it to one")
    unknown = [name for name in group_of if name not in trainable]
    if unknown:
        raise ValueError(f"group {group_of[unknown[0]]} names {unknown[0]!r}, which is not a trainable parameter")
    return group_of
