"""What have all runs on one dataset spent together? A book beside the data: it needs no torch, and holds no example."""

from vestige.budget.book import Book, Reading, Terms, terms
from vestige.budget.filters import Slot, slots_of, usual
from vestige.budget.spending import Account, Budget, Provenance, attach, pay
from vestige.budget.storage import BookError

__all__ = [
    "Account",
    "Book",
    "BookError",
    "Budget",
    "Provenance",
    "Reading",
    "Slot",
    "Terms",
    "attach",
    "pay",
    "slots_of",
    "terms",
    "usual",
]
