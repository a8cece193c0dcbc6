"""Rows or users: which mechanism has the least noise for people with several rows? At one epsilon, and as many rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vestige import accounting
from vestige.checks import check_delta, check_epsilon, check_steps
from vestige.priced_questions import Question, SampledGaussian
from vestige.units import Users

FEWER = 4
"""Beside all of a user's rows and one of them, this part of them is tried."""


@dataclass(frozen=True)
class Mechanism:
    """A way to hide all rows of one user, with the noise that a budget asks of it."""

    sample: str
    rows_per_user: int
    """The most rows of one user in the run."""
    cap: int | None
    """The most rows of one user in a step; None: all that are drawn."""
    sample_rate: float
    noise_multiplier: float
    noise_of_mean: float
    """The deviation of a mean's noise, in clips: the multiplier over the rows, or the users, of a step."""


def mechanisms(
    *,
    users: int,
    rows_per_user: int,
    batch: int,
    steps: int,
    epsilon: float,
    delta: float,
    accountant: str = "rdp",
) -> list[Mechanism]:
    """Every mechanism at `batch` rows a step, for users who have `rows_per_user` rows each; public numbers only.

    Noise is compared at one clip. The mean of a user's rows is shorter than a row's gradient where the rows are unlike:
    its clip may then shrink, towards one over the root of their number.
    """
    for name, value in (("users", users), ("rows_per_user", rows_per_user), ("batch", batch), ("steps", steps)):
        check_steps(value, name)
    check_epsilon(epsilon)
    check_delta(delta, users)
    found = []
    for drawn, rate, units in _candidates(users, rows_per_user, batch):
        if rate > 1:
            continue

        def asked(noise: float, drawn: Users = drawn, rate: float = rate) -> dict[Question, int]:
            plain = SampledGaussian(rate, noise)
            question = plain if drawn.sample == "users" else drawn.question(plain)
            assert question is not None
            return {question: steps}

        noise = accounting.calibrate(asked, epsilon, delta, accountant)
        most = rows_per_user if drawn.rows_per_user is None else drawn.rows_per_user
        found.append(Mechanism(drawn.sample, most, drawn.cap, rate, noise, noise / units))
    return found


def _candidates(users: int, rows: int, batch: int) -> Iterator[tuple[Users, float, float]]:
    """How users are drawn from, at which rate, and how many clipped vectors a step then has."""
    some = sorted({rows, max(1, rows // FEWER), 1}, reverse=True)
    for most in some:
        yield Users(rows_per_user=most), batch / (users * most), batch
    if rows > 1:
        yield Users(rows_per_user=rows, cap=1), batch / (users * rows), batch
    for cap in some:
        yield Users(sample="users", cap=cap), batch / (users * cap), batch / cap
