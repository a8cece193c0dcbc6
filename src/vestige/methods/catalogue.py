"""What should a reader know about a method? The registry as rows and pages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from vestige.methods.base import written
from vestige.methods.registry import METHODS, Entry, find

RATE, STEPS, EPSILON = 0.05, 200, 3.0
"""The defaults of `vestige train` and a usual budget, for facts that depend on them (the state of correlated noise)."""


def rows() -> list[dict[str, Any]]:
    return [_row(entry) for entry in METHODS.values()]


def row(name: str) -> dict[str, Any]:
    return _row(find(name))


def page(name: str) -> str:
    """Everything about one method, for a terminal."""
    entry, facts = find(name), row(name)
    options = [f"  --{k.replace('_', '-'):<18} {v!s:<12} {_words(entry, k)}" for k, v in facts["defaults"].items()]
    parts = [f"  {part:<9} {value}" for part, value in facts["parts"].items()] or ["  those of DP-SGD"]
    return "\n".join(
        [
            f"{entry.name}: {entry.description}",
            *(f"Also called {alias}." for alias in entry.aliases),
            "",
            f"Releases: {facts['releases']}",
            f"Price:    {facts['price']}",
            f"Privacy:  {facts['privacy']}",
            f"State:    {facts['copies']:g} extra copies of the parameters",
            f"Neutral:  {facts['neutral']}",
            "",
            "Parts",
            *parts,
            "",
            "Options and defaults",
            *options,
            "",
            f"Reference: {facts['reference']}",
            "",
            facts["bibtex"],
        ]
    )


def _row(entry: Entry) -> dict[str, object]:
    return {
        "name": entry.name,
        "summary": entry.summary,
        "privacy": entry.privacy_class,
        "releases": entry.releases,
        "price": entry.price,
        "parts": {part: str(value) for part, value in entry.parts.items()},
        "defaults": {name: written(value) for name, value in entry.defaults.items()},
        "copies": _copies(entry),
        "neutral": _neutral(entry),
        "reference": entry.reference,
        "bibtex": bibtex()[entry.cite],
        "aliases": list(entry.aliases),
    }


def _copies(entry: Entry) -> float | None:
    made = entry.make()
    return replace(made, noise=made.noise.settled(RATE, STEPS, lambda: EPSILON)).copies(RATE, STEPS)


@cache
def bibtex() -> dict[str, str]:
    """Every paper's BibTeX entry, by its key."""
    text = (resources.files("vestige") / "data" / "references.bib").read_text(encoding="utf-8")
    return {entry.partition("{")[2].partition(",")[0]: entry for entry in text.strip().split("\n\n")}


def _neutral(entry: Entry) -> str:
    neutral = entry.neutral
    if neutral is None:
        return "none declared"
    setting = ", ".join(f"{key}={value}" for key, value in neutral.options.items()) or "always"
    if neutral.sample_rate is not None:
        setting += f", sample rate {neutral.sample_rate:g}"
    same = ", ".join(f"{key}={value}" for key, value in neutral.like_options.items())
    with_rule = f" with the optimizer {neutral.optimizer}" if neutral.optimizer else ""
    with_rule += f" by {neutral.groups}" if neutral.groups else ""
    with_rule += f" with norms by {neutral.norms}" if neutral.norms else ""
    return f"{setting}: equals {neutral.like}{f' ({same})' if same else ''}{with_rule}, bit for bit"


def _words(entry: Entry, option: str) -> str:
    annotation = entry.options[option].annotation
    return str(getattr(annotation, "__metadata__", ("",))[0])
