"""Which way does a model take in a recording? Some ask whether one is under way, and do not look into a mask then.

What they do instead costs more (a mask is made where none is needed), so a model is told only if it has to look.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

import torch


class _Way(local):
    recorded = False
    told = False
    asked = False


_way = _Way()


@contextmanager
def as_if_recorded(told: bool = True) -> Iterator[None]:
    """Inside, work is recorded or run as if it were, and a model that asks hears that it is, or that it is not."""
    before, asked = (_way.recorded, _way.told), torch.cuda.is_current_stream_capturing
    _way.recorded, _way.told, _way.asked = True, told, False
    torch.cuda.is_current_stream_capturing = _yes if told else _no
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
        _way.recorded, _way.told = before


def recording() -> bool:
    """Whether work is recorded, or run as if it were."""
    return _way.recorded


def told() -> bool:
    """Whether the model hears of it."""
    return _way.told


def asked() -> bool:
    """Whether it asked since it is recorded, or run as if it were."""
    return _way.asked


def _yes() -> bool:
    _way.asked = True
    return True


def _no() -> bool:
    _way.asked = True
    return False
