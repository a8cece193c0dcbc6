"""How does a user's module get a rule? By a function that computes each example's gradients of its parameters.

Hardly any module needs one: whatever it computes with torch's operators, forward and back, is followed. It is for
what cannot be seen into, such as a kernel, and for what a person knows a shorter way to. A rule is never taken at its
word: at its first use in a module it is held against autograd, example by example, and one that says something else is
refused.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from vestige.engines.example_axis.composite_layers import REGISTERED
from vestige.engines.example_axis.labels import Rows, SumCell, Summed, Tracker
from vestige.engines.example_axis.sums import by_example, whole
from vestige.engines.per_example.execution import unseen
from vestige.engines.per_example.gradient_forms import Dense, wide

TOLERANCE = 1e-3
"""How far a rule's gradient may be from autograd's, relative to its largest entry: rounding of another order."""
HELD: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose rule was held against autograd."""
ModuleRule = Callable[[Any, Sequence[Any], Tensor], Mapping[str, Tensor]]
"""(module, inputs, gradient of the output) -> {name of a parameter: each example's gradient, [examples, *shape]}."""


def register_rule(module_class: type[nn.Module], gradients: ModuleRule | None = None) -> Any:
    """Let `gradients(module, inputs, output_gradient)` make the per-example gradients of modules of this class.

    `inputs` are what `forward` was given, in its order; they and the gradient of its output, which is one tensor, have
    the examples on their first axis. What is returned has for every trainable parameter, by its name in the module, a
    tensor `[examples, *shape]`. Parameters have their plain values meanwhile. Without `gradients` it is a decorator.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(
            f"register_rule takes a class of modules, not {module_class!r}: put a function or an autograd.Function "
            "into a module that holds its parameters"
        )

    def register(rule: ModuleRule) -> ModuleRule:
        if not callable(rule):
            raise TypeError(f"the rule for {module_class.__name__} must be a function, not {rule!r}")
        REGISTERED[module_class] = lambda module, *args, **kwargs: _call(rule, module, args, kwargs)
        return rule

    return register if gradients is None else register(gradients)


def _call(rule: ModuleRule, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The module's own forward pass, whose parameters get their gradients from the rule."""
    inputs = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    if not trained or not torch.is_grad_enabled():
        return type(module).forward(*inputs.args, **inputs.kwargs)
    called = type(module).__name__
    values = {name: each.detach() for name, each in trained.items()}
    with _reparametrize_module(module, dict(values)):
        output = type(module).forward(*inputs.args, **inputs.kwargs)
    if not isinstance(output, Tensor):
        raise TypeError(f"{called} has a rule, but its output is a {type(output).__name__}: a rule is for one tensor")
    given = [*inputs.args[1:], *inputs.kwargs.values()]
    places = [place for place, each in enumerate(given) if isinstance(each, Tensor)]
    names = list(inputs.kwargs)

    def again(values: Mapping[str, Tensor], filled: Sequence[Any]) -> Tensor:
        with _reparametrize_module(module, dict(values)):
            named = dict(zip(names, filled[len(filled) - len(names) :], strict=True))
            made: Tensor = type(module).forward(module, *filled[: len(filled) - len(named)], **named)
            return made

    def gradients(saved: Sequence[Tensor], signal: Tensor) -> dict[str, Tensor]:
        filled = list(given)
        for place, tensor in zip(places, saved, strict=True):
            filled[place] = tensor
        with unseen(), _reparametrize_module(module, dict(values)), torch.no_grad():
            found = rule(module, filled, signal)
            rows = {name: _given(called, name, found, value, len(signal)) for name, value in values.items()}
            if module not in HELD:
                _hold_against_autograd(called, rows, values, lambda given: again(given, filled), signal)
                HELD.add(module)
        return rows

    saved = [given[place] for place in places]
    return _Ruled.apply(called, gradients, output, len(trained), *trained.values(), *saved)


class _Ruled(torch.autograd.Function):
    """The output of a module, whose parameters get the gradients that a rule makes of those of the output."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, called: str, gradients: Any, output: Tensor, count: int, *tensors: Tensor
    ) -> Tensor:
        tracker = tracker_at_work()
        if tracker is not None and tracker.labels.get(output) is None and tensors[count:]:
            label = tracker.labels.get(tensors[count])
            if label is not None:
                tracker.labels.set(output, label)  # a rule answers for what its module computes
        ctx.called, ctx.gradients = called, gradients
        ctx.save_for_backward(*tensors[count:])
        return output.detach()

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> Any:  # type: ignore[override]
        tracker = tracker_at_work()
        assert tracker is not None
        label = tracker.rows(signal)
        if label is None or label.axis or not whole(label, signal):
            raise TypeError(f"{ctx.called} has a rule, but its output has no examples on its first axis")
        found = ctx.gradients([each.detach() for each in ctx.saved_tensors], signal)
        made = [_stand_in(tracker, signal, rows, label) for rows in found.values()]
        return None, None, signal, None, *made, *[None] * len(ctx.saved_tensors)


def _stand_in(tracker: Tracker, signal: Tensor, rows: Tensor, label: Rows) -> Tensor:
    cell = SumCell([Dense(by_example(label, rows).sum(dim=1))], label.count, label.batch)
    return tracker.stand_in(signal, rows.shape[1:], Summed(cell))


def tracker_at_work() -> Tracker | None:
    """The tracker that follows what runs here."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, Tracker)), None)


def _given(called: str, name: str, found: Any, value: Tensor, rows: int) -> Tensor:
    """What a rule gives of a parameter, row by row."""
    if not isinstance(found, Mapping) or name not in found:
        raise ValueError(f"the rule for {called} gives no gradient of {name!r}")
    gradient, shape = found[name], (rows, *value.shape)
    if not isinstance(gradient, Tensor) or tuple(gradient.shape) != shape:
        got = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
        raise ValueError(f"the rule for {called} gives {got} of {name!r}, where {shape} is asked for")
    return wide(gradient.detach())


def _hold_against_autograd(
    called: str,
    rows: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    forward: Callable[[Mapping[str, Tensor]], Tensor],
    signal: Tensor,
) -> None:
    """Raise ValueError unless a rule gives each row the gradient that autograd gives it: one backward pass for each."""
    with unseen(), torch.enable_grad():
        leaves = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
        output = forward(leaves)
        for row in range(len(signal)):
            only = torch.zeros_like(signal)
            only[row] = signal[row]
            wanted = torch.autograd.grad(output, list(leaves.values()), only, retain_graph=True, allow_unused=True)
            for (name, given), want in zip(rows.items(), wanted, strict=True):
                own = torch.zeros_like(given[row]) if want is None else want.to(given.dtype)
                within = TOLERANCE * max(float(own.abs().max()), float(given[row].abs().max()))
                if bool(own.isfinite().all()) and not bool(((given[row] - own).abs() <= within).all()):
                    raise ValueError(
                        f"the rule for {called} gives another gradient of {name!r} than autograd does: correct the "
                        "rule, or remove it"
                    )
