"""Whose presence is hidden? One row, unless users are named: then all rows of one user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from vestige.checks import check_steps
from vestige.priced_questions import ExponentialMechanism, Gaussian, GroupedGaussian, Question, SampledGaussian

SAMPLES = ("rows", "users")


@dataclass(frozen=True, kw_only=True)
class Users:
    """What is public about users, and how a step draws from them.

    Neighbouring data differ in the contents of all rows of one user: those of one side are blank. The number of rows,
    the number of users and who owns which row are the same on both sides, and public.
    """

    sample: str = "rows"
    """ "rows": each row joins by itself and is clipped by itself. "users": each user joins, and the mean of the rows is
    clipped once."""
    rows_per_user: int | None = None
    """The most rows that one user has in the whole run; None where the price does not depend on it."""
    cap: int | None = None
    """The most rows of one user in one step; None: all that are drawn."""
    users: int | None = None
    """How many there are; None where only a price is asked for."""
    several_owners: bool = False
    """Whether a row may have several owners."""
    choice_epsilon: float = 0.0
    """Of the questions by which `rows_per_user` or `cap` was chosen, without a delta: added to all that follows."""
    choices: tuple[tuple[str, float], ...] = ()
    """The answers to them, by name, and what each cost."""

    def __post_init__(self) -> None:
        if self.sample not in SAMPLES:
            raise ValueError(f"sample={self.sample!r} is unknown; choose from {', '.join(SAMPLES)}")
        for name in ("rows_per_user", "cap", "users"):
            if getattr(self, name) is not None:
                check_steps(getattr(self, name), name)
        if not 0 <= self.choice_epsilon < inf:
            raise ValueError(f"choice_epsilon={self.choice_epsilon} must be zero or more, and finite")
        if self.sample == "rows" and self.rows_per_user is None:
            raise ValueError(
                "rows_per_user=None: where rows are sampled, the price for a user follows from the most rows that one "
                "has; give it, or sample='users'"
            )
        if self.several_owners and (self.sample == "users" or self.cap is not None):
            what = "sample='users'" if self.sample == "users" else f"cap={self.cap}"
            raise ValueError(
                f"{what}: not where a row has several owners: leaving out one owner's row would change what another "
                "contributes; use sample='rows' with rows_per_user"
            )

    def question(self, asked: Question) -> Question | None:
        """What a question about sampled rows is for a user with several of them; None where no theorem says."""
        assert self.rows_per_user is not None
        if self.rows_per_user == 1:
            return asked
        if isinstance(asked, SampledGaussian):
            return GroupedGaussian(asked.rate, asked.multiplier, self.rows_per_user, self.cap)
        if isinstance(asked, Gaussian):  # all rows are in it
            return Gaussian(asked.multiplier / self.rows_per_user)
        if isinstance(asked, ExponentialMechanism):  # each row moves a score by its sensitivity
            return ExponentialMechanism(asked.choice_epsilon * self.rows_per_user)
        return None

    @property
    def adjacency(self) -> str:
        most = "" if self.rows_per_user is None else f" (at most {self.rows_per_user})"
        return f"zero-out all rows of one user{most}"

    @property
    def neighbours(self) -> str:
        """The change of the data that is hidden, in a sentence."""
        return (
            "zero-out: of two neighbouring datasets one has blanks in the places of all rows of one user, which "
            "contribute nothing; the number of rows, the number of users and who owns which row are public"
        )

    @property
    def assumption(self) -> str:
        """What is public, and hence not protected."""
        graph = "who owns which row (a row may have several owners: that they share it is not protected)"
        owned = graph if self.several_owners else "who owns which row"
        return f"the number of users and {owned} are public; a user's rows are those that were named as that user's"

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Users:
        return cls(**{**content, "choices": tuple(content.get("choices", {}).items())})

    def to_json(self) -> dict[str, object]:
        row = {**asdict(self), "choices": dict(self.choices)}
        return {key: each for key, each in row.items() if each or key not in ("choice_epsilon", "choices")}
