"""Which models of our own are measured? Small ones, as tutorials have them, and a few larger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from others import Batch, Other, class_loss
from vestige.tasks import models


class Block(nn.Module):
    """A transformer block as GPT-2 and ViT have it: norms first, one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


class Transformer(nn.Module):
    """Blocks over an embedded sequence, averaged into classes. Positions are fixed: Opacus takes no bare parameters."""

    positions: Tensor

    def __init__(self, embed: nn.Module, length: int, width: int, heads: int, depth: int, causal: bool) -> None:
        super().__init__()
        self.embed = embed
        self.register_buffer("positions", 0.02 * torch.randn(1, length, width))
        self.blocks = nn.Sequential(*[Block(width, heads, causal) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.positions)).mean(dim=1))


class Patch(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, width, size, stride=size)

    def forward(self, image: Tensor) -> Tensor:
        return self.convolution(image).flatten(2).transpose(1, 2)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch: int
    cpu_batch: int | None = None
    """None: too slow to be worth the wait on a CPU."""


def images(size: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, 3, size, size)


CASES = {
    "digits MLP": Case(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)),
        lambda batch: torch.randn(batch, 64),
        150,
        150,
    ),
    "CIFAR MLP": Case(lambda: models.mlp(3072, 10), lambda batch: torch.randn(batch, 3072), 256, 256),
    "tanh CNN": Case(lambda: models.tanh_cnn_32(10), images(32), 2048, 64),
    "ResNet-18 GN": Case(lambda: models.resnet18(10), images(32), 512),
    "ViT-S": Case(lambda: Transformer(Patch(384, 4), 64, 384, 6, 12, causal=False), images(32), 512),
    "GPT-2 blocks": Case(
        lambda: Transformer(nn.Identity(), 256, 768, 12, 12, causal=True),
        lambda batch: torch.randn(batch, 256, 768),
        32,
    ),
}


def other(case: Case) -> Other:
    """A model of our own in loops, as other people's are."""

    def rows(size: int, small: bool) -> Batch:
        return {"inputs": case.inputs(size), "labels": torch.randint(10, (size,))}

    return Other(lambda small: case.build(), rows, class_loss, case.batch)


OWN = {name: other(case) for name, case in CASES.items()}
