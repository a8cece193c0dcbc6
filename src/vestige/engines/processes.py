"""Is this the only process that trains? Of several, each would be a mechanism of its own, and its epsilon nobody's."""

from __future__ import annotations

import os

import torch
from torch import nn

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def require_one_process(module: nn.Module) -> None:
    kind = type(module).__name__
    launched = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    if kind in WRAPPERS or kind.startswith("FSDP") or launched or _grouped():
        raise ValueError(
            "private training runs in one process here: of several, each would draw its own batches and noise. Start "
            "it without torchrun, and without DistributedDataParallel or FSDP around the module"
        )


def _grouped() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
