"""How is a comparison written on a command line? Contenders as NAME:option=value, grids as lists with commas."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from vestige.renaming import CLIP, current


def contenders(words: Sequence[str]) -> list[tuple[str, str, dict[str, object]]]:
    """NAME or NAME:option=value,... as (label, name, options); `all` is every method, and DP-SGD with momentum."""
    from vestige.methods.registry import ALIASES, METHODS, as_written, nearest

    found: list[tuple[str, str, dict[str, object]]] = []
    for word in words:
        if word == "all":
            found += [(name, name, {}) for name in METHODS]
            found.insert(1, ("dp-sgd:momentum=0.9", "dp-sgd", {"momentum": 0.9}))
            continue
        name, _, rest = word.partition(":")
        if name not in (*METHODS, *ALIASES):
            known = ", ".join(METHODS)
            raise ValueError(f"method={name!r} is unknown{nearest(name, METHODS)}; choose from {known}, or all")
        options = current(dict(_option(part) for part in _parts(rest) if part), CLIP)
        try_to_build(f"method={word!r}", name, options)
        options = as_written(options)
        found.append((word, name, options))
    return found


def try_to_build(word: str, name: str, options: dict[str, object]) -> None:
    """Refuse an option that no run could use, before a folder is created."""
    from vestige.methods.registry import as_given, make_method

    try:
        make_method(name, **as_given(options))
    except TypeError as error:
        raise ValueError(f"{word} cannot be built: {error}") from None


def _option(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"method={text!r} is not option=value, as in fo-dp-sgd:beta=0.8,window=4")
    return key.strip().replace("-", "_"), _value(value)


def _value(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        return text.strip()


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON: a folder's files could not hold it")


def _parts(text: str) -> list[str]:
    """Split at commas, except inside brackets."""
    return re.split(r",(?![^\[]*\])", text)


def grids(words: Sequence[str]) -> dict[str, tuple[object, ...]]:
    """Several grids, each for a different option."""
    found: dict[str, tuple[object, ...]] = {}
    for word in words:
        key, values = grid(word)
        if key in found:
            raise ValueError(f"tune={word!r}: {key} has a grid already; give all its values in one, with commas")
        found[key] = values
    return found


def grid(text: str) -> tuple[str, tuple[object, ...]]:
    """option=value,value,... as the option, as records call it, and its values."""
    from vestige.methods.registry import as_written

    key, _, rest = text.partition("=")
    key = next(iter(as_written(current({key.strip().replace("-", "_"): None}, CLIP))))
    values = tuple(_value(part) for part in _parts(rest) if part.strip())
    if not values:
        raise ValueError(f"tune={text!r} is an empty grid; give option=value,value,...")
    return key, values


def numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{name}={text!r} must be numbers with commas between them") from None
    if not values:
        raise ValueError(f"{name}={text!r} is an empty grid; give numbers with commas between them")
    return values
