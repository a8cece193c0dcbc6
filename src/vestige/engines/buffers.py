"""Does a forward pass leave something of its examples in the model? Its buffers are watched, pass by pass."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

Versions = dict[str, tuple[int, int]]
"""Which tensor each buffer is, and how often it was written to."""


class Buffers:
    """The buffers of a model, found once: also those that its modules will have later."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [(name, module._buffers) for name, module in model.named_modules()]

    def versions(self) -> Versions:
        found: Versions = {}
        for name, buffers in self._places:
            for key, buffer in buffers.items():
                if isinstance(buffer, Tensor):
                    found[f"{name}.{key}" if name else key] = (id(buffer), buffer._version)
        return found

    def require_unchanged(self, before: Versions, allowed: Collection[str]) -> None:
        """Raise ValueError if a pass changed a buffer that no rehearsal has cleared (`Rehearsal.changing`)."""
        now = self.versions()
        if now == before:
            return
        for name in sorted(now.keys() | before.keys()):
            if now.get(name) != before.get(name) and name not in allowed:
                raise ValueError(
                    f"buffer {name!r} was changed by the forward pass: it may hold something of the examples without "
                    "noise. Keep it out of the model, or do not change it while training"
                )
