"""How does a value become HTML? Escaped text, and tables that sort, filter and download."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def text(value: object) -> str:
    return html.escape(str(value))


def items(lines: Iterable[object]) -> str:
    return "".join(f"<li>{text(line)}</li>" for line in lines)


def table(key: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table that sorts by a click on its head, filters by typing, and downloads as CSV."""
    if not rows:
        return ""
    columns = list(rows[0])
    numeric = {c for c in columns if all(isinstance(row[c], int | float) or row[c] is None for row in rows)}
    head = "".join(
        f'<th scope="col"{" class=n" if column in numeric else ""}><button>{text(column)}</button></th>'
        for column in columns
    )
    body = "".join("<tr>" + "".join(_td(row[c], c in numeric) for c in columns) + "</tr>" for row in rows)
    return (
        f'<div class="tools"><input type="search" placeholder="filter rows" aria-label="filter rows" '
        f'data-table="table-{key}"><button class="csv" data-table="table-{key}" data-name="{key}.csv">CSV</button>'
        f'<span class="count"></span></div><div class="scroll"><table id="table-{key}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _td(value: Any, numeric: bool) -> str:
    if value is None:
        return "<td data-v=''>-</td>"
    if isinstance(value, float):
        return f'<td class="n" data-v="{value!r}">{value:.4g}</td>'
    kind = " class=n" if numeric else " class=w" if len(str(value)) > 60 else ""
    return f'<td{kind} data-v="{text(value)}">{text(value)}</td>'
