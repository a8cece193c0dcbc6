"""Which way does a model take in a recording? Some ask whether one is under way, and do not look into a mask then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def as_if_recorded() -> Iterator[None]:
    """Inside, a model that asks is told that it is recorded."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = _yes
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


def _yes() -> bool:
    return True
