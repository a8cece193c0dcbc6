"""Which rows is a book about? Keyed hashes of rows in a canonical encoding, the same in any order and any file.

A row is the sequence of its fields: by the names of the columns in their order as text, or by position where there are
no names; lists, arrays and dictionaries inside a field are its elements one by one. Each field is encoded as

- a number: "n" and eight bytes, an IEEE double, big end first. Whole numbers are exact, others are rounded to float32
  first, so that a copy in float32 has the same hash; minus zero is zero. Whole numbers beyond 2^53 are text.
- text: "t", the number of its bytes as four bytes, and the text in UTF-8, composed (NFC), with line ends as "\\n". Text
  that is a decimal number is a number; "true" and "false", however capitalised, are truth values.
- a truth value: the text "true" or "false". Bytes: "b", their number, and they.
- nothing (None, not a number, empty text): the number NaN.
- a date or time: its ISO form as text, with a blank between date and time.

The hash is the first eight bytes of HMAC-SHA256 of the row under the data's key. Without the key rows cannot be tried
out; with it, hashes show duplicates and overlap, so a book is as private as the data.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vestige.budget.storage import BookError

Hashes = npt.NDArray[np.uint64]

EXACT = 2**53
AT_ONCE = 1 << 22
"""Numbers that are encoded together."""
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
ENCODED = np.dtype([("tag", "S1"), ("value", ">f8")])
KEY_BYTES = 32


def hashes_of(data: object, key: bytes) -> Hashes:
    """One hash for each row: of columns (a tuple or list of arrays or tensors of one length, or a mapping by name), or
    of anything with rows: a list, a dataset, a loader's."""
    columns = columns_of(data)
    if columns is None:
        return np.array([_hash(_field(row), key) for row in _rows(data)], dtype=np.uint64)
    counts = {len(column) for column in columns}
    if len(counts) != 1:
        raise ValueError(f"data: the columns hold {sorted(counts)} rows; give one each")
    [count] = counts
    pieces = [_array(column) for column in columns]
    if all(piece is not None for piece in pieces):
        arrays = [np.asarray(piece).reshape(count, -1) for piece in pieces]
        some = max(1, AT_ONCE // max(1, sum(array.shape[1] for array in arrays)))
        found = np.empty(count, dtype=np.uint64)
        for first in range(0, count, some):
            whole = _numbers(
                np.concatenate([array[first : first + some].astype(np.float64) for array in arrays], axis=1)
            )
            for place, row in enumerate(whole, first):
                found[place] = _hash(row.tobytes(), key)
        return found
    rows = zip(*columns, strict=True)
    return np.array([_hash(b"".join(map(_field, row)), key) for row in rows], dtype=np.uint64)


def columns_of(data: object) -> list[Any] | None:
    """Data that are whole columns, by name where they have names; None where they are rows."""
    data = getattr(data, "tensors", data)  # a TensorDataset
    if isinstance(data, Mapping) and all(
        hasattr(column, "__len__") and not isinstance(column, str) for column in data.values()
    ):
        return [data[name] for name in sorted(data, key=str)]
    if isinstance(data, tuple) or (isinstance(data, list) and data and all(hasattr(each, "shape") for each in data)):
        return list(data)
    return None


def _rows(data: object) -> Iterator[object]:
    """The rows of a list, a dataset or a loader's dataset."""
    rows = getattr(data, "dataset", data)
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise ValueError(
            f"data is a {type(data).__name__}, whose rows have no numbers: say what it was made of, derived_from="
        )
    return (rows[number] for number in range(len(rows)))


def _array(column: Any) -> npt.NDArray[Any] | None:
    """A column of plain numbers as an array; None where it holds anything else."""
    if hasattr(column, "detach"):
        column = column.detach().cpu()
        column = column.double().numpy() if column.is_floating_point() else column.numpy()
    if not isinstance(column, np.ndarray) or column.dtype.kind not in "iuf":
        return None
    if column.dtype.kind in "iu" and column.size and max(abs(int(column.max())), abs(int(column.min()))) > EXACT:
        return None
    return column


def _numbers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Numbers as they are encoded, [rows, numbers]."""
    values = array.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(np.float32).astype(np.float64)
        values = np.where((np.rint(values) == values) | (np.abs(values) > EXACT), values, rounded) + 0.0
    values[np.isnan(values)] = np.nan
    found = np.empty(values.shape, dtype=ENCODED)
    found["tag"], found["value"] = b"n", values
    return found


def _number(value: float) -> bytes:
    return _numbers(np.array([[value]])).tobytes()


def _field(value: Any) -> bytes:
    """One field, or several inside it."""
    if hasattr(value, "detach") or isinstance(value, np.ndarray):
        array = _array(value)
        if array is not None:
            return _numbers(array.reshape(1, -1)).tobytes()
        value = value.tolist()
    if value is None:
        return _number(np.nan)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool | np.bool_):
        return _plain("true" if value else "false")
    if isinstance(value, Integral):
        return _plain(str(int(value))) if abs(int(value)) > EXACT else _number(float(value))
    if isinstance(value, Real | Decimal):
        return _number(float(value))
    if isinstance(value, bytes | bytearray):
        return b"b" + len(value).to_bytes(4) + bytes(value)
    if isinstance(value, datetime):
        return _plain(value.isoformat(sep=" "))
    if isinstance(value, date | time):
        return _plain(value.isoformat())
    if isinstance(value, Mapping):
        return b"".join(_field(value[name]) for name in sorted(value, key=str))
    if isinstance(value, Iterable):
        return b"".join(map(_field, value))
    raise ValueError(
        f"data: a field of type {type(value).__name__} has no canonical form; say what it was made of, derived_from="
    )


def _text(value: str) -> bytes:
    word = value.strip()
    if not word:
        return _number(np.nan)
    if NUMBER.fullmatch(word):
        whole = int(word) if word.lstrip("+-").isdigit() else None
        return _plain(str(whole)) if whole is not None and abs(whole) > EXACT else _number(float(word))
    if word.lower() in ("true", "false", "nan", "none", "null"):
        return _plain(word.lower()) if word.lower() in ("true", "false") else _number(np.nan)
    return _plain(unicodedata.normalize("NFC", value.replace("\r\n", "\n").replace("\r", "\n")))


def _plain(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return b"t" + len(content).to_bytes(4) + content


def _hash(row: bytes, key: bytes) -> int:
    return int.from_bytes(hmac.digest(key, row, "sha256")[:8], "little")


# --- the key ----------------------------------------------------------------------------------------------------------


def fingerprint(key: bytes) -> str:
    """Identifies a key without revealing it."""
    return hmac.digest(key, b"vestige book key", "sha256").hex()[:16]


def make_key(path: Path) -> bytes:
    """The key in a file, drawn and written if there is none yet; only its owner may read it."""
    if path.exists():
        return read_key(path)
    key = secrets.token_bytes(KEY_BYTES)
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError as error:
        raise ValueError(
            f"key={str(path)!r} cannot be written: {error.strerror}; give another place, key=FILE"
        ) from error
    with open(handle, "w") as file:
        file.write(key.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return key


def books_of(path: Path) -> list[str]:
    """The books that were opened with a key: lines below it."""
    return path.read_text().splitlines()[1:] if path.exists() else []


def note_book(path: Path, book: Path) -> None:
    """Write down, with the key, that a book was opened: a second one for the same rows is not opened unseen."""
    with path.open("a") as file:
        file.write(f"{book.resolve()}\n")
        file.flush()
        os.fsync(file.fileno())


def read_key(path: Path) -> bytes:
    try:
        key = bytes.fromhex((path.read_text().splitlines() or [""])[0].strip())
    except OSError as error:
        raise ValueError(
            f"key={str(path)!r} cannot be read: {error.strerror}; it lies with the data, key=FILE"
        ) from error
    except ValueError:
        raise ValueError(f"key={str(path)!r} is not the key of a book") from None
    if len(key) != KEY_BYTES:
        raise ValueError(f"key={str(path)!r} is not the key of a book")
    return key


# --- the rows of a book -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowSet:
    """The hashes of a book's rows, sorted, in a file of their own; in a book of parts, each with its part's number."""

    hashes: Hashes
    parts: npt.NDArray[np.uint16] | None = None

    @staticmethod
    def of(hashes: Hashes, parts: Sequence[int] | None = None) -> RowSet:
        order = np.argsort(hashes, kind="stable")
        if parts is None:
            return RowSet(hashes[order])
        found = RowSet(hashes[order], np.array(parts, dtype=np.uint16)[order])
        assert found.parts is not None
        if ((found.hashes[1:] == found.hashes[:-1]) & (found.parts[1:] != found.parts[:-1])).any():
            raise ValueError("parts: two rows that are alike lie in two parts; a part follows from what a row holds")
        return found

    @property
    def root(self) -> str:
        return hashlib.sha256(self._bytes()).hexdigest()

    def _bytes(self) -> bytes:
        return self.hashes.astype("<u8").tobytes() + (b"" if self.parts is None else self.parts.astype("<u2").tobytes())

    def write(self, path: Path) -> None:
        handle = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        with open(handle, "wb") as file:
            file.write(self._bytes())
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(path: Path, root: str, rows: int) -> RowSet:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BookError(
                f"{path} cannot be read: {error.strerror}; the rows' hashes belong beside the book"
            ) from error
        if hashlib.sha256(content).hexdigest() != root or len(content) not in (8 * rows, 10 * rows):
            raise BookError(f"{path} does not hold the rows that the book was opened with: edited or replaced")
        hashes = np.frombuffer(content, "<u8", rows).astype(np.uint64)
        parts = np.frombuffer(content, "<u2", rows, 8 * rows) if len(content) == 10 * rows and rows else None
        return RowSet(hashes, None if parts is None else parts.astype(np.uint16))

    def part_of(self, hashes: Hashes) -> int | None:
        """The number of the part that all of these rows lie in; None where that is not one."""
        if self.parts is None or not len(hashes):
            return None
        found = np.unique(self.parts[np.searchsorted(self.hashes, hashes)])
        return int(found[0]) if len(found) == 1 else None

    def unknown(self, hashes: Hashes) -> int:
        """How many of these rows are not the book's: a row that occurs more often than in the book is
        another example with equal values."""
        theirs, often = np.unique(hashes, return_counts=True)
        ours = np.searchsorted(self.hashes, theirs, "right") - np.searchsorted(self.hashes, theirs, "left")
        return int(np.maximum(often - ours, 0).sum())


def require_rows(known: RowSet, candidates: Sequence[tuple[str, Hashes]], name: str) -> tuple[str, int | None]:
    """How the data are known to be the book's, all or some, and the number of the part that they lie in. ValueError
    where some of them are not.

    `candidates` are several readings of the same data, such as a file and what a task makes of it: one that is known
    is enough.
    """
    nearest: tuple[int, int] | None = None
    for _, hashes in candidates:
        missing = known.unknown(hashes)
        if not missing:
            said = "all rows" if len(hashes) == len(known.hashes) else f"{len(hashes)} rows"
            return said, known.part_of(hashes)
        if nearest is None or missing / len(hashes) < nearest[0] / nearest[1]:
            nearest = missing, len(hashes)
    if nearest is None:
        raise ValueError("budget: the book is about some rows, and there are none to compare with them")
    missing, count = nearest
    how = "none" if missing == count else f"{count - missing}"
    way_out = (
        "if they were made of its rows (features, tokens, another scale), say so: derived_from=FILE"
        if missing == count
        else "open a book for all of them, or leave the others out"
    )
    raise ValueError(f"budget: {how} of {count} rows are those that {name} is about; {way_out}")
