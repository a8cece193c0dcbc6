"""What do a pass and the host tell each other? In a recording they cannot.

What is sent to the GPU when the pass is tried out (tables of positions, say) is kept there, and given in the recording:
what the host makes of numbers that no example has a say in is the same every time; where it is not, there is no
recording. Where the host looks at numbers of the GPU, other than what `looks` allows, the model is told that it is
recorded, in case it knows a way without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vestige.engines.per_example.recorded_ways import as_if_recorded
from vestige.engines.per_example.taps import Doubt
from vestige.engines.recorded.looks import Look, Origins, same
from vestige.engines.recorded.steady import Unsteady

aten = torch.ops.aten
INDEXING = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
)
LOOKS = frozenset({aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default})
"""What the host waits for."""
HOST = "cpu"


@dataclass
class Exchanged:
    """What a pass and the host told each other, in its order."""

    told: bool = False
    """Whether the model was told that it is recorded."""
    sent: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Tensors of the host, and what was made of them on the GPU."""
    looks: list[Look] = field(default_factory=list)
    """What the host saw of the inputs."""

    @property
    def looked(self) -> bool:
        """Whether what the host saw may be otherwise for other inputs."""
        return any(look.at is not None for look in self.looks)

    def holds(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the same would be exchanged about these inputs."""
        return same(self.looks, inputs)

    def on(self, device: torch.device | str) -> Exchanged:
        return Exchanged(self.told, [(host, there.to(device)) for host, there in self.sent], self.looks)


def tried(
    run: Callable[[], Any],
    device: torch.device,
    told: bool = False,
    inputs: Sequence[Tensor] = (),
    load: Callable[[], object] = lambda: None,
) -> tuple[Any, Exchanged]:
    """What `run` gives as if it were recorded, and what it exchanges; the model is told where the host has to look, or
    where something is asked of the `inputs` that does not hold: then it seldom holds for all. They are loaded before.
    Raises `Unsteady` if the host looks at numbers of the GPU even where the model is told."""
    kept = Exchanged(told)
    load()
    try:
        with as_if_recorded(told), Exchanges(device, kept, inputs=() if told else inputs):
            found = run()
        if all(look.value is True for look in kept.looks if look.at is not None):
            return found, kept
    except (Unsteady, Doubt):
        if told:
            raise
    return tried(run, device, told=True, load=load)


class Exchanges(TorchDispatchMode):
    """Inside, what is exchanged with a device is kept, or (`given`) is what was kept before. Raises `Unsteady` if that
    is something else, or if the host looks at numbers there."""

    def __init__(
        self, device: torch.device, kept: Exchanged, given: bool = False, inputs: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self._kind, self._kept, self._given = device.type, kept, given
        self._sent, self._looks, self._looked = iter(kept.sent), iter(kept.looks), False
        self._origins = Origins(inputs) if inputs else None

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if self._looked and raised[0] is None:
            raise Unsteady  # which somebody swallowed

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if self._origins is not None:
            self._origins.settle()
        if self._waits(function, args, named):
            return self._seen(function, args)
        if function is aten._to_copy.default and self._goes(args[0], named.get("device")):
            return self._over(args[0], lambda: function(*args, **named))
        if function is aten.copy_.default and self._goes(args[1], args[0].device):
            args = (args[0], self._over(args[1], lambda: args[1].to(args[0].device)), *args[2:])
        elif function in INDEXING and args[0].device.type == self._kind:
            args = (args[0], [self._index(each, args[0].device) for each in args[1]], *args[2:])
        found = function(*args, **named)
        if self._origins is not None:
            self._origins.note(function, args, named, found)
        return found

    # --- to the device ------------------------------------------------------------------------------------------------

    def _goes(self, tensor: Tensor, to: torch.device | None) -> bool:
        return to is not None and torch.device(to).type == self._kind and tensor.device.type == HOST != self._kind

    def _index(self, each: Tensor | None, device: torch.device) -> Tensor | None:
        if each is None or not self._goes(each, device):
            return each
        return self._over(each, lambda: each.to(device))

    def _over(self, tensor: Tensor, send: Callable[[], Tensor]) -> Tensor:
        if not self._given:
            self._kept.sent.append((tensor.clone(), send()))
            return self._kept.sent[-1][1].clone()
        before, there = next(self._sent, (None, None))
        if before is None or there is None or before.dtype != tensor.dtype or not torch.equal(before, tensor):
            raise Unsteady
        return there.clone()

    # --- to the host --------------------------------------------------------------------------------------------------

    def _seen(self, function: Any, args: Any) -> Any:
        """What the host sees, if it may look."""
        if function is aten._local_scalar_dense.default:
            if self._given and (look := next(self._looks, None)) is not None:
                return look.value
            if self._origins is not None and (at := self._origins.of(args[0])) is not None:
                self._kept.looks.append(Look(function(*args), at if at.varies else None))
                return self._kept.looks[-1].value
        self._looked = True
        raise Unsteady("the host waits for numbers of the GPU")

    def _waits(self, function: Any, args: Any, named: Mapping[str, Any]) -> bool:
        if function in LOOKS:
            return bool(args[0].device.type == self._kind != HOST)
        if function is aten._to_copy.default:
            return self._comes(args[0], named.get("device"))
        return function is aten.copy_.default and self._comes(args[1], args[0].device)

    def _comes(self, tensor: Tensor, to: torch.device | None) -> bool:
        return to is not None and tensor.device.type == self._kind != torch.device(to).type == HOST
