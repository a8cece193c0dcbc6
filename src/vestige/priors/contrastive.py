"""How is a network pretrained without real images? Two views of a made-up image shall get similar features.

The loss is alignment and uniformity on the sphere (Wang and Isola 2020), as DP-RandP (Tang et al. 2023) uses it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

import vestige
from vestige.mechanism.groups import head_of
from vestige.priors.generators import generator
from vestige.tasks.features.starting_weights import Prior, body
from vestige.tasks.models import network

TEMPERATURE = 2.0
PROJECTED = 128


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a prior is made. All of it is public, and no real data are part of it."""

    generator: str = "dead-leaves"
    network: str = "wrn16-4"
    size: int = 32
    images: int = 100_000
    """How many different images are drawn; they are drawn again, alike, in every pass."""
    steps: int = 2000
    batch: int = 512
    lr: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        generator(self.generator)
        for name, least in (("size", 8), ("images", 8), ("steps", 1), ("batch", 8)):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= least):
                raise ValueError(f"{name}={value} must be a whole number, at least {least}")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr} must be positive")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be 0 or more")


Watch = Callable[[int, float], bool]
"""Called with the number of a step and its loss; False ends the training."""


def make(
    plan: Plan, device: str = "cpu", *, seconds: float | None = None, watch: Watch | None = None, channels: int = 3
) -> Prior:
    """Train a network by contrast on images that a generator draws; the prior is its body, without a head.

    With `seconds`, training ends after them, and its learning rate falls accordingly.

    Formal guarantees: the weights are a function of the plan and of random numbers: no example of any dataset has a
    part in them, so a private run may start from them at no price.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(plan.seed)
        model = network(plan.network, (channels, plan.size, plan.size), PROJECTED)
        features = head_of(model)[1].in_features
        projection = nn.Sequential(nn.ReLU(), nn.Linear(PROJECTED, PROJECTED))
    model, projection = model.to(device), projection.to(device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    draw = Generator(device=device).manual_seed(plan.seed + 1)
    weights = [*model.parameters(), *projection.parameters()]
    optimizer = torch.optim.SGD(weights, lr=plan.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    begin, losses, step = time.perf_counter(), [0.0], 0
    for step, images in enumerate(_batches(plan, draw, channels), 1):
        spent = 0.0 if seconds is None else (time.perf_counter() - begin) / seconds
        progress = max((step - 1) / plan.steps, spent)
        if progress >= 1:
            step -= 1
            break
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * min(1.0, step / 100) * (0.5 + 0.5 * math.cos(math.pi * progress))
        seen = torch.cat([views(images, draw), views(images, draw)]) * 2 - 1
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device.startswith("cuda")):
            found = projection(model(seen.contiguous(memory_format=torch.channels_last)))
        loss = contrast(*functional.normalize(found.float(), dim=1).chunk(2))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == plan.steps:
            losses.append(float(loss.detach()))
            if watch is not None and not watch(step, losses[-1]):
                break
    statement = _statement(plan, step, losses[-1], time.perf_counter() - begin, features)
    kept = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in body(model).items()
    }
    return Prior(plan.network, channels, kept, statement)


def contrast(one: Tensor, other: Tensor) -> Tensor:
    """Alignment and uniformity of two views' points on the sphere, [images, numbers] each."""
    alignment = (one - other).square().sum(dim=1).mean()
    apart = [torch.pdist(each).square().mul(-TEMPERATURE).exp().mean().log() for each in (one, other)]
    return alignment + (apart[0] + apart[1]) / 2


@torch.no_grad()
def views(images: Tensor, draw: Generator) -> Tensor:
    """Another view of each image: cropped, stretched, mirrored, of other colours."""
    count, _, height, width = images.shape

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=draw, device=draw.device)

    area, stretch = uniform(0.08, 1.0).sqrt(), (uniform(-1, 1) * math.log(4 / 3) / 2).exp()
    wide, high = (area * stretch).clamp(max=1), (area / stretch).clamp(max=1)
    mirrored = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(wide)
    rows = [wide * mirrored, zero, (1 - wide) * uniform(-1, 1), zero, high, (1 - high) * uniform(-1, 1)]
    places = functional.affine_grid(torch.stack(rows, dim=1).view(count, 2, 3), [count, 3, height, width], False)
    seen = functional.grid_sample(images, places, padding_mode="reflection", align_corners=False)
    jittered = (uniform(0, 1, 1, 1, 1) < 0.8).float()
    seen = seen * (1 + jittered * uniform(-0.4, 0.4, 1, 1, 1))
    mean = seen.mean(dim=(1, 2, 3), keepdim=True)
    seen = mean + (seen - mean) * (1 + jittered * uniform(-0.4, 0.4, 1, 1, 1))
    grey = seen.mean(dim=1, keepdim=True)
    saturation = torch.where(uniform(0, 1, 1, 1, 1) < 0.2, 0.0, 1 + jittered * uniform(-0.4, 0.4, 1, 1, 1))
    seen = grey + (seen - grey) * saturation
    tint = 1 + jittered * 0.15 * (torch.rand(count, seen.shape[1], 1, 1, generator=draw, device=draw.device) * 2 - 1)
    return (seen * tint).clamp(0, 1)


def _batches(plan: Plan, draw: Generator, channels: int) -> Iterator[Tensor]:
    """Batches of the plan's images, as bytes in memory, in another order in every pass."""
    made: list[Tensor] = []
    drawn = generator(plan.generator)
    while sum(map(len, made)) < plan.images:
        with torch.no_grad():
            images = drawn(min(plan.batch, plan.images - sum(map(len, made))), plan.size, draw)
        images = images if channels == 3 else images.mean(dim=1, keepdim=True).expand(-1, channels, -1, -1)
        made.append((images * 255).round().byte())
        if len(made[-1]) == plan.batch:  # it is learned from while the others are drawn
            yield made[-1].float() / 255
    everything = torch.cat(made)
    while True:
        order = torch.randperm(len(everything), generator=draw, device=draw.device)
        for rows in order.split(plan.batch):
            if len(rows) == min(plan.batch, len(everything)):
                yield everything[rows].float() / 255


def _statement(plan: Plan, steps: int, loss: float, seconds: float, features: int) -> dict[str, object]:
    return {
        "made_of": f"images of the procedure {plan.generator!r}, drawn from random numbers: no photograph, no text, "
        "and no row of anybody's data",
        "trained_by": "contrast: alignment and uniformity of two views (Wang and Isola 2020)",
        "generator": plan.generator,
        "images": min(plan.images, steps * plan.batch),
        "size": plan.size,
        "steps": steps,
        "batch": plan.batch,
        "lr": plan.lr,
        "seed": plan.seed,
        "loss": round(loss, 4),
        "features": features,
        "seconds": round(seconds, 1),
        "vestige": vestige.__version__,
        "torch": str(torch.__version__),
    }
