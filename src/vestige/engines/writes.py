"""Does a forward pass leave something of its examples in the model? What it holds is watched, pass by pass.

Watched are counts of writes, which cost nothing; what is written by way of `.data` only a rehearsal sees.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

Versions = list[tuple[int, str, int, int]]
"""Of each buffer and parameter: where it is kept, under which name, which tensor it is, and how often it was written
to."""


class Writes:
    """How often the buffers and parameters of a model were written to; also those that its modules will have later."""

    def __init__(self, model: nn.Module) -> None:
        places = [
            (kind, name, store)
            for name, module in model.named_modules()
            for kind, store in (("buffer", module._buffers), ("parameter", module._parameters))
        ]
        self._names = [(kind, name) for kind, name, _ in places]
        self._stores = [store for _, _, store in places]

    def versions(self) -> Versions:
        """Asked twice a pass, so without names."""
        return [
            (place, key, id(tensor), tensor._version)
            for place, store in enumerate(self._stores)
            if store
            for key, tensor in store.items()
            if isinstance(tensor, Tensor)
        ]

    def _named(self, versions: Versions) -> dict[tuple[str, str], tuple[int, int]]:
        found = {}
        for place, key, tensor, version in versions:
            kind, name = self._names[place]
            found[kind, f"{name}.{key}" if name else key] = tensor, version
        return found

    def require_unchanged(self, before: Versions, allowed: Collection[str]) -> None:
        """Raise ValueError if a pass changed something that no rehearsal has cleared (`Rehearsal.changing`)."""
        after = self.versions()
        if after == before:
            return
        then, now = self._named(before), self._named(after)
        for kind, name in sorted(now.keys() | then.keys()):
            if now.get((kind, name)) != then.get((kind, name)) and name not in allowed:
                raise ValueError(
                    f"{kind} {name!r} was changed by the forward pass: it may hold something of the examples without "
                    "noise. Keep it out of the model, or do not change it while training"
                )
