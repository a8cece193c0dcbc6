"""How does a user's own loop train a sharded module? Its training passes run in a twin that holds whole parameters.

The twin is the skeleton of `Shards`: it has everything of the module but the parameters and FSDP2's hooks, which would
reduce gradients that are not clipped. The first training pass after a step fills it, and the step empties it. So the
passes of one step send no messages of their own, and one process may have more of them than another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vestige.call_interception import CallInterceptor, install_interceptor
from vestige.layout import compiled_in, modules_of
from vestige.processes.group import digest
from vestige.processes.parameter_shards import HOOKS, ShardedSum, Shards, of_fsdp, resharded

APART = {
    "_parameters",
    "_modules",
    *HOOKS,
    "_compiled_call_impl",
    "forward",
    "zero_grad",
}
"""What a module and its twin do not share."""
REPLACED = (
    "module: its modules, parameters or hooks were replaced, moved or sharded anew after make_private, and its "
    "training passes would not see that: make_private comes last, once the module is as it will be trained"
)
WRITTEN = (
    "module: its parameters were changed between two training passes of one step, which are about the whole parameters "
    "as the first of them met them: change them right after optimizer.step(), before any eval pass"
)

COMPILED = (
    "module: it, or one of its modules, was compiled by torch.compile, and private passes of a sharded module run in a "
    "twin that is not: leave torch.compile out, or call it after make_private, where it is for evaluation alone"
)


class Through(CallInterceptor):
    """Calls of a sharded module: by its twin where gradients are asked of it, by itself elsewhere."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        model = self.owner.model
        if not (model.training and torch.is_grad_enabled()):
            return (self.compiled or model._call_impl)(*args, **kwargs)
        return self.privately(self.owner, args, kwargs)


def private_call(loop: ShardedLoop, args: Any, kwargs: Any) -> object:
    """A call of a sharded module that gradients are asked of."""
    with loop.passing():
        return loop.skeleton(*args, **kwargs)


class ShardedLoop:
    """A sharded module between the steps of a user's loop."""

    def __init__(self, shards: Shards) -> None:
        if compiled_in(shards.model):
            raise ValueError(COMPILED)
        self.shards, self.group = shards, shards.group
        self.model, self.skeleton = shards.model, shards.skeleton
        self._held: dict[str, Any] = dict(self.model.named_parameters())
        self._twins = list(zip(modules_of(self.skeleton), modules_of(self.model), strict=True))
        self._husks = dict(self.skeleton.named_parameters())
        self._form = self._form_now()
        self._steps = 0
        self.settings: Callable[[], dict[str, object]] = dict
        """What decides how the optimizer moves, as public facts: every process moves its own rows."""
        self._filled: list[int] | None = None
        """How often each parameter had been written to when the twin was filled; None while it is empty."""
        self.require_same()

    def redirect(self) -> None:
        """Calls of the module come through here; `module.compile()` may have put something else there."""
        install_interceptor(self.model, Through, self, private_call)

    def parameters(self) -> dict[str, Any]:
        """What the user's optimizer holds and moves: of each parameter that has a place in releases, its DTensor."""
        return {segment.name: self._held[segment.name] for segment in self.shards.layout.segments}

    def point(self) -> dict[str, Tensor]:
        """This process's rows of them, in the same memory."""
        return {s.name: self.shards.parameters[s.name].detach() for s in self.shards.layout.segments}

    def gradients(self, views: dict[str, Tensor]) -> dict[str, Any]:
        """This process's rows of a gradient as DTensors, in the same memory."""
        from torch.distributed.tensor import DTensor

        made = {}
        for name, view in views.items():
            held = self._held[name]
            with torch.no_grad():
                local = view.view(held.to_local().shape)
            made[name] = DTensor.from_local(
                local, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
            )
        return made

    # --- passes -------------------------------------------------------------------------------------------------------

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around a training pass of the twin. Together, for the first one after a step."""
        self.require_same()
        now = self._versions()
        if self._filled is None:
            self.group.same(self._steps, "they have taken different numbers of steps: each takes all steps of one run")
            self.shards.fill()
            self._filled = now
        elif self._filled != now:
            raise ValueError(WRITTEN)
        for name, husk in self._husks.items():
            husk.requires_grad_(self._held[name].requires_grad)
        for twin, own in self._twins:
            _follow(twin, own)
        try:
            yield
        finally:
            for twin, own in self._twins:  # what a forward pass has set
                _follow(own, twin)

    def stepped(self) -> None:
        """The parameters have moved: gather them again before the next pass."""
        self._steps += 1
        self.forget()

    def forget(self) -> None:
        self._filled = None
        self.shards.empty()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Together: inside, the twin holds the whole parameters."""
        if self._filled is not None:
            yield
            return
        with self.shards.filled():
            yield

    def in_rounds(self, draw: int, last: bool, shares: Iterator[Callable[[], object]], running: ShardedSum) -> None:
        """Together: add the shares of this process to a sum that all of them make, as many rounds as the process with
        the most shares of the draw has. One that has closed its `last` part waits for the others. Before
        they step, their optimizers are compared: rows of one weight would move at different rates."""
        mine = digest(self.settings()) if last else 0
        while True:
            share = next(shares, None)
            if share is None and not last:
                return
            told = self.group.told(draw, int(share is not None), mine)
            for rank, (other, _, _) in enumerate(told):
                if other != told[0][0]:
                    raise ValueError(
                        f"process {rank} is at draw {other} of the private loader and process 0 at draw {told[0][0]}: "
                        "every process goes through all parts of every draw, so leave the loader at the same draw "
                        "everywhere"
                    )
            if not any(there for _, there, _ in told):  # so all of them have closed their last part
                if any(settings != told[0][2] for *_, settings in told):
                    self.group.agree(self.settings())
                return
            if share is None:
                running.nothing()
            else:
                share()

    # --- the module is as it was --------------------------------------------------------------------------------------

    def require_same(self) -> None:
        """What was gathered for a pass of FSDP2's own is freed, since it would outlast the next step; and nothing
        was replaced that the twin has a copy of."""
        resharded(self.model)
        form = self._form_now()
        with torch.no_grad():
            moved = any(
                p.to_local().data_ptr() != self.shards.parameters[name].data_ptr() for name, p in self._held.items()
            )
        if form != self._form or moved:
            raise ValueError(REPLACED)
        if any("forward" in vars(own) for _, own in self._twins):
            raise ValueError(
                "module: the forward method of one of its modules is replaced by a function, which belongs to the "
                "sharded module and not to its whole one: write it into the module's class"
            )

    def _form_now(self) -> list[object]:
        modules = modules_of(self.model)
        parameters = [id(p) for each in modules for p in each._parameters.values()]
        hooks = [key for each in modules for kind in HOOKS for key, h in vars(each)[kind].items() if not of_fsdp(h)]
        return [list(map(id, modules)), parameters, hooks]

    def _versions(self) -> list[int]:
        """Writes by way of the DTensors, and to the rows themselves."""
        return [p._version for held in (self._held, self.shards.parameters) for p in held.values()]


def _follow(to: nn.Module, of: nn.Module) -> None:
    """Whatever is set on the one module is set on the other: modes, options, counters."""
    mine, theirs = vars(to), vars(of)
    for key, value in theirs.items():
        if key not in APART and mine.get(key, APART) is not value:
            mine[key] = value
    for key in [key for key in mine if key not in theirs and key not in APART]:
        del mine[key]
