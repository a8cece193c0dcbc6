"""What may the host look at in a pass that is recorded? At what follows from whole numbers of the inputs alone.

Some models ask whether a mask leaves anything out, and go a faster way if it does not. What they ask is computed again
before every replay, from the inputs as the replay will read them: a recording stands for batches with the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

aten = torch.ops.aten
MADE = frozenset({aten.arange, aten.ones, aten.zeros, aten.full, aten.scalar_tensor})
"""What makes the same numbers of nothing every time."""


@dataclass(frozen=True, eq=False)
class Input:
    """One of the inputs."""

    number: int
    varies = True

    def of(self, inputs: Sequence[Tensor], known: dict[int, Any]) -> Tensor:
        return inputs[self.number]


@dataclass(frozen=True, eq=False)
class Result:
    """What an operation makes of inputs and of other results."""

    function: Any
    arguments: tuple[Any, ...]
    form: Any
    varies: bool
    """Whether an input has a say in it."""

    def of(self, inputs: Sequence[Tensor], known: dict[int, Any]) -> Any:
        """For these inputs; `known` are results that were asked for before."""
        if id(self) not in known:
            given = [each.of(inputs, known) if isinstance(each, Input | Result) else each for each in self.arguments]
            args, kwargs = tree_unflatten(given, self.form)
            known[id(self)] = self.function(*args, **kwargs)
        return known[id(self)]


@dataclass(frozen=True, eq=False)
class Look:
    """SENSITIVE: what the host saw, and what it looked at; None if that is the same whatever the inputs are."""

    value: Any
    at: Result | None


class Origins:
    """Where whole numbers come from, as far as it is the inputs. What is written to is not followed any further."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._known: dict[int, tuple[Tensor, int, Input | Result]] = {}
        """By the tensors' own numbers, which are theirs as long as they are kept; with how often they were written to,
        by themselves or through a view."""
        self._last: tuple[Tensor, Result] | None = None
        """The last result. What it is a view of, if of anything, it does not know until it was returned."""
        for number, each in enumerate(inputs):
            if _whole(each):
                self._known[id(each)] = each, each._version, Input(number)

    def note(self, function: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        leaves, form = tree_flatten((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if function._schema.is_mutable:
            return
        follows = all(id(each) in self._known for each in tensors) and (
            bool(tensors) or function.overloadpacket in MADE
        )
        chance = torch.Tag.nondeterministic_seeded in function.tags
        if not follows or chance or not isinstance(result, Tensor) or not _whole(result):
            return
        given = tuple(self._known[id(leaf)][2] if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        varies = any(isinstance(each, Input | Result) and each.varies for each in given)
        self._last = result, Result(function, given, form, varies)

    def settle(self) -> None:
        """Before anything else is run."""
        if self._last is not None:
            tensor, result = self._last
            self._known[id(tensor)] = tensor, tensor._version, result
            self._last = None

    def of(self, tensor: Tensor) -> Result | None:
        if any(each._version != version for each, version, _ in self._known.values()):
            return None
        found = self._known[id(tensor)][2] if id(tensor) in self._known else None
        return found if isinstance(found, Result) else None


def _whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


class Otherwise(Exception):
    """Of this batch the host would see something else than it did when the pass was recorded."""


def pad(inputs: Sequence[Tensor], count: int) -> None:
    """Put the first row in the place of those after the examples: who asks whether something holds for all rows hears
    what he would if there were no padding."""
    for each in inputs:
        if _whole(each) and 0 < count < len(each):
            each[count:].copy_(each[:1])


def same(looks: Sequence[Look], inputs: Sequence[Tensor]) -> bool:
    """Whether the host would see of these inputs what it saw."""
    known: dict[int, Any] = {}
    with torch.no_grad():
        seen = [look.at.of(inputs, known) == look.value for look in looks if look.at is not None]
        return not seen or bool(torch.stack(seen).all())
