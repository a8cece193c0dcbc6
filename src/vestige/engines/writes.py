"""Does a forward pass leave something of its examples in the model? What it holds is watched, pass by pass.

Watched are counts of writes, which cost nothing; what is written by way of `.data` only a rehearsal sees.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

Versions = dict[tuple[str, str], tuple[int, int]]
"""Which tensor each buffer and parameter is, and how often it was written to."""


class Writes:
    """How often the buffers and parameters of a model were written to; also those that its modules will have later."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (kind, name, store)
            for name, module in model.named_modules()
            for kind, store in (("buffer", module._buffers), ("parameter", module._parameters))
        ]

    def versions(self) -> Versions:
        found: Versions = {}
        for kind, name, store in self._places:
            for key, tensor in store.items():
                if isinstance(tensor, Tensor):
                    found[kind, f"{name}.{key}" if name else key] = (id(tensor), tensor._version)
        return found

    def require_unchanged(self, before: Versions, allowed: Collection[str]) -> None:
        """Raise ValueError if a pass changed something that no rehearsal has cleared (`Rehearsal.changing`)."""
        now = self.versions()
        if now == before:
            return
        for kind, name in sorted(now.keys() | before.keys()):
            if now.get((kind, name)) != before.get((kind, name)) and name not in allowed:
                raise ValueError(
                    f"{kind} {name!r} was changed by the forward pass: it may hold something of the examples without "
                    "noise. Keep it out of the model, or do not change it while training"
                )
