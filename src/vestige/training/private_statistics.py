"""How is a scaler, a vocabulary or a class weight fitted without telling about a row? By bounded, charged questions.

What is fitted to private rows without noise is an exact statistic of them. `private_statistics` asks for the same
things with noise, and `vestige.train(..., statistics=...)` counts their price with that of the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri

from vestige import accounting, assumptions
from vestige.accounting.ledger import Ledger, LedgerError, read
from vestige.budget.spending import Budget, Provenance, account_of, attach
from vestige.checks import check_delta, check_epsilon, check_multiplier, check_number, check_steps, python_numbers
from vestige.files import read_json, sha256, write_json
from vestige.mechanism.users.ownership import ChosenBound, ownership
from vestige.priced_questions import ExponentialMechanism, Gaussian, Question, new_answer
from vestige.randomness import lattice, rounded_gaussian
from vestige.randomness.exponential_mechanism import choose
from vestige.randomness.keys import Randomness
from vestige.randomness.rounded_gaussian import STEPS
from vestige.randomness.streams import Stream
from vestige.randomness.sum_and_release_types import BoundedSum
from vestige.tasks import of_file
from vestige.training.verify import verify
from vestige.units import Users

Bounds = tuple[float, float]
Column = Hashable
"""A column's name, or its number in an array."""
GRID = 1024
"""Points of the public grid that a quantile is chosen from."""
PER_MULTIPLIER = 0.5
"""The epsilon of choosing a quantile, times the noise multiplier of the sums: about as private as they are."""


@dataclass(frozen=True)
class Vocabulary:
    """The `size` most frequent words of a column of texts, each row counting for at most `words_per_row` of its own.

    With `candidates`, a public list, all of them are counted. Without, only words that occur are, and only those are
    shown whose noised count passes a threshold, which fails with probability `delta` for a word of one row alone.
    """

    size: int
    words_per_row: int = 64
    candidates: Sequence[str] | None = None
    delta: float | None = None
    split: Callable[[str], Sequence[str]] = str.split

    def __post_init__(self) -> None:
        check_steps(self.size, "size")
        check_steps(self.words_per_row, "words_per_row")
        if (self.candidates is None) == (self.delta is None):
            raise ValueError(
                "vocabulary: give candidates, a public list of words, or delta, with which words of the rows are shown "
                "by a threshold: noise on the words that occur tells which they are"
            )
        if self.delta is not None:
            check_delta(self.delta)


@dataclass(frozen=True)
class PrivateStatistics:
    """Noised statistics of private rows: releases, free to use, and the questions that they cost."""

    means: dict[Column, float] = field(default_factory=dict)
    deviations: dict[Column, float] = field(default_factory=dict)
    quantiles: dict[Column, tuple[float, ...]] = field(default_factory=dict)
    counts: dict[Column, dict[Column, float]] = field(default_factory=dict)
    """Of each class of a column, not below zero."""
    words: dict[Column, tuple[str, ...]] = field(default_factory=dict)
    """The vocabulary of a column, most frequent first."""
    questions: tuple[Question, ...] = ()
    rows: int = 0
    delta: float = 1e-6
    selection_delta: float = 0.0
    """What thresholds of vocabularies add to delta."""
    noise: str = "secret"
    answer: str = field(default_factory=new_answer)
    """Its name: the same questions asked again are another answer, and cost again."""
    paid: dict[str, Any] | None = None
    """Where they were charged to the book of the dataset: which, and as what."""
    ledger: Ledger | None = field(default=None, repr=False, compare=False)

    def guarantee(self) -> accounting.Guarantee:
        """What these answers cost by themselves, at `delta`."""
        facts = accounting.Facts(sampling="every-example", noise=self.noise, selection_delta=self.selection_delta)
        known = {} if self.ledger is None else self.ledger.assumptions
        return accounting.guarantee(Counter(self.questions), self.delta, facts, known)

    def scaled(self, inputs: object) -> torch.Tensor:
        """Columns of an array less their noised means, over their noised deviations: `StandardScaler`'s place."""
        x = torch.as_tensor(inputs, dtype=torch.get_default_dtype())
        places = list(self.means)
        if x.dim() != 2 or places != list(range(x.shape[1])):
            raise ValueError(f"scaled: the means are of the columns {places}, and the array is {list(x.shape)}")
        mean, deviation = (torch.tensor([each[place] for place in places]) for each in (self.means, self.deviations))
        return (x - mean) / deviation

    def class_weights(self, column: Column) -> torch.Tensor:
        """Weights for a loss, in the order of the public classes: as scikit-learn's "balanced", of noised counts."""
        counts = torch.tensor(list(self.counts[column].values()))
        floor = max(1.0, 0.001 * self.rows)  # a class that noise has emptied must not weigh without bound
        return self.rows / (len(counts) * counts.clamp(min=floor))

    def encoded(self, column: Column, texts: Sequence[str], length: int, split: Any = str.split) -> torch.Tensor:
        """Texts as numbers of words, cut and padded to a public length: 0 pads, 1 is any other word."""
        numbers = {word: 2 + place for place, word in enumerate(self.words[column])}
        found = torch.zeros(len(texts), length, dtype=torch.long)
        for row, text in zip(found, texts, strict=True):
            for place, word in enumerate(split(text)[:length]):
                row[place] = numbers.get(word, 1)
        return found

    @property
    def identity(self) -> dict[str, object]:
        """What is public of it, for a ledger."""
        asked = Counter(self.questions)
        questions = [{**each.to_json(), "count": n} for each, n in asked.items()]
        return {"rows": self.rows, "questions": questions, "answer": self.answer}


@python_numbers
def private_statistics(
    data: object,
    *,
    means: Bounds | Mapping[Column, Bounds] | None = None,
    quantiles: Mapping[Column, tuple[float, float, Sequence[float]]] | None = None,
    classes: Mapping[Column, Sequence[object]] | None = None,
    vocabulary: Mapping[Column, Vocabulary] | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-6,
    ledger: str | Path | None = None,
    budget: Budget = None,
    reproducible: int | None = None,
) -> PrivateStatistics:
    """Ask for statistics of private rows with noise, in place of fitting to them; the answers are free to use.

    - `data` is an array or tensor [rows, columns], whose columns are 0, 1, ...; or a data frame or dictionary of
      columns by name.
    - `means` are public bounds (low, high) of all columns, or of some by name: their means and deviations. Values
      beyond the bounds are clamped; a missing or non-finite one counts for nothing.
    - `quantiles` are bounds and shares by column: {"income": (0, 1e6, (0.25, 0.5, 0.75))}.
    - `classes` are public lists of the values that a column may have: how many rows have each.
    - `vocabulary` are `Vocabulary(...)` by column.
    - `epsilon` is what all of them may cost together at `delta`, with as much noise for each; or give
      `noise_multiplier`, their noise over what one row can change.
    - `ledger` is a file for the questions, written before they are answered.
    - `budget` is the book of the dataset (`vestige budget open`), or a `vestige.budget.Account`, charged before the
      first answer; None: that of VESTIGE_BUDGET, if it is set. A run that is handed the result is not charged for it
      again.

    Hand the result to `vestige.train(..., statistics=result)`: its epsilon then covers both.

    >>> import torch, vestige
    >>> rows = torch.randn(1000, 3)
    >>> found = vestige.private_statistics(rows, means=(-5, 5), epsilon=1, delta=1e-6)
    >>> found.scaled(rows).shape
    torch.Size([1000, 3])

    Formal guarantees: `result.guarantee()`, for one row or a blank in its place. Means and deviations of all columns
    together, each histogram and each vocabulary are one Gaussian mechanism: a row's part has a public norm at most.
    Each quantile is one exponential mechanism: a row moves every candidate's score by at most 1. A threshold without
    candidates fails with probability at most its own delta, which is added.
    """
    columns, rows = _columns(data)
    asked = _asked(columns, means, quantiles or {}, classes or {}, vocabulary or {})
    if not asked:
        raise ValueError("private_statistics: nothing was asked for; give means, quantiles, classes or vocabulary")
    check_delta(delta, rows)
    reserved = sum(each.delta or 0.0 for each in (vocabulary or {}).values())
    if reserved >= delta:
        raise ValueError(f"delta={delta} must be more than the vocabularies' own, {reserved:g}, a part of it")
    multiplier = _multiplier(asked, epsilon, noise_multiplier, delta - reserved)
    key = Randomness.secret() if reproducible is None else Randomness.reproducible(reproducible)
    books = Ledger(None if ledger is None else Path(ledger))
    questions = tuple(each.question(multiplier) for each in asked)
    secrecy = "secret" if reproducible is None else "seeded"
    told = accounting.Facts(sampling="every-example", noise=secrecy, selection_delta=reserved)
    answer = new_answer()
    entry = _reserve(books, budget, questions, columns if hasattr(data, "columns") else data, told, reserved, answer)
    try:
        books.open(
            {
                "population": rows,
                "delta": delta,
                "noise": told.noise,
                "sampling": told.sampling,
                "arithmetic": "lattice",
                "schedule": "fixed",
                "adjacency": assumptions.ADJACENCY,
                "answer": answer,
                **({"selection_delta": reserved} if reserved else {}),
                **({} if entry is None else {"budget": entry}),
            }
        )
    except BaseException:
        if books.spending is not None:
            books.spending.finish()
        raise
    _record(books, reproducible)
    found: dict[str, Any] = {}
    for number, (each, question) in enumerate(zip(asked, questions, strict=True)):
        books.ask(question, step=number, part=0, sensitivity=each.sensitivity)
        for name, values in each.answer(multiplier, key.stream(f"statistics/{each.name}", number)).items():
            found.setdefault(name, {}).update(values)
    books.finish({})
    books.close()
    by_column: dict[Column, tuple[float, ...]] = {}
    for (column, _), value in found.pop("quantiles", {}).items():
        by_column[column] = tuple(sorted((*by_column.get(column, ()), value)))
    facts: dict[str, Any] = {"rows": rows, "delta": delta, "selection_delta": reserved, "ledger": books}
    facts |= {"questions": questions, "noise": told.noise, "paid": entry, "answer": answer}
    return PrivateStatistics(**found, quantiles=by_column, **facts)


def _reserve(
    books: Ledger,
    budget: Budget,
    questions: Sequence[Question],
    data: object,
    facts: accounting.Facts,
    delta: float,
    answer: str,
) -> dict[str, object] | None:
    """In the book of the dataset, if there is one. The deltas of thresholds are entries of their own."""
    account = account_of(budget)
    if account is not None and delta:
        raise ValueError(
            "vocabulary: words shown by a threshold have a delta of their own, which a book takes from entries by hand "
            "alone; give candidates, a public list of words"
        )
    source = Provenance(data=data, of_file=of_file)
    purpose = f"{len(questions)} statistics"
    return attach(books, account or False, Counter(questions), purpose=purpose, source=source, facts=facts, run=answer)


def _record(books: Ledger, reproducible: int | None) -> None:
    """What is known of these questions about the assumptions."""
    if reproducible is None:
        assumptions.record(books, "key", "checked", "drawn from the operating system for this call")
    for name in ("rows_apart", "loss_per_example", "padding", "processes"):
        assumptions.record(books, name, "not needed", "sums of single rows, in one process")
    assumptions.record(books, "adjacency", "checked", "a blank row counts for nothing; the number of rows is public")
    assumptions.record(books, "sampling", "not needed", "every row is asked")
    assumptions.record(books, "divisor", "checked", "the public number of rows")
    missing = "a value that is missing or out of range counts for nothing; one of another kind ends the call"
    assumptions.record(books, "bad_rows", "assumed", missing)
    assumptions.record(books, "fixed_steps", "checked", "all questions were fixed beforehand")


def _multiplier(asked: Sequence[_Asked], epsilon: float | None, given: float | None, delta: float) -> float:
    if (epsilon is None) == (given is None):
        raise ValueError("give epsilon, or noise_multiplier: how private the statistics are")
    if given is not None:
        check_multiplier(given)
        return given
    assert epsilon is not None
    check_epsilon(epsilon)
    return accounting.calibrate(lambda m: Counter(each.question(m) for each in asked), epsilon, delta)


# --- the questions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """One question: what it costs, and how it is answered."""

    name: str
    sensitivity: float
    question: Callable[[float], Question]
    answer: Callable[[float, Any], dict[str, dict[Column, Any]]]


def _asked(
    columns: Mapping[Column, object],
    means: Bounds | Mapping[Column, Bounds] | None,
    quantiles: Mapping[Column, tuple[float, float, Sequence[float]]],
    classes: Mapping[Column, Sequence[object]],
    vocabulary: Mapping[Column, Vocabulary],
) -> list[_Asked]:
    found = []
    for name, asked in (("quantiles", quantiles), ("classes", classes), ("vocabulary", vocabulary)):
        if not isinstance(asked, Mapping):
            raise ValueError(f"{name}={asked!r} must be a dictionary: what is asked, by column")
    if means is not None:
        bounds = means if isinstance(means, Mapping) else dict.fromkeys(columns, means)
        for column, bound in bounds.items():
            _check_bounds("means", column, bound)
        found.append(_moments({column: _numbers(columns, column) for column in bounds}, bounds))
    for column, given in quantiles.items():
        low, high, shares = _bounds_and_shares(column, given)
        values = np.sort(np.clip(_finite(_numbers(columns, column)), low, high))
        total = len(_numbers(columns, column))
        found += [_quantile(column, values, total, low, high, share) for share in shares]
    for column, labels in classes.items():
        found.append(_histogram(column, _values(columns, column), list(labels)))
    for column, wanted in vocabulary.items():
        found.append(_words(column, _values(columns, column), wanted))
    return found


def _moments(values: Mapping[Column, np.ndarray], bounds: Mapping[Column, Bounds]) -> _Asked:
    """Sums of z and of z^2 - 1/2, each value being z in [-1, 1] of its bounds: of all columns as one vector. A row's
    part has the square norm z^2 + (z^2 - 1/2)^2 <= 5/4 in each column."""
    sensitivity = sqrt(1.25 * len(values))

    def answer(multiplier: float, stream: Stream) -> dict[str, dict[Column, Any]]:
        sums = []
        for column, numbers in values.items():
            low, high = bounds[column]
            z = np.clip((_finite(numbers) - low) / (high - low) * 2 - 1, -1, 1)
            sums += [z.sum(), (z**2 - 0.5).sum()]
        total = torch.tensor(sums, dtype=torch.float64)
        lattice.add_noise(BoundedSum(total, sensitivity), multiplier, stream)
        means, deviations = {}, {}
        for place, (column, numbers) in enumerate(values.items()):
            low, high = bounds[column]
            first, second = (float(part) / len(numbers) for part in total[2 * place : 2 * place + 2])
            first = min(1.0, max(-1.0, first))
            spread = sqrt(max(second + 0.5 - first**2, 1e-4))  # a hundredth of half the range at least
            means[column] = low + (first + 1) / 2 * (high - low)
            deviations[column] = spread / 2 * (high - low)
        return {"means": means, "deviations": deviations}

    return _Asked("means", sensitivity, Gaussian, answer)


def _quantile(column: Column, values: np.ndarray, rows: int, low: float, high: float, share: float) -> _Asked:
    check_number("quantiles", share)
    if not 0 < share < 1:
        raise ValueError(f"quantiles={share} of column {column!r} must lie between 0 and 1")
    grid = np.linspace(low, high, GRID)

    def question(multiplier: float) -> Question:
        return ExponentialMechanism(PER_MULTIPLIER / multiplier)

    def answer(multiplier: float, stream: Stream) -> dict[str, dict[Column, object]]:
        # A row more or less moves the count of values below a candidate by 1 at most; the number of rows is public.
        scores = -np.abs(np.searchsorted(values, grid) - share * rows)
        chosen = choose(scores.tolist(), 1.0, PER_MULTIPLIER / multiplier, stream)
        return {"quantiles": {(column, share): float(grid[chosen])}}

    return _Asked("quantile", 1.0, question, answer)


def _histogram(column: Column, values: Sequence[object], labels: Sequence[object]) -> _Asked:
    if not all(isinstance(label, Hashable) for label in labels) or len(set(labels)) != len(labels) or len(labels) < 2:
        raise ValueError(f"classes of column {column!r} must be two or more different values that may occur")

    def answer(multiplier: float, stream: Stream) -> dict[str, dict[Column, object]]:
        found = Counter(value.item() if hasattr(value, "item") else value for value in values)
        total = torch.tensor([float(found[label]) for label in labels], dtype=torch.float64)
        lattice.add_noise(BoundedSum(total, 1.0), multiplier, stream)
        return {"counts": {column: dict(zip(labels, total.clamp(min=0).tolist(), strict=True))}}

    return _Asked("classes", 1.0, Gaussian, answer)


def _words(column: Column, texts: Sequence[str], wanted: Vocabulary) -> _Asked:
    """A row counts once for each of its first different words, `words_per_row` at most: the norm of its part is at most
    the root of that."""
    if not isinstance(wanted, Vocabulary):
        raise ValueError(f"vocabulary of column {column!r}: give a vestige.Vocabulary, not {wanted!r}")
    most = wanted.words_per_row
    sensitivity = sqrt(most)

    def answer(multiplier: float, stream: Stream) -> dict[str, dict[Column, object]]:
        candidates = None if wanted.candidates is None else dict.fromkeys(wanted.candidates)
        counts: Counter[str] = Counter()
        for text in texts:
            words = dict.fromkeys(wanted.split(text) if isinstance(text, str) else ())
            kept = [word for word in words if candidates is None or word in candidates]
            counts.update(kept[:most])
        names = sorted(counts) if candidates is None else list(candidates)
        # Steps of a public size: how many different words occur must not show.
        deviation = multiplier * sensitivity * (1 + 2 * lattice.ROUNDING)
        spacing = deviation * 2.0**-STEPS
        steps = np.round(np.array([counts[name] for name in names], dtype=np.float64) / spacing)
        noised = (steps + rounded_gaussian.draw(len(names), stream)) * spacing if names else np.zeros(0)
        least = -np.inf
        if candidates is None:
            assert wanted.delta is not None
            least = 1 + spacing + deviation * float(ndtri(1 - wanted.delta / most))
        order = [place for place in np.argsort(-noised, kind="stable") if noised[place] > least]
        return {"words": {column: tuple(names[place] for place in order[: wanted.size])}}

    return _Asked("vocabulary", sensitivity, Gaussian, answer)


# --- the rows ---------------------------------------------------------------------------------------------------------


def _columns(data: Any) -> tuple[dict[Column, object], int]:
    """Columns by name or place, and how many rows there are."""
    if isinstance(data, Mapping) or hasattr(data, "columns"):
        names = list(data if isinstance(data, Mapping) else data.columns)
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f"data: several columns are named {twice[0]!r}; give each a name of its own")
        columns = {name: data[name] for name in names}
    else:
        array = np.asarray(data.detach().cpu() if isinstance(data, torch.Tensor) else data)
        if array.ndim != 2:
            raise ValueError(
                f"data: an array of shape {list(array.shape)}; give [rows, columns], or a dictionary of columns by name"
            )
        columns = {place: array[:, place] for place in range(array.shape[1])}
    counts = {len(column) for column in columns.values()}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(f"data: columns of {sorted(counts)} rows; they must have one number of rows, and some")
    rows = counts.pop()
    for name, column in columns.items():
        _require_one_value(name, getattr(column, "shape", (rows,)), rows)
    return columns, rows


def _require_one_value(column: Column, shape: Sequence[int], rows: int) -> None:
    """What a row may change is bounded for one value of each row in each column."""
    if tuple(shape) != (rows,):
        raise ValueError(
            f"data: column {column!r} has the shape {list(shape)}, and a column has one value for each row: give its "
            "parts as columns of their own"
        )


def _column(columns: Mapping[Column, object], column: Column) -> Any:
    if column not in columns:
        raise ValueError(f"column {column!r} is none of {', '.join(map(repr, columns))}")
    found = columns[column]
    return found.tolist() if isinstance(found, torch.Tensor) else found


def _values(columns: Mapping[Column, object], column: Column) -> list[Any]:
    found = list(_column(columns, column))
    listed = next((value for value in found if not isinstance(value, Hashable)), None)
    if listed is not None:
        raise ValueError(f"column {column!r} holds a {type(listed).__name__} where each row has one value")
    return found


def _numbers(columns: Mapping[Column, object], column: Column) -> np.ndarray:
    given = _column(columns, column)
    try:
        found = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"column {column!r} holds no numbers") from error
    _require_one_value(column, found.shape, len(given))
    return found


def _finite(numbers: np.ndarray) -> np.ndarray:
    return numbers[np.isfinite(numbers)]


def _check_bounds(name: str, column: Column, bounds: Any) -> None:
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise ValueError(f"{name} of column {column!r}: give public bounds (low, high), not {bounds!r}") from None
    check_number(name, low)
    check_number(name, high)
    if not low < high:
        raise ValueError(f"{name} of column {column!r}: the bounds ({low}, {high}) must rise")
    if not isfinite(float(high) - float(low)):
        raise ValueError(f"{name} of column {column!r}: the bounds ({low}, {high}) are too far apart for a float")


def _bounds_and_shares(column: Column, given: Any) -> tuple[float, float, Sequence[float]]:
    try:
        low, high, shares = given
        shares = list(shares)
    except (TypeError, ValueError):
        raise ValueError(
            f"quantiles of column {column!r}: give public bounds and shares (low, high, (0.25, 0.5)), not {given!r}"
        ) from None
    _check_bounds("quantiles", column, (low, high))
    return low, high, shares


# --- how many rows of one user ----------------------------------------------------------------------------------------

BOUND = "bound.json"


@python_numbers
def private_bound(
    users: object,
    *,
    epsilon: float,
    share: float = 0.5,
    largest: int = 64,
    delta: float = 1e-6,
    out: str | Path | None = None,
    budget: Budget = None,
) -> ChosenBound:
    """The number of rows that a `share` of the users do not exceed, by one private question that costs `epsilon`.

    - `users` is an id for each row. Rows with several owners are refused: one owner's rows decide how many rows another
      has, so that no score has a sensitivity.
    - `share=0.5` is the median, 0.9 a bound that leaves out rows of one user in ten.
    - `largest` is the largest bound that may be chosen, a public number.
    - `out` is a new folder for the ledger and bound.json; `vestige verify` recomputes its cost, at `delta`.
    - `budget` is the book of the dataset: `vestige.budget.Account(BOOK, derived_from=BOUND)`.

    Hand the result to `vestige.train` or `make_private` as `rows_per_user=` or `cap=`: the epsilon of that run is then
    the sum of both, and the noise is calibrated to what is left.

    >>> import vestige
    >>> chosen = vestige.private_bound([row // 5 for row in range(5000)], epsilon=2, largest=20)
    >>> 3 < chosen.rows < 7
    True

    Formal guarantees: `epsilon`-differential privacy (delta 0) for adding, removing or changing all rows of one user:
    the exponential mechanism over 1 to `largest`, by how far the rank `share` times all users lies from those of users
    with so many rows, which one user moves by 1 at most.
    """
    check_number("epsilon", epsilon)
    check_epsilon(epsilon)
    check_number("share", share)
    if not 0 < share < 1:
        raise ValueError(f"share={share} must lie between 0 and 1: of users who have no more rows than the bound")
    check_steps(largest, "largest")
    owned = ownership(users, len(users) if hasattr(users, "__len__") else 0)
    if owned.several:
        raise ValueError(
            "users: some rows have several owners, and one owner's rows decide how many another has: no question about "
            "counts is bounded. Take a number, or rows_per_user='median' of the public counts"
        )
    check_delta(delta, owned.users)
    folder = None if out is None else Path(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    ledger, question = Ledger(None if folder is None else folder / "ledger.jsonl"), ExponentialMechanism(epsilon)
    facts = accounting.Facts(sampling="every-example", users=Users(sample="users", users=owned.users))
    source, answer = Provenance(data=None, of_file=of_file), new_answer()
    purpose = "a bound on users' rows"
    entry = attach(ledger, budget, {question: 1}, purpose=purpose, source=source, facts=facts, run=answer)
    _open_choice(ledger, facts, owned.users, delta, answer, entry)
    ledger.ask(question, step=0, part=0, sensitivity=1.0)
    chosen = 1 + choose(
        bound_scores(owned.counts, share, largest).tolist(), 1.0, epsilon, Randomness.secret().stream("choice", 0)
    )
    if folder is not None:
        write_json(folder / BOUND, {"rows": chosen, "epsilon": epsilon, "share": share, "largest": largest})
    ledger.finish({} if folder is None else {BOUND: sha256(folder / BOUND)})
    ledger.close()
    return ChosenBound(chosen, epsilon, answer)


def bound_scores(counts: np.ndarray, share: float, largest: int) -> np.ndarray:
    """SENSITIVE: of each bound, minus how many users the wanted rank lies above those who have no more rows, or below
    those who have fewer; zero where users with just so many rows have it. A user more or less, or with other rows,
    moves it by 1 at most."""
    ordered, bounds, wanted = np.sort(counts), np.arange(1, largest + 1), share * len(counts)
    fewer, no_more = (np.searchsorted(ordered, bounds, side=side) for side in ("left", "right"))
    return np.asarray(-np.maximum(0.0, np.maximum(wanted - no_more, fewer - wanted)))


def _open_choice(
    ledger: Ledger, facts: accounting.Facts, users: int, delta: float, answer: str, entry: dict[str, object] | None
) -> None:
    assert facts.users is not None
    told = {
        "population": users,
        "delta": delta,
        "noise": facts.noise,
        "sampling": facts.sampling,
        "arithmetic": "lattice",
        "schedule": "fixed",
        "adjacency": facts.users.adjacency,
        "users": facts.users.to_json(),
        "answer": answer,
        **({} if entry is None else {"budget": entry}),
    }
    try:
        ledger.open(told)
    except BaseException:
        if ledger.spending is not None:
            ledger.spending.finish()
        raise
    assumptions.record(ledger, "key", "checked", "drawn from the operating system for this choice")
    for name in ("rows_apart", "loss_per_example", "padding", "processes", "divisor", "bad_rows"):
        assumptions.record(ledger, name, "not needed", "counts of rows, in one process")
    assumptions.record(ledger, "sampling", "not needed", "every user is asked")
    assumptions.record(ledger, "fixed_steps", "checked", "one question")


def read_bound(folder: str | Path) -> ChosenBound:
    """A bound that `private_bound(out=folder)`, or `vestige bound`, has chosen; what it says is held against its
    ledger."""
    path = Path(folder)
    if not (path / BOUND).is_file():
        raise ValueError(f"{str(folder)!r} holds no {BOUND}: give a folder that `vestige bound` has written")
    verify(path)
    content = read_json(path / BOUND)
    history = read(path / "ledger.jsonl")
    if history.spent(replays_are_free=False) != {ExponentialMechanism(content["epsilon"]): 1}:
        raise LedgerError(f"{path / BOUND} says epsilon {content['epsilon']}, which is not what its ledger has asked")
    facts = history.facts
    answer = facts.get("answer") or facts.get("budget", {}).get("run") or history.head  # the former since 0.3
    return ChosenBound(int(content["rows"]), float(content["epsilon"]), answer)


def given_bound(asked: int | str | None) -> int | str | ChosenBound | None:
    """A bound as a command names it: a number, "median", or the folder of a chosen one."""
    return read_bound(asked) if isinstance(asked, str) and asked != "median" else asked
