"""How does a user's module get a rule? By a function that computes each example's gradients of its parameters.

Hardly any module needs one: whatever it computes with torch's functions is watched. It is for what torch cannot see
into, such as an autograd.Function, and for what a person knows a shorter way to. A rule is never taken at its word: at
its first use in a module it is held against autograd, example by example, and one that says something else is refused.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from vestige.engines.example_axis.labels import unseen
from vestige.engines.per_example.composite_layers import REGISTERED
from vestige.engines.per_example.gradient_forms import Dense, wide
from vestige.engines.per_example.parameter_expressions import Axis, Expression, Pulled, tapped
from vestige.engines.per_example.uses import TrackedParameter

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
    """The module's own forward pass on plain values, its output tapped."""
    watched = {name: p for name, p in module.named_parameters() if isinstance(p, TrackedParameter)}
    inputs = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    if not watched:
        return type(module).forward(*inputs.args, **inputs.kwargs)
    called = type(module).__name__
    values = {name: each.expression.value for name, each in watched.items()}
    with _reparametrize_module(module, dict(values)):
        output = type(module).forward(*inputs.args, **inputs.kwargs)
    if not isinstance(output, Tensor):
        raise TypeError(f"{called} has a rule, but its output is a {type(output).__name__}: a rule is for one tensor")
    given = [*inputs.args[1:], *inputs.kwargs.values()]
    places = [place for place, each in enumerate(given) if isinstance(each, Tensor)]

    def again(values: Mapping[str, Tensor], filled: Sequence[Any]) -> Tensor:
        with _reparametrize_module(module, dict(values)):
            named = dict(zip(inputs.kwargs, filled[len(filled) - len(inputs.kwargs) :], strict=True))
            made: Tensor = type(module).forward(module, *filled[: len(filled) - len(named)], **named)
            return made

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        filled = list(given)
        for place, tensor in zip(places, saved, strict=True):
            filled[place] = tensor
        with _reparametrize_module(module, dict(values)), torch.no_grad():
            found = rule(module, filled, signal)
        rows = {name: _given(called, name, found, each.expression, len(signal)) for name, each in watched.items()}
        if module not in HELD:
            _hold_against_autograd(called, rows, values, lambda given: again(given, filled), signal)
            HELD.add(module)
        for name, each in watched.items():
            yield each.expression, Dense(axis.first(rows[name]).sum(dim=1))

    now = next(iter(watched.values())).now
    if isinstance(inputs.args[1], Tensor):
        now.tracker.label_like(output, inputs.args[1])  # a rule answers for what its module computes
    axes = now.axes((output,))
    if not axes or axes[0].place != 0:
        raise TypeError(f"{called} has a rule, but its output has no examples on its first axis")
    return tapped(now, called, axes, (output,), [given[place] for place in places], settle)[0]


def _given(called: str, name: str, found: Any, expression: Expression, rows: int) -> Tensor:
    """What a rule gives of a parameter, row by row."""
    if not isinstance(found, Mapping) or name not in found:
        raise ValueError(f"the rule for {called} gives no gradient of {name!r}")
    gradient, shape = found[name], (rows, *expression.value.shape)
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
