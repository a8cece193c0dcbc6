"""How does the user call the model? The arguments of a call, flat."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

DIVISORS = ("num_items_in_batch",)
"""What callers divide a model's own loss by: everyone's tokens."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the user's."""

    leaves: list[Any]
    tree: TreeSpec
    in_order: bool = False
    """Whether all arguments are tensors, given by position."""

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Call:
        if not kwargs and all(type(each) is Tensor for each in args):
            return cls(list(args), _in_order(len(args)), in_order=True)
        return cls(*tree_flatten((args, kwargs)))

    @property
    def names(self) -> dict[int, str]:
        """Of arguments that are given by name, by their places."""
        if self.in_order:
            return {}
        _, named = tree_unflatten(list(range(len(self.leaves))), self.tree)
        return {place: name for name, place in named.items() if isinstance(place, int)}

    def names_in(self, forward: Callable[..., Any]) -> dict[int, str]:
        """Of all arguments, by their places, as the function calls them."""
        given, named = tree_unflatten(list(range(len(self.leaves))), self.tree)
        in_order = zip(_parameters(getattr(forward, "__func__", forward)), given, strict=False)
        return {place: name for name, place in (*in_order, *named.items()) if isinstance(place, int)}

    def with_leaves(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        return (leaves, {}) if self.in_order else tree_unflatten(list(leaves), self.tree)


@lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a method's arguments that are given in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds]
    return tuple(found[1:] if found[:1] == ["self"] else found)


@cache
def _in_order(count: int) -> TreeSpec:
    """The form of so many tensors, given by position."""
    return tree_flatten(((None,) * count, {}))[1]
