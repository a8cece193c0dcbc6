"""Which images hold no real data? Those that procedures draw from random numbers alone: leaves, untrained networks,
fractals.

Each generator draws a batch of colour images, [count, 3, size, size] in [0, 1], from a torch generator and nothing
else. What they have in common with photographs, edges, occlusion, textures of every scale, is in the procedure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches

import torch
from torch import Generator, Tensor
from torch.nn import functional

LEAVES = 48
"""Leaves of an image: the last ones lie on top."""
POINTS, THROWS = 3000, 24
"""Points of a fractal, and how often each is thrown on."""

Draw = Callable[[int, int, Generator], Tensor]


def dead_leaves(count: int, size: int, draw: Generator) -> Tensor:
    """Opaque discs, squares and triangles of power-law sizes on one another, each with a texture (Lee et al. 2001;
    Baradad et al. 2021)."""
    across, down = _grid(size, draw)
    images = _texture(count, size, draw)
    for _ in range(LEAVES):
        x, y, turn = (_uniform((count, 1, 1), draw, low, high) for low, high in ((-1, 1), (-1, 1), (0, 2 * math.pi)))
        radius = _power_law((count, 1, 1), draw, 0.08, 0.9)
        right, left = across - x, down - y
        one, other = right * turn.cos() + left * turn.sin(), left * turn.cos() - right * turn.sin()
        longer = _uniform((count, 1, 1), draw, 0.4, 1.0)
        disc = one.square() + (other / longer).square() < radius.square()
        box = torch.maximum(one.abs(), (other / longer).abs()) < radius
        wedge = (other > -radius / 2) & (other + 1.73 * one.abs() < radius)
        kind = torch.randint(3, (count, 1, 1), generator=draw, device=draw.device)
        leaf = torch.where(kind == 0, disc, torch.where(kind == 1, box, wedge)).unsqueeze(1)
        images = torch.where(leaf, _texture(count, size, draw), images)
    return images


def random_network(count: int, size: int, draw: Generator) -> Tensor:
    """Noise sent through a convolutional network that was never trained, another one for each image, from coarse to
    fine (after the untrained StyleGAN of Baradad et al. 2021)."""
    width, side = 24, 4
    state = _normal((1, count * width, side, side), draw)
    while side < size:
        side = min(2 * side, size)
        state = functional.interpolate(state, size=(side, side), mode="bilinear", align_corners=False)
        weights = _normal((count * width, width, 3, 3), draw) / (width * 9) ** 0.5
        state = functional.conv2d(state, weights, padding=1, groups=count)
        loud = _power_law((1, count, 1, 1), draw, 0.05, 1.0).repeat_interleave(width, dim=1)
        state = functional.leaky_relu(state + loud * _normal((1, 1, side, side), draw), 0.2)
        state = functional.instance_norm(state) * (0.5 + _uniform((1, count * width, 1, 1), draw, 0, 1))
        state = state + _normal((1, count * width, 1, 1), draw) * 0.3
    colours = _normal((count * 3, width, 1, 1), draw) / width**0.5
    return functional.conv2d(state, colours, groups=count).reshape(count, 3, size, size).mul(1.2).sigmoid()


def fractals(count: int, size: int, draw: Generator) -> Tensor:
    """Attractors of random affine maps, in random colours on a texture (Kataoka et al. 2020)."""
    maps = 4
    turn, lean = (_uniform((count, maps), draw, 0, 2 * math.pi) for _ in range(2))
    large, small = _uniform((count, maps), draw, 0.4, 0.85), _uniform((count, maps), draw, 0.15, 0.7)
    rows = torch.stack([large * turn.cos(), -small * lean.sin(), large * turn.sin(), small * lean.cos()], dim=-1)
    matrices, shifts = rows.reshape(count, maps, 2, 2), _uniform((count, maps, 2), draw, -1, 1)
    points = _uniform((count, POINTS, 2), draw, -1, 1)
    for _ in range(THROWS):
        which = torch.randint(maps, (count, POINTS), generator=draw, device=draw.device)
        matrix = matrices.gather(1, which[..., None, None].expand(-1, -1, 2, 2))
        points = (matrix @ points.unsqueeze(-1)).squeeze(-1) + shifts.gather(1, which[..., None].expand(-1, -1, 2))
    low, high = points.amin(dim=1, keepdim=True), points.amax(dim=1, keepdim=True)
    places = ((points - low) / (high - low).clamp(min=1e-3) * (size - 1)).round().long().clamp(0, size - 1)
    flat = places[..., 0] * size + places[..., 1]
    hits = torch.zeros(count, maps, size * size, device=draw.device)
    hits.view(count, -1).scatter_add_(1, which * size * size + flat, torch.ones_like(flat, dtype=torch.float32))
    ink = hits.log1p() / hits.log1p().amax(dim=(1, 2), keepdim=True).clamp(min=1e-6)
    colours = _uniform((count, maps, 3), draw, 0, 1)
    drawn = torch.einsum("nkp,nkc->ncp", ink, colours).reshape(count, 3, size, size)
    cover = ink.sum(dim=1).clamp(max=1).reshape(count, 1, size, size)
    return (drawn + (1 - cover) * _texture(count, size, draw)).clamp(0, 1)


def mixed(count: int, size: int, draw: Generator) -> Tensor:
    """A third of each."""
    each = [count // 3, count // 3, count - 2 * (count // 3)]
    kinds = zip((dead_leaves, random_network, fractals), each, strict=True)
    made = [kind(many, size, draw) for kind, many in kinds if many]
    return torch.cat(made)[torch.randperm(count, generator=draw, device=draw.device)]


GENERATORS: dict[str, Draw] = {
    "dead-leaves": dead_leaves,
    "random-network": random_network,
    "fractals": fractals,
    "mixed": mixed,
}


def generator(name: str) -> Draw:
    if name not in GENERATORS:
        close = get_close_matches(name, GENERATORS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(GENERATORS)}"
        raise ValueError(f"generator={name!r}: no such generator; {hint}")
    return GENERATORS[name]


# --- parts ------------------------------------------------------------------------------------------------------------


def _texture(count: int, size: int, draw: Generator) -> Tensor:
    """A colour with stripes of any direction and fineness, and noise whose power falls with the frequency."""
    across, down = _grid(size, draw)
    colour, other = (_colour(count, draw) for _ in range(2))
    turn, phase = (_uniform((count, 1, 1, 1), draw, 0, 2 * math.pi) for _ in range(2))
    waves = _power_law((count, 1, 1, 1), draw, 0.5, size / 4)
    stripes = (math.pi * waves * (across * turn.cos() + down * turn.sin()) + phase).sin() / 2 + 0.5
    strength = _uniform((count, 1, 1, 1), draw, 0, 1) * _coin((count, 1, 1, 1), draw)
    striped = colour.lerp(other.expand(-1, -1, size, size), strength * stripes)
    loud = _uniform((count, 1, 1, 1), draw, 0, 0.35)
    return (striped + loud * _falling_noise(count, size, draw)).clamp(0, 1)


def _colour(count: int, draw: Generator) -> Tensor:
    """A random grey, mixed with a random colour: few natural surfaces are saturated."""
    grey, vivid = _uniform((count, 1, 1, 1), draw, 0, 1), _uniform((count, 1, 1, 1), draw, 0, 0.8)
    return grey.expand(-1, 3, -1, -1).lerp(_uniform((count, 3, 1, 1), draw, 0, 1), vivid)


def _falling_noise(count: int, size: int, draw: Generator) -> Tensor:
    """Noise of unit deviation whose amplitude falls as 1 / frequency^a, a from 0.5 to 2 for each image."""
    rows = torch.fft.fftfreq(size, device=draw.device)[:, None]
    columns = torch.fft.rfftfreq(size, device=draw.device)
    frequency = (rows.square() + columns.square()).sqrt().clamp(min=1 / size)
    fall = frequency ** -_uniform((count, 1, 1, 1), draw, 0.5, 2.0)
    noise = torch.fft.irfft2(torch.fft.rfft2(_normal((count, 3, size, size), draw)) * fall, s=(size, size))
    return noise / noise.std(dim=(-2, -1), keepdim=True).clamp(min=1e-6)


def _grid(size: int, draw: Generator) -> tuple[Tensor, Tensor]:
    line = torch.linspace(-1, 1, size, device=draw.device)
    return line[None, :].expand(size, size), line[:, None].expand(size, size)


def _normal(shape: tuple[int, ...], draw: Generator) -> Tensor:
    return torch.randn(shape, generator=draw, device=draw.device)


def _uniform(shape: tuple[int, ...], draw: Generator, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=draw, device=draw.device)


def _coin(shape: tuple[int, ...], draw: Generator) -> Tensor:
    return (torch.rand(shape, generator=draw, device=draw.device) < 0.5).float()


def _power_law(shape: tuple[int, ...], draw: Generator, low: float, high: float) -> Tensor:
    """As many of one octave as of any other."""
    return low * (high / low) ** torch.rand(shape, generator=draw, device=draw.device)
