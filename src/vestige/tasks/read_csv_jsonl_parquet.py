"""How are named columns read from a user's file? Row by row, and an error names a place, never its content.

The columns' names are not listed either: of a .csv without a header they would be a private row.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LONGEST_FIELD = 2**31 - 1
"""In characters; Python's own limit for a field of a .csv is 131,072, which a document may exceed."""


def read_columns(path: Path, columns: Mapping[str, str], blank: Collection[str] = ()) -> dict[str, list[Any]]:
    """The columns of a file, by what they are for: `{"text_column": "review"}` gives `{"text_column": [...]}`. Those of
    `blank` may have nothing in a row (None); in the others that is refused."""
    if not path.is_file():
        raise ValueError(f"data={str(path)!r}: there is no such file")
    if path.suffix not in READERS:
        raise ValueError(f"data={str(path)!r} must be one of {', '.join(READERS)}")
    try:
        found = READERS[path.suffix](path, columns, blank)
    except UnicodeDecodeError:
        raise ValueError(f"data={str(path)!r} is not text in UTF-8") from None
    if not any(found.values()):
        raise ValueError(f"data={str(path)!r} holds no rows")
    return found


def read_all(path: Path) -> dict[str, list[object]]:
    """All columns of a file by name, unconverted; None where a row lacks one."""
    if not path.is_file():
        raise ValueError(f"data={str(path)!r}: there is no such file")
    if path.suffix not in READERS:
        raise ValueError(f"data={str(path)!r} must be one of {', '.join(READERS)}, or .npz")
    try:
        if path.suffix == ".parquet":
            names = _parquet_names(path)
            return _from_parquet(path, {name: name for name in names}, names)
        rows = list(_lines(path) if path.suffix == ".jsonl" else _csv_rows(path))
    except UnicodeDecodeError:
        raise ValueError(f"data={str(path)!r} is not text in UTF-8") from None
    if not rows:
        raise ValueError(f"data={str(path)!r} holds no rows")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _lines(path: Path) -> Iterator[dict[str, object]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parsed(path, number, line)


def _csv_rows(path: Path) -> Iterator[dict[str, object]]:
    with path.open(encoding="utf-8-sig", newline="") as lines, _long_fields():
        reader = csv.DictReader(lines)
        names = list(reader.fieldnames or ())
        if len(set(names)) != len(names):
            raise ValueError(f"data={str(path)!r} has two columns of one name; rename one of them")
        try:
            yield from (row for _, row in _whole(path, reader))
        except csv.Error:
            raise ValueError(f"data={str(path)!r}: line {reader.line_num} is not a line of a .csv") from None


def _from_jsonl(path: Path, columns: Mapping[str, str], blank: Collection[str]) -> dict[str, list[object]]:
    def rows() -> Iterator[tuple[str, Any]]:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"line {number}", _parsed(path, number, line)

    return _gathered(path, rows(), columns, blank)


def _parsed(path: Path, number: int, line: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"data={str(path)!r}: line {number} is not a JSON object")
    return row


def _from_csv(path: Path, columns: Mapping[str, str], blank: Collection[str]) -> dict[str, list[object]]:
    with path.open(encoding="utf-8-sig", newline="") as lines, _long_fields():
        reader = csv.DictReader(lines)
        try:
            _check_there(path, columns, reader.fieldnames or ())
            _check_once(path, columns, reader.fieldnames or ())
            return _gathered(path, _whole(path, reader), columns, blank)
        except csv.Error:
            raise ValueError(f"data={str(path)!r}: line {reader.line_num} is not a line of a .csv") from None


def _whole(path: Path, reader: csv.DictReader[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows, and what they are called. One with more fields than columns has a comma without quotes somewhere: what
    stands where is not known."""
    for number, row in enumerate(reader, 1):
        if any(field.strip() for field in row.get(None, ())):  # type: ignore[call-overload]
            raise ValueError(f"data={str(path)!r}: row {number} has more fields than there are columns")
        yield f"row {number}", row


@contextmanager
def _long_fields() -> Iterator[None]:
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parquet_names(path: Path) -> list[str]:
    _require_pyarrow(path)
    import pyarrow
    from pyarrow import parquet

    try:
        return list(parquet.ParquetFile(path).schema_arrow.names)
    except pyarrow.ArrowException:
        raise ValueError(f"data={str(path)!r} is not a readable .parquet file") from None


def _require_pyarrow(path: Path) -> None:
    if find_spec("pyarrow") is None:
        raise ValueError(f"data={str(path)!r} needs pyarrow, which is not installed: pip install pyarrow")


def _from_parquet(path: Path, columns: Mapping[str, str], blank: Collection[str]) -> dict[str, list[object]]:
    _require_pyarrow(path)
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        _check_there(path, columns, file.schema_arrow.names)
        table = file.read(columns=list(columns.values()))
    except pyarrow.ArrowException:
        raise ValueError(f"data={str(path)!r} is not a readable .parquet file") from None
    return {use: table.column(name).to_pylist() for use, name in columns.items()}


def _check_once(path: Path, columns: Mapping[str, str], there: Sequence[str]) -> None:
    for use, name in columns.items():
        if list(there).count(name) > 1:
            raise ValueError(f"{use}={name!r}: data={str(path)!r} has two columns of that name; rename one of them")


READERS = {".jsonl": _from_jsonl, ".csv": _from_csv, ".parquet": _from_parquet}


def _gathered(
    path: Path, rows: Iterator[tuple[str, Mapping[str, object]]], columns: Mapping[str, str], blank: Collection[str]
) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {use: [] for use in columns}
    for place, row in rows:
        for use, name in columns.items():
            if row.get(name) is None and use not in blank:
                lack = "has nothing in that column" if name in row else "has no such column"
                raise ValueError(f"{use}={name!r}: {place} of data={str(path)!r} {lack}")
            found[use].append(row.get(name))
    return found


def _check_there(path: Path, columns: Mapping[str, str], there: Sequence[str]) -> None:
    if not there:
        raise ValueError(f"data={str(path)!r} holds no rows")
    for use, name in columns.items():
        if name not in there:
            raise ValueError(f"{use}={name!r}: data={str(path)!r} has no such column")
