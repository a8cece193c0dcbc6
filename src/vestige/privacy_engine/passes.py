"""What do the user's own forward and backward passes leave? Each one is watched, or cut off and run again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from vestige.engines.independence import require_independent
from vestige.mechanism.clipping import Clip
from vestige.privacy_engine.accumulator import Finished, Gathered
from vestige.privacy_engine.coverage import require_noised
from vestige.privacy_engine.loaders import Part
from vestige.privacy_engine.replayed import Call, Caller, CallForm, floating
from vestige.privacy_engine.watched import Scaled, Uses, WatchedPass, add_watched


class Signal(torch.autograd.Function):
    """The model's outputs as leaves of the user's graph: what reaches them going back is handed to `receive`."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[[Sequence[Tensor]], None], anchor: Tensor, *outputs: Tensor) -> Any:
        ctx.receive = receive
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> Any:
        ctx.receive(signals)
        return (None, None, *[None] * len(signals))


@dataclass(frozen=True)
class Uncompiled:
    """Calls a module as it is where gradients are asked of it, and its compiled form elsewhere."""

    module: nn.Module
    compiled: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module._call_impl(*args, **kwargs) if _asks(self.module) else self.compiled(*args, **kwargs)


class Passes:
    """Follows the passes of the caller's module in training, and hands what they leave to `gathered`."""

    def __init__(self, caller: Caller, clip: Clip, gathered: Gathered) -> None:
        self._caller, self._module, self._clip, self._gathered = caller, caller.module, clip, gathered
        self.form: CallForm | None = None
        self.second_passes: str | None = None
        """Why the model is run twice, once that is known to be needed."""
        self.part: Part | None = None
        self.largest = inf
        """The most examples that the loader has handed out at once; the last part will not do, for a loop that takes
        its batches before it uses them."""
        self._anchor = torch.zeros((), requires_grad=True)
        self._open: tuple[Call, WatchedPass | None] | None = None
        self.settle()
        self._module.register_forward_pre_hook(self._before, with_kwargs=True)
        self._module.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def __deepcopy__(self, memo: Any) -> Passes:
        """A copy of the model, to be averaged or evaluated, does not copy the books: its hooks lead here."""
        return self

    def enter(self, part: Part) -> None:
        """A new physical batch is handed out. What an abandoned draw left behind was never released: it is dropped."""
        if self.part is not None and part.draw != self.part.draw and not self.part.last:
            self._gathered.forget()
        self.settle()
        self.largest = part.size if self.part is None else max(self.largest, part.size)
        self.part = part

    def settle(self) -> None:
        """No pass is under way: close what was interrupted, and see that the next one reaches the hooks.

        `module.compile()` puts a compiled graph around our hooks too; private passes go past it, others do not.
        """
        self._abandon()
        compiled: Any = self._module._compiled_call_impl
        if compiled is not None and not isinstance(compiled, Uncompiled):
            self._module._compiled_call_impl = Uncompiled(self._module, compiled)  # type: ignore[assignment]

    # --- a forward pass begins ---

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        asks = _asks(module)
        if module is not self._module and asks:
            raise ValueError("module is a copy of a private model: load its state_dict into a new one to train it")
        if self._caller.busy or module is not self._module:
            return None
        if self._open is not None:
            self._abandon()
            if module.training:
                raise ValueError("a forward pass of the model began inside another, or after one that was interrupted")
        if not asks:
            return None
        require_independent(module)  # as it is now: its modes may have changed
        require_noised(module, self._caller.released)
        if self._gathered.waiting:
            self._gathered.gather(watched=True)  # what several passes have left need not be held at once
        leaves, tree = tree_flatten((args, kwargs))
        # Detached: what is before the model gets no gradients, which would be of examples and without noise.
        kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call = Call(kept, tree, self._caller.random_state())
        if self.form is None and self.second_passes is None:
            self._rehearse(call)
        watch = self._watch(call)
        self._open = call, watch
        if watch is not None:
            watch.open()
        else:
            torch.set_grad_enabled(False)  # this pass only finds the outputs; the engine runs another for the gradients
        return tree_unflatten(kept, tree)

    def _rehearse(self, call: Call) -> None:
        found = self._caller.rehearse(call)
        if isinstance(found, str):
            self._twice(found)
        else:
            self.form = found

    def _twice(self, reason: str) -> None:
        self.second_passes = reason
        warnings.warn(f"{reason}: every step runs the model a second time, which is exact but slower", stacklevel=2)

    def _watch(self, call: Call) -> WatchedPass | None:
        """A watch for a pass of the form that was rehearsed, if nothing speaks against it."""
        if self.form is None or self.second_passes is not None:
            return None
        examples = self.form.examples(call)
        kind = self._caller.device.type
        if examples == 0 or (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16):
            return None  # the gradients of a mean are small: half precision would lose them
        part = self.part

        def finished(uses: Uses) -> None:
            add = partial(self._add_watched, uses, examples)
            self._gathered.waiting.append(Finished(part, examples, add, watched=True))

        return WatchedPass(self.form.plan, examples, self._caller.point(), finished)

    # --- it ends ---

    def _end(self) -> tuple[Call, WatchedPass | None]:
        assert self._open is not None
        (call, watch), self._open = self._open, None
        if watch is None:
            torch.set_grad_enabled(True)
        else:
            watch.close()
        return call, watch

    def _abandon(self) -> None:
        """Close a pass that was interrupted before its end."""
        if self._open is not None:
            _, watch = self._end()
            if watch is not None:
                watch.drop()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        if self._caller.busy or self._open is None or module is not self._module:
            return outputs
        call, watch = self._end()
        found, shape = tree_flatten(outputs)
        places = floating(found)
        if not places:
            return outputs
        if any(found[i].dim() == 0 for i in places):
            raise ValueError("the model returned a loss of the whole batch: compute the loss outside, from its outputs")
        call = replace(call, outputs=places, rows=len(found[places[0]]))
        self._require_rows(call, watch)
        leading = self._leading(call, watch, [found[i] for i in places])
        for place, tensor in zip(places, leading, strict=True):
            found[place] = tensor
        return tree_unflatten(found, shape)

    def _require_rows(self, call: Call, watch: WatchedPass | None) -> None:
        """A row is an example, at most once: each is bounded by itself, so one in several rows would move the sum by
        several bounds."""
        if not call.batched:
            problem = f"none of the tensors that it was called with has {call.rows} rows"
        elif call.rows > self.largest:
            problem = f"the loader handed out {self.largest:.0f} examples at once"
        else:
            return
        if watch is not None:
            watch.drop()
        raise ValueError(
            f"the model returned {call.rows} rows, but {problem}: every example must be one row of the model's "
            "inputs and outputs, and of one batch of the loader"
        )

    def _leading(self, call: Call, watch: WatchedPass | None, outputs: list[Tensor]) -> Sequence[Tensor]:
        """The outputs as the user gets them: with the model behind them if it was watched, else as ends of a graph."""
        if watch is not None:
            if self._as_rehearsed(call, watch, outputs):
                return watch.rooted(outputs)
            watch.drop()
        part = self.part

        def receive(signals: Sequence[Tensor]) -> None:
            add = partial(self._add_again, call, [signal.detach() for signal in signals])
            self._gathered.waiting.append(Finished(part, call.rows, add, watched=False))

        cut = [output.detach() for output in outputs]  # a graph that is not used must not be run either
        return Signal.apply(receive, self._anchor, *cut)  # type: ignore[no-any-return]

    def _as_rehearsed(self, call: Call, watch: WatchedPass, outputs: list[Tensor]) -> bool:
        """If in doubt, every pass is run again; if only the outputs differ, this one."""
        assert self.form is not None
        if watch.doubt is not None:
            self._twice(watch.doubt)
            return False
        return call.outputs == self.form.outputs and all(len(output) == watch.examples for output in outputs)

    # --- what a backward pass left is clipped ---

    def _add_watched(self, uses: Uses, examples: int, scale: int, into: Tensor) -> None:
        add_watched(uses, Scaled(self._clip, scale), self._caller.layout, into, examples)

    def _add_again(self, call: Call, signals: Sequence[Tensor], scale: int, into: Tensor) -> None:
        flat = torch.cat([signal.reshape(call.rows, -1) for signal in signals], dim=1) * scale
        self._caller.again(call, flat, self._clip, into)
        self.form = self.form and self.form.narrowed(call)


def _asks(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()
