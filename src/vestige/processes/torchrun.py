"""Has torchrun started several processes, and which of them is this? Read from the environment, without torch."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether this is one of several processes that torchrun has started."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def followed() -> bool:
    """Whether another process of the same launch, rank 0, prints for all of them."""
    return launched() and os.environ["RANK"] != "0"


def require_alone(what: str) -> None:
    """Refuse to be one of several processes: each would do the same work by itself, or wait for the others."""
    if launched():
        raise ValueError(
            f"{what} runs in one process: start it without torchrun, which is for vestige train and finetune"
        )
