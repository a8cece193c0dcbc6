"""Which commands are there? Each is listed by name and one line, and its module is imported when it is called.

So `vestige --help`, and a mistake in the name of a command, need not wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import vestige
from vestige.cli.errors import INTERRUPTED, FlagCommand, one_line_errors

COMMANDS = {
    "train": ("train", "Train a model privately."),
    "account": ("account", "Price a plan without training: epsilon from noise, or noise from epsilon."),
    "verify": (
        "checks",
        "Recompute a run's epsilon from its ledger alone, and hold its result, model and checkpoint against it.",
    ),
    "doctor": (
        "checks",
        "Examine a model and its data before training; name what is at fault (exit code 1 if anything is).",
    ),
    "methods": ("lists", "List the private optimizers, or describe one."),
    "tasks": ("lists", "List the tasks: datasets with their models."),
    "compare": ("compare", "Which private optimizer is best at this budget, and is the difference real?"),
    "report": (
        "report",
        "Write one self-contained HTML page about a comparison: it opens from disk, without a network.",
    ),
    "presets": ("reproduce", "List the tables and figures of the papers that `vestige reproduce` makes again."),
    "reproduce": ("reproduce", "Make a table or figure of a paper again, and set ours beside the printed one."),
}
"""The module that holds each command, as a function of its name, and the first line of that function's help."""


class Commands(TyperGroup):
    """The commands: those that are only listed have a name and a line of help, the one that is called is imported."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, None if listed is None else load(str(listed.name)), rest

    def main(self, *args: Any, **settings: Any) -> Any:
        with one_line_errors():
            code = super().main(*args, **{**settings, "prog_name": "vestige", "standalone_mode": False})
            if code == INTERRUPTED:  # Ctrl-C, in the newer versions of typer; in the older it is an Abort already
                raise typer.Abort
        sys.exit(code)


def load(name: str) -> Any:
    """A command with all its options, from its module."""
    module, _ = COMMANDS[name]
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    alone.command(name, cls=FlagCommand)(getattr(import_module(f"vestige.cli.{module}"), name))
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,  # they may show local variables, and those hold data
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"vestige {vestige.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models with differential privacy, with optimizers that remember past private releases."""


def _listed() -> None:
    """A placeholder in the list of commands for one that is not loaded."""


for _name, (_, _line) in COMMANDS.items():
    app.command(_name, help=_line)(_listed)


def main() -> None:
    """The `vestige` command."""
    app()


if __name__ == "__main__":
    main()
