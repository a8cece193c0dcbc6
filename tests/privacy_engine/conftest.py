"""Loops are tried twice: with passes as they are, and with passes that are captured and replayed, as on a GPU."""

from __future__ import annotations

import pytest

from captured_on_cpu import captured_on_cpu

TWICE = ("test_loops", "test_passes")


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.rpartition(".")[2] in TWICE:
        metafunc.parametrize("replayed", [False, True], ids=["", "replayed"], indirect=True)


@pytest.fixture(autouse=True)
def replayed(request):
    """Whether passes are captured and replayed."""
    if not getattr(request, "param", False):
        yield False
        return
    with captured_on_cpu():
        yield True
