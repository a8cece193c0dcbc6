"""How does the user call the model? Which of the arguments hold examples, and which outputs, is tried out, not assumed.

A tensor that has as many rows as the batch has examples may hold them, or be as long by accident (a square mask, say).
So the model is called with two and with three made-up examples, and what has no examples in it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vestige.engines.per_example.rehearsal import (
    Dependent,
    Rehearsal,
    Unclear,
    Unwatchable,
    left_as_found,
    made_up,
    rehearsed,
)
from vestige.engines.per_example.taps import Taps, floating
from vestige.layout import Layout

MOST_GUESSES = 16


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the user's: its arguments, flat."""

    leaves: list[Any]
    tree: TreeSpec

    @property
    def kind(self) -> tuple[Any, ...]:
        """What calls of one form have in common: everything but how many rows they have."""
        return self.tree, tuple(_kind(leaf) for leaf in self.leaves)

    def with_rows(self, tensors: Sequence[Tensor], places: Sequence[int]) -> tuple[Any, Any]:
        leaves = list(self.leaves)
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.tree)  # type: ignore[no-any-return]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dim(), leaf.dtype
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)


@dataclass(frozen=True, eq=False)
class CallForm:
    """A form of call that was rehearsed."""

    taps: Taps
    batched: tuple[int, ...]
    """Which arguments hold examples, on their first axis."""
    outputs: tuple[int, ...]
    """Which outputs do."""
    rehearsal: Rehearsal

    def rows(self, call: Call) -> int:
        """How many rows a call of this form has; 0 if its arguments disagree."""
        found = {len(call.leaves[place]) for place in self.batched}
        return found.pop() if len(found) == 1 else 0


def form_of(module: nn.Module, layout: Layout, call: Call, rows: int) -> CallForm:
    """Find out which arguments of a call over so many rows hold examples, and how the model uses its parameters."""
    tensors = [place for place, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
    longest = [place for place in tensors if call.leaves[place].dim() and len(call.leaves[place]) == rows]
    if not longest:
        raise ValueError(
            f"none of the tensors that the model was called with has {rows} rows, as the batch has: put the examples "
            "on the first axis of the model's inputs"
        )
    problems: list[Exception] = []
    for batched in _guesses(longest):
        try:
            return _tried(module, Taps(module, layout), call, batched)
        except (Dependent, Unwatchable, Unclear) as problem:
            problems.append(problem)
        except Exception as problem:  # a call that is not meant so may raise anything
            problems.append(problem)
    first = problems[0]
    if isinstance(first, Dependent):
        raise first
    line = (str(first).strip() or type(first).__name__).splitlines()[0]
    raise ValueError(
        f"the model cannot be made private in this loop: tried out on made-up examples of these shapes, {line}"
    ) from first


def _guesses(places: list[int]) -> Iterator[tuple[int, ...]]:
    """All of them hold examples, or all but one, or all but two..."""
    count = 0
    for size in range(len(places), 0, -1):
        for chosen in combinations(places, size):
            count += 1
            if count > MOST_GUESSES:
                return
            yield chosen


def _tried(module: nn.Module, taps: Taps, call: Call, batched: tuple[int, ...]) -> CallForm:
    device = next(module.parameters()).device
    blank = [call.leaves[place][:0] for place in batched]
    constants = [
        torch.rand(leaf.shape, generator=torch.Generator().manual_seed(3)).to(leaf.device, leaf.dtype)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
        else leaf
        for leaf in call.leaves
    ]
    shown = Call(constants, call.tree)

    def called(rows: Sequence[Tensor]) -> list[Any]:
        args, kwargs = shown.with_rows([part.clone() for part in rows], batched)
        return tree_flatten(module(*args, **kwargs))[0]

    with left_as_found(module), torch.no_grad():
        holding = _growing(*(called(made_up(blank, size, 0, device)) for size in (2, 3)))

    def run(rows: Sequence[Tensor]) -> Tensor:
        found = called(rows)
        return torch.cat([found[place].reshape(len(rows[0]), -1).float() for place in holding], dim=1)

    rehearsal = rehearsed(taps, run, lambda size, seed: made_up(blank, size, seed, device))
    taps.kinds = dict(rehearsal.kinds)
    return CallForm(taps, batched, holding, rehearsal)


def _growing(two: list[Any], three: list[Any]) -> tuple[int, ...]:
    """Which outputs have a row for each example."""
    places = [place for place in floating(two) if two[place].dim() and len(two[place]) == 2]
    found = tuple(p for p in places if p < len(three) and isinstance(three[p], Tensor) and len(three[p]) == 3)
    if not found:
        raise Dependent(
            "no output of the model has a row for each example: compute a loss of the whole batch outside, from outputs"
        )
    return found
