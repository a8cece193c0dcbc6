"""How does JSON become a value again? By the types of its fields; what does not fit is named in one line."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Value = TypeVar("Value")


def read_value(kind: type[Value], content: Any, name: str) -> Value:
    """The dataclass that was written as `content`; ValueError names the part of `name` that cannot be one."""
    if not isinstance(content, dict):
        raise ValueError(f"{name} is {_shown(content)}, not an object with named parts")
    hints, needed = _parts(kind)  # type: ignore[arg-type]
    for key in content:
        if key not in hints:
            raise ValueError(f"{name} has an unknown part {key!r}: another version wrote it")
    for key in needed:
        if key not in content:
            raise ValueError(f"{name} lacks its part {key!r}")
    return kind(**{key: _read(hints[key], value, f"{name}: {key}") for key, value in content.items()})


@lru_cache(maxsize=64)
def _parts(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The types of a dataclass's fields, and which of them have no default."""
    needed = (each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING)
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}, tuple(needed)


def _read(hint: Any, value: Any, name: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return read_value(hint, value, name)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        return None if value is None else _read(inner[0], value, name)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(inner[0], each, f"{name}[{place}]") for place, each in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {key: _read(inner[1], each, f"{name}.{key}") for key, each in value.items()}
    if hint is Any or _is(hint, value):
        return value
    words = {tuple: "a list", Mapping: "an object", int: "a whole number", float: "a number", bool: "true or false"}
    raise ValueError(f"{name} is {_shown(value)}, not {words.get(origin or hint, 'text')}")


def _is(hint: Any, value: Any) -> bool:
    """Whether a plain value is of its type: a whole number is a number too, and true is neither."""
    if get_origin(hint) is Literal or hint is str:
        return isinstance(value, str)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int) if hint is int else hint is float and isinstance(value, int | float)


def _shown(value: Any) -> str:
    line = repr(value)
    return line if len(line) <= 40 else f"{line[:40]}..."
