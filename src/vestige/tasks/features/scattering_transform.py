"""What do wavelets see in an image? Scattering coefficients of two scales and eight angles (Bruna and Mallat 2013).

An image is filtered by Morlet wavelets, the moduli are filtered once more, and a Gaussian blurs everything to a quarter
of the resolution: 1 + 16 + 64 channels, computed by Fourier transforms on whatever device the images are. The filters
are those of kymatio's `Scattering2D(J=2)`, which is the oracle of the tests.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

SCALES, ANGLES = 2, 8
CHANNELS = 1 + SCALES * ANGLES + ANGLES * ANGLES
REDUCED = 2**SCALES
"""By how much height and width shrink."""


class Scattering:
    """Scattering coefficients of images of one size: [..., height, width] -> [..., 81, height / 4, width / 4].

    Formal guarantees: each image's coefficients are a function of it alone, so nothing is asked of the data.
    """

    def __init__(self, height: int, width: int, device: torch.device | str = "cpu") -> None:
        for name, size in (("height", height), ("width", width)):
            if size < 2 * REDUCED or size % REDUCED:
                raise ValueError(
                    f"{name}={size}: scattering needs a multiple of {REDUCED} pixels, {2 * REDUCED} at least"
                )
        rows, columns = height + 2 * REDUCED, width + 2 * REDUCED
        fine, coarse = (_wavelets(rows, columns, scale) for scale in range(SCALES))
        blur = _fourier(_gabor(rows, columns, 0.8 * 2 ** (SCALES - 1), 0.0, 0.0, 1.0))
        self._fine, self._coarse, self._blur = (each.float().to(device) for each in (fine, coarse, blur))
        self._blur_halved = _halved(blur).float().to(device)

    def __call__(self, images: Tensor) -> Tensor:
        flat = images.reshape(-1, 1, *images.shape[-2:])
        whole = torch.fft.fft2(functional.pad(flat, (REDUCED,) * 4, mode="reflect"))
        first = torch.fft.fft2(torch.fft.ifft2(whole * self._fine).abs())
        coarse = _thinned(whole * self._coarse, 2)
        pairs = _thinned(first.unsqueeze(2) * self._coarse, 2).flatten(1, 2)
        second = torch.fft.fft2(torch.fft.ifft2(torch.cat([coarse, pairs], dim=1)).abs())
        wide = _thinned(torch.cat([whole, first], dim=1) * self._blur, REDUCED)
        narrow = _thinned(second * self._blur_halved, 2)
        found = torch.fft.ifft2(torch.cat([wide, narrow], dim=1)).real[..., 1:-1, 1:-1]
        return found.reshape(*images.shape[:-2], CHANNELS, *found.shape[-2:])


def _thinned(transform: Tensor, factor: int) -> Tensor:
    """Of the Fourier transform of images, that of their every `factor`-th pixel: frequencies are folded."""
    *lead, rows, columns = transform.shape
    folds = transform.reshape(*lead, factor, rows // factor, factor, columns // factor)
    return folds.mean(dim=(-4, -2))


def _wavelets(rows: int, columns: int, scale: int) -> Tensor:
    """The Morlet wavelets of a scale, one for each angle, in the Fourier domain: [angles, rows, columns], float64."""
    made = []
    for angle in range(ANGLES):
        turn = (ANGLES // 2 - 1 - angle) * math.pi / ANGLES
        size, frequency, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4.0 / ANGLES
        wave, envelope = (_gabor(rows, columns, size, turn, each, slant) for each in (frequency, 0.0))
        made.append(_fourier(wave - wave.sum() / envelope.sum() * envelope))  # its mean is zero
    return torch.stack(made)


def _gabor(rows: int, columns: int, size: float, turn: float, frequency: float, slant: float) -> Tensor:
    """A plane wave in a Gaussian envelope, wrapped around the image's borders: [rows, columns], complex128."""
    down = torch.arange(-2 * rows, 3 * rows, dtype=torch.float64)[:, None]
    right = torch.arange(-2 * columns, 3 * columns, dtype=torch.float64)
    along = down * math.cos(turn) + right * math.sin(turn)
    across = right * math.cos(turn) - down * math.sin(turn)
    envelope = torch.exp(-(along.square() + (slant * across).square()) / (2 * size**2))
    wave = envelope * torch.exp(1j * frequency * along) * slant / (2 * math.pi * size**2)
    return wave.reshape(5, rows, 5, columns).sum(dim=(0, 2))


def _fourier(filter_: Tensor) -> Tensor:
    return torch.fft.fft2(filter_).real  # its imaginary part is zero but for rounding


def _halved(filter_: Tensor) -> Tensor:
    """A filter of whole images as one of images of every second pixel: its upper half of frequencies is cut off."""
    rows, columns = filter_.shape
    kept = filter_.clone()
    kept[rows // 4 : rows // 4 + rows // 2] = 0
    kept[:, columns // 4 : columns // 4 + columns // 2] = 0
    return kept.reshape(2, rows // 2, 2, columns // 2).sum(dim=(0, 2))
