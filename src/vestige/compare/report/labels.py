"""How are methods, tasks, rates and budgets labelled in a report? The same way in all of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Content = Mapping[str, Any]
"""A comparison as its folder holds it: `title`, `specification`, `summary`, `records`, and a `paper` if it has one."""

STAGES = {"tuned": "tuned rate", "auto": "automatic rate", "given": "given rate"}


def names(content: Content) -> list[str]:
    """The methods in the order of the specification, the baseline first."""
    labels = [each["label"] for each in content["specification"]["contenders"]]
    baseline = content["specification"]["baseline"]
    return sorted(labels, key=lambda label: label != baseline)


def tasks(content: Content) -> list[str]:
    return [problem["task"] for problem in content["specification"]["problems"]]


def budget_of(run: Mapping[str, Any]) -> str:
    kinds = {"epsilon": "epsilon", "paper_sigma": "the paper's sigma", "noise_multiplier": "noise multiplier"}
    return f"{kinds[run['budget']['kind']]} {run['budget']['value']:g}"
