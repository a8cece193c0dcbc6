"""What do tests of several processes share? Two of them, and four, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from process_gang import Gang


@pytest.fixture(scope="session")
def two() -> Iterator[Gang]:
    gang = Gang(2)
    yield gang
    gang.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Gang]:
    gang = Gang(4)
    yield gang
    gang.close()
