"""How does a step shed its launches on a GPU? It is captured once as a CUDA graph, and replayed.

Capturing runs the step's Python once more, with every operator followed: what is replayed is what was proved. A graph
has a fixed shape, but a Poisson sample has none: a batch is padded to one of a few sizes by rows of weight zero, copies
of its first row, and texts are padded to one of a few lengths.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import ceil, inf, sqrt
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vestige.devices import tf32_convolutions, tf32_products
from vestige.engines.bookkeeping import BookKeeping, add_weighted
from vestige.engines.capture_guards import (
    NotCapturable,
    host_draws,
    require_same_on_any_draw,
    restore_host_draws,
    state_fingerprint,
)
from vestige.engines.example_axis.labels import NotApart, untracked
from vestige.engines.host_transfers import HostTransfers, Sent
from vestige.engines.per_example.taps import gradients
from vestige.engines.per_example.uses import UnsupportedUse
from vestige.layout import Layout
from vestige.mechanism.clipping import Batch, Clip, Flat, Loss, Parameters, Transform
from vestige.mechanism.losses.criteria import BY_PLACE, Form, of_torch
from vestige.mechanism.transforms import Term, only_mean, terms_of

SECONDS = 2.0
"""How long sizes are captured ahead, after the first; a size that was not reached is padded to the next one."""
MOST_SIZES, DEVIATIONS = 8, (2.5, 1.6, 1.0, 0.6, 0.2, -0.2, -0.6, -1.0, -1.6)
"""Sizes of batches that are parts of samples; and of whole samples, how far from the mean, in standard deviations."""
MOST_GRAPHS, OFTEN = 64, 3
"""Graphs that are kept; and how often a size is met before it is captured, where a larger one serves meanwhile."""
DECODED = ("labels", "decoder_input_ids", "decoder_attention_mask")
"""What a decoder writes."""
LENGTHS = ((64, 16), (256, 32), (1024, 128))
"""Up to this length, texts are padded to multiples of that; beyond, to multiples of 256."""


def sizes_of(population: int, rate: float, part: int | None = None) -> list[int]:
    """The sizes to capture for Poisson samples that are taken whole, or in parts of at most so many: largest first."""
    mean, deviation = population * rate, sqrt(population * rate * (1 - rate))
    sizes = {min(population, max(2, ceil(mean + each * deviation))) for each in DEVIATIONS}
    if part is not None and part < max(sizes):  # what is left over of a sample is as likely to be small as large
        sizes = {max(2, ceil(part * place / MOST_SIZES)) for place in range(1, MOST_SIZES + 1)}
    return sorted(sizes, reverse=True)


def ahead(sizes: Sequence[int]) -> list[int]:
    """The order in which sizes are captured: the largest, in whose memory others find room, then the middle ones."""
    middle = len(sizes) // 2
    return [sizes[0], *sorted(sizes[1:], key=lambda size: abs(sizes.index(size) - middle))]


def capturable(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def captured(work: Callable[[], object], pool: Any, device: torch.device) -> torch.cuda.CUDAGraph:
    """The GPU's part of some work, to be replayed; nothing is run."""
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[device.index or 0]
    spare, stream = generator.clone_state(), torch.cuda.current_stream(device)
    # cuBLAS keeps a workspace for each stream. The graph's own must not outlive its memory pool, and the one that it
    # replaces would lie idle.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with _no_collection(), torch.cuda.graph(graph, pool=pool):
            work()
    except BaseException:
        # A capture that breaks off leaves the generator unusable, its own stream the current one, and, before torch
        # 2.12, the allocator in the belief that it goes on, so that no cached memory is ever given back.
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(spare)
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    return graph


@contextmanager
def mask_is_full(full: bool) -> Iterator[None]:
    """Inside, where no mask leaves anything out, a model that asks whether it is captured hears that it is not:
    transformers' models then look at the mask, which is answered, and skip work."""
    asked = torch.cuda.is_current_stream_capturing
    if full:
        torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


def is_full(mask: Tensor) -> bool:
    """Whether a mask leaves nothing out: models then skip work, with the same result."""
    with untracked():
        return bool((mask == 1).all())


@contextmanager
def _no_collection() -> Iterator[None]:
    """What Python's collector frees while a step is captured, an older graph above all, would break it off."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def new_pool() -> Any:
    """Memory for graphs."""
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None


def device_draws(device: torch.device) -> Tensor:
    """The state of the generator that draws there."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def restore_device_draws(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def give_back(device: torch.device) -> None:
    """What nobody needs any more; of cuBLAS too, whose workspaces would be missed where they are freed later."""
    if device.type == "cuda":
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def precision() -> tuple[Hashable, ...]:
    """What a graph takes for granted of torch's settings."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return tf32_products(), tf32_convolutions(), autocast


def fill_rows(buffer: Tensor, rows: Tensor) -> None:
    """Put rows into a buffer; further ones are copies of the first, so that predicates over all keep their value."""
    count = len(rows)
    buffer[:count].copy_(rows)
    if count < len(buffer):
        buffer[count:].copy_(buffer[:1].expand(len(buffer) - count, *buffer.shape[1:]))


# --- texts ------------------------------------------------------------------------------------------------------------


def rounded_length(length: int) -> int:
    step = next((step for most, step in LENGTHS if length <= most), 256)
    return -(-length // step) * step


def padded_lengths(module: nn.Module, named: Mapping[str, Tensor]) -> dict[str, int]:
    """To which length each text among a call's arguments is padded; none, if its model may take notice of that.

    Models of transformers (and peft's around them) leave out what a mask leaves out, and a decoder what comes later:
    texts are padded further by the model's own padding token, masked, with labels that are ignored. Padding already
    rests on that assumption.
    """
    if type(module).__module__.split(".")[0] not in ("transformers", "peft"):
        return {}
    written = DECODED if getattr(getattr(module, "config", None), "is_encoder_decoder", False) else ()
    texts = {name: leaf for name, leaf in named.items() if leaf.dim() == 2 and not leaf.is_floating_point()}
    masked = "attention_mask" in texts
    read = texts["attention_mask"].shape[1] if masked else 0
    if any(name not in written and (not masked or leaf.shape[1] != read) for name, leaf in texts.items()):
        return {}
    longest = _most_positions(module)
    return {name: max(leaf.shape[1], min(rounded_length(leaf.shape[1]), longest)) for name, leaf in texts.items()}


def _most_positions(module: nn.Module) -> int:
    """How long texts may be, as far as the model tells: beyond a table a GPU does not refuse, but fails for good."""
    config = getattr(module, "config", None)
    prompts = any(getattr(each, "is_prompt_learning", False) for each in getattr(module, "peft_config", {}).values())
    named = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    known = [each for each in named if type(each) is int]
    tables = [
        each.num_embeddings - 2
        for name, each in module.named_modules()
        if isinstance(each, nn.Embedding) and ("position" in name or name.endswith("wpe"))
    ]
    return 0 if prompts else min([*known, *tables], default=1 << 30)


def behind_the_end(module: nn.Module, name: str) -> int:
    """What texts are padded with: the model's padding token, a label that is ignored, nothing where masks are."""
    token = getattr(getattr(module, "config", None), "pad_token_id", None)
    if name == "labels":
        return -100
    return token if type(token) is int and name.endswith("input_ids") else 0


def lengthened(module: nn.Module, named: Mapping[str, Tensor], to: Mapping[str, int]) -> dict[str, Tensor]:
    return {
        name: F.pad(leaf, (0, to[name] - leaf.shape[1]), value=behind_the_end(module, name)) if name in to else leaf
        for name, leaf in named.items()
    }


# --- the engine -------------------------------------------------------------------------------------------------------


class Captured:
    """The fast engine; on a GPU its steps are captured and replayed.

    Batches of the sizes that were announced (`expect`) are captured ahead, when the first of them comes; other forms
    when they come for the second time.
    """

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, form: Form = BY_PLACE) -> None:
        self.engine = BookKeeping(model, loss, layout, form)
        self.model, self.layout = model, layout
        self._sizes: tuple[int, ...] = ()
        self._graphs: dict[tuple[int, Hashable], CapturedStep] = {}
        self._met: Counter[Hashable] = Counter()
        self._captures, self._pool = True, None

    def expect(self, sizes: Sequence[int]) -> None:
        """Batches will be at most of these sizes, mostly: capture steps for them, largest first."""
        self._sizes = tuple(sizes)

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        if not (self._captures and isinstance(into, Tensor) and capturable(into.device) and len(batch[0])):
            return self.engine(batch, parameters, clip, into, transform)
        self.engine.say_compiled()
        most = self._sizes[0] if self._sizes else 0
        if transform is None and 0 < most < len(batch[0]):
            parts = zip(*(part.split(most) for part in batch), strict=True)  # more than was expected
            return torch.cat([self(part, parameters, clip, into) for part in parts])
        terms = terms_of(transform, parameters, batch)
        mean = only_mean(terms or ())
        step = None if mean is None else self._step(self._lengthened(mean), clip, into)
        if step is None or mean is None:
            return self.engine(batch, parameters, clip, into, transform, terms)
        return step(self._lengthened(mean).batch, clip, into)

    def _lengthened(self, mean: Term) -> Term:
        names = self.engine.form.names
        target = mean.batch[-1]
        if names is None or self.engine.form.further or (target.dim() > 1 and not of_torch(self.engine.loss)):
            return mean  # a loss of the user's may not know labels that are ignored
        named = dict(zip((*names, "labels"), mean.batch, strict=True))
        to = padded_lengths(self.model, named)
        return Term(mean.weight, mean.point, tuple(lengthened(self.model, named, to).values()), mean.views)

    def _step(self, mean: Term, clip: Clip, into: Tensor) -> CapturedStep | None:
        """The captured step for a batch like this one; None if it is to run as it is."""
        own = self.layout.parameters(self.model)
        places = tuple(p.data_ptr() for p in mean.point.values())
        if clip.recording is None or places != tuple(own[name].data_ptr() for name in mean.point):
            return None  # a point elsewhere than the model's own parameters lies at a new address every time
        shapes = tuple((part.shape[1:], part.dtype) for part in mean.batch)
        names = self.engine.form.names or ()
        masks = [part for name, part in zip(names, mean.batch, strict=False) if name.endswith("attention_mask")]
        full = bool(masks) and all(map(is_full, masks))
        form = mean.views, shapes, places, clip.recording, full
        key = form, precision(), state_fingerprint(self.model, self.engine.loss)
        rows = len(mean.batch[0]) // mean.views
        sizes = self._sizes or (padded_size(rows),)
        fitting = [size for size, known in self._graphs if known == key and size >= rows]
        best = next((size for size in reversed(sizes) if size >= rows), sizes[0])
        self._met[form, best] += 1
        if fitting and (best in fitting or self._met[form, best] != OFTEN):
            return self._graphs[min(fitting), key]
        self._met[form] += 1
        first = not self._graphs
        if len(self._graphs) >= MOST_GRAPHS or (not first and self._met[form] < 2):
            return None
        try:
            wanted = sizes if first else [best]
            self._capture(key, wanted, mean, clip, into, full)
        except (NotApart, UnsupportedUse, NotCapturable, RuntimeError) as problem:
            line = (str(problem) or type(problem).__name__).splitlines()[0]
            warnings.warn(f"the step cannot be captured as a CUDA graph ({line}); it runs as it is", stacklevel=4)
            self._captures = False
            self._graphs.clear()
            return None
        return self._step(mean, clip, into)

    def _capture(self, key: Hashable, sizes: Sequence[int], mean: Term, clip: Clip, into: Tensor, full: bool) -> None:
        start, largest = inf, None
        self._pool = self._pool or new_pool()
        with torch.cuda.device_of(into):
            for rows in ahead(sizes):
                if time.monotonic() - start > SECONDS:
                    break
                step = CapturedStep(self.engine, mean, clip, rows, into.device, largest, full)
                step.capture(mean.batch, self._pool, warm=bool(self._graphs))
                largest = largest or step
                self._graphs[rows, key] = step
                start = min(start, time.monotonic())


class CapturedStep:
    """SENSITIVE: it keeps its last batch, sum and norms. Steps on batches of up to so many examples, all at the same
    addresses; of several in one memory (`within` that of the largest) only one can be at work."""

    def __init__(
        self,
        engine: BookKeeping,
        mean: Term,
        clip: Clip,
        rows: int,
        device: torch.device,
        within: CapturedStep | None,
        full: bool = False,
    ) -> None:
        """`full`: no mask leaves anything out."""
        self.full = full
        self.engine, self.mean, self.rows, self.views = engine, mean, rows, mean.views
        count = rows * mean.views
        self.batch: list[Tensor]
        self.place: Tensor
        self.count: Tensor
        self.total: Tensor
        self.holds: list[float]
        """The number in `bound`, which all graphs of one memory share: it is written where it changes."""
        self.clip: Clip = clip
        self.bound: Tensor | None = None
        if within is not None:
            self.batch = [part[:count] for part in within.batch]
            self.place, self.count, self.total = within.place[:rows], within.count, within.total
            self.clip, self.bound, self.holds = within.clip, within.bound, within.holds
        else:
            self.batch = [part.new_zeros(count, *part.shape[1:]) for part in mean.batch]
            self.place, self.count = torch.arange(rows, device=device), torch.zeros((), device=device)
            self.total, self.holds = torch.zeros(engine.layout.size, device=device), [1.0]
            if clip.flat_bound is not None:
                self.bound = torch.ones((), dtype=torch.float64, device=device)
                self.clip = Flat(cast(float, self.bound))  # a number that may change between replays
        self.norms: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Batch, clip: Clip, into: Tensor) -> Tensor:
        assert self.graph is not None
        assert self.norms is not None
        self._load(batch)
        if self.bound is not None and clip.flat_bound is not None:
            wanted = clip.flat_bound
            if type(wanted) is not float or wanted != self.holds[0]:
                self.bound.fill_(wanted)
                self.holds[0] = float(wanted)
        self.graph.replay()
        into.add_(self.total)
        return self.norms[: len(batch[0]) // self.views].clone()

    def capture(self, batch: Batch, pool: Any, warm: bool) -> None:
        """Captured while it is proved; before that it is run once, proved too, unless one like it was (`warm`) and
        capturing works at once. Raises where that cannot be."""
        device, sent, before = self.total.device, Sent(), host_draws()
        self._load([part[: self.rows * self.views] for part in batch])
        if warm:
            with suppress(NotCapturable, RuntimeError), HostTransfers(device, sent, given=True):
                self.graph = captured(self._run, pool, device)
                restore_host_draws(before)
                return
        with HostTransfers(device, sent):
            self._run()
        if device.type == "cuda" and host_draws() != before:
            restore_host_draws(before)
            require_same_on_any_draw(self._run, self.engine.proved.tracker)
        give_back(device)
        with HostTransfers(device, sent, given=True):
            self.graph = captured(self._run, pool, device)
        restore_host_draws(before)

    def _load(self, batch: Batch) -> None:
        for mine, part in zip(self.batch, batch, strict=True):
            fill_rows(mine, part)
        self.count.fill_(len(batch[0]) // self.views)

    def _run(self) -> None:
        self.total.zero_()
        term = Term(self.mean.weight, self.mean.point, tuple(self.batch), self.views)
        tracker = self.engine.proved.tracker
        tracker.answer, tracker.captured = self.full, True
        try:
            with mask_is_full(self.full):
                found = gradients([self.engine.gradients_of(term)], self.total)
        finally:
            tracker.answer, tracker.captured = None, False
        real = self.place < self.count
        self.norms = add_weighted(found, self.clip, self.engine.layout, self.total, self.rows, real)


def padded_size(examples: int) -> int:
    """The next multiple of a power of two that is at most an eighth of it, so that there are few sizes."""
    step = max(8, 1 << max(0, examples.bit_length() - 4))
    return -(-examples // step) * step
