"""Which methods, tasks and recipes are there? `vestige methods`, `vestige tasks` and `vestige recipes` list them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from vestige.checks import check_epsilon
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
        name = ", ".join([row["name"], *row["aliases"]])
        table.add_row(name, row["summary"], row["privacy"], f"{row['copies']:g}")
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


def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe: print its settings and their source.")] = None,
    epsilon: Annotated[float, typer.Option(help="The budget at which one recipe's settings are shown.")] = 3.0,
    as_json: Json = False,
) -> None:
    """List the recipes: all settings of a private run but its budget, by name; or describe one.

    Examples:

        vestige recipes

        vestige recipes cifar10-wrn16-4 --epsilon 8
    """
    from vestige.recipes import RECIPES, find

    if name is not None:
        recipe = find(name)
        check_epsilon(epsilon)
        settings = recipe.settings(epsilon)
        if as_json:
            print_json({**recipe.row(), "settings": settings})
            return
        stdout.print(f"{recipe.name}: {recipe.summary}", markup=False)
        stdout.print(f"source: {recipe.source}", markup=False)
        if recipe.published is not None:
            printed = ", ".join(f"{accuracy:g} at epsilon {each:g}" for each, accuracy in recipe.published.accuracy)
            words = f"published: {printed} ({recipe.published.source}); sampled as priced: {recipe.published.valid}"
            stdout.print(words, markup=False)
        table = Table("setting", f"at epsilon {epsilon:g}")
        for key, value in settings.items():
            if value not in (None, False, 0) and key not in ("recipe", "epsilon"):
                flag = "max_physical_batch_size" if key == "physical_batch" else key
                table.add_row(flag, f"{value:.4g}" if isinstance(value, float) else str(value))
        stdout.print(table)
        return
    rows = [recipe.row() for recipe in RECIPES.values()]
    if as_json:
        print_json({"recipes": rows})
        return
    table = Table(Column("recipe", no_wrap=True), "for", "what it does (source)")
    for row in rows:
        needs = f" (--{row['needs']})" if row["needs"] else ""
        table.add_row(row["name"], row["kind"] + needs, escape(f"{row['summary']} ({row['source']})"))
    stdout.print(table)
    stdout.print(
        "Settings and what was published: vestige recipes NAME. To train: vestige train --recipe NAME", markup=False
    )
