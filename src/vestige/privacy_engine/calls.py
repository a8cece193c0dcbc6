"""How does the user call the model? Which of the arguments hold examples, and which outputs, is tried out, not assumed.

A tensor that has as many rows as the batch has examples may hold them, or be as long by accident (a square mask, say).
So the model is called with two and with three made-up examples, and what has no examples in it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vestige.engines.per_example.taps import Shapes, Taps, floating
from vestige.engines.rehearsal.rehearsing import (
    Dependent,
    Rehearsal,
    Unwatchable,
    WrongRule,
    endings,
    first_line,
    left_as_found,
    made_up,
    raisings,
    rehearsed,
    single_axes,
)
from vestige.layout import Layout

ONE_BY_ONE = "`vestige.train` runs a model that cannot be watched one example at a time"
MOST_GUESSES = 16


def flat(args: Any, kwargs: Any) -> tuple[list[Any], TreeSpec]:
    """The arguments of a call, flat."""
    if not kwargs and all(type(each) is Tensor for each in args):
        return list(args), _in_order(len(args))
    return tree_flatten((args, kwargs))


@cache
def _in_order(count: int) -> TreeSpec:
    """The form of so many tensors, given by position."""
    return tree_flatten(((None,) * count, {}))[1]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the user's: its arguments, flat."""

    leaves: list[Any]
    tree: TreeSpec

    @property
    def kind(self) -> tuple[Any, ...]:
        """What calls of one form have in common: everything but how many rows they have, and how long these are."""
        return self.tree, tuple(_kind(leaf) for leaf in self.leaves)

    @property
    def names(self) -> dict[int, str]:
        """Of arguments that are given by name, by their places."""
        _, named = tree_unflatten(list(range(len(self.leaves))), self.tree)
        return {place: name for name, place in named.items() if isinstance(place, int)}

    def shapes(self, batched: Sequence[int]) -> Shapes:
        """Of all tensors, without the axis of examples where there is one."""
        tensors = [(place, leaf) for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        return tuple(tuple(leaf.shape[1:] if place in batched else leaf.shape) for place, leaf in tensors)

    def with_rows(self, tensors: Sequence[Tensor], places: Sequence[int]) -> tuple[Any, Any]:
        leaves = list(self.leaves)
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.tree)  # type: ignore[no-any-return]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dim(), leaf.dtype, single_axes([leaf])
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
    made: Callable[..., list[Tensor]]
    """Made-up examples that the model takes: how many, of which seed, and, if they are to be longer or shorter than
    those of the first call, tensors like them."""

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
        left = [place for place in longest if place not in batched]
        try:
            form = _tried(module, Taps(module, layout), call, batched)
            _require_constant(module, form, call, left)
            return form
        except Exception as problem:  # a call that is not meant so may raise anything
            problems.append(problem)
    first = problems[0]
    if isinstance(first, Dependent | WrongRule):
        raise first
    wayout = f". {ONE_BY_ONE}" if isinstance(first, Unwatchable) else ""
    raise ValueError(
        f"the model cannot be made private in this loop: tried out on made-up examples of these shapes, "
        f"{first_line(first)}{wayout}"
    ) from first


def _require_constant(module: nn.Module, form: CallForm, call: Call, left: Sequence[int]) -> None:
    """A tensor as long as the batch holds no examples only if the model cannot run with more rows of it."""
    shown = _shown(call, form.rows(call))
    for place in left:
        longer = list(shown.leaves)
        longer[place] = torch.cat([longer[place], longer[place][:1]])
        args, kwargs = Call(longer, call.tree).with_rows(form.made(2, 0), form.batched)
        try:
            with left_as_found(module), torch.no_grad():
                module(*args, **kwargs)
        except Exception:
            continue
        raise Dependent(
            "one of the model's arguments has as many rows as the batch, and it cannot be told whether they are "
            "examples: if they are not, make the tensor a buffer of the model"
        )


def _shown(call: Call, rows: int) -> Call:
    """The call with made-up numbers, and zeros for whole numbers that may be of examples."""
    return Call([_made_up_leaf(leaf, rows) for leaf in call.leaves], call.tree)


def _made_up_leaf(leaf: Any, rows: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_floating_point():
        return torch.rand(leaf.shape, generator=torch.Generator().manual_seed(3)).to(leaf.device, leaf.dtype)
    return torch.zeros_like(leaf) if leaf.dim() and len(leaf) == rows else leaf


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
    """The form in which these arguments hold examples; with whole numbers that the model takes."""
    problems: list[Exception] = []
    ways = raisings([call.leaves[place] for place in batched])
    for ending, raised in ((ending, raised) for ending in endings(module) for raised in ways):
        try:
            return _with_numbers(module, taps, _shown(call, len(call.leaves[batched[0]])), batched, raised, ending)
        except (Dependent, Unwatchable, WrongRule):
            raise
        except Exception as problem:
            problems.append(problem)
    raise problems[0]


def _with_numbers(
    module: nn.Module,
    taps: Taps,
    shown: Call,
    batched: tuple[int, ...],
    raised: tuple[int, ...],
    ending: int | None,
) -> CallForm:
    device = next(module.parameters()).device
    blank = [shown.leaves[place][:0] for place in batched]

    def called(rows: Sequence[Tensor]) -> list[Any]:
        args, kwargs = shown.with_rows([part.clone() for part in rows], batched)
        return tree_flatten(module(*args, **kwargs))[0]

    def made(size: int, seed: int, like: Sequence[Tensor] | None = None) -> list[Tensor]:
        shapes = blank if like is None else [part[:0] for part in like]
        return made_up(shapes, size, seed, device, raised, ending)

    with left_as_found(module), torch.no_grad():
        holding = _growing(called(made(2, 0)), called(made(3, 0)))

    def run(rows: Sequence[Tensor]) -> Tensor:
        found = called(rows)
        return torch.cat([found[place].reshape(len(rows[0]), -1).float() for place in holding], dim=1)

    rehearsal = rehearsed(taps, run, made)
    taps.kinds, taps.recorded = dict(rehearsal.kinds), rehearsal.recorded
    taps.shapes = shown.shapes(batched)
    return CallForm(taps, batched, holding, rehearsal, made)


def _growing(two: list[Any], three: list[Any]) -> tuple[int, ...]:
    """Which outputs have a row for each example."""
    places = [place for place in floating(two) if two[place].dim() and len(two[place]) == 2]
    found = tuple(p for p in places if p < len(three) and isinstance(three[p], Tensor) and len(three[p]) == 3)
    if not found:
        raise Dependent(
            "no output of the model has a row for each example: compute a loss of the whole batch outside, from outputs"
        )
    return found
