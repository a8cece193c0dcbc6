"""Loops are tried twice: with passes as they are, and with passes that are recorded and replayed, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vestige.engines.recorded import recording
from vestige.privacy_engine.recorded import recorder, recordings

TWICE = ("test_loops", "test_passes")


class Rerun:
    """Stands for a recording where there is no GPU: its replay runs the work again, in the same memory."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work, self.replays = work, 0
        work()

    def replay(self) -> None:
        self.replays += 1
        self.work()


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.rpartition(".")[2] in TWICE:
        metafunc.parametrize("replayed", [False, True], ids=["", "replayed"], indirect=True)


@pytest.fixture(autouse=True)
def replayed(request, monkeypatch):
    """Whether passes are recorded and replayed."""
    on = getattr(request, "param", False)
    if on:
        monkeypatch.setattr(recording, "MOST_SIZES", 4)  # each is tried and recorded, which takes its time
        monkeypatch.setattr(recordings, "recorded", lambda work, pool, device: Rerun(work))
        monkeypatch.setattr(recorder, "can_record", lambda module, rows: True)
    return on
