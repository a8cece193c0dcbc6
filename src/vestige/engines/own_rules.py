"""How does a module of one's own get a rule? A function that says each example's gradients of its parameters.

Hardly any module needs one: whatever it computes with torch's functions is watched. It is for what torch cannot see
into, such as an autograd.Function, and for what a person knows a shorter way to. A rule is never taken at its word: the
rehearsal holds it against autograd, and refuses a model whose rule says something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vestige.engines.per_example.expressions import Kind, Operand, Pulled, tapped
from vestige.engines.per_example.gradients import Dense, wide
from vestige.engines.per_example.sequences import REGISTERED
from vestige.engines.per_example.uses import Watched

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
    watched = {name: p for name, p in module.named_parameters() if isinstance(p, Watched)}
    inputs = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    if not watched:
        return type(module).forward(*inputs.args, **inputs.kwargs)
    called = type(module).__name__
    values = {name: each.operand.value for name, each in watched.items()}
    with _installed(module, values):
        output = type(module).forward(*inputs.args, **inputs.kwargs)
    if not isinstance(output, Tensor):
        raise TypeError(f"{called} has a rule, but its output is a {type(output).__name__}: a rule is for one tensor")
    given = [*inputs.args[1:], *inputs.kwargs.values()]
    places = [place for place, each in enumerate(given) if isinstance(each, Tensor)]

    def settle(kind: Kind, examples: int, saved: Sequence[Tensor], signals: Sequence[Tensor]) -> Pulled:
        filled = list(given)
        for place, tensor in zip(places, saved, strict=True):
            filled[place] = tensor
        with _installed(module, values), torch.no_grad():
            found = rule(module, filled, signals[0])
        for name, each in watched.items():
            yield each.operand, Dense(_summed(called, name, found, each.operand, kind, examples, len(signals[0])))

    now = next(iter(watched.values())).now
    if isinstance(inputs.args[1], Tensor):
        now.tracker.label_like(output, inputs.args[1])  # a rule answers for what its module computes
    kind = now.kind((output,))
    if kind is None or kind.outputs[0].place != 0:
        raise TypeError(f"{called} has a rule, but its output has no examples on its first axis")
    return tapped(now, called, kind, (output,), [given[place] for place in places], settle)


def _summed(called: str, name: str, found: Any, operand: Operand, kind: Kind, examples: int, rows: int) -> Tensor:
    """One gradient an example, where an example may have several rows."""
    if not isinstance(found, Mapping) or name not in found:
        raise TypeError(f"the rule for {called} gives no gradient of {name!r}")
    gradient, shape = found[name], (rows, *operand.value.shape)
    if not isinstance(gradient, Tensor) or tuple(gradient.shape) != shape:
        got = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
        raise TypeError(f"the rule for {called} gives {got} of {name!r}, where {shape} is asked for")
    return kind.outputs[0].first(wide(gradient.detach()), examples).sum(dim=1)


@contextmanager
def _installed(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The module with plain values in place of its watched parameters."""
    before = []
    for name, value in values.items():
        owner, _, key = name.rpartition(".")
        held: dict[str, Any] = module.get_submodule(owner)._parameters
        before.append((held, key, held[key]))
        held[key] = value
    try:
        yield
    finally:
        for held, key, parameter in before:
            held[key] = parameter
