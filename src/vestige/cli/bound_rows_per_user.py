"""How many rows of one user should take part? `vestige bound` asks privately, and is charged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vestige.cli.terminal import Json, print_json, stderr, stdout


def bound(
    data: Annotated[Path, typer.Option(help="A table (.csv, .jsonl, .parquet), or a FILE.npz.")],
    user_column: Annotated[str, typer.Option(help="The column, or array, that names whose each row is.")],
    epsilon: Annotated[float, typer.Option(help="What the question costs, with delta 0.")],
    out: Annotated[Path, typer.Option(help="A new folder, for the ledger and the bound.")],
    share: Annotated[
        float, typer.Option(help="Of users who are to have no more rows than the bound; 0.5 is the median.")
    ] = 0.5,
    largest: Annotated[int, typer.Option(help="The largest bound that may be chosen: a public number.")] = 64,
    delta: Annotated[float, typer.Option(help="The delta that `vestige verify` states its epsilon at.")] = 1e-6,
    budget: Annotated[
        Path | None, typer.Option(help="The book of the dataset, which is charged before the answer exists.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose how many rows of one user take part, by one charged private question about their counts.

    Give the folder to --rows-per-user or --cap of `vestige train` and `vestige finetune`: the epsilon of that run then
    holds both. Where counts of rows are public, --rows-per-user median costs nothing.

    Examples:

        vestige bound --data visits.csv --user-column patient --epsilon 0.2 --share 0.9 --out most-visits

        vestige train --recipe tabular --data visits.csv --user-column patient --rows-per-user most-visits ...
    """
    from vestige import tasks
    from vestige.budget.spending import Account
    from vestige.training.private_statistics import private_bound

    ids = tasks.users_of(data, user_column)
    paid_by = None if budget is None else Account(budget, derived_from=data, user_column=user_column)
    asked = {"epsilon": epsilon, "share": share, "largest": largest, "delta": delta}
    found = private_bound(ids, **asked, out=out, budget=paid_by)  # type: ignore[arg-type]
    if as_json:
        print_json({"rows": found.rows, **asked, "out": str(out)})
        return
    stdout.print(f"{found.rows} rows: about {share:.0%} of users have no more", markup=False)
    stderr.print(
        f"this cost epsilon {epsilon:g}; --rows-per-user {out}, or --cap {out}, adds it to the run's", markup=False
    )
