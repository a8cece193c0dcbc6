"""What does a comparison say? Everything that terminal and report tell of it, from its records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def summarised(home: Any) -> dict[str, Any]:
    """Everything the terminal and the report say about a comparison, from its records alone."""
    from vestige import comparison, experiments

    specification, records = home.specification(), home.records()
    grid = experiments.grid_of(specification)
    settled = comparison.settled(specification, grid, records)
    return {
        "folder": str(home.path),
        "total": comparison.total(specification, grid),
        "done": sum(record["status"] == "done" for record in records.values()),
        "baseline": specification.baseline,
        "rows": comparison.rows(settled, specification.baseline),
        "choices": comparison.choices(specification, grid, records),
        "prices": experiments.prices(home) if "tuned" in specification.rates else [],
        "failed": [
            {"id": record["id"], "error": record["error"], **_which(record)}
            for record in records.values()
            if record["status"] == "failed"
        ],
        "unreadable": dict(home.unreadable),
    }


def _which(record: dict[str, Any]) -> dict[str, Any]:
    return {key: record["run"][key] for key in ("task", "label", "stage", "seed")}


def price_lines(prices: Sequence[dict[str, Any]]) -> list[str]:
    """The price of tuning, once per budget, as a range where methods differ; those without a proven one by name."""
    kinds: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in sorted(prices, key=lambda each: each["epsilon_one_run"] or 0.0):
        if row["epsilon_one_run"] is not None:
            kinds.setdefault((row["budget"], row["epsilon_best_of_trials"] is None), []).append(row)
    several = {budget for budget, count in Counter(budget for budget, _ in kinds).items() if count > 1}
    return [_price_line(rows, named=unproven and budget in several) for (budget, unproven), rows in kinds.items()]


def _price_line(rows: Sequence[dict[str, Any]], named: bool) -> str:
    row = rows[0]
    charged = [each["epsilon_best_of_trials"] for each in rows if each["epsilon_best_of_trials"] is not None]
    least, most = (f"{bound(charged):.3g}" if charged else "" for bound in (min, max))
    cost = f"costs epsilon {least if least == most else f'{least} to {most}'}" if charged else "has no proven price"
    each = f", of {row['runs_per_trial']} runs each," if row["runs_per_trial"] > 1 else ""
    whose = f" ({', '.join(dict.fromkeys(each['method'] for each in rows))})" if named else ""
    return (
        f"price of tuning at {row['budget']}{whose}: uncharged, as in the tuned rows, epsilon "
        f"{row['epsilon_one_run']:.3g}; keeping the best of a random number of trials with mean {row['trials']}{each} "
        f"{cost} (Papernot & Steinke 2022, with public validation data); the automatic rate costs nothing"
    )
