"""How many rows of one user should take part? Chosen by one charged question, where counts of rows are not public."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vestige import accounting, assumptions
from vestige.accounting.ledger import Ledger, LedgerError, read
from vestige.budget.account import Budget, Provenance, attach
from vestige.checks import check_delta, check_epsilon, check_number, check_steps
from vestige.files import read_json, sha256, write_json
from vestige.mechanism.users.ownership import ChosenBound, ownership
from vestige.questions import ExponentialMechanism
from vestige.randomness.choosing import choose
from vestige.randomness.keys import Randomness
from vestige.tasks import of_file
from vestige.training.verify import verify
from vestige.units import Users

FILE = "bound.json"


def private_bound(
    users: Any,
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
    - `budget` is the book of the dataset: `vestige.budget.Account(BOOK, derived_from=FILE)`.

    Hand the result to `vestige.train` or `make_private` as `rows_per_user=` or `cap=`: the epsilon of that run is then
    the sum of both, and the noise is calibrated to what is left.

    >>> import vestige
    >>> chosen = vestige.private_bound([row // 5 for row in range(5000)], epsilon=2, largest=20)
    >>> 3 < chosen.rows < 7
    True

    Formal guarantees: `epsilon`-differential privacy (delta 0) for adding, removing or changing all rows of one user:
    the exponential mechanism over 1 to `largest`, with the distance of the number of users who have at most so many
    rows from `share` times all users, which one user moves by 1 at most.
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
    source = Provenance(data=None, of_file=of_file)
    entry = attach(ledger, budget, {question: 1}, purpose="a bound on users' rows", source=source, facts=facts)
    _open(ledger, facts, owned.users, delta, entry)
    ledger.ask(question, step=0, part=0, sensitivity=1.0)
    chosen = 1 + choose(
        scores(owned.counts, share, largest).tolist(), 1.0, epsilon, Randomness.secret().stream("choice", 0)
    )
    if folder is not None:
        write_json(folder / FILE, {"rows": chosen, "epsilon": epsilon, "share": share, "largest": largest})
    ledger.finish({} if folder is None else {FILE: sha256(folder / FILE)})
    ledger.close()
    return ChosenBound(chosen, epsilon)


def scores(counts: np.ndarray, share: float, largest: int) -> np.ndarray:
    """SENSITIVE: of each bound, minus the distance of the number of users who have no more rows from their share. A
    user more or less, or with other rows, moves it by 1 at most."""
    no_more = np.searchsorted(np.sort(counts), np.arange(1, largest + 1), side="right")
    return np.asarray(-np.abs(no_more - share * len(counts)))


def _open(ledger: Ledger, facts: accounting.Facts, users: int, delta: float, entry: dict[str, Any] | None) -> None:
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
    if not (path / FILE).is_file():
        raise ValueError(f"{str(folder)!r} holds no {FILE}: give a folder that `vestige bound` has written")
    verify(path)
    content = read_json(path / FILE)
    spent = read(path / "ledger.jsonl").spent(replays_are_free=False)
    if spent != {ExponentialMechanism(content["epsilon"]): 1}:
        raise LedgerError(f"{path / FILE} says epsilon {content['epsilon']}, which is not what its ledger has asked")
    return ChosenBound(int(content["rows"]), float(content["epsilon"]))


def given_bound(asked: int | str | None) -> int | str | ChosenBound | None:
    """A bound as a command names it: a number, "median", or the folder of a chosen one."""
    return read_bound(asked) if isinstance(asked, str) and asked != "median" else asked
