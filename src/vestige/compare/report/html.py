"""How does a value become HTML? Escaped text, and tables that sort, filter and download."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence


def text(value: object) -> str:
    return html.escape(str(value))


def items(lines: Iterable[object]) -> str:
    return "".join(f"<li>{text(line)}</li>" for line in lines)


ALIGNED = ",".join(f".n{place} td:nth-child({place})" for place in range(1, 31)) + "{text-align:right}"
"""Style of numeric columns: a table lists their positions, so that no cell needs a class."""


def table(key: str, rows: Sequence[Mapping[str, object]]) -> str:
    """A table that sorts by a click on its head, filters by typing, and downloads as CSV.

    Optional end tags are left out: a large comparison has a hundred thousand cells.
    """
    if not rows:
        return ""
    columns = list(rows[0])
    numeric = {c for c in columns if all(isinstance(row[c], int | float) or row[c] is None for row in rows)}
    head = "".join(
        f'<th scope="col"{" class=n" if column in numeric else ""}><button>{text(column)}</button></th>'
        for column in columns
    )
    places = " ".join(f"n{place}" for place, column in enumerate(columns, 1) if column in numeric)
    body = "".join("<tr>" + "".join(_td(row[c], c in numeric) for c in columns) for row in rows)
    return (
        f'<div class="tools"><input type="search" placeholder="filter rows" aria-label="filter rows" '
        f'data-table="table-{key}"><button class="csv" data-table="table-{key}" data-name="{key}.csv">CSV</button>'
        f'<span class="count"></span></div><div class="scroll"><table id="table-{key}" class="{places}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _td(value: object, numeric: bool) -> str:
    """A cell as displayed; `data-v` is its exact value, where that differs."""
    if value is None:
        return "<td data-v>-"
    if isinstance(value, float):
        shown, kind = f"{value:.4g}", "" if numeric else " class=n"
        exact = "" if float(shown) == value else f" data-v={value!r}"
        return f"<td{kind}{exact}>{shown}"
    return f"<td{' class=w' if len(str(value)) > 60 else ''}>{text(value)}"
