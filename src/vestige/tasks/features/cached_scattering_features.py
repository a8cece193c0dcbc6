"""What do the wavelets make of a dataset's images? Scattering coefficients, computed once and cached."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vestige.tasks.features.cache import cached, fastest
from vestige.tasks.features.scattering_transform import Scattering


def scattered_grey(images: Tensor) -> Tensor:
    return _scattered(images, _unit)


def scattered_colour(images: Tensor) -> Tensor:
    return _scattered(images, _imagenet)


def _scattered(images: Tensor, rescale: Callable[[Tensor], Tensor]) -> Tensor:
    """Scattering features [N, 81 * channels, height / 4, width / 4], computed once and kept in the user's cache."""
    device = fastest()
    made: list[Scattering] = []

    def compute(part: Tensor) -> Tensor:
        if not made:
            made.append(Scattering(images.shape[-2], images.shape[-1], device))
        return made[0](rescale(part).to(device)).flatten(1, 2)

    return cached(images, "scattering", f"J=2 L=8 {rescale.__name__}", compute)


def _unit(images: Tensor) -> Tensor:
    """Back to pixels in [0, 1], as Tramer and Boneh use them for grey images."""
    return images / 2 + 0.5


def _imagenet(images: Tensor) -> Tensor:
    """Standardised by ImageNet's public mean and deviation, as they do for colour images."""
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (_unit(images) - mean[:, None, None]) / deviation[:, None, None]
