"""How does a small model's step shed its launches? Recorded once as a CUDA graph, and replayed.

A small model's step is a hundred kernels, each of which takes less time than the host needs to launch one. A recording
has a fixed shape, but a Poisson sample has none: a batch is padded to one of a few sizes, and a padding row is treated
as what the engine already knows how to leave out, an example without a usable gradient.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vestige.devices import tf32_convolutions, tf32_products
from vestige.engines.bookkeeping import BookKeeping, add_weighted
from vestige.engines.per_example.gradients import change
from vestige.engines.per_example.taps import Doubt, Taps
from vestige.layout import Layout
from vestige.mechanism.clipping import Batch, Clip, Flat, Loss, Parameters, Transform
from vestige.mechanism.criteria import BY_PLACE, Form

SMALL = 1 << 25
"""How many numbers a step may save and still be all launches: to read them ten times takes a large GPU a third of a
millisecond, which is what launching the step takes. Such a step does not mind padding; a larger one gets little."""
MUCH, LITTLE = 3, 6
MOST = 32
"""Recordings kept; what is met after that runs unrecorded."""


class Captured:
    """The fast engine; on a GPU its steps are recorded and replayed.

    What a model's forward pass decides in Python (which layer to skip, say) would be frozen in a recording. A model
    that draws random numbers is therefore never recorded, nor one that looks at its data or changes itself; and what
    the model and the loss hold in Python (`standing`) is part of what is recorded.
    """

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, form: Form = BY_PLACE) -> None:
        self.engine = BookKeeping(model, loss, layout, form)
        self.model, self.layout = model, layout
        self._padded: dict[Hashable, Padded] = {}
        self._padding, self._records = MUCH, True
        self._pool: Any = None

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        if self._records and into.is_cuda and transform is None and len(batch[0]) and not _capturing():
            try:
                with torch.cuda.device(into.device):  # a recording is one of the current device's stream
                    padded = self._like(batch, parameters, clip)
                    if padded is not None:
                        return padded(batch, clip, into)
            except (Doubt, Unsteady, RuntimeError) as problem:
                if not isinstance(problem, Unsteady):
                    warnings.warn(f"the step cannot be recorded ({problem}); it runs unrecorded", stacklevel=2)
                self._records = False
                self._padded.clear()
        return self.engine(batch, parameters, clip, into, transform)

    def _like(self, batch: Batch, parameters: Parameters, clip: Clip) -> Padded | None:
        """What was met or recorded for a batch like this one; None if it is to run unrecorded."""
        bound = clip.recording
        own = self.layout.parameters(self.model)
        places = tuple(p.data_ptr() for p in parameters.values())
        # A point elsewhere than the model's own parameters lies at a new address every time.
        if bound is None or places != tuple(own[name].data_ptr() for name in parameters):
            return None
        shapes = tuple((part.shape[1:], part.dtype) for part in batch)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        modes = tf32_products(), tf32_convolutions(), autocast
        kept = standing(self.model, self.engine.loss)
        key = padded_size(len(batch[0]), self._padding), shapes, places, bound, modes, kept
        if key in self._padded or len(self._padded) >= MOST:
            return self._padded.get(key)
        return self._meet(key, batch, parameters, clip)

    def _meet(self, key: Hashable, batch: Batch, parameters: Parameters, clip: Clip) -> Padded | None:
        taps = self.engine.taps(batch)
        self._records = taps is not None
        if taps is None:
            return None
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        padded = Padded(self.engine, taps, batch, parameters, clip, self._padding, self._pool)
        if not self._padded and self._padding == MUCH and padded.rehearse(batch) > SMALL:
            self._padding = LITTLE
            return self._like(batch, parameters, clip)
        self._padded[key] = padded
        return padded


class Unsteady(Exception):
    """The model draws random numbers, or is not after a pass what it was before."""


class Padded:
    """SENSITIVE: it keeps its last batch, sum and norms.

    Steps on batches of up to so many examples, all at the same addresses: run once, then recorded, then replayed.

    What runs unrecorded is padded all the same, so that a resumed run meets the same shapes and rounds alike.
    """

    def __init__(
        self,
        engine: BookKeeping,
        taps: Taps,
        batch: Batch,
        parameters: Parameters,
        clip: Clip,
        padding: int = MUCH,
        pool: Any = None,
    ) -> None:
        self.engine, self.taps, self.parameters, self.pool = engine, taps, parameters, pool
        device, self.rows = batch[0].device, padded_size(len(batch[0]), padding)
        self.batch = [part.new_zeros(self.rows, *part.shape[1:]) for part in batch]
        self.place, self.count = torch.arange(self.rows, device=device), torch.zeros((), device=device)
        self.clip, self.bound = clip, None
        if clip.flat_bound is not None:
            self.bound = torch.ones((), dtype=torch.float64, device=device)
            self.clip = Flat(cast(float, self.bound))  # a number that may change between replays
        self.total = torch.zeros(engine.layout.size, device=device)
        self.norms: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Batch, clip: Clip, into: Tensor) -> Tensor:
        self._load(batch)
        if self.bound is not None:
            assert clip.flat_bound is not None
            self.bound.fill_(clip.flat_bound)
        if self.graph is not None:
            self.graph.replay()
        elif self.norms is None or not into.is_cuda:
            self.rehearse(batch)
        else:
            self.graph = self._recorded()
            self.graph.replay()
        into.add_(self.total)
        assert self.norms is not None
        return self.norms[: len(batch[0])].clone()

    def rehearse(self, batch: Batch) -> int:
        """Run unrecorded; how many numbers the step saved. Raises `Unsteady`, and draws nothing, if the model draws."""
        self._load(batch)
        before, kept = _random_states(), standing(self.engine.model, self.engine.loss)
        saved = self._run()
        if _random_states() != before:
            _restore(before)
            raise Unsteady
        if standing(self.engine.model, self.engine.loss) != kept:
            raise Unsteady
        return saved

    def _load(self, batch: Batch) -> None:
        count = len(batch[0])
        for mine, part in zip(self.batch, batch, strict=True):
            mine[:count].copy_(part)
        self.count.fill_(count)

    def _run(self) -> int:
        self.total.zero_()
        gradients = self.engine.gradients(self.taps, self.batch, self.parameters)
        saved: list[int] = []
        for gradient in gradients.values():
            change(gradient, lambda tensor: saved.append(tensor.numel()) or tensor)  # type: ignore[func-returns-value]
        real = self.place < self.count
        self.norms = add_weighted(gradients, self.clip, self.engine.layout, self.total, self.rows, real)
        return sum(saved)

    def _recorded(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self.total.device.index]
        spare = generator.clone_state()
        # cuBLAS keeps a workspace for each stream. The recording's own must not outlive its memory pool, and the one
        # that it replaces would lie idle.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with _no_collection(), torch.cuda.graph(graph, pool=self.pool):
                self._run()
        except RuntimeError:
            # A recording that breaks off leaves the generator unusable, and, before torch 2.12, the allocator in the
            # belief that it goes on, so that no cached memory is ever given back.
            generator.graphsafe_set_state(spare)
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(self.total.device.index, self.pool)
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """What Python's collector frees while a step is recorded, an older recording above all, would break it off."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def padded_size(examples: int, padding: int = MUCH) -> int:
    """The next multiple of a power of two that is at most 2 / 2**padding of it, so that there are few sizes."""
    step = max(8, 1 << max(0, examples.bit_length() - padding))
    return -(-examples // step) * step


def _random_states() -> tuple[Any, ...]:
    """Of every generator that a forward pass may draw from without saying so."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    gpu = torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else []
    return torch.get_rng_state().tolist(), gpu, random.getstate(), numpy["state"]["key"].tolist(), numpy["state"]["pos"]


def _restore(states: tuple[Any, ...]) -> None:
    cpu, gpu, python, key, position = states
    torch.set_rng_state(torch.tensor(cpu, dtype=torch.uint8))
    if gpu:
        torch.cuda.set_rng_state(torch.tensor(gpu, dtype=torch.uint8))
    random.setstate(python)
    np.random.set_state(cast(Any, ("MT19937", key, position)))  # noqa: NPY002


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


# --- what a recorded step takes for granted ---------------------------------------------------------------------------

PLAIN = frozenset({bool, int, float, str, type(None), FunctionType, BuiltinFunctionType})


SEEN = PLAIN | {Tensor, nn.Parameter}


def standing(model: nn.Module, loss: Callable[..., Any]) -> tuple[Hashable, ...]:
    """Modes, numbers, functions and hooks of every module, and where its tensors lie: a step recorded under other
    ones is another step. Of the loss also what it closes over, its defaults and the globals it names.

    What is deeper (a list in a module, a variable that the forward pass of a module names) is not seen.
    """
    return (*_of_module(model), *_of_callable(loss, 3))


def _of_module(model: nn.Module) -> list[Hashable]:
    found: list[Any] = []
    modules, met = [model], {id(model)}
    for module in modules:  # which grows meanwhile; asked at every step, so faster than model.modules()
        found += (type(module), len(module._forward_hooks), len(module._forward_pre_hooks))
        found += _plain(vars(module).values())
        found += [None if t is None else t.data_ptr() for t in module._parameters.values()]
        found += [None if t is None else t.data_ptr() for t in module._buffers.values()]
        for child in module._modules.values():
            if child is not None and id(child) not in met:
                met.add(id(child))
                modules.append(child)
    return found


def _plain(values: Iterable[Any]) -> list[Hashable]:
    return [value if type(value) in PLAIN else value.data_ptr() for value in values if type(value) in SEEN]


def _of_callable(thing: Any, depth: int) -> Iterator[Hashable]:
    if isinstance(thing, nn.Module):
        yield from _of_module(thing)
        return
    held = list(_held(thing))
    yield from _plain(held)
    for value in held if depth else ():
        if type(value) not in SEEN or isinstance(value, FunctionType):
            yield from _of_callable(value, depth - 1)


def _held(thing: Any) -> Iterator[Any]:
    if isinstance(thing, partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, FunctionType):
        yield from (_content(cell) for cell in thing.__closure__ or ())
        yield from (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
        if (thing.__module__ or "").partition(".")[0] != "torch":
            named = (thing.__globals__.get(name) for name in thing.__code__.co_names)
            yield from (value for value in named if type(value) in SEEN and not isinstance(value, FunctionType))
    elif not isinstance(thing, type | ModuleType):
        yield from getattr(thing, "__dict__", {}).values()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
