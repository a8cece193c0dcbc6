"""What does a synthesis leave? Rows in the form that they came in, a record, a page with plots and a card."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vestige import accounting
from vestige.accounting.ledger import LedgerError
from vestige.assumptions import lines
from vestige.compare.report.drawing import Figure, Point, Series
from vestige.compare.report.html import items, table, text
from vestige.compare.report.page import document, panels
from vestige.files import read_json, write_atomically
from vestige.integrations.model_card import model_card
from vestige.renaming import earlier_attribute
from vestige.synthesis.schema import Codes, Column

RECORD, CARD = "synthesis.json", "README.md"
DRAWN = 24
"""Columns of which the page has a figure."""
QUALITY = {
    "repeated": "share of samples that repeat another (of rows: in all their cells)",
    "column_error": "mean distance of one column's shares from the public rows' (total variation)",
    "pair_error": "the same of two columns together",
    "test_accuracy": "accuracy on the public rows of a classifier trained on the made-up ones",
    "test_accuracy_of_the_commonest": "accuracy on them of the commonest label",
    "private_accuracy": "accuracy on the private rows of such a classifier, noised and charged",
    "private_accuracy_error": "standard deviation of that noise",
    "empty": "share of samples without a word",
    "words": "words of a sample, on average",
    "words_10_percent": "a tenth of the samples has at most so many",
    "words_90_percent": "a tenth has at least so many",
    "test_words": "words of a public text, on average",
    "distinct_pairs_of_words": "distinct pairs of neighbouring words, of all pairs",
    "word_divergence": "divergence of words from the public texts' (Jensen-Shannon, 0 to 1)",
    "perplexity": "perplexity of the public texts under the generator",
    "tokens_per_second": "tokens written in a second",
}
"""What is measured, in words."""


@dataclass(frozen=True)
class Synthesis:
    """What was made: rows by column, the guarantee, and what was measured of them. All of it may be shared but
    `nonprivate_seconds`."""

    kind: str
    """ "rows" or "texts"."""
    method: str
    rows: Mapping[str, Sequence[object]]
    count: int
    guarantee: accounting.Guarantee
    quality: Mapping[str, float]
    nonprivate_seconds: float
    """How long it took: computed from the data without noise, and therefore in no file."""
    asked: int
    out: Path | None = None

    @property
    def seconds(self) -> float:
        """The earlier name of `nonprivate_seconds`."""
        earlier_attribute("seconds", "nonprivate_seconds")
        return self.nonprivate_seconds

    def to_json(self) -> dict[str, object]:
        promise = self.guarantee
        return {
            "kind": self.kind,
            "method": self.method,
            "samples": self.count,
            "epsilon": promise.epsilon,
            "delta": promise.delta,
            "reasons": list(promise.reasons),
            "adjacency": promise.adjacency,
            "assumptions": list(promise.listed),
            "asked": self.asked,
            "quality": dict(self.quality),
            "out": None if self.out is None else str(self.out),
        }

    def __repr__(self) -> str:
        price = "no epsilon" if self.guarantee.epsilon is None else f"epsilon {self.guarantee.epsilon:.4g}"
        return f"Synthesis({self.count} {self.kind} by {self.method}, {price} at delta {self.guarantee.delta:g})"


def check_writable(suffix: str) -> None:
    if suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ValueError("data: a .parquet needs pyarrow, which is not installed: pip install 'vestige[parquet]'")


def write_rows(
    folder: Path, rows: Mapping[str, Sequence[object]], columns: Sequence[Column] | None, suffix: str
) -> Path:
    """data.csv, data.jsonl or data.parquet, with the columns by their names and types."""
    path = folder / f"data{suffix}"
    by_row = zip(*rows.values(), strict=True)
    if suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        types = {column.name: _type(pyarrow, column) for column in columns or ()}
        arrays = {name: pyarrow.array(values, types.get(name)) for name, values in rows.items()}
        write_atomically(path, lambda beside: parquet.write_table(pyarrow.table(arrays), beside))
        return path

    def write(beside: Path) -> None:
        with beside.open("w", encoding="utf-8", newline="") as file:
            if suffix == ".csv":
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(rows)
                writer.writerows(by_row)
            else:
                for values in by_row:
                    file.write(json.dumps(dict(zip(rows, values, strict=True)), ensure_ascii=False) + "\n")

    write_atomically(path, write)
    return path


def _type(pyarrow: Any, column: Column) -> object:
    if not column.is_number:
        return pyarrow.string()
    return pyarrow.int64() if column.whole else pyarrow.float64()


def card_of(folder: Path) -> str:
    """A card of the data: what they are, what was measured, and the privacy statement of their ledger."""
    title = f"---\ntags:\n- synthetic\n- differential-privacy\n---\n\n# {folder.resolve().name}\n\n"
    return title + _said(folder) + model_card(folder)


def _said(folder: Path) -> str:
    """What a card says beside its title and privacy statement, by the record."""
    made = read_json(folder / RECORD)
    measured = "\n".join(f"| {QUALITY.get(name, name)} | {value:.4g} |" for name, value in made["quality"].items())
    return (
        f"`{made['file']}` has {made['samples']:,} made-up {made['kind']}, by `vestige synthesize` ({made['method']}). "
        f"None of them is anybody's; how like the private data they are is bounded by what follows.\n\n"
        f"| measured | |\n|---|---|\n{measured}\n\n"
    )


def check_card(folder: Path) -> None:
    """Raise `LedgerError` if the card of a synthesis says something else than its record, which the ledger seals."""
    card = folder / CARD
    if (
        (folder / RECORD).is_file()
        and card.is_file()
        and _said(folder) not in card.read_text(encoding="utf-8", errors="replace")
    ):
        raise LedgerError(f"{card} says something else than {RECORD}: it was edited; remove it, or make it again")


# --- the page ---------------------------------------------------------------------------------------------------------


def page_of(
    made: Synthesis,
    columns: Sequence[Column],
    cells: Codes,
    released: Mapping[str, object],
    test: Codes | None,
) -> str:
    """One HTML file about made-up rows: releases and public rows alone are drawn."""
    figures = [_figure(column, place, cells, released, test) for place, column in enumerate(columns[:DRAWN])]
    beside = "" if test is None else ", and shares of the public rows"
    words = (
        f"<p>Shares of the made-up rows, beside the noised counts that were released on the way{beside}. Nothing here "
        "was read off the private rows without noise.</p>"
    )
    left_out = f"<p>The first {DRAWN} of {len(columns)} columns.</p>" if len(columns) > DRAWN else ""
    return whole_page(made, [("columns", "Columns", words + left_out + panels(figures, ()))])


def _figure(column: Column, place: int, cells: Codes, released: Mapping[str, object], test: Codes | None) -> Figure:
    def points(shares: Any) -> tuple[Point, ...]:
        return tuple((float(cell), float(share), None, None) for cell, share in enumerate(shares))

    def shares(table: Codes) -> object:
        return np.bincount(table[:, place], minlength=column.cells) / len(table)

    series = [Series("made up", points(shares(cells))), Series("released", points(released[column.name]))]
    if test is not None:
        series.append(Series("public", points(shares(test))))
    names = (
        column.values
        if not column.is_number
        else tuple(f"{column.low + cell * column.width:.4g}" for cell in range(column.bins))
    )
    if column.optional:
        names = (*names, "missing")
    return Figure(
        f"column-{place}", column.name, "", "share", tuple(series), "line", categories=tuple(names), percent=True
    )


def whole_page(made: Synthesis, sections: Sequence[tuple[str, str, str]]) -> str:
    promise = made.guarantee
    price = (
        f"epsilon {promise.epsilon:.4g} at delta {promise.delta:g}"
        if promise.epsilon is not None
        else "no epsilon: " + "; ".join(promise.reasons)
    )
    rows = [{"measured": QUALITY.get(name, name), "value": value} for name, value in made.quality.items()]
    privacy = f"<p><b>{text(price)}</b>, for {text(promise.adjacency)}; {made.asked} questions were charged.</p>"
    if promise.epsilon is not None:
        privacy += f"<ul>{items(lines(promise.listed))}</ul>"
    whole = [("quality", "Quality", table("quality", rows)), *sections, ("privacy", "Privacy", privacy)]
    facts = [f"{made.count:,} made-up {made.kind}", made.method, price]
    footer = "Written by vestige from what was released; nothing is loaded from anywhere."
    return document("Synthetic data", facts, whole, (), footer)
