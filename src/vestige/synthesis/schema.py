"""What may a table hold? Columns with public bounds or categories, cut into cells; nothing is read off the rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor, log10
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vestige import tasks
from vestige.checks import check_steps

Codes = npt.NDArray[np.int64]
"""Cells of rows, [rows, columns]."""
BINS = 20
"""Cells of a column of numbers, unless others are asked for."""
LARGEST_WHOLE, LARGEST = 2**53, 1e300
"""Of bounds, on either side of zero: whole numbers beyond are not told apart, and widths of cells could overflow."""
MOST_CELLS = 4096
"""Of one column: a table of two columns has as many cells as their product."""


@dataclass(frozen=True)
class Column:
    """One column: categories, or numbers between bounds in cells of equal width. What may be missing has a cell more.

    Formal guarantees: a row's cells are a function of that row and of what was declared.
    """

    name: str
    values: tuple[str, ...] = ()
    """The categories; none: a column of numbers."""
    low: float = 0.0
    high: float = 1.0
    whole: bool = False
    """Whether numbers are whole ones."""
    optional: bool = False
    bins: int = 0
    width: float = 0.0
    """Of a cell of numbers."""

    @property
    def is_number(self) -> bool:
        return not self.values

    @property
    def cells(self) -> int:
        return self._own + self.optional

    @property
    def _own(self) -> int:
        return self.bins if self.is_number else len(self.values)

    def encode(self, values: Sequence[object], where: str = "the data") -> Codes:
        """The cell of each value; one that has none is refused by its place, and never shown."""
        places = {value: place for place, value in enumerate(self.values)}
        found = np.empty(len(values), dtype=np.int64)
        for row, value in enumerate(values):
            blank = _blank(value)
            cell = self._own if blank and self.optional else -1
            if not blank:
                cell = self._cell(value) if self.is_number else _place(places, value)
            if cell < 0:
                raise ValueError(f"columns: {self.name}: row {row + 1} of {where} {self._lack(blank)}")
            found[row] = cell
        return found

    def _cell(self, value: Any) -> int:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return -1
        if number != number:
            return -1
        return min(int((min(max(number, self.low), self.high) - self.low) / self.width), self.bins - 1)

    def _lack(self, blank: bool) -> str:
        if blank:
            return f"has nothing there; declare that it may: '{self.name}?=...'"
        if self.is_number:
            return "is no number"
        return "is none of the categories that are declared; declare all that may occur"

    def decode(self, cells: Codes, random: np.random.Generator) -> list[object]:
        """A value of each cell: numbers are drawn uniformly inside theirs. None where it is missing."""
        if not self.is_number:
            return [None if cell == self._own else self.values[cell] for cell in cells]
        first = self.low + cells * self.width
        drawn = first + random.random(len(cells)) * (np.minimum(first + self.width, self.high + self.whole) - first)
        if self.whole:
            drawn = np.floor(drawn)
        else:  # few digits, but enough for a thousandth of a cell
            digits = max(0, 3 - floor(log10(self.width)))
            drawn = np.clip([round(float(each), min(digits, 300)) for each in drawn], self.low, self.high)
        numbers = [int(each) if self.whole else float(each) for each in drawn]
        return [None if cell == self._own else number for cell, number in zip(cells, numbers, strict=True)]

    def vectors(self) -> npt.NDArray[np.float32]:
        """Each cell as a point, [cells, width]: categories at distance 1 of each other (in L1), numbers by their share
        of the range."""
        if not self.is_number:
            return np.eye(self.cells, dtype=np.float32) * np.float32(0.5)
        points = np.zeros((self.cells, 1 + self.optional), dtype=np.float32)
        points[: self._own, 0] = np.linspace(0, 1, self._own) if self._own > 1 else 0.5
        if self.optional:
            points[self._own] = 0.5
        return points


def _blank(value: object) -> bool:
    """Whether a value is missing: none, an empty word, a NaN or pandas' NA, which compares with nothing."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return True
    try:
        return bool(value != value)
    except (TypeError, ArithmeticError):
        return True
    except ValueError:  # an array
        return False


def _word(value: object) -> str:
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    return str(value).strip()


def _place(places: Mapping[str, int], value: object) -> int:
    """Of a category. In a column of whole numbers of which some are missing, the others are no whole ones."""
    found = places.get(_word(value), -1)
    whole = isinstance(value, Real) and not isinstance(value, Integral) and float(value).is_integer()
    return places.get(str(int(float(value))), -1) if found < 0 and whole else found  # type: ignore[arg-type]


def columns_of(declared: str | Mapping[str, object] | Sequence[Column], bins: int = BINS) -> tuple[Column, ...]:
    """Columns as they are declared: 'age=18..80;work=office|field', a public file FILE.json of the same, or a
    dictionary {"age": (18, 80), "work": ["office", "field"]}.

    Bounds without a decimal point are those of whole numbers; a name that ends in '?' may be missing.

    >>> [(column.name, column.cells, column.whole) for column in columns_of("age=18..80;pay=0.0..1e5;work?=a|b")]
    [('age', 16, True), ('pay', 20, False), ('work', 3, False)]
    """
    check_steps(bins, "bins")
    if isinstance(declared, Path) or (isinstance(declared, str) and declared.endswith(".json")):
        declared = _read(Path(declared))
    if isinstance(declared, str):
        found = tuple(_of_text(part.strip(), bins) for part in declared.split(";") if part.strip())
    elif isinstance(declared, Mapping):
        found = tuple(_of_value(name, value, bins) for name, value in declared.items())
    elif isinstance(declared, Sequence) and all(isinstance(each, Column) for each in declared):
        found = tuple(each for each in declared if isinstance(each, Column))
    else:
        raise ValueError("columns: give 'age=18..80;work=office|field', {'age': (18, 80), 'work': [...]}, or FILE.json")
    if not found:
        raise ValueError("columns: none is named; give bounds and categories, 'age=18..80;work=office|field'")
    names = [column.name for column in found]
    for column in found:
        if names.count(column.name) > 1:
            raise ValueError(f"columns: {column.name!r} is named twice")
        if column.cells > MOST_CELLS:
            raise ValueError(f"columns: {column.name} has {column.cells} cells, and {MOST_CELLS} are the most")
    return found


def _read(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"columns={str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f'columns={str(path)!r} must hold {{"age": [18, 80], "work": ["office", "field"]}}, as JSON')
    return content


def _of_text(text: str, bins: int) -> Column:
    name, equals, rest = text.partition("=")
    low, dots, high = rest.partition("..")
    if not (name.strip() and equals and rest.strip()):
        raise ValueError(f"columns: {text!r} must be NAME=LOW..HIGH (numbers) or NAME=WORD|WORD|... (categories)")
    if not dots:
        return _of_value(name.strip(), [word.strip() for word in rest.split("|")], bins)
    try:
        ends = [int(end) if end.strip().lstrip("+-").isdigit() else float(end) for end in (low, high)]
    except ValueError:
        raise ValueError(f"columns: {text!r} must go from a number to a larger one") from None
    return _of_value(name.strip(), tuple(ends), bins)


def _of_value(name: str, value: object, bins: int) -> Column:
    if not isinstance(name, str):
        raise ValueError(f"columns: the name {name!r} must be text")
    optional, name = name.endswith("?"), name.removesuffix("?")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"columns: {name} must be a pair of bounds, or a list of categories")
    numbers = [isinstance(each, Real) and not isinstance(each, bool) for each in value]
    if None in value or (len(value) == 2 and any(numbers) and not all(numbers)):
        raise ValueError(f"columns: {name} must have two bounds, or categories of one kind: all words, or all numbers")
    if len(value) == 2 and all(numbers):
        whole = all(isinstance(end, Integral) for end in value)
        low, high = value = [int(end) if whole else float(end) for end in value]
        if not all(abs(end) <= (LARGEST_WHOLE if whole else LARGEST) for end in value):  # NaN and infinity, too
            most = f"{LARGEST_WHOLE} (whole numbers)" if whole else f"{LARGEST:g}"
            raise ValueError(f"columns: {name} must have bounds from -{most} to {most}")
        if not low < high:
            raise ValueError(f"columns: {name}={low:g}..{high:g} must go from a number to a larger one")
        if whole:  # as many whole numbers in each cell, but for the last
            count = high - low + 1
            each = ceil(count / min(bins, count))
            return Column(name, (), low, high, True, optional, ceil(count / each), each)
        return Column(name, (), float(low), float(high), False, optional, bins, (high - low) / bins)
    words = tuple(_word(each) for each in value)
    if len(set(words)) != len(words) or not all(words):
        raise ValueError(f"columns: {name}={'|'.join(words)} must name each category once")
    if len(words) < 2:
        raise ValueError(f"columns: {name} has one category, which tells nothing: give several, or bounds of a number")
    return Column(name, words, optional=optional)


def read_table(data: object, columns: Sequence[Column], where: str = "the data") -> Codes:
    """SENSITIVE: the cells of a table, [rows, columns]: of a .csv, .jsonl or .parquet, or of columns by name."""
    if isinstance(data, str | Path):
        uses = {f"columns: {column.name}": column.name for column in columns}
        blank = {use for use, column in zip(uses, columns, strict=True) if column.optional}
        by_name = dict(zip(uses.values(), tasks.read_columns(Path(data), uses, blank).values(), strict=True))
    else:
        by_name = {column.name: column_in_memory(data, column.name) for column in columns}
    if len({len(values) for values in by_name.values()}) > 1:
        raise ValueError("data: its columns have different lengths")
    if not len(by_name[columns[0].name]):
        raise ValueError("data holds no rows")
    return np.column_stack([column.encode(by_name[column.name], where) for column in columns])


def column_in_memory(data: Any, name: str, argument: str = "columns") -> list[object]:
    """A column of a dictionary of columns, or of a data frame."""
    try:
        return list(data[name])
    except (KeyError, TypeError, IndexError):
        raise ValueError(f"{argument}: {name}: the data have no such column; give a file, or columns by name") from None


def described(columns: Sequence[Column]) -> list[dict[str, object]]:
    """The public schema, for a ledger."""
    return [{**asdict(column), "values": list(column.values)} for column in columns]
