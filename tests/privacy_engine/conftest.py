"""Loops are tried twice: with passes as they are, and with passes that are captured and replayed, as on a GPU."""

from __future__ import annotations

import pytest

from captured_on_cpu import captured_on_cpu

TWICE = {"test_passes": [], "test_loops": [pytest.mark.slow]}
"""Modules whose tests are tried twice, and how the second time is marked."""


def pytest_generate_tests(metafunc):
    marks = TWICE.get(metafunc.module.__name__.rpartition(".")[2])
    if marks is not None:
        again = pytest.param(True, id="replayed", marks=marks)
        metafunc.parametrize("replayed", [pytest.param(False, id=""), again], indirect=True)


@pytest.fixture(autouse=True)
def replayed(request):
    """Whether passes are captured and replayed."""
    if not getattr(request, "param", False):
        yield False
        return
    with captured_on_cpu():
        yield True
