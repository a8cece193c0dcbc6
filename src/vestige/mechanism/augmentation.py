"""What else might an example have looked like? Augmented copies, whose gradients are averaged before clipping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import vmap

from vestige.checks import RowsNotApart
from vestige.mechanism.clipping import Batch, Parameters
from vestige.mechanism.gradient_transforms import Linear, Term


@dataclass(frozen=True)
class Augment(Linear):
    """The mean gradient of `copies` views of each image, flipped and shifted at random (De et al. 2022).

    Images are [channels, height, width]; each copy is flipped with probability one half and cropped at a random place
    after padding by `padding` pixels.

    Formal guarantees: an example still contributes one vector, clipped after averaging, so the sensitivity and the
    price are those of a single view.
    """

    copies: int = 16
    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if not (isinstance(self.copies, int) and self.copies >= 1):
            raise ValueError(f"copies={self.copies} must be a whole number of copies from 1 up")
        if not (isinstance(self.padding, int) and self.padding >= 0):
            raise ValueError(f"padding={self.padding} must be a whole number of pixels, 0 or more")

    def terms(self, point: Parameters, batch: Batch) -> list[Term]:
        def views(image: Tensor) -> Tensor:
            return vmap(lambda _: self.view(image), randomness="different")(
                torch.arange(self.copies, device=image.device)
            )

        images, *rest = batch
        seen = vmap(views, randomness="different")(images).flatten(0, 1)
        alike = [part.unsqueeze(1).expand(-1, self.copies, *part.shape[1:]).flatten(0, 1) for part in rest]
        return [Term(1.0, point, [seen, *alike], self.copies)]

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse examples that are not images."""
        if len(shape) != 3:
            raise RowsNotApart(
                f"copies={self.copies} flips and crops images [channels, height, width], but this task's examples "
                f"have shape {shape}; leave it out"
            )

    def view(self, image: Tensor) -> Tensor:
        """One random view of one image."""
        self.check(tuple(image.shape))
        height, width = image.shape[-2:]
        if self.flip:
            image = torch.where(torch.rand((), device=image.device) < 0.5, image.flip(-1), image)
        if self.padding == 0:
            return image
        padded = nn.functional.pad(image, (self.padding,) * 4)
        down, right = (torch.randint(2 * self.padding + 1, (), device=image.device) for _ in range(2))
        rows = torch.arange(height, device=image.device) + down
        columns = torch.arange(width, device=image.device) + right
        return padded.index_select(-2, rows).index_select(-1, columns)
