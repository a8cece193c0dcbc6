"""What does a comparison look like? One HTML page that needs no network, and its figures as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from vestige.compare.report.drawing import Figure, png, svg
from vestige.compare.report.figures import figures
from vestige.compare.report.html import ALIGNED, items, table, text
from vestige.compare.report.labels import STAGES, Content, budget_of, names, tasks
from vestige.compare.report.privacy import privacy
from vestige.compare.report.series_looks import key, look_of

NAMED = 5
"""A sentence names up to this many methods; more are counted, and named when the reader unfolds them."""


def page(content: Content) -> str:
    """One HTML file with everything in it: style, figures, tables, and the few lines of script that sort them."""
    order = names(content)
    drawn = figures(content)
    groups = {
        "differences": [f for f in drawn if f.key.startswith("difference-")],
        "accuracy": [f for f in drawn if f.key.startswith("accuracy-")],
        "steps": [f for f in drawn if f.key.startswith(("steps-", "loss-", "spent-", "epsilon-"))],
        "rates": [f for f in drawn if f.key.startswith("rates-")],
        "costs": [f for f in drawn if f.key.startswith(("seconds-", "memory-mb-"))],
    }
    printed = [f for f in drawn if f.key.startswith("paper-")]
    memory = [f for f in drawn if f not in printed and not any(f in group for group in groups.values())]
    sections = [
        ("result", "What was found", _findings(content) + panels(groups["differences"], order)),
        *([("paper", "Beside the paper", _beside(content["paper"], printed, order))] if content.get("paper") else []),
        (
            "accuracy",
            "Accuracy at each budget",
            panels(groups["accuracy"], order) + table("rows", _row_table(content)),
        ),
        ("tuning", "Tuning and its price", _tuning(content) + panels(groups["rates"], order)),
        ("steps", "Accuracy, loss and epsilon by step", _step_words(content) + panels(groups["steps"], order)),
        ("costs", "Time and memory", _cost_words(content) + panels(groups["costs"], order)),
        ("memory", "What the memories did", panels(memory, order) or "<p>No method here has a memory to show.</p>"),
        ("privacy", "Privacy, in plain words", privacy(content)),
        ("runs", "Every run", table("runs", _run_table(content)) + _problems(content)),
    ]
    footer = (
        f"Written by vestige from {len(content['records'])} records. Every figure and table on this page is "
        "computed from them; nothing is loaded from anywhere."
    )
    return document(content["title"], _facts(content), sections, order, footer)


def document(
    title: str, facts: Sequence[str], sections: Sequence[tuple[str, str, str]], order: Sequence[str], footer: str
) -> str:
    """A page of sections (key, title, HTML); `order` are the series that buttons show and hide."""
    links = "".join(f'<a href="#{key}">{text(name)}</a>' for key, name, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{text(name)}</h2>{inner}</section>' for key, name, inner in sections)
    chips = "".join(
        f'<button class="chip c{look.colour}" data-series="{text(name)}" aria-pressed="true">{key(look)}'
        f"{text(name)}</button>"
        for name, look in ((name, look_of(name, order)) for name in order)
    )
    asset = resources.files("vestige") / "data"
    style, script = (asset / "report.css").read_text(), (asset / "report.js").read_text()
    shown = '<p class="facts">' + "".join(f"<span>{text(fact)}</span>" for fact in facts) + "</p>"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{text(title)}</title><style>{style}{ALIGNED}</style></head>'
        f"<body><header><h1>{text(title)}</h1>{shown}<nav>{links}</nav>"
        f'<div class="chips" role="group" aria-label="methods shown">{chips}</div></header><main>{body}</main>'
        f"<footer>{footer}</footer><script>{script}</script></body></html>"
    )


def _facts(content: Content) -> list[str]:
    summary, specification = content["summary"], content["specification"]
    budgets = ", ".join(budget_of({"budget": budget}) for budget in specification["budgets"])
    return [
        f"{summary['done']} of {summary['total']} runs",
        f"{len(specification['contenders'])} methods",
        ", ".join(tasks(content)),
        budgets,
        f"{len(specification['seeds'])} seeds",
        f"delta {specification['delta']:g}",
    ]


def _findings(content: Content) -> str:
    """The conclusion in words: who can be told apart from the baseline, and who cannot."""
    baseline = content["summary"]["baseline"]
    lines = []
    rows = content["summary"]["rows"]
    for task in tasks(content):
        for budget in dict.fromkeys(row["budget"] for row in rows if row["task"] == task):
            for rate, words in STAGES.items():
                chosen = [r for r in rows if (r["task"], r["budget"], r["rate"]) == (task, budget, rate)]
                others = [row for row in chosen if row["method"] != baseline and row["mean"] is not None]
                if not chosen:
                    continue
                lines.append(_finding(content, (task, budget, words), others, chosen))
    note = (
        f"<p class='note'>Intervals are Student-t at 95% over seeds. Differences are paired by seed, tested by "
        "exchanging the two of a pair, which supposes nothing about how accuracies are distributed, and corrected by "
        f"Holm over all {content['summary']['tested']} rows that are tested. {_choice_words(content)} Not "
        "distinguishable does not mean equal: it means that these runs cannot tell; the intervals below, each for "
        "itself, say how large a difference they leave open. Full dots are told apart after the correction, hollow "
        "ones are not.</p>"
    )
    if not lines:
        lines = [f"<li>Nothing can be compared with {text(baseline)} yet.</li>"]
    return f"<ul class='findings'>{''.join(lines)}</ul>{note}"


def _tested(row: Mapping[str, object]) -> bool:
    return str(row["sentence"]).startswith(("better", "worse", "not distinguishable"))


def _choice_words(content: Content) -> str:
    """Whether the luck of choosing a rate is in the intervals."""
    if not content["summary"]["choices"]:
        return ""
    if content["specification"]["choose"] == "each seed":
        return "Each tuned run had its rate chosen by trials of its own, so the luck of the choice is in the intervals."
    return (
        "<b>The choice of the rate is not in the tuned rows' intervals:</b> it was made once for all seeds, so these "
        "rows are not tested."
    )


def _finding(content: Content, where: tuple[str, str, str], others: Sequence[Any], chosen: Sequence[Any]) -> str:
    (task, budget, words), baseline = where, content["summary"]["baseline"]
    sentences = [f"<b>{text(task)}, {text(budget)}, {words}.</b>"]
    base = next((row for row in chosen if row["method"] == baseline and row["mean"] is not None), None)
    if base is not None:
        sentences.append(f"{text(baseline)} reaches {base['mean']:.1%}.")
    for word in ("better", "worse"):
        apart = [row for row in others if row["sentence"].startswith(word)]
        if apart:
            points = ", ".join(f"{text(row['method'])} by {abs(100 * row['difference']):.1f} points" for row in apart)
            sentences.append(f"{word.capitalize()} than {text(baseline)}: {points}.")
        elif word == "better" and len(others) > 1 and any(_tested(row) for row in others):
            sentences.append("No method is shown to be better.")
    broken = [row["method"] for row in chosen if row["mean"] is None]
    if broken:
        sentences.append(f"Every run of {text(', '.join(broken))} failed; the table says why.")
    few = [row["method"] for row in others if row["sentence"].startswith("too few seeds")]
    if few:
        needed = f"{content['summary']['tested']} rows take {content['summary']['seeds_to_tell']}"
        sentences.append(f"Too few seeds to tell {text(', '.join(few))} from {text(baseline)}: {needed}.")
    once = [row["method"] for row in others if "; not tested:" in row["sentence"]]
    if once:
        sentences.append(f"Not tested, because each rate was chosen once for all seeds: {text(', '.join(once))}.")
    same = [row["method"] for row in others if row["sentence"].startswith("not distinguishable")]
    if len(same) > NAMED:
        said = f"{len(same)} methods are not distinguishable from {text(baseline)}"
        sentences.append(f"<details><summary>{said}</summary>{text(', '.join(same))}</details>")
    elif same:
        verb = "is" if len(same) == 1 else "are"
        sentences.append(f"{text(', '.join(same))} {verb} not distinguishable from {text(baseline)}.")
    return f"<li>{' '.join(sentences)}</li>"


def _beside(paper: Mapping[str, Any], drawn: Sequence[Figure], order: Sequence[str]) -> str:
    """The paper's printed numbers and ours, its figures from our runs, and what had to be assumed."""
    words = f"<p>{text(paper['title'])}.</p>"
    if paper["small"]:
        words += "<p><b>Made with --small: too few steps and seeds to compare with the paper.</b></p>"
    rows = [{key.replace("_", " "): value for key, value in row.items()} for row in paper["beside"]]
    numbers = table("paper", rows) or "<p>The paper prints no numbers here, only curves.</p>"
    assumed = items(paper["notes"])
    figures = f"<h3>On the paper's own axes</h3>{panels(drawn, order)}" if drawn else ""
    return f"{words}{numbers}{figures}<h3>What the paper left unsaid, and what was assumed</h3><ul>{assumed}</ul>"


def panels(drawn: Sequence[Figure], order: Sequence[str]) -> str:
    if not drawn:
        return ""
    return (
        '<div class="panels">'
        + "".join(
            f'<figure id="figure-{figure.key}">{svg(figure, order)}{_legend(figure, order)}</figure>'
            for figure in drawn
        )
        + "</div>"
    )


def _legend(figure: Figure, order: Sequence[str]) -> str:
    """Names of the series that are not methods, such as layers; methods are named once, at the top of the page."""
    keys = [
        f'<span class="c{look.colour}">{key(look)}{text(name)}</span>'
        for name, look in ((each.name, look_of(each.name, order, index)) for index, each in enumerate(figure.series))
        if name not in order
    ]
    return f'<figcaption class="keys">{"".join(keys)}</figcaption>' if keys else ""


def _tuning(content: Content) -> str:
    charged = {
        (row["task"], row["budget"], row["method"]): row["epsilon_with_tuning"] for row in content["summary"]["prices"]
    }
    cells: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in content["summary"]["choices"]:
        cells.setdefault((row["task"], row["budget"], row["method"]), []).append(row)
    choices = [
        {
            "task": task,
            "budget": budget,
            "method": method,
            "winning rates": _counted(_rate(row) for row in rows),
            "other options": _counted(_options(row) for row in rows),
            "mean validation accuracy": sum(row["validation_accuracy"] for row in rows) / len(rows),
            "trials": rows[0]["trials"],
            "epsilon with tuning charged": charged.get((task, budget, method)),
            "at the edge of the grid": f"{sum(row['at_edge'] for row in rows)} of {len(rows)}",
        }
        for (task, budget, method), rows in cells.items()
    ]
    if not choices:
        return "<p>Nothing was tuned.</p>"
    share = content["specification"]["validation"]
    counts = sorted({row["trials"] for row in choices})
    had = "the same number of trials" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} trials"
    once = content["specification"]["choose"] == "once"
    whose = "once for all its final runs" if once else "anew for each of its final runs"
    words = (
        f"<p>Every method had {had} over the same range of rates, {whose}, judged on {share:.0%} of the training data "
        "held out for it; the test set was not looked at. The tuned rows treat the chosen rate as public: the price of "
        "having looked is stated here and is not in their epsilon. With tuning charged, epsilon is that of one final "
        "run and of all trials that its rate was chosen by, composed as they were made; it counts the held-out "
        "examples as public, because they are scored without noise.</p>"
    )
    lines = items(content["summary"]["price_lines"])
    return f"{words}<ul>{lines}</ul>" + table("choices", choices)


def _rate(row: Mapping[str, object]) -> str:
    return f"{row['lr']:g}" if row["lr"] is not None else f"{row['factor']:.3g} x auto"


def _options(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in row["options"].items()) or "-"


def _counted(words: Iterable[str]) -> str:
    """Each word once, the most frequent first, with how often it comes if there are several."""
    found = Counter(words).most_common()
    return "; ".join(f"{word} ({count})" if len(found) > 1 else word for word, count in found)


def _step_words(content: Content) -> str:
    if content["specification"]["evaluations"]:
        return "<p>Means over the final runs, on the test set; nothing was chosen by these curves.</p>"
    if content["summary"]["choices"]:
        return (
            "<p>The trials that won, on the data held out for tuning: final runs look at the test set once, "
            "at their end.</p>"
        )
    return "<p>No run was watched on its way.</p>"


def _cost_words(content: Content) -> str:
    most = max((record.get("stacked", 1) for record in content["records"]), default=1)
    if most <= 1:
        return "<p>Means over final runs, each alone in its process.</p>"
    return (
        f"<p>Means over final runs. Up to {most} runs were trained together as one stack: a stacked run's time "
        "is its share "
        f"of the stack's, and on a CPU its memory is that of the whole process, so compare only runs made alike.</p>"
    )


def _row_table(content: Content) -> list[dict[str, object]]:
    return [
        {
            "task": row["task"],
            "budget": row["budget"],
            "rate": row["rate"],
            "method": row["method"],
            "accuracy": row["mean"],
            "in words": row["sentence"],
            "sd": row["sd"],
            "low": row["low"],
            "high": row["high"],
            "best on the way": row["best"],
            "test loss": row["test_loss"],
            "seeds": row["count"],
            "failed": len(row["failed"]),
            "epsilon": row["epsilon"],
            "noise multiplier": row["noise_multiplier"],
            "learning rate": row["lr"],
            "difference": row["difference"] if row["method"] != content["summary"]["baseline"] else None,
            "p (Holm)": row["p_holm"] if row["method"] != content["summary"]["baseline"] else None,
            "its runs": " ".join(name[:8] for name in row["runs"]),
        }
        for row in content["summary"]["rows"]
    ]


def _run_table(content: Content) -> list[dict[str, object]]:
    made = []
    for record in content["records"]:
        run = record["run"]
        made.append(
            {
                "run": record["id"][:8],
                "task": run["task"],
                "method": run["label"],
                "stage": run["stage"],
                "budget": budget_of(run),
                "seed": run["seed"],
                "learning rate": record.get("lr"),
                "accuracy": record.get("accuracy"),
                "nonprivate validation accuracy": record.get("nonprivate_validation_accuracy"),
                "epsilon": record.get("epsilon"),
                "noise multiplier": record.get("noise_multiplier"),
                "questions": record.get("asked"),
                "seconds": record.get("seconds"),
                "state": record["status"] if record["status"] == "done" else f"failed: {record['error']}",
            }
        )
    return made


def _problems(content: Content) -> str:
    failed, torn = content["summary"]["failed"], content["summary"]["unreadable"]
    parts = []
    if failed:
        parts.append(f"<h3>{len(failed)} runs failed</h3>" + table("failed", failed))
    if torn:
        rows = [{"file": name, "why it was left out": why} for name, why in torn.items()]
        parts.append("<h3>Records left out</h3>" + table("torn", rows))
    return "".join(parts)


def export(content: Content, folder: Path) -> list[str]:
    """Write every figure of a comparison as a file; returns lines that say what was written."""
    return export_figures(figures(content), names(content), folder)


def export_figures(drawn: Sequence[Figure], order: Sequence[str], folder: Path) -> list[str]:
    """Write figures as SVG and, where matplotlib is installed, as PNG; returns lines that say what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    for figure in drawn:
        (folder / f"{figure.key}.svg").write_text(svg(figure, order, standalone=True), encoding="utf-8")
    lines = [f"wrote {len(drawn)} figures to {folder} as SVG"]
    try:
        import matplotlib
    except ImportError:
        return [*lines, "no PNG: matplotlib is missing; pip install 'vestige[report]'"]
    matplotlib.use("Agg")
    for figure in drawn:
        png(figure, order, folder / f"{figure.key}.png")
    return [*lines, f"wrote {len(drawn)} figures to {folder} as PNG"]
