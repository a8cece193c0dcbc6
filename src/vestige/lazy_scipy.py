"""Scipy's solvers, imported when first needed: a quarter of a second that reading a ledger or a book spares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def brentq(function: Callable[[float], float], low: float, high: float, **settings: float) -> float:
    """A root between two points of opposite sign."""
    from scipy.optimize import brentq as solve

    return float(solve(function, low, high, **settings))


def minimize_scalar(function: Callable[[float], float], **settings: object) -> Any:
    """Where a function of one number is least, as scipy answers it."""
    from scipy.optimize import minimize_scalar as solve

    return solve(function, **settings)
