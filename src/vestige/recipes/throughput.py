"""How fast does this machine train a network privately? A few steps on made-up images are timed."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import nn

from vestige.mechanism.augmentation import Augment
from vestige.methods.base import Method
from vestige.methods.registry import make_method
from vestige.tasks.models import lay_out, network
from vestige.training.run import train


def seconds_a_step(
    name: str,
    shape: tuple[int, ...],
    *,
    batch: int,
    method: Method,
    device: str = "cpu",
    physical_batch: int | None = None,
    steps: int = 4,
    bfloat16: bool = False,
) -> float:
    """How long a private step takes on samples of so many made-up examples; the first two steps are not counted.

    Formal guarantees: no data are read.
    """
    torch.manual_seed(0)
    model = network(name, shape, 10)
    lay_out(model, device, beside=bfloat16 and device.startswith("cuda"))
    rows = batch if batch == 1 else 2 * batch  # of one example alone some samples would be empty
    data = torch.randn(rows, *shape), torch.randint(10, (rows,))
    training = train(
        model,
        nn.functional.cross_entropy,
        data,
        method=method,
        sample_rate=batch / rows,
        steps=steps + 2,
        noise_multiplier=1.0,
        delta=1e-9,
        lr=1e-3,
        max_physical_batch_size=physical_batch,
        bfloat16=bfloat16,
    )
    marks = []
    for _ in training:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
    return (marks[-1] - marks[1]) / (len(marks) - 2)


def views_per_second(
    name: str,
    shape: tuple[int, ...],
    *,
    augment: int | None,
    device: str = "cpu",
    batch: int | None = None,
    steps: int = 4,
) -> float:
    """How many views of made-up examples are trained on in a second."""
    large = batch or (256 if device.startswith("cuda") else 8)
    method = make_method("dp-sgd")
    method = method if augment is None else replace(method, augment=Augment(augment))
    spent = seconds_a_step(name, shape, batch=large, method=method, device=device, steps=steps)
    return large * (augment or 1) / spent
