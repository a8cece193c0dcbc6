"""Which method has this name? Every room of `methods` has registered its own by the time this one is imported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import vestige.methods  # noqa: F401
from vestige.method import METHODS, Entry, Method

__all__ = ["METHODS", "build", "find", "nearest"]


def build(name: str, **options: Any) -> Method:
    """A method by name, with its options; an unknown name or option is refused with the nearest known one.

    >>> import vestige
    >>> vestige.build("fo-dp-sgd", beta=0.8).memory.share
    0.8
    """
    entry = find(name)
    unknown = [key for key in options if key not in entry.options]
    if unknown:
        known = ", ".join(entry.options)
        raise ValueError(f"{unknown[0]}={options[unknown[0]]} is not an option of {name}; its options are {known}")
    return entry.make(**options)


def find(name: str) -> Entry:
    if name not in METHODS:
        raise ValueError(f"method={name!r} is unknown{nearest(name, METHODS)}; choose from {', '.join(METHODS)}")
    return METHODS[name]


def nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
