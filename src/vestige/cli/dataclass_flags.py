"""How do the flags of a command become one typed object? A frozen dataclass has a field for each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def with_flags(kind: type[DataclassInstance]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function of `flags`, an object of this kind, into a command whose parameters are its fields."""
    hints, keyword = get_type_hints(kind, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    own = {
        each.name: inspect.Parameter(
            each.name,
            keyword,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in fields(kind)
    }

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        def command(**arguments: object) -> None:
            given = {name: arguments.pop(name) for name in own}
            function(flags=kind(**given), **arguments)

        signature = inspect.signature(function, eval_str=True)
        context = [p.replace(kind=keyword) for p in signature.parameters.values() if p.name == "context"]
        parameters = [*context, *own.values()]
        command.__doc__, command.__name__, command.__module__ = function.__doc__, function.__name__, function.__module__
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return declare


def named_alike(flags: DataclassInstance, kind: type[DataclassInstance]) -> dict[str, Any]:
    """The values of those flags that a dataclass has a field of the same name for."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in vars(flags).items() if name in names}
