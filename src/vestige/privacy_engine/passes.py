"""What do the user's own forward and backward passes leave? Every example's gradient, in factored form.

For the length of the user's forward pass the model has stand-ins for its trainable parameters, so that
`loss.backward()` computes the gradients of activations, and of parameters each example's part. What cannot be proved to
keep examples apart, or is about examples that did not come through the private loader, is refused before anything is
released.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_unflatten

from vestige.call_interception import CallInterceptor, install_interceptor
from vestige.engines.audit_canaries import Canaries
from vestige.engines.bookkeeping import add_weighted
from vestige.engines.example_axis.before_dispatch import ONE_BY_ONE, ReadCount, ReadNumber, reduced
from vestige.engines.example_axis.labels import Mixed, NotApart, Rows, Tracker, without_modes
from vestige.engines.example_axis.tracked_model import ANCHOR, TrackedModel, require_unwritten
from vestige.engines.independence import require_independent
from vestige.engines.per_example.execution import unseen, unseen_by_functions
from vestige.engines.per_example.gradient_forms import Gradient, change, combine, differentiable
from vestige.engines.per_example.sums_of_users import RowCounts, UserRows
from vestige.layout import Layout, compiled_in, device_of, modules_of
from vestige.mechanism.clipping import LARGEST_SUM, Clip, Parameters, RunningSum
from vestige.privacy_engine.captured_passes import CapturedPasses, Replay
from vestige.privacy_engine.forward_call_arguments import DIVISORS, Call
from vestige.privacy_engine.microbatch_queue import (
    Microbatch,
    MicrobatchQueue,
    require_known_processes,
    require_no_accumulation,
)
from vestige.privacy_engine.optimizer_parameter_checks import require_noised
from vestige.privacy_engine.output_autograd_functions import End, NotPerExample, Signals
from vestige.privacy_engine.padding_in_loss_divisor import Lengths, Shapes
from vestige.privacy_engine.row_labels import Tracking, following
from vestige.processes.distributed_setup import fsdp_in, silence_wrapper
from vestige.processes.loops_of_sharded_models import ShardedLoop
from vestige.processes.parameter_shards import ShardedSum

Uses = dict[str, list[Gradient]]
Output = tuple[Rows, int | Tensor, torch.dtype]
"""The label of an output of the model, by what its gradient is multiplied, and its type."""
COMPILED = "per-example gradients need eager mode: torch.compile is ignored in private passes"


@dataclass
class Pending:
    """SENSITIVE: what the backward passes about one part have left since the last step, not yet clipped."""

    part: Microbatch
    examples: int
    uses: Uses = field(default_factory=dict)
    replay: Replay | None = None
    """Where they were left instead, if the pass was a captured one."""

    def add(self, uses: Uses) -> None:
        for name, gradients in uses.items():
            self.uses.setdefault(name, []).extend(gradients)

    def take_out(self) -> None:
        """Take the gradients out of the graphs' memory: more are to be added to them."""
        if self.replay is not None:
            replay, self.replay = self.replay, None
            self.add(replay.again())


class Tasks(dict[int, Uses | None]):
    """What each backward pass through a forward pass has brought so far; None if that is in the graphs' memory."""


@dataclass
class Open:
    """A forward pass of the user's."""

    examples: int
    batch: int
    """The number of the batch that it is about: rows of an earlier one are not this one's."""
    shapes: Shapes
    """Of what the model was called with, but for the rows."""
    span: tuple[int, int] = (0, 0)
    """The numbers of the nodes of autograd's graph that it has made."""
    stack: ExitStack = field(default_factory=ExitStack)
    tasks: Tasks = field(default_factory=Tasks)
    replay: Replay | None = None


class PrivateCall(CallInterceptor):
    """Calls of a private module: as it is where gradients are asked of it, by its compiled form elsewhere."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passes: Passes = self.owner
        module = passes.module
        if not asks(module):
            return (self.compiled or module._call_impl)(*args, **kwargs)
        traced = self.dynamo and torch.compiler.is_compiling()
        return self.privately(passes, traced or self.compiled is not None, args, kwargs)


def private_call(passes: Passes, compiled: bool, args: Any, kwargs: Any) -> Any:
    """A call of a private module that gradients are asked of; also where it was to be `compiled`."""
    if (compiled or passes.compiled) and not passes.said_compiled:
        passes.said_compiled = True
        warnings.warn(COMPILED, stacklevel=2)
    module = passes.module
    attributes, forward = vars(module), module.forward
    own = attributes.get("forward")
    attributes["forward"] = partial(passes.run, forward)
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
        queue: Callable[[Tracking, Callable[[], None]], MicrobatchQueue],
        sizes: Sequence[int] = (),
        tokens: int | None = None,
        canaries: Canaries | None = None,
        sharded: ShardedLoop | None = None,
        users: RowCounts | None = None,
    ) -> None:
        """`queue` makes the queue of the parts that passes may be about; `sizes` are those of batches to record passes
        for; `tokens` divides a loss of tokens that the model computes itself; `canaries` take the places of rows in the
        parts that name them; `users` with several rows are clipped once each. Of a `sharded` module this is about the
        twin that its passes run in."""
        self.module, self.layout, self.sharded = module, layout, sharded
        self._vector: Tensor | None = None
        self.tracking = Tracking(self, tokens)
        self._model = TrackedModel(module, layout)
        self._captured = CapturedPasses(module, layout, clip, sizes, self.tracking, self._model, self.vector, users)
        self._clip, self._said, self.canaries = clip, reduction, canaries
        self.parts = queue(self.tracking, self._uncompile)
        self.total: RunningSum | ShardedSum | None = None
        """SENSITIVE: the clipped sum of the parts of a draw that steps have closed."""
        self._closed: int | None = None
        """The draw that they belong to."""
        self.start_sum: Callable[[], RunningSum | ShardedSum] = lambda: RunningSum(self.layout.size, self.device)
        """What the sum of a draw begins with."""
        self.lengths = Lengths()
        self.assumed = False
        """Whether a loss was met of which something must be assumed."""
        self.written = False
        """Whether something else than steps and passes has written to the model."""
        self._after_step: int | None = None
        """How often the model had been written to when the last step was over."""
        self._pending: list[Pending] = []
        self._recomputing: list[ExitStack] = []
        self.said_compiled = False
        self.compiled = compiled_in(module)
        """Whether it was when it became private."""
        self.settle()
        module.register_forward_pre_hook(self._refuse_copies)

    def __deepcopy__(self, memo: Any) -> Passes:
        """A copy of the model, to be averaged or evaluated, does not copy the books: its hooks lead here."""
        return self

    def __reduce__(self) -> Any:
        """A model that is saved whole takes along its weights, not the books."""
        return NotSaved, ()

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
        with unseen():
            return {name: p.detach() for name, p in found.items()}

    def settle(self) -> None:
        """No pass is under way: close what was interrupted, and see that the next one comes here."""
        try:
            self.tracking.labels.require_held(self.tracking.tracker)
        except NotApart as problem:
            self.discard()
            raise ValueError(problem) from None
        finally:
            self.tracking.stop()
        for stack in self._recomputing:  # of backward passes that failed
            stack.close()
        self._recomputing = []
        self._uncompile()

    def _uncompile(self) -> None:
        """Calls of the module come here first. `module.compile()` puts a compiled graph around our hooks too; private
        passes go past it, others do not."""
        install_interceptor(self.module, PrivateCall, self, private_call)
        if self.sharded is not None:
            self.sharded.redirect()

    def step_ended(self) -> None:
        """What is written to the model until its next pass is the loop's own doing."""
        self._after_step = self._writes()

    def note_writes(self) -> None:
        if self._after_step is not None:
            self.written = self.written or self._writes() != self._after_step
            self._after_step = None

    def _writes(self) -> int:
        holders = [each for inner in modules_of(self.module) for each in (inner._parameters, inner._buffers)]
        with unseen_by_functions():
            return hash(tuple([(id(t), t._version) for held in holders for t in held.values() if t is not None]))

    # --- what has come back -------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Forget the passes since the last call of `step`, as `zero_grad` does in ordinary training."""
        self._pending = []
        self.tracking.labels.let_go(self.tracking.tracker)

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
                shares = self._shares(self.total)
                if self.sharded is not None:
                    assert isinstance(self.total, ShardedSum)
                    self.sharded.in_rounds(draws[0], closing.last, shares, self.total)
                    shares = iter(())
                for share in shares:
                    with unseen():  # what is clipped is bounded
                        share()
                if not closing.last and isinstance(self.total, RunningSum):
                    self.total.settle()  # more passes come before its noise
        except BaseException:  # which examples are in the sum is unknown: without it, none is added twice
            self.forget()
            raise
        self._pending = []
        self.parts.stepped()
        if self.canaries is not None and closing.last:
            self.canaries.note(closing.draw, closing.joined)
        return closing.last

    def forget(self) -> None:
        """Nothing of the draw was added up, and no pass is left to be."""
        for each in self._pending:
            if each.replay is not None:
                each.replay.over()
        self._pending, self.total, self._closed = [], None, None

    def _shares(self, total: RunningSum | ShardedSum) -> Iterator[Callable[[], object]]:
        """What the passes since the last call of `step` left, few examples at once: each call adds some."""
        for each in self._pending:
            if each.replay is not None and not each.replay.has_room(each.part):
                each.take_out()
            if each.replay is not None:
                if each.part.size:
                    yield partial(each.replay.clip, each.part, total)  # type: ignore[arg-type]
                each.replay.over()
            elif each.part.size and each.uses:
                yield from self._few_at_once(each, total)

    def _few_at_once(self, each: Pending, total: RunningSum | ShardedSum) -> Iterator[Callable[[], object]]:
        """Of examples that are users, the gradients of a user's rows add up before their norm is taken."""
        gradients = {name: combine(uses) for name, uses in each.uses.items()}
        if self.canaries is not None and each.part.planted:
            self.canaries.to(self.device)
            planted = each.part.planted
            gradients = self.canaries.replaced(gradients, planted, each.part.size - len(planted), each.examples)
        first = 0
        for examples, rows in each.part.users or ((each.part.size, 1),):
            at_once = max(1, LARGEST_SUM // rows)
            for start in range(0, examples, at_once):
                few = min(at_once, examples - start)
                cut, own = itemgetter(slice(first, first + few * rows)), gradients
                if few * rows < each.examples:
                    own = {name: change(gradient, cut) for name, gradient in gradients.items()}
                counts = None if rows == 1 else torch.full((few,), rows, device=self.device)
                whose = None if counts is None else UserRows(counts, few * rows, rows, equal=True)
                place = total.place(min(few * rows, LARGEST_SUM))
                yield partial(add_weighted, own, self._clip, self.layout, place, few, None, whose)
                first += few * rows

    def taken(self) -> tuple[int, Tensor]:
        """SENSITIVE: a complete draw and its clipped sum, which is then forgotten here."""
        assert self.total is not None
        assert self._closed is not None
        found = self._closed, self.total.total()
        self.total = self._closed = None
        return found

    # --- forward ------------------------------------------------------------------------------------------------------

    def _refuse_copies(self, module: nn.Module, args: Any) -> None:
        if module is not self.module and asks(module):
            raise ValueError("module is a copy of a private model: load its state_dict into a new one to train it")

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, with every operator followed."""
        call = Call.of(args, {name: value for name, value in kwargs.items() if name not in DIVISORS})
        with unseen_by_functions():
            modules = modules_of(self.module)
            self.note_writes()
            self._require_usable(modules)
            label = self._label(call)
        replay = self._captured.begin(forward, call, label, modules)
        if replay is not None:
            return self._replayed(replay, call, label)
        try:
            return self._pass(forward, call, label)
        except NotApart as problem:
            way = ONE_BY_ONE if problem.unknown else ALONE
            way += LABELS if "labels" in call.names().values() else ""
            raise ValueError(f"the model cannot be made private in this loop: {problem}. {way}") from None

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
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            raise ValueError(
                "torch.autograd.detect_anomaly looks at every gradient of the examples: leave it out, or give it "
                "check_nan=False. An example whose gradient is not finite counts as zero"
            )
        kind = self.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise ValueError(
                "autocast in float16 loses the small gradients of single examples: use torch.autocast with "
                "dtype=torch.bfloat16, which needs no GradScaler"
            )

    def _label(self, call: Call) -> Rows:
        """The label of the examples that a call is about. Raises ValueError where an argument is not a row's own."""
        tracking = self.tracking
        known: Rows | None = None
        public: list[Tensor] = []

        def named(place: int) -> str:
            return f"argument {call.names().get(place, place)!r} of the private model"

        for place, leaf in enumerate(call.leaves):
            if isinstance(leaf, ReadNumber | ReadCount):
                raise ValueError(
                    f"{named(place)} is a value of the examples that was read at {leaf.where}: no noise covers what "
                    "follows from it. Give the model tensors, row by row, or public numbers"
                )
            if not isinstance(leaf, Tensor):
                continue
            if leaf.requires_grad:
                raise ValueError(
                    "an input of the private model requires a gradient: what comes before the model would be trained "
                    "on gradients of examples without noise. Make it part of the module, or detach the input; "
                    "gradients of inputs (adversarial examples, a generator against a private discriminator) are taken "
                    "in eval mode"
                )
            label = tracking.label(leaf)
            if isinstance(label, Mixed):
                way = BY_PARTS if label.operator in PICKING else ""
                raise ValueError(
                    f"{named(place)} is not a row's own: {label}. Compute it of each example by itself; of a flattened "
                    f"batch, as of graphs or of EmbeddingBag with offsets, make a padded one{way}"
                )
            if not isinstance(label, Rows):
                public += [leaf] if label is None else []
                continue
            if label.first:
                raise ValueError(
                    f"{named(place)} begins with row {label.first} of its batch of {label.count}, and a batch is taken "
                    f"whole, in one pass{BY_PARTS}"
                )
            if known is not None and label.batch != known.batch:
                raise ValueError(
                    "arguments of the private model are rows of different batches: each step is about one batch"
                )
            known = known or label
        if known is None:
            rows = self._rows(public)
            tracking.label_arguments(public, rows)
            self.assumed = True
            known = Rows(0, 1, rows, tracking.batches)
        tracking.start()
        for leaf in public:  # values of as many rows, such as drawn time steps, are given row by row
            alike = leaf.dim() and len(leaf) == known.count and not leaf.is_floating_point()
            if alike and tracking.label(leaf) is None:
                tracking.labels.set(leaf, known.at(0)._replace(inner=1))
        return known

    def _rows(self, tensors: Sequence[Tensor]) -> int:
        """How many rows a call has whose arguments came from no labelled batch."""
        waiting = {part.rows for part in self.parts.waiting()}
        candidates = [len(leaf) for leaf in tensors if leaf.dim()]
        found = next((each for each in candidates if each in waiting), candidates[0] if candidates else 0)
        if not found:
            raise ValueError("none of the arguments of the private model is a tensor with a row for each example")
        return found

    def _pass(self, forward: Callable[..., Any], call: Call, label: Rows) -> Any:
        rows, (args, kwargs), tasks = label.count, tree_unflatten(call.leaves, call.tree), Tasks()
        with self.tracking.model() as tracker:
            point, deliver = self.point(), partial(self._deliver, weakref.ref(tasks))
            first = torch._C._autograd._get_sequence_nr()
            with self._model.tracked(tracker, point, label.batch, deliver):
                outputs = forward(*args, **kwargs)
            span = first, torch._C._autograd._get_sequence_nr()
            with unseen_by_functions():
                found = self._ended(Open(rows, label.batch, self._shapes(call), span, tasks=tasks), outputs)
            require_unwritten(self.module, tracker.labels, point)
            return found

    def _replayed(self, replay: Replay, call: Call, label: Rows) -> Any:
        """The outputs of a captured pass, as `_ended` gives them of others."""
        opened = Open(label.count, label.batch, self._shapes(call), replay=replay)
        found, shape = replay.outputs()
        endings = replay.endings()
        labels = [own._replace(count=label.count, batch=label.batch) for _, _, own in endings]
        reductions = [ending.reduction for _, ending, _ in endings]
        return tree_unflatten(
            self._with_ends(opened, found, [place for place, _, _ in endings], labels, reductions), shape
        )

    def _shapes(self, call: Call) -> Shapes:
        """Of all tensors, without the axis of examples where there is one."""
        tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
        return tuple(tuple(leaf.shape[isinstance(self.tracking.label(leaf), Rows) :]) for leaf in tensors)

    def _ended(self, opened: Open, outputs: Any) -> Any:
        """The outputs as the user gets them: what has rows leads back to them, losses are means over the examples."""
        tracker, rows = self.tracking.tracker, opened.examples
        found, shape = tree_flatten(outputs)
        places, labels, refused = [], [], []
        for place, leaf in enumerate(found):
            label = tracker.labels.get(leaf) if isinstance(leaf, Tensor) else None
            if not differentiable(leaf) or (label is None and not leaf.requires_grad):
                found[place] = _for_user(leaf, tracker) if isinstance(leaf, Tensor) else leaf
                continue
            if isinstance(label, Rows) and (label.count, label.batch, label.first) == (rows, opened.batch, 0):
                places.append(place)
                labels.append(label)
            else:
                why = (
                    "an output of the model is about other rows than those of the call"
                    if isinstance(label, Rows)
                    else str(label)
                )
                refused += [] if label is None else [why]
                why = "it depends on no example" if label is None else why
                found[place] = NotPerExample.apply(ANCHOR, _for_user(leaf.detach(), tracker), why)
        if not places:
            raise NotApart(refused[0] if refused else "no output of the model has a row for each example")
        reductions = [tracker.reduction(found[place]) for place in places]
        return tree_unflatten(self._with_ends(opened, found, places, labels, reductions), shape)

    def _with_ends(
        self,
        opened: Open,
        found: list[Any],
        places: Sequence[int],
        labels: Sequence[Rows],
        reductions: Sequence[str | None],
    ) -> list[Any]:
        rows, part = opened.examples, self.parts.take(opened.examples, opened.batch)
        # The gradient of a row's own loss: the reductions of the model are known, that of the loop is `loss_reduction`.
        factors: list[int | Tensor] = [rows if (kind or self._said) == "mean" else 1 for kind in reductions]
        if part is not None and part.users:
            weights = _weights(part)
            factors = [
                torch.from_numpy(_along(factor * weights, label, found[place].shape)).to(self.device, non_blocking=True)
                for factor, place, label in zip(factors, places, labels, strict=True)
            ]
        back = [(label, factor, found[p].dtype) for label, factor, p in zip(labels, factors, places, strict=True)]
        reached = partial(self._reached, opened, part, back)
        ends = End.apply(reached, ANCHOR, *(found[place] for place in places))
        for place, end, label, reduction in zip(places, ends, labels, reductions, strict=True):
            self.tracking.labels.set(end, label)
            found[place] = reduced(end, label, reduction)
            if reduction is not None:  # the model may have kept it, and a read of it gives the number
                self.tracking.tracker.mark_reduced(end, reduction)
        return found

    # --- backward -----------------------------------------------------------------------------------------------------

    def _reached(self, opened: Open, part: Microbatch | None, outputs: Sequence[Output], signals: Signals) -> Signals:
        """A backward pass has reached the outputs of the model: the gradients that continue into it, unless it was
        captured.

        What comes back to a row is multiplied by the number of rows where the loss is a mean: that is the gradient of
        the row's own loss. Where a user is an example, it is divided by the number of the user's rows, too.
        """
        if part is None or not self.parts.usable(part):
            raise ValueError(
                f"this pass of the model is about {opened.examples} rows, but {self.parts.expected(opened.examples)}: "
                "train on the batches of the loader that make_private returned, each in one step, in order and leaving "
                "none out"
            )
        if not following():
            raise ValueError(
                "this backward pass runs in another thread than the one that took its batch from the private loader, "
                "where every operator is followed: take batches, compute the loss and call backward in one thread "
                "(num_workers of the loader fetches ahead)"
            )
        for (label, _, _), signal in zip(outputs, signals, strict=True):
            own = None if signal is None else self.tracking.label(signal)
            if isinstance(own, Mixed):
                raise ValueError(f"the loss is not each row's own: {own}. {_way_out(own)}")
            if own is not None and own != label:
                raise ValueError(f"what comes back to the model's outputs belongs to other rows. {OWN_LOSS}")
        tracker = self.tracking.tracker
        if tracker.reductions and self._said not in tracker.reductions:
            kind = next(iter(tracker.reductions))
            raise ValueError(
                f"loss_reduction={self._said!r}, but the loss is a {kind} over the batch: say loss_reduction={kind!r}"
            )
        self.lengths.met(opened.shapes, tracker.averaged)
        self._captured.met(signals)
        task = torch._C._current_graph_task_id()
        opened.tasks[task] = {}
        tracker.strict = True  # what hooks and functions of the model's read on the way back decides for everybody
        tracker.spans.append(opened.span)
        if self._model.spelled:  # activations may be computed again (checkpointing)
            opened.stack.enter_context(self._model.installed({}))
            self._recomputing.append(opened.stack)
        Variable._execution_engine.queue_callback(  # type: ignore[attr-defined]
            partial(self._finish, opened, part, task)
        )
        back: list[Tensor | None] = []
        for (label, factor, dtype), signal in zip(outputs, signals, strict=True):
            if signal is None:
                back.append(None)
                continue
            whole = (signal if isinstance(factor, int) and factor == 1 else signal * factor).to(dtype)
            whole = whole if self.tracking.label(whole) is not None else whole.clone()  # the same for all rows
            self.tracking.labels.set(whole, label)
            back.append(whole)
        if opened.replay is None:
            return back
        if opened.replay.went_back:  # the graphs' memory is for one backward pass
            for each in self._pending:
                each.take_out()
        with without_modes():
            opened.tasks[task] = opened.replay.back(back)
        return [None] * len(back)

    def _deliver(self, tasks: weakref.ref[Tasks], name: str, uses: Sequence[Gradient]) -> None:
        """Sorted by backward pass; one that fails leaves nothing. `tasks` are those of a pass, which they do not keep
        alive: what it saved for the backward pass goes when the user's loss does."""
        found, task = tasks(), torch._C._current_graph_task_id()
        if found is None or task not in found:
            raise ValueError(
                "the loss uses something from inside the private model that is not one of its outputs: return it from "
                "the model's forward, with a row for each example"
            )
        held = found[task]
        assert held is not None, "a captured pass delivers nothing"
        held.setdefault(name, []).extend(uses)

    def _finish(self, opened: Open, part: Microbatch, task: int) -> None:
        """A backward pass is complete. Several about one part add up before they are clipped: each example once."""
        opened.stack.close()
        self.tracking.tracker.strict = False
        self.tracking.tracker.spans.clear()
        self._recomputing = [stack for stack in self._recomputing if stack is not opened.stack]
        uses, replay = opened.tasks.pop(task), opened.replay
        self.parts.use(part)
        if not (self._pending and self._pending[-1].part is part):
            self._pending.append(Pending(part, opened.examples, replay=replay if uses is None else None))
            uses = uses or {}
        held = self._pending[-1]
        if uses:
            held.take_out()
            held.add(uses)
        elif uses is None and replay is not None:
            held.add(replay.again())


BY_PARTS = "; to compute few rows at once, give make_private max_physical_batch_size, and step after every part"
PICKING = ("index", "index_select", "gather", "a view")
LABELS = ". If it is about the labels: call the model without them, and take the loss of its logits"
ALONE = "No example's influence can be bounded: compute it of each example by itself"


def _way_out(problem: Mixed) -> str:
    if "batch_norm" in problem.operator:
        return "Put the module that normalises by the batch into eval mode, or use GroupNorm"
    if "different batches" in problem.why:
        return "Keep no rows from batch to batch, but what was released: weights, epsilon, public data"
    return OWN_LOSS


OWN_LOSS = (
    "Take the loss of each row by itself, then a sum or a mean with a public divisor; of losses that cannot be written "
    "so: criterion = engine.criterion(loss)"
)


def _for_user(output: Tensor, tracker: Tracker) -> Tensor:
    return reduced(output, tracker.labels.get(output), tracker.reduction(output))


def _weights(part: Microbatch) -> NDArray[np.float32]:
    """Of each row of a part of users: one over the number of the user's rows."""
    counts = [*(users * rows for users, rows in part.users), part.rows - part.size]
    return np.array([*(1 / rows for _, rows in part.users), 0.0], dtype=np.float32).repeat(counts)


def _along(weights: NDArray[np.float32], label: Rows, output: Sequence[int]) -> NDArray[np.float32]:
    """Weights of examples as an output has them: along its axis of rows, or of the one example that it is about."""
    if label.axis < 0:
        return weights[label.first : label.first + 1].reshape(())
    shape, size = [1] * len(output), output[label.axis]
    shape[label.axis] = size
    each = weights.repeat(label.inner)  # copies of the batch, one after another
    return np.tile(each, size // len(each)).reshape(shape)


class NotSaved:
    """What is left of the books in a model that was saved whole and loaded again: an ordinary model."""

    def _refuse_copies(self, module: nn.Module, args: Any) -> None:
        return None
