"""What does a comparison say? Everything that terminal and report tell of it, from its records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any


def summarised(home: Any) -> dict[str, Any]:
    """Everything the terminal and the report say about a comparison, from its records alone."""
    from vestige.compare import comparison, runner

    specification, records = home.specification(), home.records()
    grid = runner.grid_of(specification)
    settled = runner.settled(home)
    return {
        "folder": str(home.path),
        "total": comparison.total(specification, grid),
        "done": sum(r["status"] == "done" and r["run"]["stage"] != comparison.SUPERSEDED for r in settled),
        "baseline": specification.baseline,
        "rows": comparison.rows(settled, specification.baseline),
        "choices": comparison.choices(specification, grid, records),
        "prices": runner.prices(home) if "tuned" in specification.rates else [],
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
    for row in prices:
        if row["epsilon_one_run"] is not None:
            kinds.setdefault((row["budget"], row["epsilon_with_tuning"] is None), []).append(row)
    several = {budget for budget, count in Counter(budget for budget, _ in kinds).items() if count > 1}
    return [_price_line(rows, named=unproven and budget in several) for (budget, unproven), rows in kinds.items()]


def _price_line(rows: Sequence[dict[str, Any]], named: bool) -> str:
    charged = [row["epsilon_with_tuning"] for row in rows if row["epsilon_with_tuning"] is not None]
    cost = f"together cost epsilon {_range(charged)}" if charged else "have no proven price"
    repeats = rows[0]["runs_per_trial"]
    each = f", of {repeats} runs each," if repeats > 1 else ""
    whose = f" ({', '.join(dict.fromkeys(row['method'] for row in rows))})" if named else ""
    return (
        f"price of tuning at {rows[0]['budget']}{whose}: uncharged, as in the tuned rows, epsilon "
        f"{_range([row['epsilon_one_run'] for row in rows])}; choosing by the best of a random number of trials with "
        f"mean {_range([row['trials'] for row in rows])}{each} and one final run {cost} (Papernot & Steinke 2022, with "
        "public validation data); the automatic rate costs nothing"
    )


def _range(values: Sequence[float]) -> str:
    """Both ends, or the upper one where they are one to a percent; rounded upwards, as what bounds must be."""
    least, most = (_upwards(bound(values)) for bound in (min, max))
    return most if max(values) <= 1.01 * min(values) else f"{least} to {most}"


def _upwards(value: float) -> str:
    """Three digits, not below the value."""
    with localcontext(prec=3, rounding=ROUND_CEILING):
        return f"{float(+Decimal(repr(value))):g}"
