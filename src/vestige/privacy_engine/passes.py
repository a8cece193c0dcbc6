"""What do the user's own forward and backward passes leave? Every example's gradient, in factored form.

For the length of the user's forward pass the model's trainable parameters are watched, so that `loss.backward()`
computes the gradients of activations only. What cannot be watched, or is about examples that did not come through the
private loader, is refused before anything is released.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_unflatten

from vestige.engines.bookkeeping import add_weighted
from vestige.engines.independence import require_independent
from vestige.engines.per_example.expressions import ANCHOR, Pass
from vestige.engines.per_example.gradients import Gradient, change, combine
from vestige.engines.per_example.taps import Shapes, floating
from vestige.engines.planted import TOGETHER, Canaries
from vestige.engines.writes import Versions, Writes
from vestige.entrances import Entrance, stand_at
from vestige.layout import Layout, compiled_in, device_of, modules_of
from vestige.mechanism.clipping import LARGEST_SUM, Clip, Parameters, RunningSum
from vestige.privacy_engine.calls import ONE_BY_ONE, Call, CallForm, flat, form_of
from vestige.privacy_engine.coverage import require_noised
from vestige.privacy_engine.labels import Labelled, Labels
from vestige.privacy_engine.lengths import Lengths
from vestige.privacy_engine.outputs import End, Reduction, Rowless, watch_backward_passes
from vestige.privacy_engine.parts import Part, Parts, require_known_processes, require_no_accumulation
from vestige.privacy_engine.recorded.recorder import Asked, Recorder
from vestige.privacy_engine.recorded.recordings import Replay, Uses
from vestige.processes.loops import ShardedLoop
from vestige.processes.plan import fsdp_in, silence_wrapper
from vestige.processes.shards import ShardedSum

Signals = Sequence[Tensor]
UNCOMPILED = (
    "the model is compiled, but its private passes run uncompiled: a compiled graph would run past the uses that are "
    "watched"
)


@dataclass
class Pending:
    """SENSITIVE: what the backward passes about one part have left since the last step, not yet clipped."""

    part: Part
    examples: int
    uses: Uses = field(default_factory=dict)
    replay: Replay | None = None
    """Where they were left instead, if the pass was a recorded one."""

    def add(self, uses: Uses) -> None:
        for name, gradients in uses.items():
            self.uses.setdefault(name, []).extend(gradients)

    def unroll(self) -> None:
        """Take the gradients out of the recordings' memory: more are to be added to them."""
        if self.replay is not None:
            replay, self.replay = self.replay, None
            self.add(replay.unrolled())


@dataclass
class Open:
    """A forward pass of the user's that is under way."""

    now: Pass
    form: CallForm
    stack: ExitStack
    buffers: Versions
    shapes: Shapes
    """Of what the model was called with, but for the rows."""
    replay: Replay | None = None
    """The recorded pass that takes its place."""
    tasks: dict[int, Uses | None] = field(default_factory=dict)
    """What each backward pass through it has brought so far; None if that is in the recordings' memory."""
    dropped: bool = False


class PrivateEntrance(Entrance):
    """Calls of a private module: as it is where gradients are asked of it, by its compiled form elsewhere."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passes: Passes = self.owner
        module = passes.module
        if not asks(module):
            return (self.compiled or module._call_impl)(*args, **kwargs)
        if passes.busy:
            return module._call_impl(*args, **kwargs)
        traced = self.dynamo and torch.compiler.is_compiling()
        return self.privately(passes, traced or self.compiled is not None, args, kwargs)


def private_call(passes: Passes, compiled: bool, args: Any, kwargs: Any) -> Any:
    """A call of a private module that gradients are asked of; also where it was to be `compiled`."""
    if (compiled or passes.compiled) and not passes.said_compiled:
        passes.said_compiled = True
        warnings.warn(UNCOMPILED, stacklevel=2)
    module = passes.module
    attributes, forward = vars(module), module.forward
    own = attributes.get("forward")
    attributes["forward"] = passes.entered(forward)
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        if own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = own


def asks(module: nn.Module) -> bool:
    """Whether gradients are asked of a call of the module."""
    return module.training and torch.is_grad_enabled()


class Passes:
    """Follows the training passes of a module, and adds up the clipped gradients of the parts that they are about."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        clip: Clip,
        reduction: str,
        parts: Parts,
        sizes: Sequence[int] = (),
        tokens: int | None = None,
        canaries: Canaries | None = None,
        sharded: ShardedLoop | None = None,
    ) -> None:
        """`sizes` are those of batches to record passes for; `tokens` divides a loss of tokens that the model computes
        itself; `canaries` are those that draws name, added once a sum outside all passes. Of a `sharded` module this
        is about the twin that its passes run in."""
        self.module, self.layout, self.sharded = module, layout, sharded
        self._recorder = Recorder(module, self.layout, clip, sizes, self.vector)
        self._vector: Tensor | None = None
        self._labels = Labels(module, tokens)
        self._labelled: tuple[Labelled, dict[str, Tensor]] | None = None
        self._clip, self._said, self.parts, self.canaries = clip, reduction, parts, canaries
        self.total: RunningSum | ShardedSum | None = None
        """SENSITIVE: the clipped sum of the parts of a draw that steps have closed."""
        self._closed: int | None = None
        """The draw that they belong to."""
        self.start_sum: Callable[[], RunningSum | ShardedSum] = lambda: RunningSum(self.layout.size, self.device)
        """What the sum of a draw begins with."""
        self.lengths = Lengths()
        self.assumed = False
        """Whether a loss was met of which something must be assumed."""
        self._writes = Writes(module)
        self._pending: list[Pending] = []
        self._forms: dict[Any, CallForm] = {}
        self._open: Open | None = None
        self._forward = module.forward
        self._recomputing: list[ExitStack] = []
        self.busy = self.said_compiled = False
        self.compiled = compiled_in(module)
        """Whether it was when it became private."""
        watch_backward_passes()
        parts.listener = self._uncompile
        self.settle()
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def __deepcopy__(self, memo: Any) -> Passes:
        """A copy of the model, to be averaged or evaluated, does not copy the books: its hooks lead here."""
        return self

    def __reduce__(self) -> Any:
        """A model that is saved whole takes along its weights, not the books."""
        return Elsewhere, ()

    @property
    def device(self) -> torch.device:
        return device_of(self.module)

    def vector(self) -> Tensor:
        """SENSITIVE: one vector of the gradient's size, in which recorded passes leave their clipped sums. It is not
        where the optimizer finds its gradient: others may hold on to that from step to step."""
        if self._vector is None or self._vector.device != self.device:
            self._vector = torch.zeros(self.layout.size, device=self.device)
        return self._vector

    def parameters(self) -> dict[str, nn.Parameter]:
        try:
            return self.layout.parameters(self.module)
        except KeyError:
            raise ValueError(
                "modules of the private model were replaced after make_private, and the new ones would move without "
                "noise: make_private comes last (adapters: get_peft_model comes before it)"
            ) from None

    def point(self, parameters: Mapping[str, nn.Parameter] | None = None) -> Parameters:
        """`parameters` are those of now, where they are known already."""
        found = self.parameters() if parameters is None else parameters
        return {name: p.detach() for name, p in found.items()}

    def settle(self) -> None:
        """No pass is under way: close what was interrupted, and see that the next one reaches the hooks."""
        self._abandon()
        for stack in self._recomputing:  # of backward passes that failed
            stack.close()
        self._recomputing = []
        self._uncompile()

    def _uncompile(self) -> None:
        """Calls of the module come here first. `module.compile()` puts a compiled graph around our hooks too; private
        passes go past it, others do not."""
        stand_at(self.module, PrivateEntrance, self, private_call)
        if self.sharded is not None:
            self.sharded.redirect()

    # --- what has come back -------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Forget the passes since the last call of `step`, as `zero_grad` does in ordinary training."""
        self._pending = []

    def close_part(self) -> bool:
        """Clip what the passes since the last call of `step` left, each example once, and add it to the sum of its
        draw; whether the draw is then complete."""
        if not self._pending:
            raise ValueError(
                "optimizer.step() was called without a backward pass about a batch of the private loader: nothing was "
                "asked, and a step of noise alone would be charged for nothing"
            )
        draws = sorted({each.part.draw for each in self._pending})
        if len(draws) > 1:
            self._pending = []
            raise ValueError(
                f"this step is about {len(draws)} draws of the private loader: each is priced as one step. For larger "
                "batches draw larger ones (batch_size), and let max_physical_batch_size split them"
            )
        if self.total is None or self._closed != draws[0]:  # what an unfinished draw left was never released
            self.total, self._closed = self.start_sum(), draws[0]
        closing = self._pending[-1].part
        try:
            with torch.no_grad():
                self._add_up(self.total, draws[0], closing.last)
        except BaseException:  # who is in the sum already cannot be told: nobody is twice, if nobody is
            self.forget()
            raise
        self._pending = []
        self.parts.stepped()
        if closing.planted:
            self._plant(torch.tensor(closing.planted))
        return closing.last

    def forget(self) -> None:
        """Nothing of the draw was added up, and no pass is left to be."""
        for each in self._pending:
            if each.replay is not None:
                each.replay.over()
        self._pending, self.total, self._closed = [], None, None

    def _add_up(self, total: RunningSum | ShardedSum, draw: int, last: bool) -> None:
        shares = self._shares(total)
        if self.sharded is not None:
            assert isinstance(total, ShardedSum)
            self.sharded.in_rounds(draw, last, shares, total)
            return
        for share in shares:
            share()
        if not last and isinstance(total, RunningSum):
            total.settle()  # more passes come before its noise

    def _shares(self, total: RunningSum | ShardedSum) -> Iterator[Callable[[], object]]:
        """What the passes since the last call of `step` left, few examples at once: each call adds some."""
        for each in self._pending:
            if each.replay is not None:
                if each.part.size:
                    yield partial(each.replay.clip, each.examples, total)  # type: ignore[arg-type]
                each.replay.over()
            elif each.part.size and each.uses:
                gradients = {name: combine(parts) for name, parts in each.uses.items()}
                for first in range(0, each.examples, LARGEST_SUM):
                    rows = min(LARGEST_SUM, each.examples - first)
                    few = gradients
                    if rows < each.examples:
                        cut = itemgetter(slice(first, first + rows))
                        few = {name: change(gradient, cut) for name, gradient in gradients.items()}
                    yield partial(add_weighted, few, self._clip, self.layout, total.place(rows), rows)

    def _plant(self, numbers: Tensor) -> None:
        """Add the canaries of a draw to its sum, clipped like everybody's gradient."""
        assert self.canaries is not None
        assert isinstance(self.total, RunningSum)
        self.canaries.to(self.device)
        for few in numbers.split(TOGETHER):
            self.canaries.add(few, self._clip, self.total.place(len(few)))

    def taken(self) -> tuple[int, Tensor]:
        """SENSITIVE: a complete draw and its clipped sum, which is then forgotten here."""
        assert self.total is not None
        assert self._closed is not None
        found = self._closed, self.total.total()
        self.total = self._closed = None
        return found

    def _finished(self, part: Part, examples: int, uses: Uses | None, replay: Replay | None) -> None:
        """A backward pass is complete. Several about one part add up before they are clipped: each example once."""
        self.parts.use(part)
        if not (self._pending and self._pending[-1].part is part):
            self._pending.append(Pending(part, examples, replay=replay if uses is None else None))
            uses = uses or {}
        held = self._pending[-1]
        if uses:
            held.unroll()
            held.add(uses)
        elif uses is None and replay is not None:
            held.add(replay.unrolled())

    # --- a forward pass begins ----------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        asked = asks(module)
        if module is not self.module:
            if asked:
                raise ValueError("module is a copy of a private model: load its state_dict into a new one to train it")
            return None
        if self.busy:
            return None
        if self._open is not None:
            self._abandon()
            if module.training:
                raise ValueError("a forward pass of the model began inside another, or after one that was interrupted")
        if not asked:
            return None
        modules = modules_of(module)
        self._require_usable(modules)
        leaves, tree = flat(args, kwargs)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise ValueError(
                "an input of the private model requires a gradient: what comes before the model would be trained on "
                "gradients of examples without noise. Make it part of the module, or detach the input; to train a "
                "generator against a private discriminator, call the discriminator in eval mode"
            )
        labelled, labels = self._with_labels(args, kwargs)
        if labelled is not None:
            kwargs = labelled.given(kwargs)
            leaves, tree = flat(args, kwargs)
        call = Call(leaves, tree)
        form = self._form(call)
        self._begin(form, call, modules, labelled is not None)
        self._labelled = None if labelled is None else (labelled, labels)
        return args, kwargs

    def _with_labels(self, args: Any, kwargs: Any) -> tuple[Labelled | None, dict[str, Tensor]]:
        self.busy = True
        try:
            return self._labels.of(args, kwargs)
        finally:
            self.busy = False

    def _require_usable(self, modules: Sequence[nn.Module]) -> None:
        require_no_accumulation()
        require_known_processes()
        silence_wrapper()
        if fsdp_in(modules):
            raise ValueError(
                "the module was sharded (fully_shard) after make_private, and its optimizer holds other tensors now: "
                "call fully_shard first, make the optimizer of its parameters, then call make_private"
            )
        require_independent(self.module, modules)  # as it is now: its modes may have changed
        require_noised(self.module, self.parameters(), modules)
        kind = self.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise ValueError(
                "autocast in float16 loses the small gradients of single examples: use torch.autocast with "
                "dtype=torch.bfloat16, which needs no GradScaler"
            )

    def _form(self, call: Call) -> CallForm:
        key = (self.module.training, call.kind)
        found = self._forms.get(key)
        if found is None:
            rows = {part.rows for part in self.parts.waiting()}
            candidates = [len(leaf) for leaf in call.leaves if isinstance(leaf, Tensor) and leaf.dim()]
            length = next((each for each in candidates if each in rows), candidates[0] if candidates else 0)
            self.busy = True
            try:
                found = self._forms[key] = form_of(self.module, self.layout, call, length)
            finally:
                self.busy = False
        return found

    def entered(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for the module's forward pass in a call: a replay, where a recorded pass takes its place."""
        self._forward = forward
        return partial(self._passed, forward)

    def _passed(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        opened = self._open
        return forward(*args, **kwargs) if opened is None or opened.replay is None else opened.replay.outputs()

    def _begin(self, form: CallForm, call: Call, modules: Sequence[nn.Module], replaced: bool) -> None:
        """`replaced` says whether the model's own loss will be."""
        rows = form.rows(call)
        if rows == 0:
            raise ValueError("the tensors that the model was called with have different numbers of rows, or none")
        opened: Open
        shapes = call.shapes(form.batched)
        replay = self._recorder.begin(Asked(self._forward, form, call, replaced), rows, modules)
        if replay is None:
            now = form.taps.start(rows, self.point(), lambda uses: self._deliver(opened, uses), shapes)
        else:  # nothing is delivered, and nobody but the user's graph holds on to what is opened
            now = form.taps.start(rows, {}, lambda uses: None, shapes)
        now.inside = False
        stack = ExitStack()
        opened = self._open = Open(now, form, stack, self._writes.versions(), shapes, replay)
        if replay is None:
            stack.enter_context(form.taps.watching(now))

    # --- it ends ------------------------------------------------------------------------------------------------------

    def _abandon(self) -> None:
        """Close a pass that was interrupted before its end."""
        if self._open is not None:
            self._open.dropped = True
            self._open.stack.close()
            self._open = None

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        if self.busy or self._open is None or module is not self.module:
            return outputs
        opened, self._open = self._open, None
        opened.stack.close()
        if outputs is None:  # the forward pass has failed
            opened.dropped = True
            return outputs
        self._check(opened)
        alone = type(outputs) is Tensor
        found, shape = ([outputs], None) if alone else tree_flatten(outputs)
        places, rows = opened.form.outputs, opened.now.examples
        if not all(place < len(found) and _has_rows(found[place], rows) for place in places):
            opened.dropped = True
            raise ValueError(f"the model's outputs are not as rehearsed: each must have {rows} rows")
        for place in floating(found):
            if place not in places:
                found[place] = Rowless.apply(ANCHOR, found[place].detach())
        part = self.parts.take(rows)
        reached = partial(self._reached, opened, part)
        ends = End.apply(reached, ANCHOR, rows, self._said, *(found[place] for place in places))
        for place, tensor in zip(places, ends, strict=True):
            found[place] = tensor
        outputs = found[0] if shape is None else tree_unflatten(found, shape)
        if self._labelled is not None:
            labelled, labels = self._labelled
            self._labelled = None
            return labelled.with_loss(outputs, labels)
        return outputs

    def _check(self, opened: Open) -> None:
        """The pass was what the rehearsal said, and left nothing behind."""
        if opened.now.doubt is not None:
            opened.dropped = True
            raise ValueError(f"this pass of the model cannot be made private: {opened.now.doubt}. {ONE_BY_ONE}")
        try:
            self._writes.require_unchanged(opened.buffers, opened.form.rehearsal.changing)
        except ValueError:
            opened.dropped = True
            raise

    # --- the way back -------------------------------------------------------------------------------------------------

    def _reached(self, opened: Open, part: Part | None, reduction: Reduction) -> Callable[[Signals], None] | None:
        """A backward pass has come to the outputs of the model; if the pass was recorded, what takes it on."""
        if opened.dropped:
            raise ValueError("this backward pass goes through a forward pass of the model that was broken off")
        if part is None or not self.parts.usable(part):
            raise ValueError(
                f"this pass of the model is about {opened.now.examples} rows, but {self.parts.expected()}: train on "
                "the batches of the loader that make_private returned, each in one step, in order and leaving none out"
            )
        self.lengths.met(opened.shapes, reduction.averaged)
        self.assumed = self.assumed or not reduction.seen
        opened.now.going_back = True
        task = torch._C._current_graph_task_id()
        opened.tasks[task] = {}
        if opened.now.recomputes:
            opened.stack.enter_context(opened.form.taps.watching(opened.now))
            self._recomputing.append(opened.stack)
        Variable._execution_engine.queue_callback(  # type: ignore[attr-defined]
            partial(self._finish, opened, part, task)
        )
        return None if opened.replay is None else partial(self._back, opened, opened.replay, task)

    def _back(self, opened: Open, replay: Replay, task: int, signals: Signals) -> None:
        if replay.went_back:  # the recordings' memory is for one backward pass
            for each in self._pending:
                each.unroll()
        opened.tasks[task] = replay.back(signals)

    def _deliver(self, opened: Open, uses: Mapping[str, Gradient]) -> None:
        """Sorted by backward pass; one that fails leaves nothing."""
        held = opened.tasks[torch._C._current_graph_task_id()]
        assert held is not None, "a recorded pass delivers nothing"
        for name, gradient in uses.items():
            held.setdefault(name, []).append(gradient)

    def _finish(self, opened: Open, part: Part, task: int) -> None:
        opened.stack.close()
        self._recomputing = [stack for stack in self._recomputing if stack is not opened.stack]
        self._finished(part, opened.now.examples, opened.tasks.pop(task), opened.replay)


def _has_rows(output: Any, rows: int) -> bool:
    return isinstance(output, Tensor) and output.dim() > 0 and len(output) == rows


class Elsewhere:
    """What is left of the books in a model that was saved whole and loaded again: an ordinary model."""

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        return None

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        return outputs
