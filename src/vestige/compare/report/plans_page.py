"""What does a plan look like? One page that needs no network: what was chosen, and what there was to choose from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vestige.compare.report.drawing import Figure, Series
from vestige.compare.report.html import items, table, text
from vestige.compare.report.page import document, panels

Plan = Mapping[str, Any]
"""The `to_json` of a plan."""
LIMITS = (
    "Nothing was trained, and no data was touched: everything here follows from public numbers.",
    "Signal is a ratio of a whole run: a constant gradient as long as the clip, added up over all steps, over the "
    "noise added up with it. It says how much of what is learned is noise, not how much there is to learn.",
    "Choices are compared by Renyi, which is fast; epsilon of the choice itself is by loss distributions. What is "
    "charged is what a run asks, and its ledger says so.",
    "The learning rate is the recipe's, scaled so that the noise alone walks as far as at the recipe's own settings.",
)


def page(plan: Plan, title: str | None = None) -> str:
    """One HTML file about a plan, with everything in it."""
    budget, choice = plan["budget"], plan["choice"]
    drawn = figures(plan)
    order = [series.name for series in drawn[0].series]
    facts = [
        f"{budget['examples']:,} examples",
        f"epsilon {budget['epsilon']:g} at delta {budget['delta']:g}",
        duration(budget["seconds"]),
        f"{budget['views_per_second']:,.0f} views a second",
    ]
    sections = [
        (
            "choice",
            "What to run",
            f"<ul class='findings'>{items(findings(plan))}</ul><pre>{text(plan['command'])}</pre>",
        ),
        ("trade", "Batch, steps and noise", panels(drawn, order)),
        ("choices", "Every batch", table("choices", [_row(each, choice) for each in plan["by_batch"]])),
        ("limits", "What a plan does not know", f"<ul>{items(LIMITS)}</ul>"),
    ]
    footer = "Written by vestige from public numbers; nothing is loaded from anywhere."
    return document(title or f"A plan for {plan['recipe']}", facts, sections, order, footer)


def findings(plan: Plan) -> list[str]:
    """The plan in sentences."""
    choice, own = plan["choice"], plan["recipes_own"]
    views = f", {plan['augment']} views of each" if plan["augment"] else ""
    rate = "the automatic learning rate" if plan["lr"] == "auto" else f"learning rate {plan['lr']:.3g}"
    found = [
        f"{plan['recipe']}: {plan['summary']} ({plan['source']})",
        f"{choice['steps']} steps of {choice['batch']} examples on average{views}, noise multiplier "
        f"{choice['noise_multiplier']:.4g}, {rate}: {duration(choice['seconds'])}, epsilon {plan['epsilon']:.4g} by "
        "loss distributions",
    ]
    share = choice["signal"] / own["signal"]
    found.append(
        f"its signal is {share:.0%} of that of the recipe at its own length ({own['steps']} steps of {own['batch']}, "
        f"{duration(own['seconds'])})"
    )
    return found


def figures(plan: Plan) -> list[Figure]:
    """Signal and noise over the batch, for this time and for others."""
    here = plan["budget"]["seconds"]
    times = sorted([(here, plan["by_batch"]), *((seconds, found) for seconds, found in plan["other_times"])])
    lines = {duration(seconds): found for seconds, found in times if found}
    return [
        Figure("signal", "Signal of the whole run", "batch", "signal", _series(lines, "signal"), log_x=True),
        Figure(
            "noise", "Noise multiplier", "batch", "noise multiplier", _series(lines, "noise_multiplier"), log_x=True
        ),
        Figure("steps", "Steps worth taking", "batch", "steps", _series(lines, "steps"), log_x=True),
    ]


def _series(lines: Mapping[str, Sequence[Mapping[str, object]]], key: str) -> tuple[Series, ...]:
    return tuple(Series(name, tuple(_points(found, key))) for name, found in lines.items())


def _points(found: Iterable[Mapping[str, Any]], key: str) -> Iterable[tuple[float, float, None, None]]:
    return ((float(each["batch"]), float(each[key]), None, None) for each in found)


def _row(each: Mapping[str, Any], choice: Mapping[str, object]) -> dict[str, object]:
    return {
        "batch": each["batch"],
        "sample rate": each["sample_rate"],
        "steps": each["steps"],
        "noise multiplier": each["noise_multiplier"],
        "signal": each["signal"],
        "takes": duration(each["seconds"]),
        "": "chosen" if each["batch"] == choice["batch"] else "",
    }


def duration(seconds: float) -> str:
    """A time as people write it: 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
