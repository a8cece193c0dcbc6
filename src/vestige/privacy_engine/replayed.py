"""How did the user call the model, and how does an engine make that call again? With the user's random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.taps import TapPlan, eagerly
from vestige.layout import Grouping, Layout
from vestige.mechanism.clipping import Clip, GradientEngine, Loss, Parameters
from vestige.privacy_engine.watched import unwatchable


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the user's: its arguments, the random numbers it had, and, once known, its rows and outputs."""

    leaves: list[Any]
    tree: TreeSpec
    random_state: list[Tensor]
    rows: int = 0
    outputs: Sequence[int] = ()

    @property
    def tensors(self) -> list[int]:
        return [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    @property
    def batched(self) -> list[int]:
        """Which leaves have examples on their first axis: as many rows as the outputs."""
        return [i for i in self.tensors if self.leaves[i].dim() and len(self.leaves[i]) == self.rows]


@dataclass(frozen=True, eq=False)
class CallForm:
    """How the model was called when it was rehearsed, and how it is tapped; a pass of another form is not watched."""

    plan: TapPlan
    tree: TreeSpec
    tensors: list[int]
    batched: frozenset[int]
    outputs: Sequence[int]

    def examples(self, call: Call) -> int:
        """How many examples a call of this form is about; 0 if it has another form, or none."""
        if call.tree != self.tree or call.tensors != self.tensors:
            return 0
        rows = {len(call.leaves[place]) for place in self.batched if call.leaves[place].dim()}
        return rows.pop() if len(rows) == 1 else 0

    def narrowed(self, call: Call) -> CallForm:
        """Two batches of different sizes tell what has examples on its first axis."""
        return replace(self, batched=self.batched & frozenset(call.batched)) if call.tree == self.tree else self


class Adapter(nn.Module):
    """The user's model as the engines call it: tensors with examples first, one flat answer per example."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.call: Call | None = None

    def forward(self, *inputs: Tensor) -> Tensor:
        assert self.call is not None
        leaves = list(self.call.leaves)
        for place, tensor in zip(self.call.batched, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.call.tree)
        found = tree_flatten(self.module(*args, **kwargs))[0]
        return torch.cat(
            [found[i].flatten(1) if found[i].dim() > 1 else found[i][:, None] for i in self.call.outputs], dim=1
        )


class Caller:
    """Calls the user's model for an engine: again with what came back to a pass, or in rehearsal before the first."""

    def __init__(
        self,
        module: nn.Module,
        grouping: Grouping | None,
        engine: Callable[[nn.Module, Loss, Layout], GradientEngine],
    ) -> None:
        self.module, self._adapter = module, Adapter(module)
        self.layout = Layout.of(self._adapter, grouping and _inside(grouping))
        self.released = frozenset(segment.name.removeprefix("module.") for segment in self.layout.segments)
        """The parameters of the user's module that have a place in a release."""
        self._engine = engine(self._adapter, _along, self.layout)

    def again(self, call: Call, signals: Tensor, clip: Clip, into: Tensor) -> None:
        """Add the clipped sum of gradients that the user's backward pass would have made of these signals."""
        with self._as_called(call) as batch, torch.random.fork_rng(self._cuda):
            torch.random.set_rng_state(call.random_state[0])
            for state in call.random_state[1:]:
                torch.cuda.set_rng_state(state, self.device)
            self._engine([*batch, signals], self.point(), clip, into)

    def rehearse(self, call: Call) -> CallForm | str | None:
        """Can the user's passes be watched? In which form, or why not; None if this call cannot tell.

        With made-up signals, in place of a loss's.
        """
        if not isinstance(self._engine, BookKeeping):
            return None
        with torch.random.fork_rng(self._cuda):
            with self._as_called(call), torch.no_grad(), eagerly():
                args, kwargs = tree_unflatten(call.leaves, call.tree)
                found = tree_flatten(self.module(*args, **kwargs))[0]
            places = floating(found)
            rows = {len(found[i]) if found[i].dim() else 0 for i in places}
            if not rows or 0 in rows:
                return None
            if len(rows) > 1:
                return "the model's outputs have different numbers of rows"
            call = replace(call, outputs=places, rows=rows.pop())
            width = sum(found[i][0].numel() for i in places)
            random = torch.Generator().manual_seed(0)
            signals = 0.5 + torch.rand(call.rows, width, generator=random).to(self.device)
            with self._as_called(call) as batch, torch.enable_grad():
                plan = self._engine.plan([*batch, signals], self.point())
        if not self._engine.rehearsed:
            return None
        doubt = unwatchable(plan)
        if doubt is not None:
            return doubt
        assert plan is not None
        return CallForm(plan, call.tree, call.tensors, frozenset(call.batched), places)

    @property
    def busy(self) -> bool:
        """Is the model being called for an engine? Then it is no pass of the user's."""
        return self._adapter.call is not None

    @contextmanager
    def _as_called(self, call: Call) -> Iterator[list[Tensor]]:
        self._adapter.call = call
        try:
            yield [call.leaves[i] for i in call.batched]
        finally:
            self._adapter.call = None

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.layout.parameters(self._adapter)

    def point(self) -> Parameters:
        return {name: p.detach() for name, p in self.parameters().items()}

    def zeros(self) -> Tensor:
        return torch.zeros(self.layout.size, device=self.device)

    def random_state(self) -> list[Tensor]:
        return [torch.random.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda)]

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def _cuda(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []


def floating(leaves: Sequence[Any]) -> list[int]:
    """Which leaves are tensors that gradients can come back to."""
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _along(outputs: Tensor, signals: Tensor) -> Tensor:
    """The loss whose gradient at the outputs is the signal: its gradients in the parameters are the user's."""
    return (outputs * signals).sum()


def _inside(grouping: Grouping) -> Grouping:
    """A grouping of the user's module, in the names that its parameters have inside the adapter."""
    return lambda adapter: [[f"module.{name}" for name in group] for group in grouping(cast(Adapter, adapter).module)]
