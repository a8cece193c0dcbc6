"""Which method has this name? Every room of `methods` has registered its own by the time this one is imported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import vestige.methods  # noqa: F401
from vestige.mechanism.groups import named_grouping
from vestige.methods.base import METHODS, Entry, Method, by_group

__all__ = ["METHODS", "build", "find", "nearest"]


def build(name: str, *, groups: str | None = None, **options: Any) -> Method:
    """A method by name, with its options; an unknown name or option is refused with the nearest known one.

    Any method may clip by groups of parameters instead of its own way: `groups` is layers, flat, or patterns.

    >>> import vestige
    >>> vestige.build("fo-dp-sgd", beta=0.8).memory.share
    0.8
    >>> vestige.build("dp-sgd", groups="layers").grouping
    Layers()
    """
    entry = find(name)
    unknown = [key for key in options if key not in entry.options]
    if unknown:
        known = ", ".join((*entry.options, "groups"))
        raise ValueError(f"{unknown[0]}={options[unknown[0]]} is not an option of {name}; its options are {known}")
    method = entry.make(**options)
    return method if groups is None else by_group(method, named_grouping(groups))


def find(name: str) -> Entry:
    if name not in METHODS:
        raise ValueError(f"method={name!r} is unknown{nearest(name, METHODS)}; choose from {', '.join(METHODS)}")
    return METHODS[name]


def nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
