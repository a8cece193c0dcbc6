"""How does a table become numbers? By bounds and categories that are given: public, and never read off the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vestige.tasks.read_csv_jsonl_parquet import read_columns
from vestige.tasks.readers_common import LabelledTensors


@dataclass(frozen=True)
class Bounded:
    """A column of numbers, clamped to [low, high] and scaled to [-1, 1]; what is no number is the middle."""

    name: str
    low: float
    high: float
    width = 1

    def __post_init__(self) -> None:
        if not (isfinite(self.low) and isfinite(self.high) and self.low < self.high):
            raise ValueError(f"columns: {self.name}={self.low:g}..{self.high:g} must go from a number to a larger one")

    def encode(self, value: Any) -> list[float]:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return [0.0]
        if number != number:
            return [0.0]
        return [2 * (min(max(number, self.low), self.high) - self.low) / (self.high - self.low) - 1]


@dataclass(frozen=True)
class Categories:
    """A column of words, one number for each that may occur; any other word is none of them."""

    name: str
    values: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.values)) != len(self.values) or not all(self.values):
            raise ValueError(f"columns: {self.name}={'|'.join(self.values)} must name each category once")
        if len(self.values) < 2:
            raise ValueError(
                f"columns: {self.name}={self.values[0]} is one category, which tells nothing: give several, "
                f"{self.name}=WORD|WORD, or bounds of a number, {self.name}=LOW..HIGH"
            )

    @property
    def width(self) -> int:
        return len(self.values)

    def encode(self, value: object) -> list[float]:
        word = str(value).strip()
        return [float(word == each) for each in self.values]


Column = Bounded | Categories


def columns_of(text: str) -> tuple[Column, ...]:
    """Columns as the command line names them.

    >>> columns_of("age=0..100;work=office|field")
    (Bounded(name='age', low=0.0, high=100.0), Categories(name='work', values=('office', 'field')))
    """
    found = tuple(_column(part.strip()) for part in text.split(";") if part.strip())
    if not found:
        raise ValueError(
            f"columns={text!r} names no column: give bounds and categories, 'age=0..100;work=office|field'"
        )
    names = [column.name for column in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"columns={text!r} names {name!r} twice")
    return found


def _column(text: str) -> Column:
    name, equals, rest = text.partition("=")
    low, dots, high = rest.partition("..")
    if name and equals and dots:
        try:
            return Bounded(name, float(low), float(high))
        except ValueError as error:
            if "columns:" in str(error):
                raise
    elif name and rest:
        return Categories(name, tuple(word.strip() for word in rest.split("|")))
    raise ValueError(f"columns: {text!r} must be NAME=LOW..HIGH (numbers) or NAME=WORD|WORD|... (categories)")


def encoded_rows(rows: Sequence[Mapping[str, object]], columns: Sequence[Column]) -> Tensor:
    """Rows by name as numbers, [rows, width].

    Formal guarantees: each row is a function of itself and of public bounds and categories: nothing is asked.
    """
    each = [[number for column in columns for number in column.encode(row[column.name])] for row in rows]
    return torch.tensor(each, dtype=torch.float32)


def bounded(table: Tensor, bounds: Sequence[tuple[float, float]]) -> Tensor:
    """A table of numbers, [rows, columns], each column clamped to its public bounds and scaled to [-1, 1].

    Formal guarantees: as `encoded_rows`.
    """
    if table.dim() != 2 or table.shape[1] != len(bounds):
        raise ValueError(
            f"bounds: {len(bounds)} pairs for a table of shape {tuple(table.shape)}; give one (low, high) a column"
        )
    try:
        low, high = torch.tensor([[float(end) for end in each] for each in bounds], dtype=torch.float32).unbind(1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"bounds={bounds!r} must be pairs of a number and a larger one") from error
    if not bool((low < high).all() and low.isfinite().all() and high.isfinite().all()):
        raise ValueError(f"bounds={list(bounds)} must be pairs of a number and a larger one")
    scaled = 2 * (torch.minimum(torch.maximum(table.float(), low), high) - low) / (high - low) - 1
    return scaled.nan_to_num(0.0)


def read_table(path: str | Path, columns: Sequence[Column], label: str, labels: Sequence[str]) -> LabelledTensors:
    """A .csv, .jsonl or .parquet as numbers and labels: the place of each row's label among `labels`.

    A row's label must be one of them: an error names its place in the file, and never its content.
    """
    if label in [column.name for column in columns]:
        raise ValueError(f"label_column={label!r} is among the columns: a model would read the answer there")
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise ValueError(f"labels={','.join(labels)} must be two or more different ones")
    wanted = {f"columns: {column.name}": column.name for column in columns}
    found = read_columns(Path(path), {**wanted, "label_column": label})
    answers = [str(each).strip() for each in found["label_column"]]
    for place, answer in enumerate(answers, 1):
        if answer not in labels:
            raise ValueError(f"label_column={label!r}: row {place} of data={str(path)!r} is none of the labels given")
    rows = [dict(zip(wanted.values(), row, strict=True)) for row in zip(*(found[use] for use in wanted), strict=True)]
    return encoded_rows(rows, columns), torch.tensor([list(labels).index(answer) for answer in answers])
