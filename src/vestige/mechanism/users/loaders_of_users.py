"""How are users protected in a user's training loop? Whose rows a loader has, and how many of one take part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Subset

from vestige.mechanism.users.ownership import ChosenBound, Most, Ownership, RowsOfEach, facts_of_users, ownership
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Poisson, RowsOfUsers, Sampling
from vestige.units import Users


@dataclass(frozen=True, eq=False)
class LoaderOfUsers:
    """A loader of rows whose users are named; None in the place of users: each row is a user of its own."""

    loader: DataLoader[object]
    users: Users | None = None
    owned: Ownership | None = None
    owners: np.ndarray | None = None
    """Of sampled rows, whose each is."""

    @property
    def samples_users(self) -> bool:
        return self.users is not None and self.users.sample == "users"

    @property
    def population(self) -> int:
        """How many there are that samples are drawn from: users, or rows."""
        if self.samples_users:
            assert self.owned is not None
            return self.owned.users
        return len(self.loader.dataset)  # type: ignore[arg-type]

    def left(self, epsilon: float) -> float:
        """Of a budget, what the choice of a bound on users' rows has left."""
        chosen = 0.0 if self.users is None else self.users.choice_epsilon
        if chosen and epsilon <= chosen:
            raise ValueError(
                f"target_epsilon={epsilon} is not more than the {chosen:g} that the choice of a bound on users' rows "
                "has cost: give a larger one, or choose the bound by a smaller one"
            )
        return epsilon - chosen

    def rows_of_each(self, randomness: Randomness) -> RowsOfEach | None:
        """Which rows of a sampled user take part; None where rows are sampled."""
        if not self.samples_users:
            return None
        assert self.users is not None
        assert self.owned is not None
        return RowsOfEach(self.owned, self.users.cap, randomness)

    def sampling(self, drawn: Sampling, name: str) -> Sampling:
        """How samples are drawn that are Poisson ones of rows; others have no theorem for several rows of one user."""
        if self.users is None or self.samples_users or self.users.rows_per_user == 1:
            return drawn
        if not isinstance(drawn, Poisson):
            raise ValueError(
                f"sampling={name!r}: of sampled rows, several of which are one user's, only Poisson samples have a "
                "theorem; leave it out, or say sample='users'"
            )
        assert self.users.cap is None or self.owners is not None
        return RowsOfUsers(drawn, self.users, np.zeros(0) if self.owners is None else self.owners)


def of_users(
    loader: DataLoader[object],
    ids: object,
    sample: str,
    rows_per_user: Most,
    cap: int | ChosenBound | None,
    delta: float | None,
) -> LoaderOfUsers:
    """The loader with at most `rows_per_user` rows of each user, or of which users are sampled.

    The coins that leave rows out are public: every process, and a resumed run, leaves out the same, and nothing is
    concluded from their being secret.
    """
    if ids is None:
        asked = (("sample", sample, "rows"), ("rows_per_user", rows_per_user, None), ("cap", cap, None))
        for name, value, usual in asked:
            if value != usual:
                raise ValueError(f"{name}={value!r} is about users: give users=, an id for each row")
        return LoaderOfUsers(loader)
    dataset: Any = loader.dataset
    owned = ownership(ids, len(dataset))
    users = facts_of_users(owned, sample, rows_per_user, cap, delta)
    if users.sample == "users":
        return LoaderOfUsers(loader, users, owned)
    assert users.rows_per_user is not None
    kept = owned.bounded(users.rows_per_user, Randomness.reproducible(0))
    owners = None if owned.several else owned.owners[kept]
    return LoaderOfUsers(loader if len(kept) == len(dataset) else _of_rows(loader, kept, users), users, owned, owners)


def _of_rows(loader: DataLoader[object], kept: np.ndarray, users: Users) -> DataLoader[object]:
    """The same loader over some of its rows."""
    if hasattr(loader, "base_dataloader"):
        raise ValueError(
            f"rows_per_user={users.rows_per_user} leaves rows out, and Accelerate has prepared this loader: call "
            "make_private before accelerator.prepare, or leave those rows out of the dataset"
        )
    if loader.batch_size is None or len(kept) == 0:
        raise ValueError(f"rows_per_user={users.rows_per_user} leaves rows out: give the loader a batch_size and rows")
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    same = {name: getattr(loader, name) for name in (*names, "prefetch_factor", "persistent_workers")}
    return DataLoader(Subset(loader.dataset, kept.tolist()), batch_size=loader.batch_size, shuffle=True, **same)
