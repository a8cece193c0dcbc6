"""What did audits find? One page: epsilon at least and at most, the attackers' curves, and what they do not mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vestige.compare.report.drawing import Figure, Series
from vestige.compare.report.html import items, table, text
from vestige.compare.report.page import document, export_figures, panels

Audit = Mapping[str, Any]
"""The result of `vestige audit --out FILE`, or the `to_json` of a loop's audit."""
MADE_UP = "stand-in"
"""The task of audits that were trained on made-up rows."""
STANDS = (
    "We attacked our own training with an adversary who sees what is named here, and found no more than the guarantee "
    "allows; such a test can uncover a fault, and can never prove that there is none."
)
BROKEN = (
    "In {broken} of {all} audits the attack found more than the guarantee allows: until the cause is found, that "
    "guarantee must not be relied on."
)
STRAYS = (
    "Curves of finitely many runs stray, also above what is allowed: the verdict counts that error, the eye does not."
)
LIMITS = (
    "Every number on this page is what the files of the audits say, the accountant's epsilon too: they are not sealed, "
    "and nothing was recomputed. `vestige verify RUN` recomputes the epsilon of a run from its ledger.",
    "The lower bound is proved, with its confidence, of the runs that were attacked: it is no estimate of epsilon, and "
    "a small one is no sign of privacy. An attack may be weak, and at small delta even a perfect one needs many runs.",
    "The upper bound is the accountant's. It is a promise about every attacker, if the code does what it says.",
    "Nothing is said about other data, models or settings, about what was not attacked (files, logs, timings), or "
    "about people with several rows.",
    "Of many audits at 95% confidence one in twenty may contradict by chance: repeat it at a higher confidence.",
)


def page(audits: Sequence[Audit], title: str) -> str:
    """One HTML file about these audits, with everything in it."""
    labels = labelled(audits)
    bounds, curves = _bounds(audits, labels), _curves(audits, labels)
    broken = sum(bool(each["contradicts"]) for each in audits)
    sentence = BROKEN.format(broken=broken, all=len(audits)) if broken else STANDS
    found = items(_finding(each, label) for each, label in zip(audits, labels, strict=True))
    drawn = panels(curves, ())
    rocs = (
        f"<p>{STRAYS}</p>{drawn}"
        if drawn
        else "<p>An audit of one run has no curve: each of its canaries is one guess.</p>"
    )
    sections = [
        ("result", "At least, at most", f"<ul class='findings'>{found}</ul>{panels(bounds, labels)}"),
        ("curves", "What the attacker detected", rocs),
        ("meaning", "For a data-protection officer", f"<p><b>{text(sentence)}</b></p><ul>{items(LIMITS)}</ul>"),
        ("audits", "Every audit", _notes(audits) + table("audits", _rows(audits, labels))),
    ]
    facts = [f"{len(audits)} audits", f"{len({each['method'] for each in audits})} methods", f"{broken} contradictions"]
    footer = f"Written by vestige from {len(audits)} audits; nothing is loaded from anywhere."
    return document(title, facts, sections, (), footer)


def export(audits: Sequence[Audit], folder: Path) -> list[str]:
    """Write every figure as a file; returns lines that say what was written."""
    labels = labelled(audits)
    return export_figures([*_bounds(audits, labels), *_curves(audits, labels)], labels, folder)


def labelled(audits: Iterable[Audit]) -> list[str]:
    """Each audit by its method and epsilon; of several alike, with a number."""
    seen: Counter[str] = Counter()
    labels = []
    for each in audits:
        at = "no epsilon" if each["epsilon"] is None else f"epsilon {each['epsilon']:.3g}"
        label = f"{each['method']}, {at}"
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label} #{seen[label]}")
    return labels


def _attack(audit: Audit) -> str:
    return f"{audit['canary']} canary, {audit['sees']} seen" if "canary" in audit else "canaries of one run"


def _finding(audit: Audit, label: str) -> str:
    most = (
        "no epsilon holds for it"
        if audit["epsilon"] is None
        else f"at most {audit['epsilon']:.4g} (accountant, not verified)"
    )
    verdict = "CONTRADICTION" if audit["contradicts"] else "no contradiction"
    return (
        f"{label}, {_attack(audit)}: epsilon is at least {audit['epsilon_lower_bound']:.3g} "
        f"({audit['confidence']:.4g} confidence), {most} at delta {audit['delta']:g}; {verdict}"
    )


def _bounds(audits: Sequence[Audit], labels: Sequence[str]) -> list[Figure]:
    """From the lower bound to the accountant's, by audit; hollow where they contradict each other."""
    groups: dict[str, list[Series]] = {}
    for each, label in zip(audits, labels, strict=True):
        least, most = each["epsilon_lower_bound"], each["epsilon"]
        ends = (None, None) if most is None else (min(least, most), max(least, most))
        groups.setdefault(_attack(each), []).append(
            Series(label, ((0.0, least, *ends),), hollow=bool(each["contradicts"]))
        )
    axis = "epsilon: dot at least, end of the bar at most"
    return [
        Figure(f"bounds-{attack.replace(' ', '-').replace(',', '')}", attack, axis, "", tuple(series), "rows")
        for attack, series in groups.items()
    ]


def _curves(audits: Sequence[Audit], labels: Sequence[str]) -> list[Figure]:
    drawn = []
    for number, (each, label) in enumerate(zip(audits, labels, strict=True), 1):
        if not each.get("roc"):
            continue
        lines = [Series("the attack", _points(each["roc"]))]
        if each.get("roc_allowed"):
            lines.append(Series("the most that the accountant allows", _points(each["roc_allowed"])))
        lines.append(Series("guessing", _points([(0.0, 0.0), (1.0, 1.0)])))
        title = f"{label}: {_attack(each)}"
        drawn.append(Figure(f"roc-{number}", title, "false alarms", "detected", tuple(lines), percent=True))
    return drawn


def _points(curve: Iterable[Sequence[float]]) -> tuple[tuple[float, float, None, None], ...]:
    return tuple((float(alarms), float(detected), None, None) for alarms, detected in curve)


def _notes(audits: Sequence[Audit]) -> str:
    own = sorted({each["task"] for each in audits if each.get("task", MADE_UP) != MADE_UP})
    if not own:
        return ""
    return (
        f"<p><b>Not private:</b> audits of {text(', '.join(own))} were trained on its examples without a budget. Keep "
        "this page to yourself, unless these are public.</p>"
    )


def _rows(audits: Sequence[Audit], labels: Sequence[str]) -> list[dict[str, object]]:
    return [
        {
            "audit": label,
            "attack": _attack(each),
            "data": each.get("task") or each.get("run"),
            "runs": each.get("runs", 1),
            "canaries": each.get("canaries", 1),
            "at least": each["epsilon_lower_bound"],
            "confidence": each["confidence"],
            "at most": each["epsilon"],
            "delta": each["delta"],
            "estimate by the area": each.get("epsilon_by_area"),
            "ROC area": (each.get("area") or {}).get("estimate"),
            "area allowed": each.get("area_allowed"),
            "verdict": "CONTRADICTION" if each["contradicts"] else "no contradiction",
        }
        for each, label in zip(audits, labels, strict=True)
    ]
