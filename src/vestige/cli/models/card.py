"""How does a model's card learn about privacy from the terminal? `vestige card`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vestige.cli.errors import fail


def card(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or the ledger of a PrivacyEngine.")],
    out: Annotated[Path | None, typer.Option(help="Write it to this file instead of printing it.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="Allowed failure probability, for the ledger of a loop of your own.")
    ] = None,
) -> None:
    """Print the privacy statement of a run as Markdown, for a model card.

    What was protected and by which mechanism, epsilon and delta, what they rest on, what is not covered, and the end of
    the ledger. A run whose ledger does not hold has no card (exit code 1).

    Examples:

        vestige card my-run

        vestige card my-run --out my-run/adapter/README.md

        vestige card loop-ledger.jsonl --delta 1e-6
    """
    text = statement_of(run, delta)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


def statement_of(run: Path, delta: float | None = None) -> str:
    """The card of a run; a ledger that does not hold ends the command."""
    from vestige.accounting.ledger import LedgerError
    from vestige.integrations.model_card import model_card as text

    try:
        return text(run, delta)
    except LedgerError as error:
        fail(f"NOT VERIFIED: {error}", 1)
        raise
