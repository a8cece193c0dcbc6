"""What does a report promise about privacy, in plain words? For a reader who is responsible for the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vestige.compare.report.html import items, table, text
from vestige.compare.report.labels import Content, budget_of


def privacy(content: Content) -> str:
    """What is promised, to whom, on which assumptions, and what is not."""
    done = [record for record in content["records"] if record["status"] == "done"]
    if not done:
        return "<p>No run finished, so nothing is promised.</p>"

    def seen(key: str) -> str:
        return text(", ".join(dict.fromkeys(str(record.get(key)) for record in done)))

    without = [record for record in done if record["epsilon"] is None]
    covered = [record for record in done if record["epsilon"] is not None]
    seeded = sum(record["noise"] != "secret" for record in done)
    facts = [
        (
            "The promise",
            "None. No run on this page has an epsilon; the reasons are below."
            if not covered
            else "Whoever sees one finished model, and everything released on the way to it, learns almost the same "
            'about a person\'s example as if that example had not been in the data. Epsilon says how much "almost" '
            "leaves open (0 is nothing; each step of about 1 multiplies what may be inferred by e), delta how "
            "often it may fail." + (" Runs without an epsilon have no part in it." if without else ""),
        ),
        (
            "Neighbouring data",
            f"{seen('adjacency')}: one dataset has an example where the other has a blank in its place; the number of "
            "rows is public. The prices of add/remove one example are valid for it.",
        ),
        (
            "Unit",
            "One row of the data. A person who contributed several rows is less protected; see the notes of the task.",
        ),
        ("Sampler", " ".join(_sampler(str(kind)) for kind in dict.fromkeys(record["sampling"] for record in done))),
        ("Accountant", f"{seen('accountant')}; epsilon is an upper bound, rounded upwards."),
        ("Delta", seen("delta")),
        (
            "Noise",
            f"{seen('noise')}; its keys were drawn from the operating system and never written down."
            if not seeded
            else f"{seen('noise')}: {seeded} of {len(done)} runs drew predictable noise for testing; those protect "
            "nobody and have no epsilon.",
        ),
    ]
    listed = "".join(f"<dt>{text(term)}</dt><dd>{words}</dd>" for term, words in facts)
    earlier = dict.fromkeys(
        line for record in covered for line in record.get("assumptions", ()) if isinstance(line, str)
    )
    reasons = dict.fromkeys(line for record in without for line in record.get("reasons", ()))
    parts = [f"<dl>{listed}</dl>"]
    if covered:
        parts.append("<h3>It rests on these assumptions</h3>" + table("assumptions", _assumptions(content)))
    if earlier:
        parts.append(f"<p>As runs of an earlier version said it:</p><ul>{items(earlier)}</ul>")
    parts.append("<h3>What was charged</h3>" + table("charged", _charged(done)))
    parts.append(
        "<h3>What is not private, or not covered</h3><ul>"
        + "".join(f"<li>{line}</li>" for line in _limits(content, done))
    )
    if without:
        words = "; ".join(text(reason) for reason in reasons) or "no theorem covers them"
        parts.append(f"<li><b>{len(without)} runs have no epsilon at all:</b> {words}.</li>")
    return "".join(parts) + "</ul>"


def _assumptions(content: Content) -> list[dict[str, object]]:
    """What holds for all runs of the page: the weakest that any of them says."""
    return [
        {
            "assumption": each["name"],
            "in these runs": each["status"] + (f" ({each['detail']})" if each["detail"] else ""),
            "what": each["sentence"],
            "where it does not hold": each["if_false"],
        }
        for each in content["summary"]["assumptions"]
    ]


SAMPLERS = {
    "poisson": "at every step each example joins by its own coin flip, as the theorems assume.",
    "cyclic-poisson": "the data are split once into parts that take turns; at its part's turn an example joins by its "
    "own coin flip, and always where the charge says rate 1.",
    "every-example": "every example is in every step.",
    "allocation": "in every epoch each example is in one step, drawn uniformly and kept secret.",
}


def _sampler(kind: str) -> str:
    return f"{text(kind)}: {SAMPLERS.get(kind, 'no theorem here covers it.')}"


def _charged(done: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """One row per method and budget, and more where runs of one method were charged differently."""
    kinds: dict[tuple[str, str, float, str], dict[str, Any]] = {}
    for record in done:
        run, asked = record["run"], "; ".join(_questions(record["charged"]))
        row = kinds.setdefault(
            (run["task"], run["label"], run["budget"]["value"], asked),
            {
                "task": run["task"],
                "method": run["label"],
                "budget": budget_of(run),
                "questions asked of the data in one run": asked,
                "epsilon": record["epsilon"],
                **(_means(record) if any(each.get("attacker_accuracy") for each in done) else {}),
                "runs": 0,
            },
        )
        row["runs"] += 1
    return [kinds[key] for key in sorted(kinds)]


def _means(record: Mapping[str, object]) -> dict[str, object]:
    """What a record's epsilon means; a record of an earlier version, or without an epsilon, does not say it."""
    return {
        "attacker is right, at most": record.get("attacker_accuracy"),
        "detected at 1% false alarms, at most": record.get("detection_at_1_percent"),
        "Gaussian mu": record.get("gaussian_mu"),
        "epsilon for replacing one": record.get("epsilon_replacing"),
    }


LISTED = 4
"""Up to this many questions of one kind are listed one by one; for more, the range of each number is given."""


def _questions(charged: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in charged:
        kinds.setdefault(row["kind"], []).append(row)
    for kind, rows in kinds.items():
        listed = [[row] for row in rows] if len(rows) <= LISTED else [rows]
        for alike in listed:
            facts = ", ".join(
                _range(key, [row[key] for row in alike]) for key in alike[0] if key not in ("kind", "count")
            )
            various = f" with {len(alike)} different numbers" if len(alike) > 1 else ""
            yield f"{sum(row['count'] for row in alike)} x {kind}{various} ({facts})"


def _range(key: str, values: Sequence[Any]) -> str:
    shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in (values[0], values[-1])]
    if all(isinstance(value, int | float) for value in values):
        shown = [f"{value:.4g}" for value in (min(values), max(values))]
    return f"{key} {shown[0]}" if shown[0] == shown[1] else f"{key} {shown[0]} to {shown[1]}"


def _limits(content: Content, done: Sequence[Mapping[str, Any]]) -> list[str]:
    tuned = [record for record in done if record["run"]["stage"] == "tuning"]
    lines = [
        f"Each epsilon is that of <b>one</b> run released alone. This page shows {len(done)} runs on the same data: "
        "publishing several of them, or this page itself where the data are private, costs more than any one "
        "row says.",
        "Test accuracies are computed without noise on the test set, which is taken to be public.",
    ]
    if tuned:
        lines.append(
            "Validation accuracies come from held-out training data without noise, and the tuned rates were chosen by "
            "them: that choice is not in the epsilon of the tuned rows (see the price of tuning). The "
            "automatic rate uses "
            "public numbers only."
        )
    evaluated = max((len(record["curve"]) for record in done if record["run"]["stage"] != "tuning"), default=0)
    if evaluated:
        lines.append(
            f"The test set was looked at up to {evaluated} times during a final run, for the curves; nothing was "
            "chosen by it."
        )
    else:
        lines.append("The test set was touched once per final run, at its end.")
    lines.append("Model structure, number of steps, sampling rate, expected batch size and clipping bound are public.")
    return lines
