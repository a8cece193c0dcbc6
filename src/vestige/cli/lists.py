"""Which methods and tasks are there? `vestige methods` and `vestige tasks` list them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from vestige.cli.terminal import Json, print_json, stdout


def methods(
    name: Annotated[str | None, typer.Argument(help="A method: print its page, with the BibTeX of its paper.")] = None,
    as_json: Json = False,
) -> None:
    """List the private optimizers, or describe one.

    Examples:

        vestige methods

        vestige methods dp-sat
    """
    from vestige.methods import catalogue

    if name is not None:
        row = catalogue.row(name)
        if as_json:
            print_json(row)
        else:
            stdout.print(catalogue.page(name), markup=False)
        return
    rows = catalogue.rows()
    if as_json:
        print_json({"methods": rows})
        return
    table = Table("method", "what it does", "privacy", "copies")
    for row in rows:
        table.add_row(row["name"], row["summary"], row["privacy"], f"{row['copies']:g}")
    stdout.print(table)
    stdout.print(
        "copies: extra state, in copies of the parameters. Options, price, reference and BibTeX: vestige methods NAME"
    )


def tasks(as_json: Json = False) -> None:
    """List the tasks: datasets with their models."""
    from vestige import tasks as known

    if as_json:
        print_json({"tasks": known.describe()})
        return
    table = Table("task", "dataset", "model", "data")
    for row in known.describe():
        words = (str(row[key]) for key in ("name", "dataset", "model"))
        table.add_row(*words, "--data" if row["needs_data"] else "included")
    stdout.print(table)
