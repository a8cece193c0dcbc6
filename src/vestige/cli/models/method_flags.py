"""Which flags does `vestige train` have for its methods? Those of their signatures: a new method needs no line here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

import typer

from vestige.methods.registry import METHODS, SOLVERS

SHARED = 4
"""Options of fewer methods than this are not on the first screen; `vestige methods NAME` lists all of a method's."""
PANEL = "Method (all options of one: vestige methods NAME)"


def with_method_options(function: Callable[..., None]) -> Callable[..., None]:
    found: dict[str, dict[str, inspect.Parameter]] = {}
    everyone = [*METHODS.values(), *SOLVERS.values()]
    for entry in everyone:
        for name, parameter in entry.options.items():
            found.setdefault(name, {})[entry.name] = parameter
    signature = inspect.signature(function, eval_str=True)
    kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, users in found.items():
        annotation, _ = _option_of(next(iter(users.values())))
        flag = f"--{name.replace('_', '-')}"
        off = f"/--no-{flag[2:]}" if bool in get_args(annotation) else ""
        words, hidden = help_of(users, len(everyone)), len(users) < SHARED
        option = typer.Option(flag + off, help=words, rich_help_panel=PANEL, hidden=hidden)
        kept.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option]
            )
        )

    def command(**arguments: object) -> None:
        function(**arguments)

    command.__doc__, command.__name__ = function.__doc__, function.__name__
    command.__signature__ = signature.replace(parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in kept}
    return command


def help_of(users: dict[str, inspect.Parameter], methods: int) -> str:
    """An option's meaning and default, listed by method where these differ."""
    meanings: dict[str, list[str]] = {}
    defaults: dict[str, list[str]] = {}
    for method, parameter in users.items():
        meanings.setdefault(_option_of(parameter)[1], []).append(method)
        default = parameter.default
        defaults.setdefault("none" if default is None else str(default), []).append(method)
    if len(meanings) == 1 and len(users) == methods:
        words = next(iter(meanings))
    else:
        words = "; ".join(f"{meaning} ({', '.join(whose)})" for meaning, whose in meanings.items())
    usual, *others = sorted(defaults, key=lambda value: -len(defaults[value]))
    exceptions = "".join(f"; {value} for {', '.join(defaults[value])}" for value in others)
    return f"{words} [default: {usual}{exceptions}]"


def _option_of(parameter: inspect.Parameter) -> tuple[object, str]:
    """The command line's type for a method's option (text where Python takes several types), and its help."""
    kind, words = parameter.annotation, ""
    if get_origin(kind) is Annotated:
        kind, words = get_args(kind)[:2]
    present = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) in (Union, UnionType) and len(present) == 1:
        kind = present[0]
    known = kind in (int, float, bool, str) or get_origin(kind) is tuple
    return (kind if known else str) | None, words
