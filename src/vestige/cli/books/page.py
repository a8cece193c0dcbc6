"""What does a book look like? One page for the person who answers for the data: spent, left, by whom, over time."""

from __future__ import annotations

from typing import Any

from vestige.budget.book import Book
from vestige.budget.summary import described
from vestige.budget.verify import Replay
from vestige.compare.report.html import items, table, text
from vestige.compare.report.page import document

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 300, 46, 34, 18


def page(book: Book, title: str | None = None) -> str:
    """One HTML file that needs no network."""
    found = described(book)
    parts = [
        {"part": each["part"], "spent": each["epsilon_spent"], "with what is reserved": each["epsilon_reserved"]}
        for each in found.get("parts", ())
    ]
    name = found["data"]["name"] or book.path.name
    sections = [
        ("left", "What is left", _left(found) + _bar(found)),
        ("time", "Over time", _plot(Replay.of(book).points, found["epsilon"])),
        *([("parts", "Parts of the rows", table("parts", parts))] if parts else []),
        ("people", "Who spent it", table("people", [_plain(each) for each in found["people"]]) or _nobody()),
        ("runs", "Every run", table("runs", [_row(each) for each in found["runs"]]) or _nobody()),
        ("hand", "Entered by hand", table("hand", found["external"]) or "<p>Nothing.</p>"),
        ("terms", "What was fixed when the book was opened", _terms(found)),
        ("assumes", "What it rests on", f"<ul>{items(found['assumes'])}</ul>"),
    ]
    facts = [
        f"epsilon {found['epsilon']:g} at delta {found['delta']:g}",
        f"per {found['unit']}",
        f"{found['epsilon_spent']:.3f} spent",
        f"{len(found['runs'])} runs",
        f"{found['data']['rows'] or '?'} rows",
    ]
    footer = (
        f"Written by vestige from the book {text(found['book'])}, whose last row is <code>{text(found['head'])}</code>."
    )
    return document(title or f"Privacy budget of {name}", facts, sections, [], footer)


def _nobody() -> str:
    return "<p>Nobody has spent anything yet.</p>"


def _left(found: dict[str, Any]) -> str:
    spent, reserved, whole = found["epsilon_spent"], found["epsilon_reserved"], found["epsilon"]
    waiting = f" and {reserved - spent:.3f} more is reserved" if reserved > spent + 1e-9 else ""
    return (
        f"<p><b>{text(found['guarantee'][0].upper() + found['guarantee'][1:])}.</b> The reading is {spent:.3f} of "
        f"{whole:g}{waiting}.</p><p class='note'>The reading is {text(found['epsilon_spent_is'])}. Epsilons of runs do "
        "not add up: together they cost less than their sum.</p>"
    )


def _bar(found: dict[str, Any]) -> str:
    """Spent, reserved and free, as one bar with its numbers."""
    whole = found["epsilon"]
    spent, reserved = (min(1.0, found[key] / whole) for key in ("epsilon_spent", "epsilon_reserved"))
    label = f"{found['epsilon_spent']:.3f} of {whole:g} spent, {found['epsilon_reserved']:.3f} with what is reserved"
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} 46" role="img" aria-label="{text(label)}">'
        f'<rect x="0" y="6" width="{WIDTH}" height="18" rx="4" style="fill:var(--line)"/>'
        f'<rect x="0" y="6" width="{WIDTH * reserved:.1f}" height="18" rx="4" style="fill:var(--accent);opacity:.35"/>'
        f'<rect x="0" y="6" width="{WIDTH * spent:.1f}" height="18" rx="4" style="fill:var(--accent)"/>'
        f'<text x="0" y="42">{text(label)}</text></svg></figure>'
    )


def _plot(points: list[tuple[str, float, float]], epsilon: float) -> str:
    """The reading after each entry, as steps; entries are spaced evenly, with their dates below."""
    top, right = max(epsilon, *(reserved for *_, reserved in points)) * 1.05, WIDTH - 8
    step = (right - LEFT) / max(1, len(points))

    def x(place: float) -> float:
        return LEFT + step * place

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)

    def line(values: list[float]) -> str:
        path = f"M{x(0):.1f} {y(values[0]):.1f}"
        for place, value in enumerate(values):
            path += f"V{y(value):.1f}H{x(place + 1):.1f}"
        return path

    ticks = [epsilon * share for share in (0, 0.25, 0.5, 0.75, 1)]
    grid = "".join(
        f'<path d="M{LEFT} {y(value):.1f}H{right}" style="stroke:var(--line);fill:none"/>'
        f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        for value in ticks
    )
    some = sorted({0, len(points) // 2, len(points) - 1})
    days = {at[:10] for at, *_ in points}
    shown = slice(0, 10) if len(days) > 1 else slice(11, 16)  # the hours of one day
    dates = "".join(
        f'<text x="{min(x(place), right - 60):.1f}" y="{HEIGHT - 10}">{text(points[place][0][shown])}</text>'
        for place in some
    )
    marks = "".join(
        f'<circle cx="{x(place + 0.5):.1f}" cy="{y(spent):.1f}" r="3" style="fill:var(--accent)"><title>'
        f"{text(at)}: {spent:.3f} spent, {reserved:.3f} with what was reserved</title></circle>"
        for place, (at, spent, reserved) in enumerate(points)
        if len(points) <= 400
    )
    full, dashed = line([spent for _, spent, _ in points]), line([reserved for *_, reserved in points])
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="the reading over time">{grid}'
        f'<path d="M{LEFT} {y(epsilon):.1f}H{right}" style="stroke:#c2334d;fill:none;stroke-width:1.5"/>'
        f'<text x="{right}" y="{y(epsilon) - 5:.1f}" text-anchor="end">the budget, {epsilon:g}</text>'
        f'<path d="{dashed}" style="stroke:var(--accent);fill:none;opacity:.45" stroke-dasharray="5 4"/>'
        f'<path d="{full}" style="stroke:var(--accent);fill:none;stroke-width:2"/>{marks}{dates}</svg>'
        "<figcaption>Full: what was charged. Dashed: with what was reserved, which comes back where it is not asked."
        "</figcaption></figure>"
    )


def _plain(person: dict[str, object]) -> dict[str, object]:
    return {"person": person["person"], "runs": person["runs"], "reading of their own": person["epsilon_reading"],
            "granted": person["granted"]}  # fmt: skip


def _row(run: dict[str, Any]) -> dict[str, object]:
    return {
        "run": run["id"],
        "person": run["person"],
        "what": run["purpose"],
        "when": run["at"][:16].replace("T", " "),
        "on": ", ".join(filter(None, (run["part"], run["rows"]))),
        "state": run["state"],
        "reserved": run["reserved"],
        "counted": run["counted"],
        "epsilon if it were alone": run["epsilon_alone"],
        **({} if run["slot"] is None else {"slot": run["slot"]}),
    }


def _terms(found: dict[str, Any]) -> str:
    lines = [f"{found['mode']}: {_mode(found)}", f"guaranteed for: {found['neighbours']}"]
    aside = found["external_delta"]
    lines.append(f"delta set aside for entries by hand: {aside['set_aside']:.3g}, of which {aside['left']:.3g} is left")
    lines.append(f"opened {found['opened']['at'][:16].replace('T', ' ')} by {found['opened']['by']}")
    slots = table("slots", [{**each, "asks": "; ".join(each["asks"])} for each in found.get("slots", [])])
    return f"<ul>{items(lines)}</ul>{slots}"


def _mode(found: dict[str, Any]) -> str:
    if found["mode"] == "slots":
        return f"{len(found['slots'])} slots, composed by loss distributions"
    chosen = found["filter"]
    return (
        f"Renyi orders weighted in advance, {chosen['weight']:.2g} on order {chosen['favoured_order']:.3g} and the "
        f"rest on {chosen['other_orders']} others; what is asked may depend on answers"
    )
