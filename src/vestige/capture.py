"""How does a small model's step shed its launches? Recorded once as a CUDA graph, and replayed.

A small model's step is a hundred kernels, each of which takes less time than the host needs to launch one. A recording
has a fixed shape, but a Poisson sample has none: a batch is padded to one of a few sizes, and a padding row is treated
as what the engine already knows how to leave out, an example without a usable gradient.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Hashable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vestige.adaptive import Automatic, Counted
from vestige.bookkeeping import BookKeeping, add_weighted
from vestige.clipping import Clip, Flat, Loss, Parameters, Transform
from vestige.groups import PerGroup
from vestige.layers import change
from vestige.layout import Layout
from vestige.taps import Misfit, Plan

SMALL = 1 << 25
"""How many numbers a step may save and still be all launches: to read them ten times takes a large GPU a third of a
millisecond, which is what launching the step takes."""
MOST = 32
"""Recordings kept; what is met after that runs unrecorded."""


class Captured:
    """The fast engine; on a GPU, a small model's steps are recorded and replayed.

    What a model's forward pass decides in Python (which layer to skip, say) would be frozen in a recording. A model
    that draws random numbers is therefore never recorded.
    """

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout) -> None:
        self.engine = BookKeeping(model, loss, layout)
        self.model, self.layout = model, layout
        self._padded: dict[Hashable, Padded] = {}
        self._worth = True

    def __call__(
        self,
        batch: Sequence[Tensor],
        parameters: Parameters,
        clip: Clip,
        into: Tensor,
        transform: Transform | None = None,
    ) -> Tensor:
        if self._worth and into.is_cuda and transform is None and len(batch[0]) and not _capturing():
            padded = self._like(batch, parameters, clip)
            if padded is not None:
                try:
                    norms = padded(batch, clip, into)
                except (Misfit, RuntimeError) as problem:
                    warnings.warn(f"the step cannot be recorded ({problem}); it runs unrecorded", stacklevel=2)
                    self._worth = False
                else:
                    self._worth = padded.worth
                    return norms
                finally:
                    if not self._worth:
                        self._padded.clear()
        return self.engine(batch, parameters, clip, into, transform)

    def _like(self, batch: Sequence[Tensor], parameters: Parameters, clip: Clip) -> Padded | None:
        """What was met or recorded for a batch like this one; None if it is to run unrecorded."""
        bound = _fixed(clip)
        own = self.layout.parameters(self.model)
        places = tuple(p.data_ptr() for p in parameters.values())
        # A point elsewhere than the model's own parameters lies at a new address every time.
        if bound is None or places != tuple(own[name].data_ptr() for name in parameters):
            return None
        shapes = tuple((part.shape[1:], part.dtype) for part in batch)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        modes = self.model.training, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, autocast
        key = padded_size(len(batch[0])), shapes, places, bound, modes
        if key not in self._padded and len(self._padded) < MOST:
            plan = self.engine.plan(batch, parameters)
            self._worth = plan is not None and not plan.inner and not plan.sketch.whole
            if plan is None or not self._worth:
                return None
            self._padded[key] = Padded(plan, self.layout, batch, parameters, clip)
        return self._padded.get(key)


class Padded:
    """Steps on batches of up to so many examples, all at the same addresses: run once, then recorded, then replayed.

    The first one is padded though not recorded, so that a resumed run meets the same shapes and rounds alike.
    """

    def __init__(self, plan: Plan, layout: Layout, batch: Sequence[Tensor], parameters: Parameters, clip: Clip) -> None:
        self.plan, self.layout, self.parameters = plan, layout, parameters
        device, self.rows = batch[0].device, padded_size(len(batch[0]))
        self.batch = [part.new_zeros(self.rows, *part.shape[1:]) for part in batch]
        self.place, self.count = torch.arange(self.rows, device=device), torch.zeros((), device=device)
        self.clip, self.bound = clip, None
        if isinstance(clip, Flat | Counted):
            self.bound = torch.ones((), dtype=torch.float64, device=device)
            self.clip = Flat(cast(float, self.bound))  # a number that may change between replays
        self.total = torch.zeros(layout.size, device=device)
        self.norms: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.worth = True

    def __call__(self, batch: Sequence[Tensor], clip: Clip, into: Tensor) -> Tensor:
        count = len(batch[0])
        for mine, part in zip(self.batch, batch, strict=True):
            mine[:count].copy_(part)
        self.count.fill_(count)
        if self.bound is not None:
            self.bound.fill_(cast(Flat, clip).bound)
        if self.graph is not None:
            self.graph.replay()
        elif self.norms is None or not into.is_cuda:
            self._try()
        else:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._run()
            self.graph.replay()
        into.add_(self.total)
        assert self.norms is not None
        return self.norms[:count].clone()

    def _try(self) -> None:
        """Run unrecorded, and see whether a recording would pay and could be true."""
        before = _random_states()
        saved = self._run()
        self.worth = saved <= SMALL and before == _random_states()

    def _run(self) -> int:
        """The engine's step on the padded batch; returns how many numbers it saved."""
        self.total.zero_()
        gradients = self.plan.gradients(self.batch, self.parameters)
        saved: list[int] = []
        for gradient in gradients.values():
            change(gradient, lambda tensor: saved.append(tensor.numel()) or tensor)  # type: ignore[func-returns-value]
        real = self.place < self.count
        self.norms = add_weighted(gradients, self.clip, self.layout, self.total, self.rows, real)
        return sum(saved)


def padded_size(examples: int) -> int:
    """The next multiple of a power of two near an eighth of it: at most a quarter more, and few sizes in all."""
    step = max(8, 1 << max(0, examples.bit_length() - 3))
    return -(-examples // step) * step


def _fixed(clip: Clip) -> Hashable:
    """What a recording fixes of a clip; None if its factors cannot be recorded."""
    if isinstance(clip, Flat | Counted):
        return Flat
    return clip if isinstance(clip, Automatic) or (isinstance(clip, PerGroup) and clip.split is None) else None


def _random_states() -> list[Any]:
    """Of every generator that a forward pass may draw from without saying so."""
    tensors = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
    return [*(state.numpy().tobytes() for state in tensors), random.getstate(), str(np.random.get_state())]  # noqa: NPY002


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()
