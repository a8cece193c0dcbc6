"""What do tests of books share? A plain run, a book on disk, and a clean environment."""

import pytest

from vestige.budget import Book, terms, usual

RUN = usual(0.01, 1.2, 1000)


@pytest.fixture(autouse=True)
def _nobodys_budget(monkeypatch):
    for name in ("VESTIGE_BUDGET", "VESTIGE_PERSON"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def book(tmp_path):
    """Holds five runs."""
    return Book.create(tmp_path / "book", terms(3.341, 1e-5, expect=RUN))
