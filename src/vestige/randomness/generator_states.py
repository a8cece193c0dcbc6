"""How are random numbers put back after a pass that leaves no trace? By the states of all generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


def host_draws() -> tuple[Any, ...]:
    """The state of every generator on the host: torch's, Python's, NumPy's."""
    _, key, *rest = cast(tuple[Any, ...], np.random.get_state())  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (key.tobytes(), *rest)


def restore_host_draws(states: tuple[Any, ...]) -> None:
    cpu, python, (key, *rest) = states
    torch.set_rng_state(torch.frombuffer(bytearray(cpu), dtype=torch.uint8))
    random.setstate(python)
    np.random.set_state(cast(Any, ("MT19937", np.frombuffer(key, dtype=np.uint32), *rest)))  # noqa: NPY002


def device_draws(device: torch.device) -> Tensor:
    """The state of the generator that draws there."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def restore_device_draws(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def draws_kept(*devices: torch.device) -> Iterator[None]:
    """Inside, random numbers are drawn that are drawn again afterwards, on the host and on these devices."""
    host, others = host_draws(), [(device_draws(device), device) for device in devices]
    try:
        yield
    finally:
        for state, device in others:
            restore_device_draws(state, device)
        restore_host_draws(host)


def seed_draws(device: torch.device, seed: int) -> None:
    """`torch.manual_seed` for the generators that a model on this device draws from. `torch.manual_seed` itself
    also seeds every absent kind of device, and formats a stack trace for each, at every step."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def seed_all_draws(device: torch.device, seed: int) -> None:
    """The same, of Python's and NumPy's generators too."""
    seed_draws(device, seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
