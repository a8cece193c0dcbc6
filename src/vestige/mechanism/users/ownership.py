"""Who owns which row, and which rows take part? Public facts and coins: no row's content is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any
from unicodedata import normalize
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vestige.checks import check_delta, check_steps
from vestige.priced_questions import new_answer
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import first_of_each
from vestige.units import Users

Rows = npt.NDArray[np.int64]
Ids = Any
"""One id for each row; or a list of owners for each row."""


@dataclass(frozen=True, eq=False)
class Ownership:
    """Pairs of a row and one of its owners, in the order of the rows. Users are numbered in the order of their ids."""

    population: int
    """How many rows there are."""
    users: int
    rows: Rows
    owners: Rows
    """`owners[i]` owns `rows[i]`."""

    @property
    def several(self) -> bool:
        """Whether some row has several owners."""
        return len(self.rows) > self.population

    @cached_property
    def counts(self) -> Rows:
        """How many rows each user has."""
        return np.bincount(self.owners, minlength=self.users)

    @cached_property
    def starts(self) -> Rows:
        """Where each user's rows begin in `by_user`."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def by_user(self) -> Rows:
        """The rows of the first user, of the second, and so on."""
        return np.asarray(self.rows[np.argsort(self.owners, kind="stable")])

    @property
    def fingerprint(self) -> int:
        """The same for the same users in the same rows, whatever their ids are."""
        return crc32(self.owners.tobytes(), crc32(self.rows.tobytes()))

    def bounded(self, most: int, randomness: Randomness) -> Rows:
        """Rows of which no user has more than `most`, in their order.

        With one owner each, those that stay are drawn uniformly from each user's own. With several, rows are
        visited by the number of their owners, then by index: one is kept if none of its owners has `most` rows yet
        (2503.03622, algorithm 2). Either way only the ownership decides, which is public.
        """
        if self.counts.max(initial=0) <= most:
            return np.arange(self.population)
        if not self.several:
            coins = randomness.stream("rows of users", 0).permutation(self.population)
            return np.sort(first_of_each(self.owners, coins, most))
        return _greedy(self, most)


def _greedy(owned: Ownership, most: int) -> Rows:
    how_many = np.bincount(owned.rows, minlength=owned.population)
    first = np.cumsum(how_many) - how_many
    taken, room = [], np.full(owned.users, most)
    for row in np.argsort(how_many, kind="stable"):
        owners = owned.owners[first[row] : first[row] + how_many[row]]
        if np.all(room[owners] > 0):
            room[owners] -= 1
            taken.append(row)
    return np.sort(np.array(taken, dtype=np.int64))


class RowsOfEach:
    """Which rows of a user take part in a question: all of them, or `cap`, drawn uniformly for each question.

    A part of a sample is a set of users, never of rows, so that all rows of a user are clipped together. Users with
    equally many rows are batched together, which needs no padding.
    """

    def __init__(self, owned: Ownership, cap: int | None, randomness: Randomness) -> None:
        assert not owned.several, "a row of several owners is no part of one vector"
        self._owned, self._randomness = owned, randomness
        self._most = owned.counts if cap is None else np.minimum(owned.counts, cap)
        """How many rows of each user take part."""
        self._all, self._total = bool((self._most == owned.counts).all()), int(self._most.sum())
        self._table: Rows | None = None
        """Where all users have as many rows, and all take part: [users, rows]."""
        if self._all and owned.users and (owned.counts == owned.counts[0]).all():
            self._table = owned.by_user.reshape(owned.users, -1)

    @property
    def mean(self) -> float:
        """How many rows of a user take part, on average."""
        return float(self._most.mean())

    @property
    def numbers(self) -> dict[int, int]:
        """How many users take part with so many rows."""
        rows, users = np.unique(self._most, return_counts=True)
        return dict(zip(rows.tolist(), users.tolist(), strict=True))

    def parts(self, users: Tensor, most: int) -> Sequence[Tensor]:
        """Users in parts of at most `most` rows; a user with more is a part alone."""
        if self._total <= most or int(self._most[users.numpy()].sum()) <= most:
            return [users]
        ends, rows = [], 0
        for place, count in enumerate(self._most[users.numpy()].tolist()):
            if rows and rows + count > most:
                ends.append(place)
                rows = 0
            rows += count
        return torch.tensor_split(users, ends)

    def together(self, index: int, users: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
        """The rows of these users for a question, one user's after another's: in the order of their numbers of rows,
        and how many users have how many."""
        chosen = users.numpy()
        if len(chosen) == 0:
            return torch.zeros(0, dtype=torch.long), [(0, 1)]
        if self._table is not None:
            found = self._table[chosen]
            return torch.from_numpy(found.reshape(-1)), [(found.shape[0], found.shape[1])]
        counts = self._most[chosen]
        order = counts.argsort(kind="stable")
        chosen, counts = chosen[order], counts[order]
        ends = [*(1 + (counts[1:] != counts[:-1]).nonzero()[0]).tolist(), len(counts)]
        numbers = [(end - start, int(counts[start])) for start, end in pairwise([0, *ends])]
        if self._all:
            last = counts.cumsum()
            places = np.arange(last[-1])
            places += (self._owned.starts[chosen] - last + counts).repeat(counts)
            return torch.from_numpy(self._owned.by_user[places]), numbers
        # Which of a user's rows take part need not be secret, only blind to their content, and the same in every part
        # and process that a sample may be divided over.
        seed = int(self._randomness.stream("rows of users", 1 + index).integers(2**63))
        pairs = zip(np.split(chosen, ends[:-1]), numbers, strict=True)
        return torch.cat([self._rows_of(some, count, seed).flatten() for some, (_, count) in pairs]), numbers

    def _rows_of(self, users: np.ndarray, count: int, seed: int) -> Tensor:
        """So many rows of each of these users, [users, rows], drawn uniformly where there are more."""
        owned = self._owned
        starts, have = owned.starts[users], owned.counts[users]
        if (have == count).all():
            return torch.from_numpy(owned.by_user[starts[:, None] + np.arange(count)])
        owner = np.arange(len(users)).repeat(have)
        rows = owned.by_user[np.arange(have.sum()) + (starts - (np.cumsum(have) - have)).repeat(have)]
        chosen = first_of_each(owner, mixed(rows, seed), count).reshape(-1, count)
        return torch.from_numpy(rows[np.sort(chosen, axis=1)])


def mixed(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Numbers in a pseudorandom order: SplitMix64 of each, from a place that the seed gives."""
    with np.errstate(over="ignore"):
        found = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(found ^ (found >> np.uint64(31)))


def ownership(ids: Ids, population: int) -> Ownership:
    """Who owns which of so many rows, from an id for each row, or a list of owners for each row."""
    if isinstance(ids, Tensor):
        ids = ids.cpu().numpy()
    elif hasattr(ids, "to_numpy"):  # a column of pandas, whatever its index
        ids = ids.to_numpy()
    if isinstance(ids, str | Mapping) or not hasattr(ids, "__len__") or getattr(ids, "ndim", 1) == 0:
        raise ValueError(
            f"users={type(ids).__name__}: give one id for each row (an array, a list), a list of owners for each row, "
            "or the name of a column"
        )
    if len(ids) != population:
        raise ValueError(f"users: {len(ids)} ids for {population} rows; give one for each row")
    if population and isinstance(ids[0], list | tuple | set | frozenset):
        return _several(ids, population)
    if isinstance(ids, list | tuple):
        listed = next((row for row, each in enumerate(ids) if isinstance(each, list | tuple | set | frozenset)), None)
        if listed is not None:
            raise ValueError(f"users: row {listed} has a list of owners, where row 0 has one id; give lists for all")
    values = np.asarray(ids)
    if values.dtype.kind in "US" and not isinstance(ids, np.ndarray) and len({type(each) for each in ids}) > 1:
        values = np.asarray(ids, dtype=object)
    if values.ndim != 1:
        raise ValueError(f"users: an array of shape {list(values.shape)}; give one id for each row, or lists of owners")
    missing = _missing(values)
    if len(missing):
        raise ValueError(f"users: row {missing[0]} has no user, of {len(missing)} such rows; leave those rows out")
    if values.dtype == object or values.dtype.kind in "US":
        values = np.array([_name(value) for value in values.tolist()])
    found, numbers = np.unique(values, return_inverse=True)
    return Ownership(population, len(found), np.arange(population), numbers.astype(np.int64))


def _missing(values: npt.NDArray[Any]) -> Rows:
    """The rows whose id is None, not a number, no time, or a blank text."""
    if values.dtype.kind == "f":
        return np.flatnonzero(np.isnan(values))
    if values.dtype.kind in "mM":
        return np.flatnonzero(np.isnat(values))
    if values.dtype.kind in "US":
        return np.flatnonzero(np.char.strip(values) == values.dtype.type())
    if values.dtype == object:
        return np.array([place for place, value in enumerate(values) if _absent(value)], dtype=np.int64)
    return np.zeros(0, dtype=np.int64)


def _absent(value: object) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return True
    return not value.strip() if isinstance(value, str | bytes) else bool(value != value)


def _name(value: Any) -> str:
    """An id as a text: 3, 3.0, "3", "3.0" and " 3" are one user, and so are composed and decomposed letters, since a
    column of several kinds would divide a person into two, whose rows would be clipped apart."""
    if repr(value) == object.__repr__(value) and str(value) == repr(value):  # where it lies in memory
        raise ValueError(
            f"users: an id is a {type(value).__name__}, and two of them cannot be compared; give numbers or texts"
        )
    text = normalize("NFC", value.decode(errors="replace") if isinstance(value, bytes) else str(value)).strip()
    whole = isinstance(value, float | np.floating) and float(value).is_integer()
    if whole or (text.endswith(".0") and text[:-2].removeprefix("-").isdecimal()):
        return str(int(value)) if whole else text[:-2]
    return text


def _several(ids: Sequence[object], population: int) -> Ownership:
    rows, owners = [], []
    for row, each in enumerate(ids):
        if isinstance(each, str) or not hasattr(each, "__iter__"):
            raise ValueError(f"users: row {row} has {each!r}, where others have a list of owners")
        distinct = {_name(owner) for owner in each if not _absent(owner)}
        if not distinct:
            raise ValueError(f"users: row {row} has no owner; leave it out")
        rows += [row] * len(distinct)
        owners += sorted(distinct)
    found, numbers = np.unique(np.array(owners), return_inverse=True)
    return Ownership(population, len(found), np.array(rows, dtype=np.int64), numbers.astype(np.int64))


@dataclass(frozen=True)
class ChosenBound:
    """The most rows of one user, or of one in a step, as a charged question has chosen it (`private_bound`)."""

    rows: int
    epsilon: float
    """What the choice cost. What follows from it costs so much more."""
    answer: str = field(default_factory=new_answer)
    """Its name. Another choice, asked at another time, costs again, though it be of as many rows."""


Most = int | str | ChosenBound | None
"""A bound on a user's rows: a number, "median", a chosen one, or the largest count."""


def bound_of(asked: int | str | None, owned: Ownership) -> int:
    """The most rows of one user in a run: a number (at most the largest count), "median" of the public counts, or the
    largest count (None)."""
    if asked is None:
        return int(owned.counts.max(initial=1))
    if asked == "median":
        return max(1, int(np.median(owned.counts)))
    if isinstance(asked, str):
        raise ValueError(f"rows_per_user={asked!r} must be a whole number, or 'median'")
    check_steps(asked, "rows_per_user")
    return min(asked, int(owned.counts.max(initial=1)))  # the largest count is public


def facts_of_users(
    owned: Ownership, sample: str, rows_per_user: Most, cap: int | ChosenBound | None, delta: float | None
) -> Users:
    """What is public of these users, and how steps draw from them; ValueError where no theorem covers it."""
    choices = {each.answer: float(each.epsilon) for each in (rows_per_user, cap) if isinstance(each, ChosenBound)}
    given = isinstance(rows_per_user, ChosenBound)  # it is not held against the counts
    rows_per_user = rows_per_user.rows if isinstance(rows_per_user, ChosenBound) else rows_per_user
    cap = cap.rows if isinstance(cap, ChosenBound) else cap
    bound: int | None = None
    if sample != "users":
        bound = int(rows_per_user) if given and rows_per_user is not None else bound_of(rows_per_user, owned)
    if sample == "users" and rows_per_user is not None:
        raise ValueError(
            f"rows_per_user={rows_per_user}: not with sample='users', where a user is one clipped vector however many "
            "rows there are; cap= is the most rows of one in a step"
        )
    several = owned.several
    found = Users(
        sample=sample,
        rows_per_user=bound,
        cap=cap,
        users=owned.users,
        several_owners=several,
        choice_epsilon=sum(choices.values()),
        choices=tuple(choices.items()),
    )
    if delta is not None:
        check_delta(delta)
    if delta is not None and delta >= 1 / owned.users:
        raise ValueError(
            f"delta={delta} is not below 1/U = {1 / owned.users:.3g} for {owned.users} users: it would allow "
            f"publishing all rows of one; choose a smaller delta, such as {0.1 / owned.users:.0e}"
        )
    return found


def with_users(data: Any, users: object) -> tuple[object, Ids]:
    """The data without the column that names users, and the ids; `users` may be the ids themselves."""
    if not isinstance(users, str):
        return data, users
    if isinstance(data, Mapping):
        _require_column(users, list(data))
        return {name: column for name, column in data.items() if name != users}, _plain(data[users])
    if hasattr(data, "column_names") and hasattr(data, "remove_columns"):  # of Hugging Face
        _require_column(users, list(data.column_names))
        return data.remove_columns([users]), list(data[users])
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        _require_column(users, [str(name) for name in data[0]])
        rows = [{name: value for name, value in row.items() if name != users} for row in data]
        return rows, [row.get(users) for row in data]
    raise ValueError(
        f"users={users!r} names a column, but data is a {type(data).__name__}: give a list of dictionaries or a "
        "dataset of Hugging Face, or the ids, one for each row"
    )


def _require_column(name: str, columns: list[str]) -> None:
    if name not in columns:
        raise ValueError(f"users={name!r} is no column of the data, which has {', '.join(map(str, columns))}")


def _plain(column: object) -> object:
    return column.cpu().numpy() if isinstance(column, Tensor) else column
