"""Which commands are there? Each is listed with one line of help, and its module is imported when it is called.

So `vestige --help`, or an error about a misspelt command, need not wait for torch to be imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import vestige
from vestige.cli.errors import INTERRUPTED, FlagCommand, one_line_errors
from vestige.processes.torchrun import require_alone

COMMANDS = {
    "train": ("models.train", "Train a model privately."),
    "finetune": ("models.finetune", "Fine-tune a language model of yours privately, on a file of texts."),
    "synthesize": ("models.synthesize", "Make rows or texts that may be shared, of private ones."),
    "bound": (
        "bound_rows_per_user",
        "Choose how many rows of one user take part, by one charged private question about their counts.",
    ),
    "account": ("account", "Price a plan without training: epsilon from noise, or noise from epsilon."),
    "plan": (
        "plan",
        "Choose batch, steps, noise and learning rate for a budget of privacy and time, before any data is touched.",
    ),
    "verify": (
        "verify_and_doctor",
        "Recompute a run's epsilon from its ledger alone, and hold its result, model and checkpoint against it.",
    ),
    "budget": (
        "books.budget",
        "Keep one budget for a dataset: what all runs on it may spend together, and what they have spent.",
    ),
    "audit": ("audit", "Attack a method with a canary, and bound epsilon from below with a confidence."),
    "doctor": (
        "verify_and_doctor",
        "Examine a model and its data before training; name what is at fault (exit code 1 if anything is).",
    ),
    "methods": ("lists", "List the private optimizers, or describe one."),
    "tasks": ("lists", "List the tasks: datasets with their models."),
    "recipes": ("lists", "List the recipes: all settings of a private run but its budget, by name; or describe one."),
    "prior": (
        "models.prior",
        "Make weights from procedural images alone, for a private run to start from; or say what a file of them is.",
    ),
    "compare": ("compare", "Which private optimizer is best at this budget, and is the difference real?"),
    "report": (
        "report",
        "Write one page about a comparison or audits (HTML), or the privacy statement of a run (Markdown).",
    ),
    "card": ("models.card", "Print the privacy statement of a run as Markdown, for a model card."),
    "presets": ("reproduce", "List the tables and figures of the papers that `vestige reproduce` makes again."),
    "reproduce": ("reproduce", "Make a table or figure of a paper again, and set ours beside the printed one."),
}
"""Each command's module, which has a function of the command's name, and the first line of that function's help."""


class Commands(TyperGroup):
    """The commands, loaded lazily: a listed one has only its name and line of help; the called one is imported."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, None if listed is None else load(str(listed.name)), rest

    def main(self, *args: Any, **settings: Any) -> object:
        with one_line_errors():
            code = super().main(*args, **{**settings, "prog_name": "vestige", "standalone_mode": False})
            if code == INTERRUPTED:  # Ctrl-C in newer versions of typer; older ones raise Abort themselves
                raise typer.Abort
        sys.exit(code)


TOGETHER = ("train", "finetune")
"""The commands that several processes run together."""


def load(name: str) -> object:
    """Import a command, with all its options, from its module."""
    if name not in TOGETHER:
        require_alone(f"vestige {name}")
    module, _ = COMMANDS[name]
    found = getattr(import_module(f"vestige.cli.{module}"), name)
    if isinstance(found, typer.Typer):  # a command with commands of its own
        group = typer.main.get_command(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    alone.command(name, cls=FlagCommand)(found)
    command = typer.main.get_command(alone)
    if name in TOGETHER:
        import_module("vestige.cli.models.flags").grouped(command.params)
    return command


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
    """A placeholder for a command that is listed but not imported."""


for _name, (_, _line) in COMMANDS.items():
    app.command(_name, help=_line)(_listed)


def main() -> None:
    """The `vestige` command."""
    app()


if __name__ == "__main__":
    main()
