"""What have the passes since the last release brought? Their clipped sum, and how often an example may be in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vestige.privacy_engine.loaders import Part


@dataclass(frozen=True)
class Finished:
    """What a backward pass through the user's model left: `add(scale, into)` clips each example's gradient, which is
    `scale` times what came back, and adds their sum to `into`."""

    part: Part | None
    rows: int
    add: Callable[[int, Tensor], None]
    watched: bool


class Gathered:
    """SENSITIVE: the clipped sum of every part, draw and loss since the last release, before its noise."""

    def __init__(self, zeros: Callable[[], Tensor], reduction: str) -> None:
        self._zeros, self._reduction = zeros, reduction
        self.forget()

    def forget(self) -> None:
        self.waiting: list[Finished] = []
        self.total: Tensor | None = None
        self.uses: dict[tuple[int, int], int] = {}

    def gather(self, watched: bool = False) -> Tensor:
        """Add the clipped sum of every finished pass, or of the `watched` ones; these passes are then forgotten."""
        if self.total is None:
            self.total = self._zeros()
        due = [one for one in self.waiting if one.watched or not watched]
        self.waiting = [one for one in self.waiting if watched and not one.watched]
        for one in due:
            key = (one.part.draw, one.part.number) if one.part is not None else (-1, 0)
            self.uses[key] = self.uses.get(key, 0) + 1
            if one.rows:
                one.add(one.rows if self._reduction == "mean" else 1, self.total)
        return self.total

    @property
    def draws(self) -> int:
        return max(1, len({draw for draw, _ in self.uses}))

    @property
    def often(self) -> int:
        """How often one example may be in the sum: in each draw, as often as the part that was used most."""
        most: dict[int, int] = {}
        for (draw, _), count in self.uses.items():
            most[draw] = max(most.get(draw, 0), count)
        return max(1, sum(most.values()))
