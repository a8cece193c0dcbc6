"""Which numbers can a plan be made of? Checks of rates, steps, delta and noise; errors name the argument and a fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from math import inf, isfinite
from numbers import Integral, Real
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

SMALLEST_MULTIPLIER = 1e-100
"""Below this there is noise in name only, and the square of the multiplier is close to underflow."""


LARGEST_MULTIPLIER = 1e100
"""Above this the square of the multiplier is close to overflow, and a release is only noise."""


def python_number(value: T) -> T:
    """A number of numpy as Python's: JSON takes no others, and a float32 takes digits from the floats that it meets.

    >>> import numpy as np
    >>> python_number(np.int64(3)), python_number(np.float32(0.5)), python_number("auto"), python_number(True)
    (3, 0.5, 'auto', True)
    """
    if isinstance(value, bool | int) or type(value) is float or not isinstance(value, Real):
        return value
    return cast(T, int(value) if isinstance(value, Integral) else float(value))


def python_numbers(function: Callable[P, R]) -> Callable[P, R]:
    """Declare that a function takes numbers of numpy too: it is given Python's."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*map(python_number, args), **{name: python_number(value) for name, value in kwargs.items()})  # type: ignore[arg-type]

    return call


def check_number(name: str, value: object, finite: bool = True) -> None:
    """A number that is one: no text, no truth value."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    require(name, value, number, "be a number")
    try:
        known = isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(f"{name} is a whole number that no float is as large as; give a smaller one") from None
    require(name, value, known or not finite, "be finite")


def require_line(name: str, value: object) -> None:
    """Refuse names and notes that would not show as they are: in a terminal, a table, a page."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError(f"{name}={value!r} must be one line of printable text")


def check_share_of_delta(name: str, value: object) -> None:
    """A delta that others are added to: zero or more, since one below it would let others exceed theirs."""
    check_number(name, value)
    require(name, value, 0 <= value < 1, "lie in [0, 1)")  # type: ignore[operator]


def require(name: str, value: object, holds: bool, must: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value} must {must}")


SMALLEST_BOUND, LARGEST_BOUND = 1e-10, 1e30
"""Bounds between which float32 scales every gradient to its bound, and holds the result."""


def check_bound(bound: float, name: str = "bound") -> None:
    """What one example may contribute."""
    try:
        usable = SMALLEST_BOUND <= bound <= LARGEST_BOUND
    except TypeError:
        raise ValueError(f"{name}={bound!r} must be a number: it bounds one example's influence") from None
    if not usable:
        require(name, bound, 0 < bound < inf, "be positive and finite: it bounds one example's influence")
        span = f"lie between {SMALLEST_BOUND:g} and {LARGEST_BOUND:g}: float32 scales no gradient to it exactly"
        require(name, bound, False, span)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Inside, an error that names a component's field names the option that the user wrote instead.

    >>> with renamed({"share": "beta"}):
    ...     require("share", 2, False, "lie in (0, 1]")
    Traceback (most recent call last):
    ValueError: beta=2 must lie in (0, 1]
    """
    try:
        yield
    except ValueError as error:
        field = re.match(r"(\w+)[=:]", str(error))
        if field is None or field[1] not in names:
            raise
        raise ValueError(names[field[1]] + str(error)[len(field[1]) :]) from error


def check_rate(rate: float) -> None:
    check_number("sample_rate", rate, finite=False)
    if not 0 < rate <= 1:
        raise ValueError(f"sample_rate={rate} must lie in (0, 1]: it is the probability that an example joins a step")


def check_steps(steps: int, name: str = "steps") -> None:
    if not (isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1):
        raise ValueError(f"{name}={steps} must be a whole number from 1 up")


def check_epsilon(epsilon: float) -> None:
    check_number("epsilon", epsilon, finite=False)
    require("epsilon", epsilon, 0 < epsilon < inf, "be positive and finite")


def check_delta(delta: float, population: int | None = None) -> None:
    check_number("delta", delta, finite=False)
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie in (0, 1): take one well below 1 / examples, such as 1e-5")
    if population == 0:
        raise ValueError("the data hold no example: there is nothing to train on")
    if population is not None and delta >= 1 / population:
        raise ValueError(
            f"delta={delta} is not below 1/N = {1 / population:.3g} for {population} examples: it would allow "
            f"publishing a whole example; choose a smaller delta, such as {0.1 / population:.0e}"
        )


def secure_mode(arithmetic: str) -> bool:
    """Whether noise is added in integers, by the name that run folders have for it."""
    if arithmetic not in ("lattice", "float32"):
        raise ValueError(f"noise={arithmetic!r} is unknown; choose from lattice, float32")
    return arithmetic == "lattice"


def check_multiplier(noise_multiplier: float, name: str = "noise_multiplier") -> None:
    check_number(name, noise_multiplier, finite=False)
    if not SMALLEST_MULTIPLIER <= noise_multiplier < inf:
        raise ValueError(f"{name}={noise_multiplier} must be positive and finite: without noise there is no privacy")
    if noise_multiplier > LARGEST_MULTIPLIER:
        raise ValueError(f"{name}={noise_multiplier} must be at most {LARGEST_MULTIPLIER:g}: nothing is left but noise")


def accounted_multiplier(paper_sigma: float, fresh_share: float = 1.0, groups: int = 1) -> float:
    """The noise multiplier of a whole step, from a memory method's own sigma.

    The paper adds noise of sigma times each group's bound to `fresh_share` times the sum. Dividing by `fresh_share` is
    a bijection of the release given the earlier ones. `groups` Gaussian mechanisms of one noise multiplier on one
    sample are a single mechanism with that multiplier over sqrt(groups).
    """
    check_multiplier(paper_sigma, "paper_sigma")
    return paper_sigma / (fresh_share * groups**0.5)


NOT_CALLED = (
    "hooks on parameters ({!r} has one) are not called: private passes leave no gradient there. Change the loss, or "
    "what the optimizer does with the released gradient"
)


class RowsNotApart(ValueError):
    """A refusal of the program, whatever rows it met: examples are not proved to stay apart, or are of no such kind."""


class ExampleKept(RowsNotApart):
    """Something of an example is in the model, or kept for later passes, without noise. No later step would take it
    out, so it ends the run, whichever row it is of."""
