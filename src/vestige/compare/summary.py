"""What are the results of a comparison? All that the terminal and the report show, from its records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any

from vestige.assumptions import weakest
from vestige.compare import aggregate_results, run_grid
from vestige.compare.folder import ComparisonFolder
from vestige.compare.statistics import seeds_to_tell
from vestige.run_records import completed, failed

SUPERSEDED = "superseded"
"""The stage that a final run has in reports once its rate no longer wins."""


def summarised(folder: ComparisonFolder) -> dict[str, Any]:
    """Progress, rows, choices, prices and failures of a comparison."""
    specification, records = folder.specification(), folder.records()
    grid = run_grid.grid_of(specification)
    gone = run_grid.superseded(specification, grid, records)
    standing = [record for record in records.values() if record.id not in gone]
    rows = aggregate_results.rows(standing, specification.baseline, chosen_once=specification.choose == "once")
    tested = sum(row["p_holm"] is not None for row in rows)
    return {
        "folder": str(folder.path),
        "total": run_grid.total(specification, grid),
        "done": len(completed(standing)),
        "baseline": specification.baseline,
        "rows": rows,
        "tested": tested,
        "seeds_to_tell": seeds_to_tell(tested) if tested else None,
        "choices": aggregate_results.choices(specification, grid, records),
        "prices": aggregate_results.tuning_prices(specification, grid, records),
        "failed": [
            {
                "id": record.id,
                "error": record.error,
                "task": record.run.task,
                "label": record.run.label,
                "stage": record.run.stage,
                "seed": record.run.seed,
            }
            for record in failed(records.values())
        ],
        "unreadable": dict(folder.unreadable),
        "assumptions": list(weakest(record.assumptions for record in completed(standing))),
    }


def reported_records(folder: ComparisonFolder) -> list[dict[str, object]]:
    """Every record as JSON, for the report; final runs at a rate that no longer wins are marked as superseded."""
    specification, records = folder.specification(), folder.records()
    gone = run_grid.superseded(specification, run_grid.grid_of(specification), records)
    found = {name: record.to_json() for name, record in records.items()}
    for name in gone:
        found[name]["run"]["stage"] = SUPERSEDED
    return list(found.values())


def price_lines(prices: Sequence[dict[str, Any]]) -> list[str]:
    """The price of tuning, once per budget, as a range where methods differ; those without a proven one by name."""
    kinds: dict[tuple[str, bool], list[dict[str, object]]] = {}
    for row in prices:
        if row["epsilon_one_run"] is not None:
            kinds.setdefault((row["budget"], row["epsilon_with_tuning"] is None), []).append(row)
    several = {budget for budget, count in Counter(budget for budget, _ in kinds).items() if count > 1}
    return [_price_line(rows, named=unproven and budget in several) for (budget, unproven), rows in kinds.items()]


def _price_line(rows: Sequence[dict[str, Any]], named: bool) -> str:
    charged = [row["epsilon_with_tuning"] for row in rows if row["epsilon_with_tuning"] is not None]
    counts = [row["trials"] * row["runs_per_trial"] for row in rows]
    cost = f"together cost epsilon {_range(charged)}, all composed" if charged else "have no proven price"
    whose = f" ({', '.join(dict.fromkeys(row['method'] for row in rows))})" if named else ""
    return (
        f"price of tuning at {rows[0]['budget']}{whose}: epsilon {_range([row['epsilon_one_run'] for row in rows])} of "
        f"the tuned rows is that of one final run alone; it and the {_range(counts)} runs that its rate was chosen by "
        f"{cost}, if the held-out examples are public (they are scored without noise); the automatic rate costs nothing"
    )


def _range(values: Sequence[float]) -> str:
    """Both ends, or only the upper one where they agree to a percent; rounded up, as bounds must be."""
    least, most = (_upwards(bound(values)) for bound in (min, max))
    return most if max(values) <= 1.01 * min(values) else f"{least} to {most}"


def _upwards(value: float) -> str:
    """Three digits, not below the value."""
    with localcontext(prec=3, rounding=ROUND_CEILING):
        return f"{float(+Decimal(repr(value))):g}"
