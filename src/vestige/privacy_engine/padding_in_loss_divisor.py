"""Is the length that a batch is padded to in the divisor of its loss? Its longest example decides that length.

That must not matter to the others. What lies behind an example's end is the model's and the loss's to leave out, which
becomes an assumption of the guarantee. But where a loss is a mean over all positions, the longest example is in
the divisor of every example, and that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors of a call, without the axis of examples."""


class Lengths:
    """The shapes of the batches that were trained on, and over how many numbers of a row their losses were means."""

    def __init__(self) -> None:
        self._averaged: dict[Shapes, set[int]] = {}

    @property
    def vary(self) -> bool:
        return len(self._averaged) > 1

    def met(self, shapes: Shapes, averaged: Iterable[int]) -> None:
        """A loss of a batch of these shapes, of means over so many numbers of a row. Raises ValueError if the divisor
        is the batch's length."""
        self._averaged.setdefault(shapes, set()).update(averaged)
        others = [counts for each, counts in self._averaged.items() if each != shapes and counts]
        for each in averaged:
            if others and not any(each in counts for counts in others):
                before = max(max(counts) for counts in others)
                raise ValueError(
                    f"the loss is a mean over {each} numbers of each example in this batch, and over {before} in "
                    "another: its divisor is decided by the longest example, which no noise covers. Pad to one length, "
                    "or divide each example's own sum by a public number"
                )
