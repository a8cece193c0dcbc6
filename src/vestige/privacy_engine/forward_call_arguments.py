"""How does the user call the model? The arguments of a call, flat."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

DIVISORS = ("num_items_in_batch",)
"""What callers divide a model's own loss by: everyone's tokens."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the user's."""

    leaves: list[Any]
    tree: TreeSpec

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Call:
        return cls(*tree_flatten((args, kwargs)))

    def names(self, forward: Callable[..., Any] | None = None) -> dict[int, str]:
        """Of keyword arguments, by their places; of all arguments, where `forward` is given."""
        given, named = tree_unflatten(list(range(len(self.leaves))), self.tree)
        in_order = (
            () if forward is None else zip(_parameters(getattr(forward, "__func__", forward)), given, strict=False)
        )
        return {place: name for name, place in (*in_order, *named.items()) if isinstance(place, int)}


@lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a method's arguments that are given in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds]
    return tuple(found[1:] if found[:1] == ["self"] else found)
