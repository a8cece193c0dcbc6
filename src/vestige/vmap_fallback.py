"""What does torch say of operators that vmap takes one example at a time? Nothing: the results are the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def quietly() -> Iterator[None]:
    """Silences vmap's fallback warning."""
    switch = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", bool)
    switch(False)
    try:
        yield
    finally:
        switch(True)
